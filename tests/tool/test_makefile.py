"""The front door: `make` hands the variables to the tool as they are, and its result back."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tool.miniature import REPOSITORY

FAKE = """\
#!{python}
import json, os, sys
names = ("PROJECT PLATFORM SOURCE REPOSITORY FORCE VERBATIM JSON PATCH CMD CONTINUE ABORT").split()
names += "TAG YES SKIP KEEP TAGS MARKDOWN REV TEST".split()
print(json.dumps([sys.argv[1:], {{name: os.environ[name] for name in names if os.environ.get(name)}}]))
sys.exit(21 if "tree" in sys.argv else 0)
"""


@pytest.fixture
def checkout_with_makefile(tmp_path: Path) -> Path:
    """The Makefile with an environment whose Python only says how it was called."""
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    for folder in ("scripts", "tests"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "requirements.txt").write_text("")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(FAKE.format(python=sys.executable))
    python.chmod(0o755)
    for stamp in (".tool", ".tests"):
        (tmp_path / ".venv" / stamp).touch()
    return tmp_path


def make(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=folder,
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def calls(result: subprocess.CompletedProcess[str]) -> list[tuple[list[str], dict[str, str]]]:
    return [(call[0], call[1]) for call in map(json.loads, result.stdout.splitlines())]


def test_help_lists_every_target(checkout_with_makefile: Path) -> None:
    text = (REPOSITORY / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split())  # type: ignore[index]
    for arguments in ((), ("help",)):
        shown = make(checkout_with_makefile, *arguments).stdout
        assert {line.split()[0] for line in shown.splitlines()} == targets


@pytest.mark.parametrize(
    "target",
    ["wheel", "fetch", "status", "check", "edit", "export", "rebase", "drift", "verify", "verify-wheel", "bump"],
)
def test_target_calls_the_command_of_its_name(checkout_with_makefile: Path, target: str) -> None:
    result = make(checkout_with_makefile, target)
    assert result.returncode == 0
    assert calls(result) == [(["-m", "scripts", target], {})]


@pytest.mark.parametrize(
    "value",
    [
        "sed -i 's/a b/c d/' vllm/engine.py",
        'echo "two  blanks" && echo \'one\'; true | cat > "$HOME/x"',
        "sed -i 's/end$/END/' `cat list` \\ # not a comment",
        "echo %%; echo $(pwd) $$",
    ],
)
def test_command_passes_unharmed(checkout_with_makefile: Path, value: str) -> None:
    expected = [(["-m", "scripts", "edit"], {"PATCH": "a b.patch", "CMD": value})]
    assert calls(make(checkout_with_makefile, "edit", "PATCH=a b.patch", f"CMD={value}")) == expected
    assert calls(make(checkout_with_makefile, "edit", PATCH="a b.patch", CMD=value)) == expected


def test_test_and_revision_pass_unharmed(checkout_with_makefile: Path) -> None:
    value = 'python -m pytest \'tests/a b\' -k "x" && ! grep "$HOME" x # $(pwd) $$'
    expected = [(["-m", "scripts", "bisect"], {"TEST": value})]
    assert calls(make(checkout_with_makefile, "bisect", f"TEST={value}")) == expected
    assert calls(make(checkout_with_makefile, "bisect", TEST=value)) == expected
    made = make(checkout_with_makefile, "show-change", "REV=HEAD~2..HEAD^")
    assert calls(made) == [(["-m", "scripts", "show-change"], {"REV": "HEAD~2..HEAD^"})]


def test_failure_is_a_failure(checkout_with_makefile: Path) -> None:
    result = make(checkout_with_makefile, "tree")
    assert result.returncode == 2
    assert "Error 21" in result.stderr


def test_ways_out_of_a_rebase_reach_it(checkout_with_makefile: Path) -> None:
    for values in ({"TAG": "v0.34.0", "YES": "1"}, {"CONTINUE": "1"}, {"SKIP": "1"}, {"KEEP": "1"}, {"ABORT": "1"}):
        assignments = [f"{name}={value}" for name, value in values.items()]
        assert calls(make(checkout_with_makefile, "rebase", *assignments)) == [(["-m", "scripts", "rebase"], values)]


def test_releases_pass_unharmed(checkout_with_makefile: Path) -> None:
    values = {"TAGS": "v0.28.0..pin, latest", "JSON": "a b.json", "MARKDOWN": "page.md"}
    assignments = [f"{name}={value}" for name, value in values.items()]
    assert calls(make(checkout_with_makefile, "drift", *assignments)) == [(["-m", "scripts", "drift"], values)]


def test_from_another_folder(checkout_with_makefile: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    result = make(tmp_path_factory.mktemp("elsewhere"), "-C", str(checkout_with_makefile), "status", "JSON=1")
    assert calls(result) == [(["-m", "scripts", "status"], {"JSON": "1"})]
