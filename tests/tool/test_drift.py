"""`make drift`: what other releases do to the series and the overlay, planted change by planted change."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from scripts import drift
from scripts.index import Release
from tests.tool.miniature import SERIES, UPSTREAM, Checkout, Outcome, read_files, sdist, write_files

USER = """\
from vllm.attention import select_a
from vllm.engine import drain


def use():
    return drain(select_a(1))
"""
Files = Mapping[str, str]


@pytest.fixture(name="checkout")
def checkout_whose_overlay_uses_upstream(own_cache: Checkout) -> Checkout:
    write_files(own_cache.root / "overlay", {"vllm/ours/user.py": USER})
    return own_cache


def release(checkout: Checkout, version: str, files: Files) -> None:
    sdist(checkout.files, "vllm", version, files)


def run(checkout: Checkout, *arguments: str) -> tuple[Outcome, dict[str, Any]]:
    """The command, and the JSON that it writes."""
    path = checkout.root / "drift.json"
    outcome = checkout.run("drift", "--json", str(path), *arguments)
    return outcome, json.loads(path.read_text())


def change(path: str, old: str, new: str, files: Files = UPSTREAM) -> Files:
    assert files[path].count(old) == 1, old
    return {**files, path: files[path].replace(old, new)}


def move(path: str, target: str) -> Files:
    return {**{name: text for name, text in UPSTREAM.items() if name != path}, target: UPSTREAM[path]}


START, CONFIG, HOOK = SERIES
CLEAN = ("exact", "offset(2)", "merged-3way")
EXACT = dict.fromkeys(SERIES, "exact")
USE = "overlay/vllm/ours/user.py"
SELECT_E = "def select_e(value):\n    result = value\n"
PLANTED: Mapping[str, tuple[Callable[[], Files], dict[str, str], list[str]]] = {
    "nothing": (lambda: {**UPSTREAM, "README.md": "newer\n"}, {}, []),
    "an offset": (
        lambda: {**UPSTREAM, "vllm/attention.py": f"# new\n\n{UPSTREAM['vllm/attention.py']}"},
        {HOOK: "offset(2)"},
        [],
    ),
    "a change beside a patch's": (
        lambda: change("vllm/attention.py", "def select_d(value):\n", "def select_d(value, more=0):\n"),
        {HOOK: "exact"},
        [],
    ),
    "a change in a patch's context": (
        lambda: change("vllm/attention.py", f"{SELECT_E}    return result", f"{SELECT_E}    return (result)"),
        {HOOK: "merged-3way"},
        [],
    ),
    "a patch that upstream has taken": (
        lambda: change("vllm/engine.py", *SERIES[START]["vllm/engine.py"]),
        {START: "upstreamed"},
        [],
    ),
    "a part that upstream has taken": (
        lambda: change("vllm/attention.py", *SERIES[HOOK]["vllm/attention.py"]),
        {HOOK: "partly-upstreamed(vllm/attention.py hunk 1)"},
        [],
    ),
    "a conflict": (lambda: change("vllm/config.py", "B = 2", "B = 3"), {CONFIG: "conflict(vllm/config.py)"}, []),
    "a file that moved": (
        lambda: move("vllm/attention.py", "vllm/selection.py"),
        {HOOK: "file-gone(vllm/attention.py)"},
        [
            f"{USE}:1: no module vllm.attention, from which select_a is imported; select_a is in vllm/selection.py",
        ],
    ),
    "a function that is gone": (
        lambda: change("vllm/engine.py", "def drain(", "def empty("),
        {},
        [f"{USE}:2: vllm.engine has no drain"],
    ),
    "a signature that changed": (
        lambda: change("vllm/engine.py", "def drain(value)", "def drain(value, timeout)"),
        {},
        [f"{USE}:6: vllm.engine.drain(): missing a required argument: 'timeout'"],
    ),
    "a file that the overlay has": (
        lambda: {**UPSTREAM, "vllm/ours/backend.py": "theirs = 1\n"},
        {},
        ["overlay/vllm/ours/backend.py:1: upstream has this file now"],
    ),
}


@pytest.mark.slow
def test_planted_changes(checkout: Checkout) -> None:
    """Every planted change, each in a release of its own; what is clean and what is not is also the exit code."""
    tags = {planted: f"v0.34.{number}" for number, planted in enumerate(PLANTED)}
    for planted, (files, _, _) in PLANTED.items():
        release(checkout, tags[planted].removeprefix("v"), files())
    before = read_files(checkout.root)
    outcome, found = run(checkout, "--tags", "v0.34.0..latest")
    (checkout.root / "drift.json").unlink()
    assert {path: kept for path, kept in read_files(checkout.root).items() if not path.startswith("build/")} == before

    expected = {}
    for planted, (_, verdicts, problems) in PLANTED.items():
        clean = not problems and all(one.startswith(("exact", "offset", "merged")) for one in verdicts.values())
        expected[planted] = {"patches": {**EXACT, **verdicts}, "overlay": problems, "clean": clean}
    assert {planted: found[tag] for planted, tag in tags.items()} == expected
    unclean = [tag for planted, tag in tags.items() if not expected[planted]["clean"]]
    assert outcome.code == 26
    assert f"would not be clean to {', '.join(unclean)}\n" in outcome.err
    for tag in unclean:
        left = [f"{name}: {verdict}" for name, verdict in found[tag]["patches"].items() if verdict not in CLEAN]
        assert [line for line in outcome.out.splitlines() if line.startswith(f"{tag} ")] == [
            f"{tag} {line}" for line in [*left, *found[tag]["overlay"]]
        ]
    rest = " ".join(tag for tag in tags.values() if tag not in unclean)
    outcome, found = run(checkout, "--tags", rest)
    assert outcome.code == 0, outcome.err
    assert " ".join(found) == rest


@pytest.mark.slow
def test_what_a_failing_patch_would_bring_is_its_own_verdict(checkout: Checkout) -> None:
    """B2 is the patch's: where it conflicts, its verdict says so, and not the overlay as well."""
    write_files(checkout.root / "overlay", {"vllm/ours/user.py": "from vllm.config import B2, D\n"})
    release(checkout, "0.34.0", change("vllm/config.py", "B = 2", "B = 3"))
    release(checkout, "0.35.0", change("vllm/config.py", "D = 4", "E = 4"))
    _, found = run(checkout, "--tags", "v0.34.0 v0.35.0")
    assert found["v0.34.0"]["overlay"] == []
    assert found["v0.34.0"]["patches"][CONFIG] == "conflict(vllm/config.py)"
    assert found["v0.35.0"]["overlay"] == [f"{USE}:1: vllm.config has no D"]


