"""A whole checkout in small: two upstream releases, a series of three patches, an overlay, a cache.

Upstream has what trips patch tools: CRLF line ends, files that its own .gitignore names, attributes that
convert line ends and choose other hunk headers, an executable, a file without a last newline.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts import build, cli, pins
from scripts.layout import Layout
from scripts.pins import Project
from scripts.upstream import Upstream
from tests.wheel.synthetic import PLUGIN_METADATA, TAGS, VERSION_MODULE, UpstreamWheel

REPOSITORY = Path(__file__).resolve().parents[2]
MTIME = 1_760_000_000
EXECUTABLE = frozenset({"vllm/run.sh"})


def _module(*names: str) -> str:
    """A module of functions that are all alike but for their names, so that a patch can go astray."""
    return "\n\n".join(f"def {name}(value):\n    result = value\n    return result\n" for name in names)


UPSTREAM: Mapping[str, str] = {
    ".gitattributes": "*.py diff=python\n*.txt text eol=crlf\n*.md -diff\n",
    ".gitignore": "generated.py\n_version.py\n*.sh\n",
    "README.md": "vLLM\n",
    "csrc/kernel.cu": "__global__ void f() {}\n",
    "tests/test_engine.py": "def test_engine():\n    pass\n",
    "vllm/__init__.py": "",
    "vllm/_version.py": VERSION_MODULE,
    "vllm/attention.py": _module(*(f"select_{letter}" for letter in "abcdefgh")),
    "vllm/config.py": "A = 1\r\nB = 2\r\nC = 3\r\nD = 4\r\n",
    "vllm/engine.py": _module("start", "step", "stop", "drain", "resume", "close"),
    "vllm/generated.py": "VALUE = 1\n",
    "vllm/notes.txt": "one\ntwo\nthree\n",
    "vllm/run.sh": "#!/bin/sh\necho run",
}
PLUGIN: Mapping[str, str] = {"vllm_gguf_plugin/__init__.py": "", "pyproject.toml": "[project]\n"}

OVERLAY: Mapping[str, str] = {"vllm/ours/__init__.py": "", "vllm/ours/backend.py": "def select():\n    return 'ours'\n"}

Edit = Mapping[str, tuple[str, str]]
SERIES: Mapping[str, Edit] = {
    "engine-start.patch": {
        "vllm/engine.py": ("def start(value):\n    result = value", "def start(value):\n    result = 1")
    },
    "config-b.patch": {"vllm/config.py": ("B = 2\r\n", "B = 20\r\nB2 = 21\r\n")},
    "attention-hook.patch": {
        "vllm/attention.py": ("def select_e(value):\n", "def select_e(value):\n    from vllm.ours import backend\n\n"),
        "vllm/engine.py": ("def close(value):\n    result = value", "def close(value):\n    result = None"),
    },
}
TRAILERS = "Upstream-Status: Pending\nRemove-When: upstream does it\nScope: python\n"

# A user's configuration that would change what git does, were it read.
HOSTILE_CONFIG = """\
[commit]
    gpgsign = true
[gpg]
    program = /bin/false
[core]
    autocrlf = true
    hooksPath = {hooks}
    attributesFile = {attributes}
    excludesFile = {excludes}
    quotePath = true
    abbrev = 4
[apply]
    whitespace = error
[diff]
    noprefix = true
    external = /bin/false
    renames = copies
    context = 0
    algorithm = patience
[format]
    signature = hostile
    attach = true
    numbered = true
    subjectPrefix = HOSTILE
[i18n]
    commitEncoding = latin1
[am]
    threeWay = true
[trailer]
    separators = =
[rerere]
    enabled = true
"""


def git(folder: Path, *arguments: str, date: str = f"{MTIME} +0000") -> str:
    """git as a user types it, apart from the tool."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date, "LC_ALL": "C"}
    identity = ("-c", "user.name=A Person", "-c", "user.email=person@example.org")
    command = ["git", *identity, *arguments]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    assert result.returncode == 0, f"{command}: {result.stderr.decode()}"
    return result.stdout.decode()


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
        path.chmod(0o755 if name in EXECUTABLE else 0o644)


def read_files(folder: Path) -> dict[str, tuple[bytes, bool]]:
    """Every file below a folder but git's and quilt's own, with its executable bit."""
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), bool(path.stat().st_mode & 0o100))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not {".git", ".pc", "__pycache__"} & set(path.parts)
    }


def sdist(folder: Path, name: str, version: str, files: Mapping[str, str]) -> Path:
    """A source distribution as setuptools lays one out."""
    top = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{top}.tar.gz"
    with gzip.GzipFile(path, "wb", mtime=MTIME) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for member_name, text in files.items():
            member = tarfile.TarInfo(f"{top}/{member_name}")
            member.size, member.mtime = len(text.encode()), MTIME
            member.mode = 0o755 if member_name in EXECUTABLE else 0o644
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def message(subject: str, trailers: str = TRAILERS) -> str:
    return f"{subject}\n\nUpstream prints: that does not work.\n\n{trailers}"


