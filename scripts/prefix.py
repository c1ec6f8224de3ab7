"""The prefixes of a series, and a place in which the code of one of them runs.

Upstream alone is a prefix, so is upstream with the overlay, and so is that with the first patches of the series.
"""

from __future__ import annotations

import os
import shutil
import subprocess
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
    """A prefix, named after what was laid on last: `upstream`, `overlay` or a patch file."""

    name: str
    commit: str
    patches: tuple[Patch, ...]


def prefixes(applied: Applied) -> list[Prefix]:
    """The prefixes of a series, the shortest first; they end before a patch that does not apply."""
    found = [Prefix(UPSTREAM, applied.upstream, ()), Prefix(OVERLAY, applied.overlay, ())]
    for step in applied.steps:
        if not step.verdict.good or step.commit is None:
            break
        found.append(Prefix(step.patch.name, step.commit, (*found[-1].patches, step.patch)))
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
    wheel has and no tree, such as compiled modules, and those that are upstream's in the prefix as well. Without an
    installed package there are the sources alone.
    """

    def __init__(self, layout: Layout, applied: Applied, repository: Repository, folder: Path) -> None:
        self.folder = folder
        self._project = applied.project
        self._repository = repository
        self._upstream = repository.files(applied.upstream, f"{self._project.package}/")
        self._overlay = {one.path: one.entry for one in repository.changes(applied.upstream, applied.overlay)}
        self._installed = self._usable(layout)
        self._copy(layout)

    def _copy(self, layout: Layout) -> None:
        self.folder.mkdir()
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

    def _usable(self, layout: Layout) -> dict[str, Path]:
        """The files of the installed package that are upstream's, wherever the installed wheel comes from.

        With them comes what Python has compiled them to, which it would do anew for each prefix.
        """
        package = installed_package(self._project)
        if package is None:
            return {}
        with zipfile.ZipFile(fetch.wheel(layout, self._project, build.host_platform())) as wheel:
            members = set(wheel.namelist())
        found = {path.relative_to(package.parent).as_posix(): path for path in package.rglob("*") if path.is_file()}
        files = {}
        for name, path in found.items():
            known = self._upstream.get(name)
            if blob_id(path.read_bytes()) == known.blob if known else name in members:
                files[name] = path
        return files | {name: path for name, path in found.items() if name.endswith(".pyc") and _source(name) in files}

    def lay(self, prefix: Prefix) -> None:
        """Put a prefix in the place of the one before it."""
        package = self.folder / self._project.package
        overlay = {} if prefix.name == UPSTREAM else self._overlay
        for folder in (package, self._patches, self.folder / "overlay" / self._project.package):
            shutil.rmtree(folder, ignore_errors=True)
        tree = self._repository.files(prefix.commit, f"{self._project.package}/")
        kept = {
            name: path
            for name, path in self._installed.items()
            if (known := self._upstream.get(_source(name))) is None or tree.get(_source(name)) == known
        }
        for name, path in kept.items():
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path)
        self._write("", {name: entry for name, entry in tree.items() if name not in kept})
        self._write("overlay/", {name: entry for name, entry in overlay.items() if entry})
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
        """Run a command here, where an import finds the prefix first; its stdout and stderr come as one text."""
        path = os.pathsep.join(filter(None, (str(self.folder), os.environ.get("PYTHONPATH"))))
        return subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": path, **environment},
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