@pytest.mark.slow
def test_patch_that_merges_but_not_as_the_same_change(checkout: Checkout) -> None:
    """Upstream has made a part of it: git merges the rest without a word, a rebase stops, and so it is not clean."""
    for path in checkout.patches.glob("*.patch"):
        path.unlink()
    (checkout.patches / "series").write_text("")
    head, taken = "def start(value):\n", "def start(value, *more):\n"
    body = "    result = value\n    return"
    checkout.write_series({"two.patch": {"vllm/engine.py": (f"{head}{body} result", f"{taken}{body} more")}})
    release(checkout, "0.34.0", change("vllm/engine.py", head, taken))
    outcome, found = run(checkout)
    assert outcome.code == 26
    assert found["v0.33.0"] == {"patches": {"two.patch": "exact"}, "overlay": [], "clean": True}
    assert found["v0.34.0"]["patches"] == {"two.patch": "conflict(vllm/engine.py)"}
    assert found["v0.34.0"]["clean"] is False


@pytest.mark.slow
def test_table_markdown_and_news(checkout: Checkout) -> None:
    release(checkout, "0.32.0", UPSTREAM)
    release(checkout, "0.34.0", PLANTED["a file that moved"][0]())
    page = checkout.root / "drift.md"
    outcome, found = run(checkout, "--markdown", str(page))
    assert list(found) == ["v0.32.0", "v0.33.0", "v0.34.0"]
    rows = [line.split() for line in outcome.out.splitlines()]
    assert ["patch", "v0.32.0", "v0.33.0", "v0.34.0"] in rows
    assert ["attention-hook", "exact", "exact", "file-gone"] in rows
    assert ["overlay", "fits", "fits", "1", "problem"] in rows
    assert ["rebase", "clean", "clean", "not", "clean"] in rows
    text = page.read_text()
    assert "| attention-hook | exact | exact | file-gone |" in text
    assert "* `attention-hook.patch: file-gone(vllm/attention.py)`" in text
    assert f"* `{found['v0.34.0']['overlay'][0]}`" in text
    assert "Upstream has a newer release, v0.34.0; v0.33.0 is pinned." in text
    assert "Upstream has a newer release, v0.34.0; v0.33.0 is pinned." in outcome.err


