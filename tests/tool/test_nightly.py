"""ci/nightly files one report, keeps it up to date, and closes it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.tool.miniature import REPOSITORY

NEWER = "# Drift of {project}\n\nUpstream has a newer release, v9; v1 is pinned.\n"
NEWEST = "# Drift of {project}\n\nv1, which is pinned, is upstream's newest release.\n"
# Says what the file `says` says, about the project it is asked about.
TOOL = """\
#!{python}
import json, pathlib, sys
status, text = json.loads(pathlib.Path("says").read_text())
options = dict(zip(sys.argv[4::2], sys.argv[5::2]))
assert sys.argv[1:4] == ["-m", "scripts", "drift"] and options["--tags"] == "pin..latest"
pathlib.Path(options["--markdown"]).write_text(text.format(project=options["--project"]))
sys.exit(status)
"""
# Keeps the one open issue in the file `issue`, and what was done in `done`.
GH = """\
#!{python}
import pathlib, sys
issue, done = pathlib.Path("issue"), pathlib.Path("done")
what = " ".join(sys.argv[1:3])
if what == "issue list":
    print(7 if issue.exists() else "", end="")
    sys.exit()
done.write_text(done.read_text() + what + chr(10) if done.exists() else what + chr(10))
if what in ("issue create", "issue edit"):
    issue.write_text(sys.argv[sys.argv.index("--body") + 1])
elif what == "issue close":
    issue.unlink()
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose tool and whose gh are stand-ins."""
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    for name in ("Makefile", "ci/nightly", "upstream.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    for name, text in {".venv/bin/python": TOOL, "bin/gh": GH}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text.format(python=sys.executable))
        (tmp_path / name).chmod(0o755)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "requirements.txt").write_text("")
    (tmp_path / ".venv" / ".tool").touch()
    return tmp_path


def night(checkout: Path, status: int, text: str, token: str = "secret") -> tuple[Sequence[str], int]:
    """One night: what gh was asked to do, and the exit code."""
    (checkout / "done").unlink(missing_ok=True)
    (checkout / "says").write_text(json.dumps([status, text]))
    environment = {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", "GH_TOKEN": token}
    result = subprocess.run([checkout / "ci" / "nightly"], env=environment, capture_output=True, text=True, check=False)
    done = (checkout / "done").read_text().splitlines() if (checkout / "done").exists() else []
    if result.returncode == 0:
        assert result.stdout == "".join(text.format(project=name) + "\n" for name in ("vllm", "vllm-gguf-plugin"))
    assert not token or token not in result.stdout + result.stderr
    return done, result.returncode


def test_one_report(checkout: Path) -> None:
    issue = checkout / "issue"
    assert night(checkout, 0, NEWEST) == (["label create"], 0)
    assert night(checkout, 26, NEWER) == (["label create", "issue create"], 0)
    assert "Drift of vllm-gguf-plugin" in issue.read_text()
    assert night(checkout, 0, NEWER + "more\n") == (["label create", "issue edit"], 0)
    assert "more" in issue.read_text()
    assert night(checkout, 0, NEWEST) == (["label create", "issue close"], 0)
    assert not issue.exists()


def test_failure_of_the_tool_files_nothing(checkout: Path) -> None:
    assert night(checkout, 11, NEWER) == ([], 11)


def test_without_a_token_it_is_only_printed(checkout: Path) -> None:
    (checkout / "bin" / "gh").write_text("#!/bin/sh\nexit 1\n")
    done, status = night(checkout, 26, NEWER, token="")
    assert (done, status) == ([], 0)
