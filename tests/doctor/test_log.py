"""`vllm doctor --log`: every known failure is found in a log in which it really happened, and nothing else."""

import io
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from vllm.sm120 import doctor
from vllm.sm120.doctor import log

from . import provoke

ROOT = Path(__file__).parents[2]
# What needs a GPU, or a vLLM without our patches: the first line says where it was seen.
EXCERPTS = {path.stem: path for path in (Path(__file__).parent / "logs").iterdir()}


def names(text: str) -> list[str]:
    return [finding.name for finding in log.find(text.splitlines())]


@pytest.fixture(scope="module")
def server_log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Callable[[], None]], str]]:
    """A process that believes in GPUs that are not there, and fails as told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("vllm")))
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            yield lambda function: pool.submit(provoke.server_log, function).result()


@pytest.mark.parametrize("name", provoke.FAILURES)
def test_a_failure_that_happens_is_explained(server_log, name):
    text = server_log(provoke.FAILURES[name])
    assert names(text) == [name], text


def test_a_server_without_failure_has_none(server_log):
    text = server_log(provoke.success)
    assert "Using TRITON_MLA_SPARSE attention backend" in text
    assert names(text) == []


@pytest.mark.parametrize("name", EXCERPTS)
def test_a_failure_of_other_machines_is_explained(name):
    source, _, text = EXCERPTS[name].read_text().partition("\n")
    assert names(text) == [name]
    if source.endswith(".patch"):
        assert text.strip() in (ROOT / source.removeprefix("# ")).read_text()


def test_every_known_failure_is_seen_in_some_log():
    known = [failure.name for failure in log.known_failures()]
    assert sorted(known) == sorted([*provoke.FAILURES, *EXCERPTS])


def test_the_sources_exist():
    import vllm

    for failure in log.known_failures():
        for patch in re.findall(r"(?:patches|docs)/\S+?\.(?:patch|md)", failure.source + failure.cure):
            assert (ROOT / patch).exists() or patch == "docs/doctor.md", failure.name
        for module in re.findall(r"\bvllm/(\S+\.py)\b", failure.source):
            assert (Path(vllm.__file__).parent / module).exists(), failure.name


def test_what_the_line_tells_is_in_the_cause():
    line = "OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing"
    (finding,) = log.find([line])
    assert "131072 bytes" in finding.cause
    assert "101376" in finding.cause


def test_processes_that_say_the_same_are_one_finding():
    gone = "\033[36m(Worker_TP{})\033[0m ERROR RuntimeError: Unknown gguf model_type: glm_moe_dsa"
    other = "(Worker_TP0) ERROR RuntimeError: Unknown gguf model_type: another"
    lines = ["INFO starts", gone.format(0), "ERROR CUDA out of memory, but not torch's", gone.format(1), other]
    found = [(each.line, each.count, each.text) for each in log.find(lines)]
    assert found == [
        (2, 2, "Unknown gguf model_type: glm_moe_dsa"),
        (5, 1, "Unknown gguf model_type: another"),
    ]


@pytest.fixture
def failed(tmp_path) -> Path:
    path = tmp_path / "server.log"
    path.write_text("".join(EXCERPTS[name].read_text() for name in ("no-backend-upstream", "nccl-timeout")))
    return path


def test_the_text(failed, capsys):
    assert doctor.main(["--log", str(failed)]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("no-backend-upstream: line ")
    assert any(line.startswith("  cure:   install this distribution") for line in lines)
    assert lines[-1] == "known failures: 2, the first often the cause of the others"
    assert "\033" not in "".join(lines)


def test_the_json(failed, capsys):
    assert doctor.main(["--log", str(failed), "--json"]) == 3
    content = json.loads(capsys.readouterr().out)
    assert (content["schema"], content["log"], content["exit"]) == (1, str(failed), 3)
    assert [each["name"] for each in content["findings"]] == ["no-backend-upstream", "nccl-timeout"]
    assert all(len(each["text"]) <= 304 and each["cure"] and each["source"] for each in content["findings"])


def test_a_good_log_has_exit_code_0(tmp_path, capsys):
    (tmp_path / "server.log").write_text("INFO all is well\n")
    assert doctor.main(["--log", str(tmp_path / "server.log")]) == 0
    assert capsys.readouterr().out.startswith("no known failure in ")


def test_standard_input(failed, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n" + failed.read_bytes())))
    assert doctor.main(["--log", "-"]) == 3
    assert "nccl-timeout" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, b""], ids=["no file", "empty"])
def test_nothing_to_read_is_a_message(tmp_path, capsys, content):
    path = tmp_path / "server.log"
    if content is not None:
        path.write_bytes(content)
    assert doctor.main(["--log", str(path)]) == 2
    assert capsys.readouterr().err.startswith("error: the log ")
    assert doctor.main(["--log", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_what_is_no_text_does_no_harm(tmp_path, capsys):
    error = b"Unknown gguf model_type: \xff" + b"glm\x1b]0;title\x07 \x1b[2J "
    (tmp_path / "core").write_bytes(b"\0\x1b[31m" + b"use_sparse=True " * 100_000 + b"\n" + error)
    assert doctor.main(["--log", str(tmp_path / "core")]) in (0, 3)
    assert "\x1b" not in capsys.readouterr().out
