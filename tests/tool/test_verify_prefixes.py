"""`make verify`: each prefix by itself, on a miniature package that is really imported and tested.

A golden folder has a `before/` that is verified first and an `after/` that is verified then, and in expected.txt what
is said of them.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from scripts import series, verify_prefixes
from scripts.verify_prefixes import Report, due_tests
from tests.tool.miniature import REPOSITORY, SERIES, Checkout, read_files
from tests.tool.test_interrupt import kill_after, leftovers

pytestmark = pytest.mark.slow

START, CONFIG, HOOK = SERIES
SCENARIOS = sorted(Path(__file__).with_name("verify_scenarios").iterdir())

FAKE_GPU = "def install(package):\n    pass\n\n\ndef stub_extensions(package):\n    pass\n"
TESTS = {
    "test_start.py": "from vllm import engine\n\n\ndef test_start():\n    assert engine.start(5) == 1\n",
    "test_hook.py": (
        "import pathlib\n\nfrom vllm import attention, engine\n\n\n"
        "def test_hook():\n    assert engine.close(5) is None\n    assert attention.select_e(5) == 5\n\n\n"
        "def test_series():\n    folder = pathlib.Path(__file__).parents[1] / 'patches' / 'vllm'\n"
        "    assert (folder / 'series').read_text().split()[-1] == 'attention-hook.patch'\n"
    ),
    "gpu/test_gpu.py": (
        "import os\n\nimport pytest\n\n\n@pytest.mark.skipif(not os.environ.get('CUDA_VISIBLE_DEVICES', '0'), "
        "reason='needs a GPU')\ndef test_gpu():\n    raise AssertionError\n"
    ),
}


def name_tests(checkout: Checkout, named: Mapping[str, str]) -> None:
    """Write the Tests trailers."""
    for name, tests in named.items():
        path = checkout.patches / name
        path.write_bytes(path.read_bytes().replace(b"Scope: python\n", b"Scope: python\nTests: %s\n" % tests.encode()))


def install(checkout: Checkout, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install upstream's wheels where the tool looks first."""
    for wheel in checkout.files.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(site)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site))


@pytest.fixture(name="checkout")
def checkout_with_tests(own_cache: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    checkout = own_cache
    install(checkout, tmp_path / "site", monkeypatch)
    for name, text in {**TESTS, "backend/fake_gpu.py": FAKE_GPU}.items():
        path = checkout.root / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copy(REPOSITORY / "tests" / "backend" / "import_modules.py", checkout.root / "tests" / "backend")
    return checkout


def verify(checkout: Checkout) -> list[Report]:
    return list(verify_prefixes.verify(checkout.layout, checkout.project, checkout.upstream()))


def counts(report: Report) -> tuple[str, int, int, int, dict[str, int]]:
    found = report.found
    return report.name, found.compiled, found.imported, found.passed, dict(found.skipped)


def change(checkout: Checkout, name: str, old: str, new: str) -> None:
    """Edit a patch file by hand."""
    path = checkout.patches / name
    content = path.read_bytes().decode()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new).encode())


# -- golden folders ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda path: path.name)
def test_scenario(checkout: Checkout, scenario: Path) -> None:
    said = ""
    for state in ("before", "after"):
        checkout.put(scenario / state)
        outcome = checkout.run("verify", "--project=vllm")
        reports = re.sub(r"; \d+ s$", "; anew", outcome.out, flags=re.MULTILINE)
        reports = re.sub(rf"{checkout.root}/build/\.verify-\w+/", "", reports)
        told = outcome.err.replace(f"{checkout.root}/", "")
        said += f"$ verify  # {state}\n{told}{reports}exit code {outcome.code}\n"
    assert said == (scenario / "expected.txt").read_text()


# -- what is checked ---------------------------------------------------------------------------------


def test_each_prefix(checkout: Checkout) -> None:
    name_tests(checkout, {START: "tests/test_start.py", HOOK: "tests/test_hook.py tests/gpu"})
    before = read_files(checkout.root)
    reports = verify(checkout)
    assert [counts(report) for report in reports] == [
        ("overlay", 2, 2, 0, {}),
        (START, 3, 3, 1, {}),
        (CONFIG, 4, 4, 1, {}),
        (HOOK, 5, 5, 3, {"needs a GPU": 1}),
    ]
    assert [report.found.problems for report in reports] == [(), (), (), ()]
    assert [report.verdict for report in reports] == ["overlay", "exact", "exact", "exact"]
    assert str(reports[3]).startswith(
        f"{HOOK}: ok; exact; compiled 5; imported 5; passed 3; skipped 1 (1 needs a GPU); "
    )
    after = read_files(checkout.root)
    assert {name: content for name, content in after.items() if name != "build/.lock"} == before


