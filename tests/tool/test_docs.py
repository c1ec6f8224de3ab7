"""The documentation says what the tool does."""

import re
from pathlib import Path

import pytest

from scripts import errors
from scripts.patch import UPSTREAM_STATUS
from scripts.verdict import Kind

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MAKEFILE = (ROOT / "Makefile").read_text()


def test_every_page_is_linked_from_the_readme() -> None:
    readme = PAGES[0].read_text()
    assert [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in readme] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_targets_and_variables_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    exported = re.search(r"^export (.*)$", MAKEFILE, re.MULTILINE)
    assert exported
    for command in re.findall(r"(?:^|`)make ([a-z][a-z-]*(?: [A-Z]+=\S*)*)", page.read_text(), re.MULTILINE):
        target, *assignments = command.split(" ")
        assert target in targets, command
        assert {one.split("=")[0] for one in assignments} <= set(exported[1].split()), command


def test_exit_codes_are_documented() -> None:
    page = (ROOT / "docs" / "build.md").read_text()
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    classes = errors.FatalError.__subclasses__()
    codes = [one.exit_code for one in classes]
    assert len(set(codes)) == len(codes), "each failure has an exit code of its own"
    assert documented == {*codes, 2, 130}


def test_verdicts_and_statuses_are_documented() -> None:
    page = (ROOT / "docs" / "patches.md").read_text()
    documented = set(re.findall(r"^\| ([a-z0-9-]+)(?:\(\w+\))? \| [^|]* \| (?:stops|goes on) \|$", page, re.MULTILINE))
    assert documented == set(Kind)
    assert [status for status in UPSTREAM_STATUS if status not in page] == []