@dataclass(frozen=True)
class Outcome:
    """What one run of the command line gave back."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Checkout:
    """A miniature checkout: `files` is where the upstream files lie that pip may find."""

    root: Path
    cache: Path
    files: Path

    @property
    def layout(self) -> Layout:
        return Layout(self.root, self.cache)

    @property
    def project(self) -> Project:
        return pins.load(self.layout.pins).project("vllm")

    @property
    def patches(self) -> Path:
        return self.layout.patches("vllm")

    @property
    def tree(self) -> Path:
        return self.layout.tree("vllm")

    @property
    def names(self) -> list[str]:
        return [line for line in (self.patches / "series").read_text().splitlines() if not line.startswith("#")]

    def upstream(self) -> Upstream:
        return build.get_upstream(self.layout, self.project, "sdist")

    # -- making --------------------------------------------------------------------------------------

    def release(self, files: Mapping[str, str] = UPSTREAM) -> None:
        """Make both upstream releases, put them into the cache and pin them."""
        hashes = {}
        for name, version, content in (("vllm", "0.33.0", files), ("vllm-gguf-plugin", "0.0.5", PLUGIN)):
            package = name.replace("-", "_")
            made = UpstreamWheel(
                package={path: text.encode() for path, text in content.items() if path.startswith(f"{package}/")},
                metadata=UpstreamWheel.metadata if name == "vllm" else PLUGIN_METADATA,
                info=f"{package}-{version}.dist-info",
                file_name=f"{package}-{version}-{TAGS}.whl",
            )
            for kind, path in (("sdist", sdist(self.files, name, version, content)), ("wheel", made.write(self.files))):
                hashes[f"{name} {kind}"] = digest = sha256(path)
                kept = self.cache / "files" / digest / path.name
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_bytes(path.read_bytes())
        self.layout.pins.write_text(
            _PINS.format_map({key.replace(" ", "_").replace("-", "_"): value for key, value in hashes.items()})
        )

    def write_series(self, series: Mapping[str, Edit], files: Mapping[str, str] = UPSTREAM) -> None:
        """Make patches with plain git: one for each edit, which is text to replace by file."""
        author = self.root.parent / "author"
        write_files(author, {**files, **OVERLAY})
        git(author, "init", "--quiet")
        git(author, "add", "--all", "--force")
        git(author, "commit", "--quiet", "--message=upstream")
        for number, (name, edit) in enumerate(series.items()):
            for path, (old, new) in edit.items():
                content = (author / path).read_bytes().decode()
                assert content.count(old) == 1, f"{path}: {old!r}"
                (author / path).write_bytes(content.replace(old, new).encode())
            text = message(name.removesuffix(".patch").replace("-", " ").capitalize())
            git(author, "commit", "--quiet", "--all", f"--message={text}", date=f"{MTIME + number} +0000")
            options = (
                "--zero-commit",
                "--no-signature",
                "--full-index",
                "--no-stat",
                "--keep-subject",
                "--no-textconv",
            )
            # The attributes of upstream's files are not those of the tool's repositories.
            (author / ".git" / "info" / "attributes").write_text("* !diff\n")
            self.add_patch(name, git(author, "format-patch", "-1", "--stdout", *options).encode())

    def put(self, state: Path) -> None:
        """Make this what a golden folder says; what the folder has nothing of stays as it is."""
        for name in ("patches", "overlay", "tests"):
            if (state / name).is_dir():
                if name != "tests":
                    shutil.rmtree(self.root / name, ignore_errors=True)
                # New times, for git.
                shutil.copytree(state / name, self.root / name, copy_function=shutil.copyfile, dirs_exist_ok=True)

    def add_patch(self, name: str, text: bytes) -> Path:
        """Put a patch at the end of the series."""
        path = self.patches / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
        with (self.patches / "series").open("a") as series:
            series.write(f"{name}\n")
        return path

    # -- running -------------------------------------------------------------------------------------

    def run(self, *arguments: str) -> Outcome:
        """The command line, in this process."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            cli.main(["--root", str(self.root), *arguments])
        code = ended.value.code
        return Outcome(code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())

    def start(self, *arguments: str, folder: Path | None = None, **environment: str) -> subprocess.Popen[str]:
        """The command line as a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "scripts", "--root", str(self.root), *arguments],
            cwd=folder or self.root,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def spawn(self, *arguments: str, folder: Path | None = None, **environment: str) -> Outcome:
        """The same, to its end."""
        process = self.start(*arguments, folder=folder, **environment)
        out, err = process.communicate(timeout=60)
        return Outcome(process.returncode, out, err)

    def commit(self, path: str, change: Callable[[str], str], subject: str = "", amend: bool = False) -> None:
        """Change a file of build/vllm and commit it, as a user does."""
        target = self.tree / path
        target.write_bytes(change(target.read_bytes().decode()).encode())
        options = ("--amend", "--no-edit") if amend else (f"--message={message(subject)}",)
        git(self.tree, "commit", "--quiet", "--all", *options)


_PINS = """\
# A comment that stays.
[release]
label = "sm120" # why
number = 1

[vllm]
version = "0.33.0"
tag = "v0.33.0"
repository = "https://example.invalid/vllm"
sdist = "{vllm_sdist}"
[vllm.wheel]
x86_64 = "{vllm_wheel}"
aarch64 = "{vllm_wheel}"

[vllm-gguf-plugin]
version = "0.0.5"
tag = "v0.0.5"
repository = "https://example.invalid/vllm-gguf-plugin"
sdist = "{vllm_gguf_plugin_sdist}"
[vllm-gguf-plugin.wheel]
x86_64 = "{vllm_gguf_plugin_wheel}"
aarch64 = "{vllm_gguf_plugin_wheel}"
"""


def make(folder: Path) -> Checkout:
    """A checkout in `folder` with a cache that is warm."""
    checkout = Checkout(folder / "root", folder / "cache", folder / "files")
    for path in (checkout.root, checkout.cache, checkout.files):
        path.mkdir(parents=True)
    checkout.release()
    write_files(checkout.root / "overlay", OVERLAY)
    (checkout.root / "releases.toml").write_text("")
    checkout.patches.mkdir(parents=True)
    (checkout.patches / "series").write_text("# The order.\n")
    checkout.write_series(SERIES)
    return checkout
