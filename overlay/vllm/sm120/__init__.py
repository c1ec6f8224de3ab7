# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What this build of vLLM is made of: upstream's release, patches and new files.

`python -m vllm.sm120` prints it for bug reports.
"""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

# Written by the build; the schema is that of scripts/provenance.py there.
_PROVENANCE = Path(__file__).with_name("provenance.json")
_SCHEMA = 1


class ProvenanceError(RuntimeError):
    """The provenance is missing or of another schema."""


def provenance() -> dict[str, Any]:
    """Return the provenance of this vLLM.

    Raises:
        ProvenanceError: There is none, as in a source tree, or it is not readable.
    """
    return _read(_PROVENANCE)


def plugin_provenance() -> dict[str, Any] | None:
    """Return the provenance of the GGUF plugin, or None if there is no plugin.

    The plugin is not imported: its package would import all of vLLM.

    Raises:
        ProvenanceError: The installed plugin is not of the same distribution.
    """
    try:
        plugin = importlib.metadata.distribution("vllm-gguf-plugin")
    except importlib.metadata.PackageNotFoundError:
        return None
    return _read(Path(plugin.locate_file("vllm_gguf_plugin/sm120/provenance.json")))


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ProvenanceError(
            f"{path} is missing: this is a source tree, or not a wheel of this "
            "distribution; `make wheel` writes it"
        ) from None
    except (OSError, ValueError) as error:
        raise ProvenanceError(f"{path} is not readable: {error}") from error
    if content.get("schema") != _SCHEMA:
        raise ProvenanceError(
            f"{path} has schema {content.get('schema')}, expected {_SCHEMA}"
        )
    return content
