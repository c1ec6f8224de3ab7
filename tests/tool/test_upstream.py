"""Upstream in git: what the sdist has, byte for byte; or what the pinned commit has."""

from __future__ import annotations

import io
import os
import shutil
import signal
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import build, upstream
from scripts.errors import HashError, PinError, SourceError
from scripts.pins import Project
from scripts.repository import Author, Repository
from scripts.upstream import Upstream
from tests.tool.miniature import EXECUTABLE, MTIME, PLUGIN, UPSTREAM, Checkout, git, sha256, write_files

Files = dict[str, tuple[str, bytes]]


@pytest.fixture(name="checkout")
def checkout_with_own_cache(own_cache: Checkout) -> Checkout:
    return own_cache


def content(origin: Upstream) -> Files:
    files = origin.repository.files(origin.commit)
    blobs = origin.repository.blobs([entry.blob for entry in files.values()])
    return {path: (entry.mode, data) for (path, entry), data in zip(files.items(), blobs, strict=True)}


def test_sdist_is_imported_whole(checkout: Checkout) -> None:
    """Also what upstream's .gitignore names, its line ends, its executable bits."""
    expected = {path: ("100755" if path in EXECUTABLE else "100644", text.encode()) for path, text in UPSTREAM.items()}
    assert content(checkout.upstream()) == expected


