"""The environment that the Makefile makes on a new machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BOOTSTRAP = Path(__file__).parents[2] / "scripts" / "bootstrap.py"


@pytest.fixture
def requirements(tmp_path: Path) -> Path:
    path = tmp_path / "requirements.txt"
    path.write_text("# nothing\n")
    return path


def start(requirements: Path, *options: str) -> subprocess.Popen[str]:
    folder = requirements.parent / ".venv"
    command = [sys.executable, "-I", *options, str(BOOTSTRAP), str(folder), str(requirements), str(folder / ".tool")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(requirements: Path) -> tuple[int, str]:
    process = start(requirements)
    _, err = process.communicate(timeout=120)
    return process.returncode, err


@pytest.mark.slow
def test_twice_at_once_then_again(requirements: Path) -> None:
    processes = [start(requirements), start(requirements)]
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(text.count("making") for text in said) == [0, 1]
    assert (requirements.parent / ".venv" / ".tool").exists()
    assert run(requirements) == (0, "")


@pytest.mark.slow
def test_environment_that_was_interrupted_in_the_making(requirements: Path) -> None:
    python = requirements.parent / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    settings = f"home = {Path(sys.base_prefix) / 'bin'}\ninclude-system-site-packages = false\n"
    (requirements.parent / ".venv" / "pyvenv.cfg").write_text(settings)
    code, err = run(requirements)
    assert (code, "making" in err) == (0, True)
    subprocess.run([python, "-m", "pip", "--version"], check=True, capture_output=True)


@pytest.mark.slow
def test_requirement_that_cannot_be_had(requirements: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    requirements.write_text("no-such-project-anywhere==1\n")
    code, err = run(requirements)
    assert code == 1
    assert "cure: see above; then run it again" in err
    assert not (requirements.parent / ".venv" / ".tool").exists()


def test_old_python(requirements: Path) -> None:
    script = "import runpy, sys; sys.version_info = (3, 9, 1); sys.argv = ['', 'a', 'b', 'c'];"
    script += f"runpy.run_path({str(BOOTSTRAP)!r}, run_name='__main__')"
    result = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "is Python 3.9.1\ncure: make ... PYTHON=" in result.stderr
