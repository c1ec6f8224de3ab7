"""`make wheel`: from the pins to finished wheels in dist/."""

from __future__ import annotations

import platform as machine
from dataclasses import dataclass
from pathlib import Path

from scripts import fetch, overlay, releases, series, storage, tree, upstream, wheel
from scripts.console import console
from scripts.errors import PinError
from scripts.layout import Layout
from scripts.pins import PLATFORMS, Pins, Project
from scripts.repository import REMOVED, Repository
from scripts.series import Applied
from scripts.sources import PatchInfo, SourceFile, Sources
from scripts.upstream import Upstream


@dataclass(frozen=True)
class Built:
    """The wheels of one build, and the series they were made from."""

    wheels: tuple[Path, ...]
    applied: tuple[Applied, ...]


def host_platform() -> str:
    """The platform of this machine; x86_64 where upstream has no wheel for it."""
    name = machine.machine().lower()
    return name if name in PLATFORMS else PLATFORMS[0]


def target_folder(layout: Layout, platform: str) -> Path:
    """dist/ holds the wheels for this machine, dist/<platform>/ those for another: pip could not tell them apart.

    Raises:
        PinError: upstream has no wheels for this platform.
    """
    if platform not in PLATFORMS:
        raise PinError(f"unknown platform {platform!r}", cure=f"PLATFORM is one of: {', '.join(PLATFORMS)}")
    return layout.dist if platform == host_platform() else layout.dist / platform


def get_upstream(layout: Layout, project: Project, source: str, repository: str = "") -> Upstream:
    """Upstream's tree from the source distribution or, where asked for, from a clone.

    `repository` is the address to clone from in place of the pinned one; {project} in it stands for the name.
    """
    if source == "git":
        return upstream.from_git(layout, project, repository.replace("{project}", project.name))
    if source == "sdist":
        return upstream.from_sdist(layout, project)
    raise PinError(f"unknown source {source!r}", cure="SOURCE is one of: sdist, git")


def build(layout: Layout, pins: Pins, platform: str, source: str = "sdist", repository: str = "") -> Built:
    """Assemble every project's wheel, compare them with the recorded releases and put them into dist/.

    The wheels come from the files in patches/ and overlay/; what was only changed in build/ is not in them.

    Raises:
        ApplyError, SeriesError: the series cannot be built.
        ReleaseError: the content changed and the version did not.
    """
    folder = target_folder(layout, platform)
    done: list[wheel.BuiltWheel] = []
    applied: list[Applied] = []
    with storage.scratch(layout.build, ".wheels-") as temporary:
        for project in pins.projects.values():
            if lost := tree.unsaved(layout.tree(project.name)):
                console.print(f"note: {layout.tree(project.name)} {lost}; the wheel is made from patches/ and overlay/")
            result, sources = prepare(layout, project, source, repository)
            base = fetch.wheel(layout, project, platform)
            done.append(wheel.assemble(pins, project, platform, base, sources, temporary))
            applied.append(result)
        if new := releases.settle(layout.releases, {one.path.name: one.sha256 for one in done}):
            console.print(f"recorded in {layout.releases.name}: {', '.join(new)}")
        for one in done:
            storage.replace(one.path, folder / one.path.name)
    kept = {one.path.name for one in done}
    packages = tuple(f"{project.package}-" for project in pins.projects.values())
    for old in folder.glob("*.whl"):
        if old.name not in kept and old.name.startswith(packages):
            old.unlink()  # of another version: `pip install dist/*.whl` would meet both
    return Built(tuple(folder / one.path.name for one in done), tuple(applied))


def prepare(layout: Layout, project: Project, source: str = "sdist", repository: str = "") -> tuple[Applied, Sources]:
    """Apply the series and take what the wheel needs out of git.

    Raises:
        ApplyError, SeriesError: the series cannot be built.
    """
    origin = get_upstream(layout, project, source, repository)
    with series.workshop(layout, origin) as workshop:
        applied = series.apply(layout, project, workshop, origin.commit)
        applied.refuse_bad()
        return applied, _sources(layout, workshop, applied)


def _sources(layout: Layout, repository: Repository, applied: Applied) -> Sources:
    package = f"{applied.project.package}/"
    changes = [one for one in repository.changes(applied.upstream, applied.tip) if one.path.startswith(package)]
    kept = {one.path: one.entry for one in changes if one.entry}
    contents = repository.blobs([entry.blob for entry in kept.values()])
    return Sources(
        upstream={path: entry.blob for path, entry in repository.files(applied.upstream, package).items()},
        changed={
            path: SourceFile(data, entry.mode == "100755")
            for (path, entry), data in zip(kept.items(), contents, strict=True)
        },
        deleted=frozenset(one.path for one in changes if one.entry is None),
        overlay=frozenset(overlay.files(layout, applied.project)),
        patches=tuple(
            PatchInfo(
                name=step.patch.name,
                sha256=step.patch.sha256,
                subject=step.patch.subject,
                upstream_status=step.patch.trailers.get("Upstream-Status", ""),
                upstream_link=step.patch.trailers.get("Upstream-Link", ""),
                remove_when=step.patch.trailers.get("Remove-When", ""),
                scope=step.patch.trailers.get("Scope", ""),
                text=step.patch.text,
            )
            for step in applied.steps
        ),
        tree=_package_tree(repository, applied),
    )


def _package_tree(repository: Repository, applied: Applied) -> str:
    """The tree id of the package folder without what a release generates: the same for a sdist and a clone."""
    package = applied.project.package
    with repository.private_index() as index:
        repository.read_tree(index, applied.tip)
        repository.update_index(index, {f"{package}/{upstream.GENERATED}": REMOVED})
        return repository.line("write-tree", f"--prefix={package}/", index=index)


def pip_commands(pins: Pins, wheels: tuple[Path, ...]) -> list[str]:
    """How to install what was built: vLLM alone, and with GGUF."""
    vllm = pins.projects["vllm"]
    folder = wheels[0].parent
    first = next(path for path in wheels if path.name.startswith(f"{vllm.package}-"))
    return [
        f"pip install {first}",
        f"pip install --find-links {folder} '{vllm.name}[gguf]=={vllm.local_version}'",
    ]