def test_commit_depends_on_the_content_alone(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = checkout.upstream().commit
    shutil.rmtree(checkout.cache / "git")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    monkeypatch.chdir(tmp_path)
    again = checkout.upstream()
    assert again.commit == first
    shown = again.repository.run("show", "--no-patch", "--format=%at %ct %ce%n%B", first).decode()
    assert shown.startswith(f"{MTIME} {MTIME} maintainers@vllm-sm120.invalid\nupstream vllm 0.33.0\n")
    assert checkout.project.sdist in shown


def test_killed_import_leaves_nothing_that_counts(tmp_path: Path) -> None:
    """git has been given whole files when the run dies; it must not take them for all of them."""
    repository = Repository.init(tmp_path / "git")

    def files() -> Iterator[tuple[str, bool, bytes]]:
        for number in range(20):
            yield f"file{number}", False, os.urandom(100_000)
        os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if not pid:
        repository.import_files("refs/upstream/x", files(), "x", Author("a", "a@example.org", f"{MTIME} +0000"))
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    time.sleep(0.5)  # git lives on until it has read what was in the pipe
    assert repository.ref("refs/upstream/x") is None


def test_leftovers_of_a_killed_run_are_removed(checkout: Checkout) -> None:
    commit = checkout.upstream().commit
    folder = checkout.upstream().repository.git_dir
    git(folder, "update-ref", "-d", f"refs/upstream/{checkout.project.sdist}")
    leftovers = [
        folder / "refs" / "upstream" / f"{checkout.project.sdist}.lock",
        folder / "objects" / "pack" / "tmp_pack_abcdef",
        folder / "fast_import_crash_1",
        folder / "shallow.lock",
        folder / "config.lock",
    ]
    for path in leftovers:
        path.write_bytes(b"")
    assert checkout.upstream().commit == commit
    assert not [path for path in leftovers if path.exists()]


def repack(checkout: Checkout, change: Callable[[tarfile.TarFile], None]) -> Project:
    """Pin and cache another archive in place of the source distribution."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        change(tar)
    path = checkout.files / "other.tar.gz"
    path.write_bytes(data.getvalue())
    digest = sha256(path)
    (checkout.cache / "files" / digest).mkdir()
    shutil.copy(path, checkout.cache / "files" / digest)
    return replace(checkout.project, sdist=digest)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("../evil", tarfile.REGTYPE),
        ("top/../../evil", tarfile.REGTYPE),
        ("/evil", tarfile.REGTYPE),
        ("evil", tarfile.REGTYPE),
        ("top/link", tarfile.SYMTYPE),
        ("top/link", tarfile.LNKTYPE),
        ("top/device", tarfile.CHRTYPE),
    ],
)
def test_archive_that_cannot_be_trusted(checkout: Checkout, name: str, kind: bytes) -> None:
    def add(tar: tarfile.TarFile) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, "/etc/passwd"
        tar.addfile(member)

    with pytest.raises(SourceError, match="not a plain file below the top folder") as refused:
        upstream.from_sdist(checkout.layout, repack(checkout, add))
    assert repr(name) in str(refused.value)


def test_not_an_archive(checkout: Checkout) -> None:
    project = replace(checkout.project, sdist=checkout.project.wheels["x86_64"])
    with pytest.raises(SourceError, match="not a readable source distribution"):
        upstream.from_sdist(checkout.layout, project)


# -- SOURCE=git --------------------------------------------------------------------------------------


@pytest.fixture
def clone(checkout: Checkout, tmp_path: Path) -> Path:
    """Upstream's repositories on this machine, and the commit of vLLM's pinned by a prefix."""
    for name, tag, upstream_files in (("vllm", "v0.33.0", UPSTREAM), ("vllm-gguf-plugin", "v0.0.5", PLUGIN)):
        work, bare = tmp_path / name / "work", tmp_path / name / f"{name}.git"
        files = {path: text for path, text in upstream_files.items() if not path.endswith("_version.py")}
        write_files(work, {**files, "only-in-git.md": "not in the sdist\n"})
        git(work, "init", "--quiet")
        git(work, "add", "--all", "--force")
        git(work, "commit", "--quiet", "--message=release")
        git(work, "tag", tag)
        git(tmp_path, "clone", "--quiet", "--bare", str(work), str(bare))
    pin(checkout, git(tmp_path / "vllm" / "work", "rev-parse", "HEAD").strip()[:9])
    return tmp_path / "vllm" / "vllm.git"


def pin(checkout: Checkout, commit: str) -> None:
    path = checkout.layout.pins
    path.write_text(path.read_text().replace('tag = "v0.33.0"\n', f'tag = "v0.33.0"\ncommit = "{commit}"\n'))


def move_tag(bare: Path, change: dict[str, str]) -> str:
    work = bare.with_name("work")
    write_files(work, change)
    git(work, "commit", "--quiet", "--all", "--message=other")
    git(work, "tag", "--force", "v0.33.0")
    git(work, "push", "--quiet", "--force", str(bare), "v0.33.0")
    return git(work, "rev-parse", "HEAD").strip()


def from_git(checkout: Checkout, repository: Path) -> Upstream:
    return build.get_upstream(checkout.layout, checkout.project, "git", str(repository))


def test_clone(checkout: Checkout, clone: Path) -> None:
    origin = from_git(checkout, clone)
    files = content(origin)
    assert "only-in-git.md" in files
    assert "vllm/_version.py" not in files
    package = {path: file for path, file in content(checkout.upstream()).items() if path.startswith("vllm/")}
    del package["vllm/_version.py"]
    assert {path: file for path, file in files.items() if path.startswith("vllm/")} == package
    full = git(clone, "rev-parse", "v0.33.0").strip()
    assert f'commit = "{full}"\n' in checkout.layout.pins.read_text()
    shutil.rmtree(clone)  # the second time nothing is cloned, and the pin is the full id
    assert from_git(checkout, clone).commit == origin.commit


@pytest.mark.slow
def test_tree_and_wheel_from_a_clone(checkout: Checkout, clone: Path) -> None:
    """The wheels are the same to the byte, though the clone lacks a file of the sdist and has one more."""
    assert checkout.run("wheel", "--platform=x86_64").code == 0
    wheels = {path.name: sha256(path) for path in checkout.layout.dist.rglob("*.whl")}
    shutil.rmtree(checkout.layout.dist)
    options = ("--source=git", f"--repository={clone.parents[1]}/{{project}}/{{project}}.git")
    outcome = checkout.run("wheel", "--platform=x86_64", *options)
    assert outcome.code == 0, outcome.err
    assert "vllm-gguf-plugin: v0.0.5 is commit" in outcome.err
    assert {path.name: sha256(path) for path in checkout.layout.dist.rglob("*.whl")} == wheels
    assert checkout.run("tree", *options).code == 0
    assert (checkout.tree / "only-in-git.md").exists()
    assert (checkout.tree / "vllm" / "config.py").read_bytes() == b"A = 1\r\nB = 20\r\nB2 = 21\r\nC = 3\r\nD = 4\r\n"
    assert len(wheels) == 2


def test_moved_tag(checkout: Checkout, clone: Path) -> None:
    moved = move_tag(clone, {"vllm/engine.py": "evil\n"})
    with pytest.raises(HashError, match=f"tag v0.33.0 is commit {moved}, pinned is"):
        from_git(checkout, clone)
    text = checkout.layout.pins.read_text()
    assert moved not in text


def test_clone_that_differs_from_the_sdist(checkout: Checkout, clone: Path) -> None:
    moved = move_tag(clone, {"vllm/engine.py": "evil\n"})
    text = checkout.layout.pins.read_text().replace(checkout.project.commit, moved[:12])
    checkout.layout.pins.write_text(text)
    with pytest.raises(
        HashError, match=r"1 files of v0\.33\.0 differ from the source distribution, first vllm/engine\.py"
    ):
        from_git(checkout, clone)


@pytest.mark.slow
def test_clone_is_compared_with_a_sdist_that_is_only_downloaded(checkout: Checkout, clone: Path) -> None:
    shutil.rmtree(checkout.cache / "git")
    move_tag(clone, {"vllm/engine.py": "evil\n"})
    path = checkout.layout.pins
    path.write_text(path.read_text().replace(checkout.project.commit, git(clone, "rev-parse", "v0.33.0").strip()))
    with pytest.raises(HashError, match="differ from the source distribution"):
        from_git(checkout, clone)


def test_without_a_pinned_commit_the_sdist_must_vouch(checkout: Checkout, clone: Path) -> None:
    path = checkout.layout.pins
    path.write_text(path.read_text().replace(f'commit = "{checkout.project.commit}"\n', ""))
    shutil.rmtree(checkout.cache)
    assert from_git(checkout, clone).commit
    assert checkout.project.commit == ""
    move_tag(clone, {"vllm/engine.py": "evil\n"})
    shutil.rmtree(checkout.cache / "git")
    with pytest.raises(HashError, match="differ from the source distribution"):
        from_git(checkout, clone)


def test_no_such_repository(checkout: Checkout, clone: Path) -> None:
    with pytest.raises(SourceError, match=r"tag v0\.33\.0 cannot be cloned: .*does not appear to be a git repository"):
        from_git(checkout, clone.with_name("elsewhere"))


def test_unknown_source(checkout: Checkout) -> None:
    with pytest.raises(PinError, match="unknown source 'svn'"):
        build.get_upstream(checkout.layout, checkout.project, "svn")
