"""Result files say where they come from, and are never half written."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.gpu import results


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(results.COMMIT_VARIABLE, raising=False)
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "--message=one")
    git(tmp_path, "tag", "v1")
    return tmp_path


def test_commit_is_that_of_the_working_tree(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    assert results.commit(checkout) == head
    (checkout / "new").write_text("untracked, as results are")
    assert results.commit(checkout) == head
    (checkout / "file").write_text("two")
    assert results.commit(checkout) == f"{head}-dirty"


def test_a_copy_without_history_names_the_commit_itself(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = checkout / "copy"  # inside another repository, whose commit it is not
    copy.mkdir()
    assert results.commit(copy).startswith("unknown: no .git here, and VLLM_SM120_COMMIT")
    monkeypatch.setenv(results.COMMIT_VARIABLE, "0123abc")
    assert results.commit(copy) == "0123abc"


def test_a_damaged_repository_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(results.COMMIT_VARIABLE, raising=False)
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert results.commit(tmp_path).startswith("unknown: ")


def test_rows_are_written_with_their_header_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "environment", lambda: {"hardware": {"gpu": "some GPU"}, "commit": "0123abc"})
    path = tmp_path / "folder" / "results.json"
    results.write_results(path, [{"us": 1}, {"us": 2}], matmul_tflops={"bfloat16": 700})
    assert json.loads(path.read_text()) == {
        "hardware": {"gpu": "some GPU"},
        "commit": "0123abc",
        "matmul_tflops": {"bfloat16": 700},
        "rows": [{"us": 1}, {"us": 2}],
    }
    assert '    {"us": 1},\n    {"us": 2}\n' in path.read_text()
    assert list(path.parent.iterdir()) == [path]
    before = path.read_text()
    with pytest.raises(TypeError):
        results.write_results(path, [{"us": object()}])
    assert path.read_text() == before
