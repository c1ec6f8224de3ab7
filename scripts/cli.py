"""The commands. Each loads the pins, calls one module and prints what it gives back; no logic lives here."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from scripts import pins as pins_module
from scripts.console import console, output
from scripts.errors import FatalError, StorageError
from scripts.layout import Layout, default_cache
from scripts.pins import Pins, Project
from scripts.storage import locked, write

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)

# make's variables reach an option through the environment, so that no value passes through a shell twice.
ProjectOption = Annotated[str, typer.Option("--project", envvar="PROJECT", help="Project of upstream.toml.")]
PlatformOption = Annotated[str, typer.Option("--platform", envvar="PLATFORM", help="x86_64 or aarch64.")]
SourceOption = Annotated[str, typer.Option("--source", envvar="SOURCE", help="sdist or git.")]
RepositoryOption = Annotated[str, typer.Option("--repository", envvar="REPOSITORY", help="Address to clone.")]
ForceOption = Annotated[bool, typer.Option("--force", envvar="FORCE", help="Discard work that exists nowhere else.")]

_layout = Layout(Path(__file__).resolve().parents[1], default_cache())


@app.callback()
def choose_root(
    root: Annotated[Path | None, typer.Option(help="The checkout to work on.")] = None,
) -> None:
    global _layout
    if root:
        _layout = Layout(root.absolute(), default_cache())


def _load() -> Pins:
    return pins_module.load(_layout.pins)


def _projects(pins: Pins, name: str) -> list[Project]:
    return [pins.project(name)] if name else list(pins.projects.values())


@app.command()
def fetch(platform: PlatformOption = "", project: ProjectOption = "") -> None:
    """Bring the pinned upstream files into the cache."""
    from scripts import build
    from scripts import fetch as fetch_module

    pins = _load()
    platform = platform or build.host_platform()
    build.target_folder(_layout, platform)
    for one in _projects(pins, project):
        output.print(str(fetch_module.sdist(_layout, one)))
        output.print(str(fetch_module.wheel(_layout, one, platform)))


@app.command()
def tree(
    project: ProjectOption = "",
    source: SourceOption = "sdist",
    repository: RepositoryOption = "",
    force: ForceOption = False,
) -> None:
    """Make build/<project>: upstream, overlay and one commit a patch."""
    from scripts import build
    from scripts import tree as tree_module

    pins = _load()
    with locked(_layout.build / ".lock"):
        for one in _projects(pins, project):
            origin = build.get_upstream(_layout, one, source, repository)
            applied, folder = tree_module.build(_layout, one, origin, force=force)
            for step in applied.steps:
                console.print(f"{step.patch.name}: {step.verdict}")
            output.print(str(folder))


@app.command()
def status(
    project: ProjectOption = "",
    as_json: Annotated[bool, typer.Option("--json", envvar="JSON", help="As JSON.")] = False,
) -> None:
    """Show the series as a table: order, patch, verdict, size, upstream status, removal condition."""
    from scripts import build, series
    from scripts import status as status_module
    from scripts import tree as tree_module

    pins = _load()
    report = {}
    for one in _projects(pins, project):
        origin = build.get_upstream(_layout, one, "sdist")
        with series.workshop(_layout, origin) as repository:
            applied = series.apply(_layout, one, repository, origin.commit)
        report[one.name] = status_module.rows(applied)
        if as_json:
            continue
        output.print(status_module.table(applied))
        for step in applied.steps:
            if not step.verdict.good:
                output.print(f"{step.patch.name}: {step.verdict}\n{step.verdict.explanation}")
        if lost := tree_module.unsaved(_layout.tree(one.name)):
            output.print(f"{_layout.tree(one.name)} {lost}")
    if as_json:
        print(json.dumps(report, indent=1))


@app.command()
def check(
    code: Annotated[bool, typer.Option(help="Also ruff, mypy and the fast tests.")] = True,
    tests: Annotated[bool, typer.Option(help="Of these the fast tests as well.")] = True,
) -> None:
    """Lint pins, series, headers and overlay; then ruff, mypy and the fast tests."""
    from scripts import lint

    lint.check(_layout, _load(), code=code, tests=tests)


@app.command()
def export(
    project: ProjectOption = "vllm",
    force: ForceOption = False,
    verbatim: Annotated[bool, typer.Option(envvar="VERBATIM", help="Rewrite equal files as well.")] = False,
) -> None:
    """Write the commits of build/<project> back to patch files."""
    from scripts import build
    from scripts import export as export_module

    one = _load().project(project)
    with locked(_layout.build / ".lock"):
        origin = build.get_upstream(_layout, one, "sdist")
        done = export_module.export_tree(_layout, one, origin, force=force, verbatim=verbatim)
    _report_export(one, done.written, done.removed)


@app.command()
def edit(
    patch: Annotated[str, typer.Option(envvar="PATCH", help="File name in the series.")] = "",
    project: ProjectOption = "vllm",
    command: Annotated[str, typer.Option("--command", envvar="CMD", help="Run this in place of a shell.")] = "",
    go_on: Annotated[bool, typer.Option("--continue", envvar="CONTINUE", help="Go on with it.")] = False,
    abort: Annotated[bool, typer.Option(envvar="ABORT", help="Drop it.")] = False,
) -> None:
    """Open a shell in the tree at one patch; fold the change in, re-apply the rest, export."""
    from scripts import build
    from scripts import edit as edit_module

    one = _load().project(project)
    with locked(_layout.build / ".lock"):
        if abort:
            edit_module.abort(_layout, one)
            return
        origin = build.get_upstream(_layout, one, "sdist")
        if go_on:
            done = edit_module.proceed(_layout, one, origin)
        else:
            name = patch if patch.endswith(".patch") else f"{patch}.patch"
            done = edit_module.start(_layout, one, origin, name, command)
    _report_export(one, done.written, done.removed)


@app.command()
def verify(project: ProjectOption = "") -> None:
    """Check that each prefix of the series applies, compiles, imports and passes its tests."""
    from scripts import build, verify_prefixes
    from scripts.errors import PrefixError

    pins = _load()
    bad = []
    for one in _projects(pins, project):
        for report in verify_prefixes.verify(_layout, one, build.get_upstream(_layout, one, "sdist")):
            output.print(f"{one.name}: {report}")
            if report.found.problems:
                bad.append(f"{one.name}: {report.name}")
    if bad:
        raise PrefixError(
            f"these prefixes do not work: {', '.join(bad)}",
            cure="`make edit PATCH=...` opens the first of them; what passed is not done again",
        )


@app.command()
def bisect(
    command: Annotated[str, typer.Option("--test", envvar="TEST", help="Shell command; status 0 passes.")] = "",
    revisions: Annotated[
        str, typer.Option("--rev", envvar="REV", help="Search what changed since this git revision, or in A..B.")
    ] = "",
    project: ProjectOption = "vllm",
) -> None:
    """Name the patch, the overlay or the pin that breaks a command, or mends it."""
    from scripts import bisect as bisect_module
    from scripts import build

    one = _load().project(project)
    upstream = build.get_upstream(_layout, one, "sdist")
    if revisions:
        found = bisect_module.bisect_change(_layout, one, upstream, command, revisions)
    else:
        found = bisect_module.bisect(_layout, one, upstream, command)
    print(found.output, end="")
    output.print(found.describe())


@app.command()
def show_change(
    revisions: Annotated[str, typer.Option("--rev", envvar="REV", help="Git revision, or two: A..B.")] = "HEAD",
    project: ProjectOption = "",
) -> None:
    """Show what a change of patches, overlay or pin does to the source: REV against the working tree, or A..B."""
    from scripts import revision
    from scripts import show_change as show_change_module

    with revision.states(_layout, revisions) as (before, after):
        names = [project] if project else list(dict.fromkeys([*before.pins.projects, *after.pins.projects]))
        for name in names:
            print(show_change_module.compare(before, after, name).text(), end="")


@app.command()
def rebase(
    tag: Annotated[str, typer.Option(envvar="TAG", help="Release to go to, or latest.")] = "",
    project: ProjectOption = "vllm",
    yes: Annotated[bool, typer.Option(envvar="YES", help="Pin it without being asked.")] = False,
    go_on: Annotated[bool, typer.Option("--continue", envvar="CONTINUE", help="Go on with it.")] = False,
    skip: Annotated[bool, typer.Option(envvar="SKIP", help="Leave out the patch that it stopped at.")] = False,
    keep: Annotated[bool, typer.Option(envvar="KEEP", help="Stop here and write what is done.")] = False,
    abort: Annotated[bool, typer.Option(envvar="ABORT", help="Drop it.")] = False,
) -> None:
    """Bring the series to another upstream release, patch by patch."""
    from scripts import rebase as rebase_module

    if (bool(tag), go_on, skip, keep, abort).count(True) != 1:
        raise typer.BadParameter("give one of TAG=, CONTINUE=1, SKIP=1, KEEP=1, ABORT=1")
    one = _load().project(project)
    with locked(_layout.build / ".lock"):
        if abort:
            rebase_module.abort(_layout, one)
            return
        if tag:
            done = rebase_module.start(_layout, one, tag, yes=yes)
        elif go_on:
            done = rebase_module.proceed(_layout, one)
        else:
            done = (rebase_module.skip if skip else rebase_module.keep)(_layout, one)
    _report_export(one, done.exported.written, done.exported.removed)
    output.print(f"{_layout.pins}: {one.name} is pinned to {done.project.tag}")
    for name in done.rest:
        output.print(f"still to do: {name}; `make rebase TAG={done.project.tag}` goes on")


@app.command()
def drift(
    tags: Annotated[str, typer.Option(envvar="TAGS", help="Releases: tags, pin, latest, ranges A..B.")] = "",
    project: ProjectOption = "vllm",
    json_path: Annotated[str, typer.Option("--json", envvar="JSON", help="Write JSON here; 1: print it.")] = "",
    markdown_path: Annotated[str, typer.Option("--markdown", envvar="MARKDOWN", help="Write Markdown here.")] = "",
) -> None:
    """Show what the series and the overlay would meet on other upstream releases; fails unless a rebase is clean."""
    from scripts import drift as drift_module

    one = _load().project(project)
    found = drift_module.drift(_layout, one, tags)
    text = json.dumps(drift_module.as_json(found), indent=1)
    if markdown_path:
        write(Path(markdown_path).absolute(), drift_module.markdown(found).encode())
    if json_path not in ("", "1"):
        write(Path(json_path).absolute(), f"{text}\n".encode())
    if json_path == "1":
        print(text)
    else:
        output.print(drift_module.table(found))
        for line in drift_module.details(found):
            output.print(line)
    console.print(drift_module.news(found))
    found.refuse_unclean()


def _report_export(project: Project, written: tuple[str, ...], removed: tuple[str, ...]) -> None:
    for word, names in (("written", written), ("removed", removed)):
        for name in names:
            output.print(f"{word}: {_layout.patches(project.name) / name}")
    if not written and not removed:
        output.print("no patch file changed")


@app.command()
def wheel(platform: PlatformOption = "", source: SourceOption = "sdist", repository: RepositoryOption = "") -> None:
    """Build the wheels of both projects into dist/."""
    from scripts import build

    pins = _load()
    with locked(_layout.build / ".lock"):
        built = build.build(_layout, pins, platform or build.host_platform(), source, repository)
    for applied in built.applied:
        for step in applied.steps:
            console.print(f"{applied.project.name}: {step.patch.name}: {step.verdict}")
    for path in built.wheels:
        output.print(str(path))
    console.print("install with one of:")
    for command in build.pip_commands(pins, built.wheels):
        output.print(f"  {command}")


@app.command()
def verify_wheel(platform: PlatformOption = "") -> None:
    """Check the finished wheels in dist/ against upstream's and this repository."""
    from scripts import build, verify
    from scripts import fetch as fetch_module
    from scripts.errors import VerifyError

    pins = _load()
    platform = platform or build.host_platform()
    folder = build.target_folder(_layout, platform)
    for one in pins.projects.values():
        found = sorted(folder.glob(f"{one.package}-{one.local_version}-*.whl"))
        if not found:
            raise VerifyError(f"{folder}: no wheel of {one.name} {one.local_version}", cure="`make wheel` builds it")
        _, sources = build.prepare(_layout, one)
        verify.verify(pins, one, platform, found[0], sources, fetch_module.wheel(_layout, one, platform))
        output.print(f"{found[0]}: as it should be")


@app.command()
def install() -> None:
    """Install the wheels in dist/ with all their dependencies into the environment of this tool."""
    from scripts import install as install_module

    install_module.install(_layout, _load())


@app.command()
def bump() -> None:
    """Raise the release number, as any change of content needs."""
    output.print(f"release.number is now {pins_module.bump(_layout.pins)}")


@app.command()
def clean(force: ForceOption = False) -> None:
    """Remove build/ and dist/; the cache stays."""
    from scripts import tree as tree_module

    with locked(_layout.build / ".lock"):
        tree_module.clean(_layout, force=force)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; a FatalError is printed without a traceback and becomes the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # upstream's sources hold what a locale may not
    try:
        app(arguments, prog_name="python -m scripts")
    except FatalError as error:
        _fail(error)
    except OSError as error:
        _fail(StorageError(str(error), cure="free some space or mend the permissions, then run it again"))


def _fail(error: FatalError) -> NoReturn:
    console.print(f"error: {error}", style="bold red")
    if error.cure:
        console.print(f"cure: {error.cure}")
    sys.exit(error.exit_code)
