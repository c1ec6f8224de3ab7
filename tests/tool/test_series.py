"""Every rule that a series, a patch file and the overlay must keep: broken, it is named with its file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import patch, series
from scripts.errors import ApplyError, SeriesError
from scripts.series import Applied
from tests.tool.miniature import SERIES, Checkout

START, CONFIG, HOOK = SERIES


def apply(checkout: Checkout) -> Applied:
    with series.workshop(checkout.layout, checkout.upstream()) as repository:
        return series.apply(checkout.layout, checkout.project, repository, checkout.upstream().commit)


def refused(checkout: Checkout) -> str:
    """What is said of a series that breaks a rule; the message names the file and a cure."""
    with pytest.raises(SeriesError) as error:
        apply(checkout)
    assert error.value.cure
    assert str(checkout.root) in str(error.value)
    return str(error.value).replace(f"{checkout.root}/", "")


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    before = path.read_bytes()
    path.write_bytes(change(before))
    assert path.read_bytes() != before


# -- the series file ---------------------------------------------------------------------------------


def test_patches_in_order(checkout: Checkout) -> None:
    assert [step.patch.name for step in apply(checkout).steps] == list(SERIES)


def test_comments_and_blank_lines(checkout: Checkout) -> None:
    edit(checkout.patches / "series", lambda text: text.replace(b"\n", b"  # why\n\n"))
    assert [step.patch.name for step in apply(checkout).steps] == list(SERIES)


def test_project_without_patches(checkout: Checkout) -> None:
    for path in checkout.patches.iterdir():
        path.unlink()
    checkout.patches.rmdir()
    applied = apply(checkout)
    assert (applied.steps, applied.tip) == ((), applied.overlay)


def test_listed_but_missing(checkout: Checkout) -> None:
    (checkout.patches / CONFIG).unlink()
    assert refused(checkout) == f"patches/vllm/series: no such file: {CONFIG}"


def test_missing_series_file(checkout: Checkout) -> None:
    (checkout.patches / "series").unlink()
    assert START in refused(checkout)


def test_not_in_the_series(checkout: Checkout) -> None:
    (checkout.patches / "other.patch").write_bytes((checkout.patches / START).read_bytes())
    assert refused(checkout) == "patches/vllm: not in the series: other.patch"


def test_listed_twice(checkout: Checkout) -> None:
    edit(checkout.patches / "series", lambda text: text + START.encode() + b"\n")
    assert refused(checkout) == f"patches/vllm/series: listed twice: {START}"


def test_same_change_twice(checkout: Checkout) -> None:
    checkout.add_patch("other.patch", (checkout.patches / START).read_bytes())
    assert refused(checkout) == f"patches/vllm/other.patch: the same change as {START}"


@pytest.mark.parametrize(
    "line", ["../evil.patch", "/etc/passwd", "sub/a.patch", "a.diff", "Upper.patch", "-p0 a.patch"]
)
def test_line_that_is_no_file_name(checkout: Checkout, line: str) -> None:
    edit(checkout.patches / "series", lambda text: text + line.encode() + b"\n")
    assert refused(checkout).startswith(f"patches/vllm/series: {line!r} is not the name of a patch file")


def test_series_that_is_no_text(checkout: Checkout) -> None:
    (checkout.patches / "series").write_bytes(b"\xff\xfe")
    assert refused(checkout) == "patches/vllm/series: not text"


# -- a patch file ------------------------------------------------------------------------------------

BINARY = b"diff --git a/vllm/x.bin b/vllm/x.bin\nindex 1111111..2222222 100644\n"
NEW = b"""
diff --git a/vllm/new.py b/vllm/new.py
new file mode 100644
index 0000000..2222222
--- /dev/null
+++ b/vllm/new.py
@@ -0,0 +1 @@
+new
"""
MODE = b"\ndiff --git a/vllm/engine.py b/vllm/engine.py\nold mode 100644\nnew mode 100755\n"
DIFF = re.compile(rb"\ndiff --git .*", re.DOTALL)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: b"", "empty"),
        (lambda text: b"\n \n", "empty"),
        (lambda text: text.replace(b"\n", b"\r\n"), "has CRLF line ends"),
        (lambda text: text[text.index(b"diff --git") :], "not a git format-patch mail with a diff"),
        (lambda text: DIFF.sub(b"\n", text), "not a git format-patch mail with a diff"),
        (lambda text: text.replace(b"From: A Person <person@example.org>\n", b""), "not a git format-patch mail"),
        (lambda text: text.replace(b"+    result = 1\n", b""), "malformed diff"),
        (lambda text: text.replace(b"@@ -1,5", b"@@ -1,9"), "malformed diff"),
        (lambda text: re.sub(rb"@@ .*", b"", text, flags=re.DOTALL), "changes no line of vllm/engine.py"),
        (lambda text: DIFF.sub(b"\n" + BINARY + b"GIT binary patch\nliteral 1\nIcmZ\n", text), "changes a binary file"),
        (
            lambda text: DIFF.sub(b"\n" + BINARY + b"Binary files a/vllm/x.bin and b/vllm/x.bin differ\n", text),
            "changes a binary file",
        ),
        (lambda text: text.replace(b"/vllm/engine.py", b"/../engine.py"), "a/../engine.py leads out of the tree"),
        (lambda text: text.replace(b"/vllm/engine.py", b"/vllm/../../x"), "a/vllm/../../x leads out of the tree"),
        (lambda text: text.replace(b"/vllm/engine.py", b"/.git/config"), "a/.git/config leads out of the tree"),
        (lambda text: text.replace(b"a/vllm/engine.py", b"/etc/passwd"), "/etc/passwd leads out of the tree"),
        (lambda text: DIFF.sub(MODE, text), "changes no line of vllm/engine.py"),
        (lambda text: DIFF.sub(NEW, text), "adds vllm/new.py"),
        (lambda text: text.replace(b"Upstream prints", b"diff --git"), "a line of the message begins like a diff"),
        (lambda text: text.replace(b"Upstream prints", b"--- x"), "a line of the message begins like a diff"),
    ],
)
def test_bad_patch_file(checkout: Checkout, change: Callable[[bytes], bytes], problem: str) -> None:
    path = checkout.patches / START
    edit(path, change)
    with pytest.raises(SeriesError) as error:
        patch.load(checkout.upstream().repository, path)
    assert str(error.value).startswith(f"{path}: {problem}")
    assert error.value.cure


def test_patch_that_is_a_folder(checkout: Checkout) -> None:
    (checkout.patches / START).unlink()
    (checkout.patches / START).mkdir()
    assert refused(checkout) == f"patches/vllm/{START}: cannot be read: Is a directory"


def test_patch_of_an_overlay_file(checkout: Checkout) -> None:
    edit(checkout.patches / START, lambda text: text.replace(b"/vllm/engine.py", b"/vllm/ours/backend.py"))
    assert refused(checkout) == f"patches/vllm/{START}: touches overlay files: vllm/ours/backend.py"


def test_patch_of_compiled_code(checkout: Checkout) -> None:
    edit(checkout.patches / START, lambda text: text.replace(b"/vllm/engine.py", b"/csrc/kernel.cu"))
    with pytest.raises(ApplyError, match=rf"{START}: native-in-wheel-mode\(csrc/kernel\.cu\)"):
        apply(checkout).refuse_bad()


# -- the overlay -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["vllm/engine.py", "vllm/generated.py", "vllm/_version.py"])
def test_overlay_file_over_one_of_upstream(checkout: Checkout, path: str) -> None:
    (checkout.root / "overlay" / path).write_text("ours\n")
    assert refused(checkout) == f"overlay files shadow files of upstream: {checkout.root}/overlay/{path}".replace(
        f"{checkout.root}/", ""
    )


@pytest.mark.slow
def test_overlay_file_in_the_place_of_a_folder(checkout: Checkout) -> None:
    files = {"vllm/deep/er/module.py": "", "vllm/__init__.py": ""}
    checkout.release(files)
    (checkout.root / "overlay" / "vllm" / "deep").write_text("ours\n")
    for name in SERIES:
        (checkout.patches / name).unlink()
    (checkout.patches / "series").write_text("")
    assert "overlay/vllm/deep" in refused(checkout)


@pytest.mark.parametrize("name", ["backend.py.orig", "backend.py.rej", "backend.py~", "backend.pyc", ".backend.py.swp"])
def test_leftover_in_the_overlay(checkout: Checkout, name: str) -> None:
    (checkout.root / "overlay" / "vllm" / "ours" / name).write_text("left\n")
    assert refused(checkout) == f"overlay/vllm/ours/{name}: a leftover in the overlay"


def test_link_in_the_overlay(checkout: Checkout) -> None:
    (checkout.root / "overlay" / "vllm" / "ours" / "link.py").symlink_to("/etc/passwd")
    assert refused(checkout) == "overlay/vllm/ours/link.py: the overlay takes plain files only"


@pytest.mark.slow
def test_compiled_python_is_passed_over(checkout: Checkout) -> None:
    cache = checkout.root / "overlay" / "vllm" / "ours" / "__pycache__"
    cache.mkdir()
    tip = apply(checkout).tip
    (cache / "backend.cpython-311.pyc").write_bytes(b"x")
    assert apply(checkout).tip == tip
