"""Conflicts that were resolved before (git's rerere), kept where the next rebase and other people find them.

git's own store is a folder per conflict, named by what conflicted, with the file before and after the resolution.
"""

from __future__ import annotations

import re
from pathlib import Path

from scripts.storage import write

_ID = re.compile(r"[0-9a-f]{40}")


def copy(source: Path, target: Path) -> list[str]:
    """Copy what is resolved in one store to another and return the ids of those that are new there.

    The postimage, which makes a resolution whole, is written last.
    """
    new = []
    for folder in sorted(source.iterdir()) if source.is_dir() else ():
        if not _ID.fullmatch(folder.name) or not (folder / "postimage").is_file():
            continue
        files = {name: (folder / name).read_bytes() for name in ("preimage", "postimage")}
        for name, data in files.items():
            path = target / folder.name / name
            if not path.is_file() or path.read_bytes() != data:
                write(path, data)
                if name == "postimage":
                    new.append(folder.name)
    return new
