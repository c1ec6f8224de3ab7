"""`make verify`: does every prefix of the series work, so that each patch can be looked at, and bisected, by itself?

Each prefix has to apply, to compile, to let the modules that it touches be imported, and to pass the tests that its
patches name. A prefix that passed is remembered by its tree and by all else that decides the result.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import warnings
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from scripts import prefix as prefix_module
from scripts import series, storage
from scripts.console import console
from scripts.errors import PrefixError
from scripts.layout import Layout
from scripts.patch import Patch
from scripts.pins import Project
from scripts.prefix import Checkout, Prefix
from scripts.repository import Repository
from scripts.series import Applied
from scripts.upstream import Upstream

_IMPORTER = Path("tests", "backend", "import_modules.py")
#: The same result on every machine: tests that need a GPU say so and are skipped, and vLLM keeps Triton on, which it
#: turns off where it sees no GPU unless somebody has hidden all of them.
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
#: Lines of output that a problem quotes where nothing shorter says what is wrong.
_QUOTED = 15
#: Problems of a prefix that are listed.
_LISTED = 20


@dataclass(frozen=True)
class Found:
    """What the checks of one prefix found: how much is well, tests skipped by reason, and what is wrong."""

    compiled: int = 0
    imported: int = 0
    passed: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"compiled {self.compiled}", f"imported {self.imported}", f"passed {self.passed}"]
        if self.skipped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items())
            parts.append(f"skipped {sum(self.skipped.values())} ({reasons})")
        return "; ".join(parts)


@dataclass(frozen=True)
class Report:
    """How a prefix fared; `seconds` is None where it is remembered from an earlier run."""

    name: str
    verdict: str
    found: Found
    seconds: float | None

    def __str__(self) -> str:
        taken = "as before" if self.seconds is None else f"{self.seconds:.0f} s"
        problems = "".join(f"\n  {problem}" for problem in self.found.problems[:_LISTED])
        if (more := len(self.found.problems) - _LISTED) > 0:
            problems += f"\n  and {more} more"
        return f"{self.name}: {'FAILED' if problems else 'ok'}; {self.verdict}; {self.found}; {taken}{problems}"


def verify(layout: Layout, project: Project, upstream: Upstream) -> Iterator[Report]:
    """Check the prefixes one by one, the shortest first. A run that was interrupted goes on where it stopped.

    Raises:
        PrefixError: the package is not installed, so that nothing can be imported.
        SeriesError: a file of the series or of the overlay breaks a rule.
    """
    if prefix_module.installed_package(project) is None:
        raise PrefixError(
            f"{project.name} {project.version} is not installed in {sys.prefix}: nothing can be imported",
            cure="`make wheel install`; the wheel of another release number, or upstream's own, serves as well",
        )
    with series.workshop(layout, upstream) as repository, storage.scratch(layout.build, ".verify-") as folder:
        applied = series.apply(layout, project, repository, upstream.commit)
        check = _Check(layout, applied, repository, folder)
        found = prefix_module.prefixes(applied)[1:]  # upstream alone is not ours to verify
        yield check.report(found[0], prefix_module.OVERLAY)
        for step, one in zip(applied.steps, found[1:], strict=False):
            yield check.report(one, str(step.verdict))
        for step in applied.steps[len(found) - 1 :][:1]:
            yield Report(step.patch.name, str(step.verdict), Found(problems=(step.verdict.explanation,)), 0)
        if left := [step.patch.name for step in applied.steps[len(found) :]]:
            console.print(f"not looked at, since they follow a patch that does not apply: {', '.join(left)}")


def due_tests(root: Path, patches: Sequence[Patch], count: int) -> list[str]:
    """The test files that belong to the first `count` patches.

    A test belongs to the patch that names it, or else to the one that names the innermost folder around it; where
    several name the same, to the last of them: the test fails without that patch, so it has to wait for it.
    """
    owners: dict[str, tuple[int, int]] = {}
    for number, patch in enumerate(patches, 1):
        for name in patch.trailers.get("Tests", "").split():
            path = root / name
            for file in path.rglob("test_*.py") if path.is_dir() else [path]:
                test = file.relative_to(root).as_posix()
                owners[test] = max(owners.get(test, (0, 0)), (len(path.parts), number))
    return sorted(test for test, (_, number) in owners.items() if number <= count)


class _Check:
    """What all prefixes of one run share."""

    def __init__(self, layout: Layout, applied: Applied, repository: Repository, folder: Path) -> None:
        self._results = layout.cache / "verified"
        self._applied = applied
        self._repository = repository
        self._checkout = Checkout(layout, applied.project, repository, folder / "checkout")
        self._packages = _packages()

    def report(self, prefix: Prefix, verdict: str) -> Report:
        patches = [step.patch for step in self._applied.steps]
        tests = due_tests(self._checkout.folder, patches, len(prefix.patches))
        path = self._results / f"{self._repository.tree(prefix.commit)}-{self._digest(tests)}.json"
        if (remembered := _read(path)) is not None:
            return Report(prefix.name, verdict, remembered, None)
        console.print(f"{prefix.name}: verifying (test files: {len(tests)})")
        begun = time.monotonic()
        found = self._check(prefix, tests)
        if _packages() != self._packages:
            raise PrefixError(
                f"the packages in {sys.prefix} changed while {prefix.name} was verified, so the result says nothing",
                cure="run it again once the installation is finished; what passed before is not done again",
            )
        if not found.problems:
            storage.write(path, json.dumps(asdict(found), indent=1).encode() + b"\n")
        return Report(prefix.name, verdict, found, time.monotonic() - begun)

    def _digest(self, tests: Sequence[str]) -> str:
        """A hash of what decides a result beside the tree: the tests with what lies beside them, and the packages."""
        digest = hashlib.sha256("\n".join([sys.version, *self._packages]).encode())
        folder = self._checkout.folder
        folders = {_IMPORTER.parent, *(Path(name).parent for name in tests)}
        files = {path for one in folders for path in (folder / one).rglob("*") if "__pycache__" not in path.parts}
        for path in sorted(path for path in files if path.is_file()):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(folder)} {content}\n".encode())
        digest.update("\n".join(tests).encode())
        return digest.hexdigest()[:16]

    def _check(self, prefix: Prefix, tests: list[str]) -> Found:
        changes = {
            change.path: change.entry.blob
            for change in self._repository.changes(self._applied.upstream, prefix.commit)
            if change.entry and change.path.endswith(".py")
        }
        contents = self._repository.blobs(list(changes.values()))
        problems = [text for path, data in zip(changes, contents, strict=True) if (text := _compile(path, data))]
        if problems:
            return Found(problems=tuple(problems))
        self._checkout.lay(prefix)
        package = f"{self._applied.project.package}/"
        modules = sorted(_module(path) for path in changes if path.startswith(package))
        modules = [name for name in modules if not name.endswith(".__main__")]  # which would run
        if problems := self._import(modules):
            return Found(len(changes), problems=tuple(problems))
        found = self._test(tests) if tests else Found()
        return replace(found, compiled=len(changes), imported=len(modules))

    def _import(self, modules: list[str]) -> list[str]:
        if not modules:
            return []
        results = self._checkout.folder.with_name("imported.json")
        results.unlink(missing_ok=True)
        done = self._checkout.run([sys.executable, str(_IMPORTER), str(results), *modules], **_NO_GPU)
        if not results.exists():
            return [f"the import ended with status {done.returncode}:\n{_tail(done.stdout)}"]
        errors: dict[str, str] = json.loads(results.read_bytes())
        return [f"import {name}: {error}" for name, error in errors.items() if error]

    def _test(self, tests: list[str]) -> Found:
        results = self._checkout.folder.with_name("tests.xml")
        results.unlink(missing_ok=True)
        spread = ("-n", "2", "--dist", "loadfile") if len(tests) > 1 else ()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *spread, f"--junitxml={results}"]
        done = self._checkout.run([*command, f"--rootdir={self._checkout.folder}", *tests], **_NO_GPU)
        passed, skipped, problems = 0, Counter[str](), list[str]()
        cases = ElementTree.parse(results).iter("testcase") if results.exists() else ()
        for case in cases:
            name = f"{case.get('classname', '')}.{case.get('name', '')}".strip(".")
            if (skip := case.find("skipped")) is not None:
                skipped[skip.get("message", "")] += 1
            elif (bad := next((part for part in case if part.tag in ("failure", "error")), None)) is not None:
                problems.append(f"{name}: {next(iter(bad.get('message', '').strip().splitlines()), bad.tag)}")
            else:
                passed += 1
        if done.returncode not in (0, 5) and not problems:  # 5: there were none
            problems.append(f"pytest ended with status {done.returncode}:\n{_tail(done.stdout)}")
        return Found(passed=passed, skipped=dict(sorted(skipped.items())), problems=tuple(problems))


def _packages() -> dict[str, int]:
    """The installed packages with their versions, and when each was installed.

    Not those within a package, which gets them onto the path when it is imported, as setuptools does.
    """
    found = {Path(entry): list(Path(entry).glob("*.dist-info")) for entry in sys.path}
    folders = {folder for folder, infos in found.items() if infos}
    infos = [path for folder in folders if folders.isdisjoint(folder.parents) for path in found[folder]]
    return {path.name: path.stat().st_mtime_ns for path in sorted(infos)}


def _compile(path: str, data: bytes) -> str:
    """What keeps a file from being compiled, as `compileall` would find; empty if nothing does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(data, path, "exec", dont_inherit=True)
        except SyntaxError as error:
            return f"{path}:{error.lineno}: {error.msg}"
        except ValueError as error:
            return f"{path}: {error}"
    return ""


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _tail(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-_QUOTED:])


def _read(path: Path) -> Found | None:
    """A remembered result, or None where there is none that can be read."""
    try:
        return Found(**{**json.loads(path.read_bytes()), "problems": ()})
    except (OSError, ValueError, TypeError):
        return None