@pytest.mark.slow
def test_no_cell_is_cut_off_on_a_pipe(checkout: Checkout) -> None:
    versions = [f"0.31.{number}" for number in range(9)]
    for version in versions:
        release(checkout, version, UPSTREAM)
    outcome = checkout.run("drift", "--tags", "v0.31.0..pin")
    heads = next(line.split() for line in outcome.out.splitlines() if "patch" in line)
    assert heads == ["patch", *(f"v{version}" for version in versions), "v0.33.0"]


def test_nothing_newer(checkout: Checkout) -> None:
    outcome = checkout.run("drift", "--json", "1")
    assert outcome.code == 0
    assert json.loads(outcome.out) == {"v0.33.0": {"patches": EXACT, "overlay": [], "clean": True}}
    assert "v0.33.0, which is pinned, is upstream's newest release." in outcome.err


def test_other_project(checkout: Checkout) -> None:
    sdist(checkout.files, "vllm-gguf-plugin", "0.0.6", {"vllm_gguf_plugin/__init__.py": ""})
    _, found = run(checkout, "--project", "vllm-gguf-plugin")
    assert found == {tag: {"patches": {}, "overlay": [], "clean": True} for tag in ("v0.0.5", "v0.0.6")}


@pytest.mark.parametrize(
    ("tags", "chosen"),
    [
        ("", "1.3 1.4 1.5 1.6 2.0 2.1 2.2 2.3 2.4"),
        ("v1.5", "1.5"),
        ("1.5, v1.1\nv2.5", "1.1 1.5 2.5"),
        ("latest", "2.5"),
        ("v1.4..v2.1", "1.4 1.5 1.6 2.0 2.1"),
        ("v2.4..latest v2.0", "2.0 2.4 2.5"),
        ("pin..latest", "2.0 2.1 2.2 2.3 2.4 2.5"),
        ("v2.2rc1", "2.2rc1"),
        ("v1.7", "1.7"),
    ],
)
def test_choice_of_releases(checkout: Checkout, tags: str, chosen: str) -> None:
    """Neither pre-releases nor withdrawn ones come unasked; the pin does, also where no index has it."""
    numbers = "1.1 1.2 1.3 1.4 1.5 1.6 1.7 2.1 2.2rc1 2.2 2.3 2.4 2.5 3.0a1"
    known = {one: Release(one, "", {}, yanked=str(one) == "1.7") for one in map(Version, numbers.split(" "))}
    project = drift.replace(checkout.project, version="2.0")
    assert " ".join(map(str, drift.choose(known, project, tags))) == chosen


@pytest.mark.parametrize("tag", ["v0.99.0", "nonsense", "v0.32.0..v0.99.0"])
def test_unknown_release(checkout: Checkout, tag: str) -> None:
    outcome = checkout.run("drift", "--tags", tag)
    assert outcome.code == 10
    assert "in the package indexes" in outcome.err
    assert "the newest: v0.33.0" in outcome.err


def test_no_index(checkout: Checkout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    assert checkout.run("drift").code == 11


def test_series_that_does_not_apply_to_its_pin(checkout: Checkout) -> None:
    patch = checkout.patches / CONFIG
    patch.write_bytes(patch.read_bytes().replace(b"-B = 2", b"-B = 5"))
    outcome = checkout.run("drift")
    assert outcome.code == 21
    assert str(patch) in outcome.err


@pytest.mark.slow
def test_killed_run_goes_on(checkout: Checkout) -> None:
    """A run that dies while it imports a release leaves nothing that counts; the next one says the same as ever."""
    for version in ("0.34.0", "0.35.0", "0.36.0"):
        release(checkout, version, {**UPSTREAM, "README.md": version})
    page = checkout.root / "page.md"
    process = checkout.start("drift", "--markdown", str(page))
    assert process.stderr is not None
    for line in process.stderr:
        if "importing vllm-0.35.0" in line:
            break
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not page.exists()
    outcome, found = run(checkout)
    assert outcome.code == 0, outcome.err
    assert list(found) == ["v0.33.0", "v0.34.0", "v0.35.0", "v0.36.0"]
    assert "importing vllm-0.34.0" not in outcome.err
