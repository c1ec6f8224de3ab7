"""`make check`: every rule of this repository that can be checked without a work tree or a GPU."""

from __future__ import annotations

import subprocess
import sys
import zipfile

from scripts import build, export, fetch, overlay, patch, series
from scripts.console import console
from scripts.errors import FatalError, LintError, SourceError
from scripts.layout import Layout
from scripts.pins import PLATFORMS, Pins, Project

_TESTS = "fast tests"
_CODE_CHECKS = {
    "ruff check": ("ruff", "check", "--quiet", "."),
    "ruff format": ("ruff", "format", "--quiet", "--check", "."),
    "mypy": ("mypy",),
    _TESTS: ("pytest", "-q", "-n", "2", "-m", "not slow and not gpu", "tests/tool", "tests/wheel"),
}


def check(layout: Layout, pins: Pins, *, code: bool = True, tests: bool = True) -> None:
    """Run every check, say of each whether it passed, and fail at the end if one did not.

    Raises:
        LintError: lists what is wrong.
        SourceError: an upstream file is neither cached nor to be had; says which.
    """
    _fetch_all(layout, pins)
    problems = _report("folders", _stray_folders(layout, pins))
    for project in pins.projects.values():
        problems += _report(f"series of {project.name}", _series_problems(layout, project))
    if code:
        for name, arguments in _CODE_CHECKS.items():
            if name == _TESTS and not tests:
                continue
            result = subprocess.run(
                [sys.executable, "-m", *arguments], cwd=layout.root, capture_output=True, text=True, check=False
            )
            found = [] if result.returncode == 0 else [f"{name}:\n{result.stdout}{result.stderr}".rstrip()]
            problems += _report(name, found)
    if problems:
        raise LintError("\n".join(problems))


def _report(name: str, problems: list[str]) -> list[str]:
    console.print(f"{'FAILED' if problems else 'ok    '} {name}")
    return problems


def _fetch_all(layout: Layout, pins: Pins) -> None:
    """Bring what the checks read; with a cold cache and no network say everything that is missing at once."""
    missing = []
    for project in pins.projects.values():
        try:
            build.get_upstream(layout, project, "sdist")
        except SourceError as error:
            missing.append(str(error))
    if missing:
        raise SourceError("\n".join(missing), cure="`make fetch` with a network fills the cache")


def _stray_folders(layout: Layout, pins: Pins) -> list[str]:
    """Folders beside those of the projects, which nothing would ever read."""
    known = {path for one in pins.projects.values() for path in (layout.patches(one.name), layout.overlay(one.package))}
    parents = {path.parent for path in known}
    return [
        f"{path}: belongs to no project of {layout.pins.name}"
        for parent in sorted(parents)
        for path in sorted(parent.glob("*/"))
        if path not in known and not path.name.startswith(".")
    ]


def _series_problems(layout: Layout, project: Project) -> list[str]:
    origin = build.get_upstream(layout, project, "sdist")
    try:
        with series.workshop(layout, origin) as repository:
            applied = series.apply(layout, project, repository, origin.commit)
            problems = [
                f"{step.patch.path}: {step.verdict}\n{step.verdict.explanation}"
                for step in applied.steps
                if not step.verdict.good
            ]
            problems += export.problems(repository, applied)
    except FatalError as error:
        return [str(error)]
    for step in applied.steps:
        problems += patch.header_problems(step.patch, layout.root, project.package)
    return problems + _wheel_shadows(layout, project)


def _wheel_shadows(layout: Layout, project: Project) -> list[str]:
    """Overlay files that a wheel has and the sdist has not. A wheel that is not cached is checked when it is built."""
    ours = overlay.files(layout, project)
    problems = []
    for platform in PLATFORMS:
        wheel = fetch.cached(layout, project.wheels[platform])
        if wheel:
            members = set(zipfile.ZipFile(wheel).namelist())
            problems += [f"{file}: shadows a file of {wheel.name}" for path, file in ours.items() if path in members]
    return problems
