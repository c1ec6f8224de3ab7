"""Result files: what was measured, on which hardware, with which versions."""

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


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
    }


def write_results(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows with their environment as JSON, one row a line."""
    head = json.dumps(environment(), indent=2).removesuffix("\n}")
    body = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n  "rows": [\n{body}\n  ]\n}}\n')


def gpu_slug() -> str:
    """Return the GPU's name for a file name: "NVIDIA H200" gives "h200"."""
    return torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "-")
