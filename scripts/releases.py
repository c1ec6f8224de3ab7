"""releases.toml: the sha256 of every wheel that a version stands for.

pip does not reinstall a version that it has, so changed content needs a new number; and a build that
gives other bytes than the recorded ones is not the release it claims to be.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import tomlkit

from scripts.errors import ReleaseError
from scripts.storage import write

_HEADER = "# The wheels of each version by sha256, written by `make wheel`. Commit it; a line never changes.\n"


def settle(path: Path, wheels: dict[str, str]) -> list[str]:
    """Compare finished wheels (file name to sha256) with what is recorded; record those that are new.

    Returns:
        the names recorded just now.

    Raises:
        ReleaseError: a wheel of this name was recorded with other content, or the file is not readable.
    """
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else _HEADER
        recorded = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ReleaseError(f"{path}: not valid TOML: {error}", cure="restore it") from None
    if changed := [name for name, sha256 in wheels.items() if recorded.get(name, sha256) != sha256]:
        raise ReleaseError(
            f"{', '.join(changed)}: the content is not what {path.name} records for this version",
            cure="raise release.number in upstream.toml (`make bump`); or, if this version was never given to anyone, "
            f"remove its lines from {path.name}",
        )
    new = [name for name in wheels if name not in recorded]
    if new:
        document = tomlkit.parse(text)
        for name in new:
            document[name] = wheels[name]
        write(path, tomlkit.dumps(document).encode())
    return new
