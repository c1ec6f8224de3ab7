"""`make check` finds each planted problem, says its file, and finds all of them in one run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable

import pytest

from scripts import lint, patch, pins
from scripts.errors import FatalError, LintError, SourceError
from tests.tool.miniature import SERIES, TRAILERS, UPSTREAM, Checkout

START, CONFIG, HOOK = SERIES


def problems(checkout: Checkout) -> str:
    with pytest.raises(LintError) as found:
        lint.check(checkout.layout, pins.load(checkout.layout.pins), code=False)
    return str(found.value).replace(f"{checkout.root}/", "")


def change(checkout: Checkout, do: Callable[[bytes], bytes], name: str = START) -> None:
    path = checkout.patches / name
    before = path.read_bytes()
    path.write_bytes(do(before))
    assert path.read_bytes() != before


def test_nothing_wrong(checkout: Checkout) -> None:
    outcome = checkout.run("check", "--no-code")
    assert (outcome.code, outcome.out) == (0, "")
    assert "ok     series of vllm\n" in outcome.err
    assert "ok     series of vllm-gguf-plugin\n" in outcome.err


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (f"\n\n{TRAILERS}", "\n\n", "trailer Upstream-Status is missing"),
        ("Upstream-Status: Pending\n", "", "trailer Upstream-Status is missing"),
        ("Remove-When: upstream does it\n", "", "trailer Remove-When is missing"),
        ("Scope: python\n", "", "trailer Scope is missing"),
        ("Scope: python\n", "Scope: rust\n", "Scope 'rust' is none of python, native"),
        ("Pending", "Perhaps", "Upstream-Status 'Perhaps' is none of Pending, Submitted"),
        ("Pending", "Submitted", "Upstream-Status Submitted needs an Upstream-Link"),
        ("Pending", "Backport\nUpstream-Link: yes", "Upstream-Status Backport needs an Upstream-Link"),
        ("Scope: python\n", "Scope: python\nTests: tests/none.py\n", "Tests names tests/none.py, which does not exist"),
        ("Scope: python\n", "Scope: python\nPatch-Filename: x.patch\n", "trailer Patch-Filename does not belong"),
        ("Upstream prints: that does not work.\n\n", "", "the message does not say why the patch exists"),
    ],
)
def test_header(checkout: Checkout, old: str, new: str, problem: str) -> None:
    text = (checkout.patches / START).read_text()
    assert old in text
    repository = checkout.upstream().repository
    read = patch.parse(repository, checkout.patches / START, text.replace(old, new).encode())
    found = patch.header_problems(read, checkout.root, "vllm")
    assert [line for line in found if line.startswith(f"{checkout.patches / START}: {problem}")]


@pytest.mark.slow
def test_links_and_tests_that_are_there(checkout: Checkout) -> None:
    (checkout.root / "tests").mkdir()
    (checkout.root / "tests" / "test_x.py").write_text("")
    good = b"Backport\nUpstream-Link: https://example.org/1\nTests: tests/test_x.py"
    change(checkout, lambda text: text.replace(b"Pending", good))
    lint.check(checkout.layout, pins.load(checkout.layout.pins), code=False)


def test_text_that_an_export_would_not_write(checkout: Checkout) -> None:
    change(checkout, lambda text: text.replace(b"Subject: ", b"Subject: [PATCH] "))
    assert problems(checkout) == f"patches/vllm/{START}: is not what `make export VERBATIM=1` writes"


@pytest.mark.slow
def test_patch_that_does_not_apply(checkout: Checkout) -> None:
    change(checkout, lambda text: text.replace(b"-    result = value", b"-    result = other"))
    found = problems(checkout)
    assert f"patches/vllm/{START}: conflict(vllm/engine.py)\nvllm/engine.py, hunk 1 of 1" in found


@pytest.mark.slow
def test_all_problems_at_once(checkout: Checkout) -> None:
    change(checkout, lambda text: text.replace(b"-    result = value", b"-    result = other"))
    change(checkout, lambda text: text.replace(b"Scope: python\n", b""), CONFIG)
    (checkout.root / "overlay" / "vllm_gguf_plugin").mkdir()
    (checkout.root / "overlay" / "vllm_gguf_plugin" / "__init__.py").write_text("")
    found = problems(checkout)
    assert START in found
    assert f"{CONFIG}: trailer Scope is missing" in found
    assert "overlay files shadow files of upstream: overlay/vllm_gguf_plugin/__init__.py" in found


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("vllm/engine.py", "overlay files shadow files of upstream: overlay/vllm/engine.py"),
        ("vllm/built.py", r"overlay/vllm/built\.py: shadows a file of vllm-0\.33\.0-.*x86_64\.whl"),
    ],
)
def test_overlay_over_upstream(checkout: Checkout, path: str, problem: str) -> None:
    """Over a file of the sdist, and over one that only the wheel has."""
    wheel_only = {**UPSTREAM, "vllm/built.py": "built\n"}
    checkout.release(wheel_only)
    sdist = checkout.project.sdist
    wheel = checkout.project.wheels["x86_64"]
    checkout.release()
    text = checkout.layout.pins.read_text()
    checkout.layout.pins.write_text(text.replace(checkout.project.wheels["x86_64"], wheel))
    assert checkout.project.sdist != sdist
    (checkout.root / "overlay" / path).write_text("ours\n")
    assert re.search(problem, problems(checkout))


@pytest.mark.parametrize("folder", ["patches/vlm", "overlay/vllm-gguf-plugin"])
def test_folder_of_no_project(checkout: Checkout, folder: str) -> None:
    (checkout.root / folder).mkdir(parents=True)
    assert f"{folder}: belongs to no project of upstream.toml" in problems(checkout)


@pytest.mark.slow
def test_cold_cache_without_an_index_says_all_that_is_missing(cold: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(SourceError) as missing:
        lint.check(cold.layout, pins.load(cold.layout.pins), code=False)
    assert "no-index" in str(missing.value)
    monkeypatch.setenv("PIP_FIND_LINKS", str(cold.root))
    with pytest.raises(SourceError) as missing:
        lint.check(cold.layout, pins.load(cold.layout.pins), code=False)
    assert "vllm 0.33.0 (sdist) is not cached" in str(missing.value)
    assert "vllm-gguf-plugin 0.0.5 (sdist) is not cached" in str(missing.value)


@pytest.mark.slow
def test_code_checks(checkout: Checkout) -> None:
    """ruff, mypy and pytest run in the checkout, and what they say is shown."""
    (checkout.root / "scripts").mkdir()
    (checkout.root / "scripts" / "bad.py").write_text("import os\nx: int = 'text'\n")
    (checkout.root / "tests" / "tool").mkdir(parents=True)
    (checkout.root / "tests" / "tool" / "test_bad.py").write_text("def test_bad():\n    assert 1 == 2\n")
    (checkout.root / "tests" / "wheel").mkdir()
    shutil.copy("pyproject.toml", checkout.root)
    with pytest.raises(LintError) as found:
        lint.check(checkout.layout, pins.load(checkout.layout.pins))
    for text in ("ruff check:", "F401", "ruff format", "mypy:", "bad.py:2: error", "fast tests:", "assert 1 == 2"):
        assert text in str(found.value)


def test_every_error_has_its_own_exit_code() -> None:
    classes = FatalError.__subclasses__()
    codes = [one.exit_code for one in classes]
    assert len(set(codes)) == len(classes)
    assert not {0, 1, 2, 130} & set(codes)
