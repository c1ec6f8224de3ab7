"""Result files: what was measured, on which hardware, with which versions, of which commit, when."""

import json
import os
import platform
import subprocess
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
#: Names the commit where the working tree has no history, as a copy has none.
COMMIT_VARIABLE = "VLLM_SM120_COMMIT"


def environment() -> dict[str, Any]:
    """Return the hardware and the versions a measurement belongs to, read from the machine."""
    gpu = torch.cuda.get_device_properties(0)
    return {
        "hardware": {
            "gpu": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "multiprocessors": gpu.multi_processor_count,
            "memory_gib": round(gpu.total_memory / 2**30),
            "l2_mib": gpu.L2_cache_size // 2**20,
        },
        "versions": {
            **{name: version(name) for name in ("vllm", "torch", "triton", "transformers")},
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "commit": commit(),
        "date": date.today().isoformat(),
    }


def commit(root: Path = ROOT) -> str:
    """Return the commit of the working tree, with "-dirty" where tracked files differ from it."""
    if named := os.environ.get(COMMIT_VARIABLE):
        return named
    if not (root / ".git").exists():  # else git would look for a repository around it
        return f"unknown: no .git here, and {COMMIT_VARIABLE} is not set"
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown: {error}"


def write_results(path: Path, rows: list[dict[str, Any]], **header: Any) -> None:
    """Write rows with their environment and what `header` adds, as `write_result` does."""
    write_result(path, environment() | header, rows)


def write_result(path: Path, header: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write a header and rows as JSON, one row a line, all or nothing."""
    head = json.dumps(header, indent=2).removesuffix("\n}")
    body = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(f'{head},\n  "rows": [\n{body}\n  ]\n}}\n')
    unfinished.replace(path)


def gpu_slug() -> str:
    """Return the GPU's name for a file name: "NVIDIA H200" gives "h200"."""
    return torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "-")
