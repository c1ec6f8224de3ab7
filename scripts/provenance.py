"""What a wheel says about its own making: `provenance.json` for programs, `MODIFICATIONS.txt` for the licence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from unidiff.patch import PatchSet

from scripts.pins import COMMIT_DIGITS, Project
from scripts.sources import Build, PatchInfo

#: Raised when a reader of an older provenance.json would misread a newer one.
SCHEMA = 1

#: The notice's path below `<dist-info>/licenses/` (PEP 639).
NOTICE = "MODIFICATIONS.txt"


def path(project: Project) -> str:
    """The member that holds the provenance; in `vllm`, the package beside it prints it."""
    return f"{project.package}/sm120/provenance.json"


def document(build: Build) -> dict[str, Any]:
    """The content of provenance.json."""
    project, sources = build.project, build.sources
    return {
        "schema": SCHEMA,
        "name": project.name,
        "version": project.local_version,
        "platform": build.platform,
        "release": {"label": build.pins.label, "number": build.pins.number},
        "upstream": {
            "version": project.version,
            "repository": project.repository,
            "tag": project.tag,
            # As many digits as any pin has: a clone makes it the full id, and the wheel stays the same.
            "commit": project.commit[:COMMIT_DIGITS],
            "sdist": {"sha256": project.sdist},
            "wheel": {"file": build.upstream_wheel.name, "sha256": project.wheels[build.platform]},
        },
        "tree": sources.tree,
        "patches": [
            {
                "name": patch.name,
                "sha256": patch.sha256,
                "subject": patch.subject,
                "upstream_status": patch.upstream_status,
                "upstream_link": patch.upstream_link,
                "remove_when": patch.remove_when,
            }
            for patch in sources.patches
        ],
        "overlay": [
            {"path": name, "sha256": hashlib.sha256(sources.changed[name].data).hexdigest()}
            for name in sorted(sources.overlay)
        ],
    }


def render(content: Mapping[str, Any]) -> bytes:
    """The document as text; keys keep their order, which is the one to read them in."""
    return (json.dumps(content, indent=2) + "\n").encode()


def modifications(build: Build, packaged: Iterable[str], sbom: str) -> bytes:
    """The notice of changes that section 4(b) of the Apache License 2.0 asks for.

    Args:
        packaged: the changed and removed files to list.
        sbom: the member that has the patches in full.
    """
    project, sources = build.project, build.sources
    patches = {patch.name: touched(patch) for patch in sources.patches}
    sections: dict[str, list[str]] = {"Modified": [], "Added": [], "Removed": []}
    for name in sorted(packaged):
        by = ["overlay"] if name in sources.overlay else []
        by += [patch for patch, names in patches.items() if name in names]
        section = "Removed" if name in sources.deleted else "Modified" if name in sources.upstream else "Added"
        sections[section].append(f"  {name}  ({', '.join(by)})")
    lines = [
        f"{project.name} {project.local_version} is a modified build of {project.name} {project.version}",
        f"({project.repository}). Its authors did not make, review or endorse these changes.",
        "",
        f"{path(project)} names each patch, where it comes from and its sha256;",
        f"{sbom} has the patches in full.",
    ]
    for title, files in sections.items():
        lines += ["", f"{title}:", *(files or ["  none"])]
    lines += ["", "The files that carry the version (METADATA, WHEEL, RECORD, _version.py) were written anew."]
    return ("\n".join(lines) + "\n").encode()


def touched(patch: PatchInfo) -> frozenset[str]:
    """The files that a patch modifies, adds or removes."""
    return frozenset(file.path for file in PatchSet.from_string(patch.text.decode("utf-8", "surrogateescape")))