def test_command(checkout: Checkout) -> None:
    name_tests(checkout, {HOOK: "tests/test_hook.py"})
    outcome = checkout.run("verify")
    assert outcome.code == 0
    names = [line.split("; ")[0] for line in outcome.out.splitlines()]
    assert names == [*(f"vllm: {name}: ok" for name in ("overlay", *SERIES)), "vllm-gguf-plugin: overlay: ok"]
    assert f"{HOOK}: verifying (test files: 1)\n" in outcome.err
    assert all(line.endswith("; as before") for line in checkout.run("verify").out.splitlines())


def test_import_that_ends_the_process(checkout: Checkout) -> None:
    text = "import os\n\nprint('goodbye', flush=True)\nos._exit(3)\n"
    (checkout.root / "overlay" / "vllm" / "ours" / "backend.py").write_text(text)
    assert verify(checkout)[0].found.problems == ("the import ended with status 3:\ngoodbye",)


def test_program_is_not_run(checkout: Checkout) -> None:
    (checkout.root / "overlay" / "vllm" / "ours" / "__main__.py").write_text("raise SystemExit('was run')\n")
    assert counts(verify(checkout)[0]) == ("overlay", 3, 2, 0, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def test():\n    raise ValueError('no\\nsuch')\n", "tests.test_start.test: ValueError: no"),
        ("import nothing\n", "tests.test_start: collection failure"),
        ("import os\n\nos._exit(9)\n", "pytest ended with status 9:"),
    ],
)
def test_tests_that_fail(checkout: Checkout, text: str, said: str) -> None:
    name_tests(checkout, {HOOK: "tests/test_start.py"})
    (checkout.root / "tests" / "test_start.py").write_text(text)
    report = verify(checkout)[-1]
    assert report.name == HOOK
    assert report.found.problems[0].startswith(said)


def test_long_lists_are_cut(checkout: Checkout) -> None:
    name_tests(checkout, {HOOK: "tests/test_start.py"})
    text = "import pytest\n\n\n@pytest.mark.parametrize('n', range(30))\ndef test(n):\n    assert n == 30\n"
    (checkout.root / "tests" / "test_start.py").write_text(text)
    report = verify(checkout)[-1]
    assert len(report.found.problems) == 30
    assert str(report).endswith("tests.test_start.test[19]: assert 19 == 30\n  and 10 more")


# -- where the tests see it --------------------------------------------------------------------------


def test_a_test_belongs_to_the_patch_that_names_it_best(checkout: Checkout) -> None:
    """By itself rather than by a folder, by the inner folder rather than the outer, later rather than earlier."""
    names = ("a/test_x.py", "a/test_y.py", "a/b/test_z.py", "c/test_last.py")
    for name in ("a/helper.py", *names):
        path = checkout.root / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    named = {START: "tests/a tests/a/test_x.py tests/c", CONFIG: "tests/a/b tests/a/test_y.py", HOOK: "tests/a tests/c"}
    name_tests(checkout, named)
    with series.workshop(checkout.layout, checkout.upstream()) as repository:
        patches = series.load(checkout.layout, checkout.project, repository)
    due = [due_tests(checkout.root, patches, count) for count in range(4)]
    tests = [f"tests/{name}" for name in sorted(names)]
    assert due == [[], ["tests/a/test_x.py"], ["tests/a/b/test_z.py", "tests/a/test_x.py", "tests/a/test_y.py"], tests]


def test_installed_wheel_may_be_patched_and_of_an_older_number(checkout: Checkout, tmp_path: Path) -> None:
    """Whatever is installed, a prefix has upstream's files, its own, and nothing else."""
    name_tests(checkout, {HOOK: "tests/test_start.py"})
    site = tmp_path / "site"
    (site / "vllm-0.33.0.dist-info").rename(site / "vllm-0.33.0+sm120.7.dist-info")
    metadata = site / "vllm-0.33.0+sm120.7.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 0.33.0\n", "Version: 0.33.0+sm120.7\n", 1))
    (site / "vllm" / "engine.py").write_text("def start(value):\n    return 7\n")
    (site / "vllm" / "ours").mkdir()
    (site / "vllm" / "ours" / "old.py").write_text("")
    text = (
        "import importlib.util\n\nfrom vllm import engine\n\n\ndef test_start():\n    assert engine.start(5) == 1\n"
        "    assert importlib.util.find_spec('vllm.ours.old') is None\n"
    )
    (checkout.root / "tests" / "test_start.py").write_text(text)
    assert [report.found.problems for report in verify(checkout)] == [(), (), (), ()]
    assert "return 7" in (site / "vllm" / "engine.py").read_text()


