"""Make the virtual environment and install a requirements file into it.

    python3 -I scripts/bootstrap.py .venv scripts/requirements.txt .venv/.tool

The Makefile runs this with whatever Python there is, so it uses the standard library alone and says what is
missing. The last argument is a file that is touched when all is done: what was interrupted is done again.
"""

import fcntl
import subprocess
import sys
from pathlib import Path

#: What vLLM's wheels ask for.
OLDEST = (3, 11)


def main() -> None:
    folder, requirements, stamp = map(Path, sys.argv[1:])
    if sys.version_info < OLDEST:
        version = ".".join(map(str, sys.version_info[:3]))
        sys.exit(f"error: {sys.executable} is Python {version}\ncure: make ... PYTHON=<CPython 3.11 or newer>")
    python = folder / "bin" / "python"
    try:
        with folder.with_name(f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once would spoil each other's environment
            if stamp.exists() and stamp.stat().st_mtime >= requirements.stat().st_mtime:
                return  # another run did it while this one waited
            if not _works(python):
                print(f"making {folder}", file=sys.stderr)
                _run(sys.executable, "-m", "venv", "--clear", str(folder))
            pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
            _run(*pip, "--requirement", str(requirements))
            stamp.touch()
    except OSError as error:
        sys.exit(f"error: {error}\ncure: free some space or mend the permissions of {folder}, then run it again")


def _works(python: Path) -> bool:
    """Whether there is an environment with pip; one that was interrupted in the making may have none."""
    command = [str(python), "-m", "pip", "--version"]
    return python.exists() and subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(*command: str) -> None:
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"error: {' '.join(command)} failed\ncure: see above; then run it again")


if __name__ == "__main__":
    main()
