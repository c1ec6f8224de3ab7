"""All that is measured on a GPU, correctness first: what `make bench` runs.

python -m benchmarks
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"


def steps() -> list[list[str]]:
    """Return what is run, as arguments of Python."""
    import torch

    # The engine benchmark compares with a backend that only these GPUs have.
    is_sm90 = torch.cuda.get_device_capability()[0] == 9
    return [
        ["-m", "pytest", "tests/gpu", "--results", RESULTS],
        ["-m", "benchmarks.sparse_mla", "--results", RESULTS],
        ["-m", "benchmarks.indexer", "--results", RESULTS],
        *([["-m", "benchmarks.engine", "--results", RESULTS]] if is_sm90 else []),
        ["-m", "benchmarks.report", RESULTS],
    ]


def problem() -> str:
    """Return why nothing can be measured here, and the cure, or nothing."""
    for name in ("torch", "vllm"):
        if importlib.util.find_spec(name) is None:
            return f"error: {name} is not installed in {sys.prefix}\ncure: `make wheel`, then `make install`"
    import torch

    if not torch.cuda.is_available():
        return "error: no CUDA GPU here\ncure: run it on a machine with one; docs/bench.md says how"
    return ""


def main() -> None:
    if text := problem():
        sys.exit(text)
    for step in steps():
        print(f"== python {' '.join(step)}", flush=True)
        if subprocess.run([sys.executable, *step], cwd=ROOT, check=False).returncode:
            sys.exit(f"error: python {' '.join(step)} failed\ncure: see above; what comes after it was not run")


if __name__ == "__main__":
    main()