@pytest.mark.parametrize("version", [None, "0.32.0"])
def test_not_installed(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    def distribution(name: str) -> importlib.metadata.Distribution:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return importlib.metadata.Distribution.at(tmp_path / "old.dist-info")

    (tmp_path / "old.dist-info").mkdir()
    (tmp_path / "old.dist-info" / "METADATA").write_text(f"Name: vllm\nVersion: {version}\n")
    monkeypatch.setattr("scripts.prefix.distribution", distribution)
    outcome = checkout.run("verify")
    assert outcome.code == 27
    assert "vllm 0.33.0 is not installed in " in outcome.err
    assert "cure: `make wheel install`" in outcome.err


# -- what is remembered ------------------------------------------------------------------------------


def remembered(checkout: Checkout) -> list[bool]:
    return [report.seconds is None for report in verify(checkout)]


def test_only_what_changed_is_done_again(checkout: Checkout) -> None:
    assert remembered(checkout) == [False, False, False, False]
    assert remembered(checkout) == [True, True, True, True]
    change(checkout, HOOK, "+    result = None\n", "+    result = None  # closed\n")
    assert remembered(checkout) == [True, True, True, False]
    checkout.run("bump")
    assert remembered(checkout) == [True, True, True, True]


def test_changed_tests_are_run_again(checkout: Checkout) -> None:
    name_tests(checkout, {HOOK: "tests/gpu"})
    verify(checkout)
    (checkout.root / "tests" / "gpu" / "helper.py").write_text("")
    assert remembered(checkout) == [True, True, True, False]
    with (checkout.root / "tests" / "backend" / "fake_gpu.py").open("a") as file:
        file.write("# changed\n")
    assert remembered(checkout) == [False, False, False, False]


def test_another_package_has_the_tests_run_again(checkout: Checkout, tmp_path: Path) -> None:
    verify(checkout)
    (tmp_path / "site" / "torch_like-2.0.dist-info").mkdir()
    (tmp_path / "site" / "torch_like-2.0.dist-info" / "METADATA").write_text("Name: torch-like\nVersion: 2.0\n")
    assert remembered(checkout) == [False, False, False, False]


def test_what_a_package_has_on_the_path_is_none(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify(checkout)
    vendor = tmp_path / "site" / "setuptools_like" / "_vendor"
    (vendor / "wheel_like-1.0.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(vendor))
    assert remembered(checkout) == [True, True, True, True]


def test_installation_meanwhile_spoils_no_result(checkout: Checkout, tmp_path: Path) -> None:
    """Such as a wheel that is installed anew beside a run: modules are missing for a while."""
    text = f"import pathlib\n\npathlib.Path({str(tmp_path / 'site' / 'vllm-0.33.0.dist-info' / 'NEW')!r}).touch()\n"
    backend = checkout.root / "overlay" / "vllm" / "ours" / "backend.py"
    backend.write_text(f"{text}from vllm import nothing\n")
    outcome = checkout.run("verify")
    assert outcome.code == 27
    assert "changed while overlay was verified, so the result says nothing\ncure: run it again" in outcome.err
    assert outcome.out == ""


def test_failures_are_not_remembered(checkout: Checkout) -> None:
    change(checkout, CONFIG, "+B = 20\r\n", "+B = 20 +\r\n")
    verify(checkout)
    assert remembered(checkout) == [True, True, False, False]


def test_damaged_result_is_done_again(checkout: Checkout) -> None:
    verify(checkout)
    results = sorted((checkout.cache / "verified").glob("*.json"))
    assert len(results) == 4
    results[0].write_text("{")
    results[1].write_text(json.dumps({"unknown": 1}))
    assert sorted(remembered(checkout)) == [False, False, True, True]


def test_killed_and_run_again(checkout: Checkout) -> None:
    """What was done before the kill is not done again, and nothing is left of what was under way."""
    folder = checkout.cache / "verified"
    begun = time.monotonic()
    expected = [counts(report) for report in verify(checkout)]
    span = time.monotonic() - begun
    killed = 0
    for part in (0.3, 0.6, 0.9):
        shutil.rmtree(folder)
        killed += kill_after(checkout, span * part, "--root", str(checkout.root), "verify", "--project=vllm")
        done = len(list(folder.glob("*.json")))
        reports = verify(checkout)
        assert [report.seconds is None for report in reports] == [number < done for number in range(4)]
        assert [counts(report) for report in reports] == expected
        assert leftovers(checkout) == []
    assert killed
