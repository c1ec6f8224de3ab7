"""Both wheels with all their dependencies, and what the tests need, in the environment that runs this tool."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from scripts import build
from scripts.console import console
from scripts.errors import WheelError
from scripts.layout import Layout
from scripts.pins import Pins


def install(layout: Layout, pins: Pins) -> None:
    """Install what dist/ holds, once for each content.

    Raises:
        WheelError: a wheel is not there, or pip fails.
    """
    folder = build.target_folder(layout, build.host_platform())
    wheels = []
    for project in pins.projects.values():
        found = sorted(folder.glob(f"{project.package}-{project.local_version}-*.whl"))
        if not found:
            raise WheelError(f"{folder}: no wheel of {project.name} {project.local_version}", cure="`make wheel`")
        wheels += found
    requirements = [layout.root / "scripts" / "requirements.txt", layout.root / "tests" / "requirements.txt"]
    stamp = Path(sys.prefix) / "installed.sha256"
    content = "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()} {path.name}\n" for path in wheels + requirements
    )
    if stamp.exists() and stamp.read_text() == content:
        console.print(f"{sys.prefix}: already holds these wheels")
        return
    stamp.unlink(missing_ok=True)
    # pip would keep an installed version although the file's content differs.
    _pip("uninstall", "--yes", "--quiet", *pins.projects)
    _pip("install", *(str(path) for path in wheels), *(f"--requirement={path}" for path in requirements))
    _pip("check")
    stamp.write_text(content)


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    if subprocess.run(command, check=False).returncode:
        raise WheelError(f"pip {arguments[0]} failed", cure="see what pip says above")
