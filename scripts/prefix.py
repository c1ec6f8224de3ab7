"""The prefixes of a series, and a place in which the code of one of them runs.

Upstream alone is a prefix, so is upstream with the overlay, and so is that with the first patches of the series.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.version import Version

from scripts import build, fetch
from scripts.layout import Layout
from scripts.patch import Patch
from scripts.pins import Project
from scripts.repository import Entry, Repository
from scripts.series import Applied
from scripts.sources import blob_id

UPSTREAM = "upstream"
OVERLAY = "overlay"


@dataclass(frozen=True)
class Prefix:
    """A prefix, named after what was laid on last: `upstream`, `overlay` or a patch file.

    `upstream` and `overlay` are the commits that it is made of, `commit` is its last one.
    """

    names: tuple[str, ...]
    project: Project
    upstream: str
    overlay: str
    commit: str
    patches: tuple[Patch, ...]

    @property
    def name(self) -> str:
        return ", ".join(self.names)


def prefixes(applied: Applied) -> list[Prefix]:
    """The prefixes of a series, the shortest first; they end before a patch that does not apply."""
    project, upstream, laid = applied.project, applied.upstream, applied.overlay
    found = [
        Prefix((UPSTREAM,), project, upstream, upstream, upstream, ()),
        Prefix((OVERLAY,), project, upstream, laid, laid, ()),
    ]
    for step in applied.steps:
        if not step.verdict.good or step.commit is None:
            break
        patches = (*found[-1].patches, step.patch)
        found.append(Prefix((step.patch.name,), project, upstream, laid, step.commit, patches))
    return found


def installed_package(project: Project) -> Path | None:
    """The folder of the installed package, or None where it is not there in the pinned version, patched or not."""
    try:
        found = distribution(project.name)
    except PackageNotFoundError:
        return None
    folder = Path(str(found.locate_file(project.package)))
    pinned = Version(found.version).public == Version(project.version).public
    return folder if pinned and folder.is_dir() else None


class Checkout:
    """A copy of this checkout that also holds the package of one prefix at a time, and runs commands on it.

    Patches and overlay are those of the prefix, too, and the tests are as they were when it began, whatever happens
    in this checkout meanwhile; the other folders are links. Of the installed package come the files that upstream's
    wheel has and no tree, such as compiled modules, and those that are upstream's in the prefix as well; where a prefix
    is of another release than is installed, they come out of that release's wheel. Without an installed package there
    are the sources alone.
    """

    def __init__(self, layout: Layout, project: Project, repository: Repository, folder: Path) -> None:
        self.folder = folder
        self._layout = layout
        self._project = project
        self._repository = repository
        self._releases: dict[str, tuple[dict[str, Entry], dict[str, Path]]] = {}
        self._copy()

    def _copy(self) -> None:
        self.folder.mkdir()
        layout = self._layout
        ours = {layout.patches(self._project.name), layout.overlay(self._project.package)}
        for path in sorted(layout.root.iterdir()):
            target = self.folder / path.name
            if path.name.startswith(".") or path in (layout.build, layout.dist):
                continue
            if path.name in ("patches", "overlay"):
                target.mkdir()
                for part in path.iterdir():
                    if part not in ours:
                        (target / part.name).symlink_to(part)
            elif path.name == "tests":
                shutil.copytree(path, target, ignore=shutil.ignore_patterns("__pycache__"))
            elif path.is_dir():
                target.symlink_to(path)
            else:
                shutil.copy2(path, target)

    def _release(self, prefix: Prefix) -> tuple[dict[str, Entry], dict[str, Path]]:
        """The files of a prefix's release: those of its package, and those that need not be written."""
        if prefix.upstream not in self._releases:
            files = self._repository.files(prefix.upstream, f"{self._project.package}/")
            usable = self._usable(prefix.project, files) if installed_package(self._project) else {}
            self._releases[prefix.upstream] = files, usable
        return self._releases[prefix.upstream]

    def _usable(self, project: Project, upstream: Mapping[str, Entry]) -> dict[str, Path]:
        """The files on disk that are those of upstream's wheel, wherever the installed wheel comes from.

        With them comes what Python has compiled them to, which it would do anew for each prefix.
        """
        package = installed_package(project)
        with zipfile.ZipFile(fetch.wheel(self._layout, project, build.host_platform())) as wheel:
            members = {name for name in wheel.namelist() if not name.endswith("/")}
            if package is None:
                folder = self.folder.with_name(f"{project.package}-{project.version}")
                names = [name for name in members - upstream.keys() if name.startswith(f"{project.package}/")]
                wheel.extractall(folder, names)
                return {name: folder / name for name in names}
        found = {path.relative_to(package.parent).as_posix(): path for path in package.rglob("*") if path.is_file()}
        files = {}
        for name, path in found.items():
            known = upstream.get(name)
            if blob_id(path.read_bytes()) == known.blob if known else name in members:
                files[name] = path
        return files | {name: path for name, path in found.items() if name.endswith(".pyc") and _source(name) in files}

    def lay(self, prefix: Prefix) -> None:
        """Put a prefix in the place of the one before it."""
        package = self.folder / self._project.package
        for folder in (package, self._patches, self.folder / "overlay" / self._project.package):
            shutil.rmtree(folder, ignore_errors=True)
        upstream, usable = self._release(prefix)
        tree = self._repository.files(prefix.commit, f"{self._project.package}/")
        kept = {
            name: path
            for name, path in usable.items()
            if (known := upstream.get(_source(name))) is None or tree.get(_source(name)) == known
        }
        for name, path in kept.items():
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path)
        self._write("", {name: entry for name, entry in tree.items() if name not in kept})
        ours = {change.path: change.entry for change in self._repository.changes(prefix.upstream, prefix.overlay)}
        self._write("overlay/", {name: entry for name, entry in ours.items() if entry})
        self._patches.mkdir(parents=True)
        for patch in prefix.patches:
            (self._patches / patch.name).write_bytes(patch.text)
        (self._patches / "series").write_text("".join(f"{patch.name}\n" for patch in prefix.patches))

    @property
    def _patches(self) -> Path:
        return self.folder / "patches" / self._project.name

    def _write(self, folder: str, files: Mapping[str, Entry]) -> None:
        contents = self._repository.blobs([entry.blob for entry in files.values()])
        for (name, entry), data in zip(files.items(), contents, strict=True):
            path = self.folder / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            if entry.mode == "100755":
                path.chmod(0o755)

    def run(self, command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command here; its stdout and stderr come as one text.

        An import finds the prefix first, and `python` is that of the environment in which the wheels are installed.
        """
        first = {"PYTHONPATH": str(self.folder), "PATH": str(Path(sys.executable).parent)}
        paths = {name: os.pathsep.join(filter(None, (path, os.environ.get(name)))) for name, path in first.items()}
        return subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, **paths, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )


def _source(name: str) -> str:
    """The file that a compiled one was made from; of any other, itself."""
    folder, cached, file = name.rpartition("__pycache__/")
    return f"{folder}{file.split('.')[0]}.py" if cached else name
