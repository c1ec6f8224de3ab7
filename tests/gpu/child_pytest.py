"""pytest in a process of its own, where the tests need other surroundings than the process that asks."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """What became of one test."""

    test: str
    parameters: str
    outcome: str  # "passed", "skipped" or "failed"
    reason: str  # of a skip


@dataclass(frozen=True)
class Run:
    """A finished pytest process."""

    returncode: int
    output: str
    cases: list[Case]


def run_pytest(
    arguments: Sequence[str],
    *,
    cwd: Path,
    report: Path,
    environment: dict[str, str] | None = None,
    path: Sequence[Path] = (),
    workers: int = 1,
    prefix: Sequence[str] = (),
) -> Run:
    """Run pytest with `cwd` first on its path.

    Args:
        arguments: pytest's.
        cwd: folder to run in.
        report: file for the outcomes; pytest writes it, as JUnit's XML.
        environment: variables to set beside those of this process.
        path: folders to put on the path behind `cwd`.
        workers: processes, at most one per CPU; one process without pytest-xdist.
        prefix: a command that runs the command that follows it.

    """
    child = {**os.environ, **(environment or {})}
    child["PYTHONPATH"] = os.pathsep.join(filter(None, [*map(str, path), child.get("PYTHONPATH", "")]))
    command = [*prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", str(report)]
    workers = min(workers, os.cpu_count() or 1)
    if workers > 1 and find_spec("xdist"):
        command += ["-n", str(workers)]
    process = subprocess.run(
        [*command, *arguments], cwd=cwd, env=child, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    cases = [_case(element) for element in ElementTree.parse(report).iter("testcase")] if report.exists() else []
    return Run(process.returncode, process.stdout, cases)


def _case(element: ElementTree.Element) -> Case:
    test, _, parameters = element.attrib["name"].partition("[")
    skipped = element.find("skipped")
    if skipped is not None:
        return Case(test, parameters, "skipped", skipped.attrib["message"])
    failed = element.find("failure") is not None or element.find("error") is not None
    return Case(test, parameters, "failed" if failed else "passed", "")
