"""Time of the series check and of drift beside plain tools that answer the same questions.

    python -m benchmarks.follow [--tag v0.32.0] [--repetitions 5]

Does the series apply? Ours reads the patch files and lays them over upstream in a bare repository; the plain way is to
unpack the source distribution and `quilt push -a`. What would another release do to it? Ours is what `make drift` does
for one release; the plain way is a fresh work tree of that release and `git am -3`, which ends at the first conflict,
while ours judges every patch. The overlay check, to which nothing corresponds, is timed by itself.

All by turns on this machine, so that other load hits all. Before anything is timed, the files that quilt patched and
those that git am patched are compared with ours; a difference ends the run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.build import ROOT, hardware, run, timed
from scripts import drift, fetch, index, overlay, overlay_check, pins, series, symbols, upstream, way_back
from scripts.layout import Layout, default_cache
from scripts.repository import Repository

RESULT = ROOT / "benchmarks" / "results" / "follow.json"
GIT = ("git", "-c", "user.name=A Person", "-c", "user.email=person@example.org", "-c", "gc.auto=0")
PLAIN = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "LC_ALL": "C"}


class Plain:
    """What a user without this tool does, in folders of his own."""

    def __init__(self, folder: Path, sdist: Path, patches: Path, objects: Path) -> None:
        self.folder, self.sdist, self.patches = folder, sdist, patches
        self.files = [str(patches / name) for name in series.listed(patches / "series")]
        run("git", "init", "--quiet", "--bare", str(folder / "git"))
        (folder / "git" / "objects" / "info" / "alternates").write_text(f"{objects}\n")

    def quilt(self) -> Path:
        """Unpack the source distribution and push the series; the folder of the patched sources."""
        with tarfile.open(self.sdist) as archive:
            archive.extractall(self.folder / "quilt", filter="data")
        (top,) = (self.folder / "quilt").iterdir()
        run("quilt", "--quiltrc", "-", "push", "-a", "-q", cwd=top, env={**PLAIN, "QUILT_PATCHES": str(self.patches)})
        return top

    def am(self, commit: str) -> tuple[Path, bool]:
        """A fresh work tree of a release, and the series by mail; the folder, and whether all of it went in."""
        top = self.folder / "am"
        run(*GIT, "worktree", "add", "--quiet", "--detach", str(top), commit, cwd=self.folder / "git", env=PLAIN)
        command = [*GIT, "am", "--quiet", "-3", "--keep-cr", *self.files]
        return top, subprocess.run(command, cwd=top, env=PLAIN, capture_output=True, check=False).returncode == 0

    def clear(self) -> None:
        """Remove what the last turn made, untimed."""
        shutil.rmtree(self.folder / "quilt", ignore_errors=True)
        shutil.rmtree(self.folder / "am", ignore_errors=True)
        run("git", "worktree", "prune", cwd=self.folder / "git")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", default="v0.32.0", help="the other release")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if not shutil.which("quilt"):
        sys.exit("quilt is not installed")

    load = os.getloadavg()[0]
    layout = Layout(ROOT, default_cache())
    project = pins.load(layout.pins).project("vllm")
    pinned = upstream.from_sdist(layout, project)
    known = {one.version: one for one in index.releases(project.name)}
    other = drift.at(project, drift.choose(known, project, arguments.tag)[0], known)
    commits = {project.tag: pinned.commit, other.tag: upstream.from_sdist(layout, other).commit}
    folder = layout.build / "benchmark"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    plain = Plain(folder, fetch.sdist(layout, project), layout.patches(project.name), pinned.repository.objects)

    with series.workshop(layout, pinned) as repository:
        base = series.apply(layout, project, repository, pinned.commit)
        base.refuse_bad()
        ours = overlay.files(layout, project)
        commits_there = {step.patch.name: step.commit for step in base.steps if step.commit}
        patches = [way_back.as_committed(repository, step.patch.path, step.commit or "") for step in base.steps]
        top, whole = plain.am(pinned.commit)
        assert whole
        for where in (plain.quilt(), top):
            compare(repository, base.overlay, base.tip, where)
        plain.clear()

        tips = {}

        def series_check() -> None:
            with series.workshop(layout, pinned) as fresh:
                series.apply(layout, project, fresh, pinned.commit).refuse_bad()

        def drift_of(tag: str) -> None:
            repository.files(commits[tag])
            laid = series.lay(project, repository, commits[tag], ours, patches)
            tips[tag] = drift.confirmed(repository, laid, commits_there).tip

        def check_overlay(tag: str) -> None:
            for remembered in (overlay_check._uses, symbols._parse_blob, symbols._parse):
                remembered.cache_clear()  # `make drift` meets every tree once
            overlay_check.check(repository, ours, upstream=commits[tag], tip=tips[tag], pinned=base.tip)

        turns = {"series_check": series_check, "unpack_and_quilt_push": plain.quilt}
        for tag in commits:
            turns[f"drift {tag}"] = lambda tag=tag: drift_of(tag)
            turns[f"git_am_3 {tag}"] = lambda tag=tag: plain.am(commits[tag])
            turns[f"overlay_check {tag}"] = lambda tag=tag: check_overlay(tag)
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        for number in range(arguments.repetitions):
            for name, step in turns.items():
                seconds[name].append(timed(step))
                print(f"{number + 1}/{arguments.repetitions} {name}: {seconds[name][-1]:.2f} s", flush=True)
                plain.clear()
    shutil.rmtree(folder)

    result = {
        "what": "seconds; each ratio is how many times longer the plain way took, turn by turn",
        "hardware": hardware(),
        "load_average_before": round(load, 1),
        "versions": {"vllm": project.version, "python": platform.python_version(), "patches": len(patches)},
        "seconds": {name: [round(value, 3) for value in values] for name, values in seconds.items()},
        "median_seconds": {name: round(statistics.median(values), 3) for name, values in seconds.items()},
        "ratios": {
            "quilt over series_check": ratio(seconds, "unpack_and_quilt_push", "series_check"),
            **{f"git am -3 over drift, {tag}": ratio(seconds, f"git_am_3 {tag}", f"drift {tag}") for tag in commits},
        },
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({"median_seconds": result["median_seconds"], "ratios": result["ratios"]}, indent=1))


def compare(repository: Repository, base: str, tip: str, top: Path) -> None:
    """The files that the series changes, ours and those below `top`; a difference ends the run."""
    for change in repository.changes(base, tip):
        ours = repository.read(tip, change.path)
        path = top / change.path
        if ours != (path.read_bytes() if path.exists() else None):
            sys.exit(f"{path} is not what ours is")


def ratio(seconds: Mapping[str, list[float]], theirs: str, ours: str) -> dict[str, float]:
    ratios = sorted(slow / fast for slow, fast in zip(seconds[theirs], seconds[ours], strict=True))
    return {"median": round(statistics.median(ratios), 1), "lowest": round(ratios[0], 1)}


if __name__ == "__main__":
    main()
