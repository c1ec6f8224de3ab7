"""Run the code that Triton generates for another GPU on this one: `-p tests.gpu.other_target --generate-for 80`.

PTX for a GPU is valid on every later one, so only the assembler has to know which GPU is really there. All that comes
before it is done for the target: how data is copied, which instructions multiply, how the loops are pipelined. The
assembler refuses what the target does not have.
"""

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--generate-for", type=int, required=True, help="the target, 80 for sm_80")
    parser.addoption("--generated", type=Path, required=True, help="file to list the generated kernels in")


def pytest_configure(config: pytest.Config) -> None:
    generate_for(config.getoption("--generate-for"), config.getoption("--generated"))


def generate_for(arch: int, generated: Path) -> None:
    """Have Triton generate code for `arch` from now on; append what it generates to a file, one JSON object a line."""
    from triton import knobs

    def change_stages(
        backend: Any = None, stages: Any = None, options: Any = None, language: Any = None, capability: Any = None
    ) -> tuple[str, str] | None:
        if backend is None:  # Triton asks for the hook's share of its cache key
            return f"sm_{arch}", f"sm_{arch}"
        assemble = stages["cubin"]

        def make_ptx(source: Any, metadata: dict[str, Any]) -> str:
            # Left alone, this stage takes the GPU that is there.
            return backend.make_ptx(source, metadata, options, arch)

        def make_cubin(ptx: str, metadata: dict[str, Any]) -> bytes:
            cubin = assemble(ptx, metadata)
            kernel = {
                "name": metadata["name"],
                "target": f".target sm_{arch}\n" in ptx,
                "matrix_products": ptx.count("mma.sync"),
                "asynchronous_copies": ptx.count("cp.async.cg"),
                "e4m3_conversions": ptx.count("e4m3x2"),
            }
            with generated.open("a") as file:
                file.write(json.dumps(kernel) + "\n")
            return cubin

        stages["ptx"], stages["cubin"] = make_ptx, make_cubin
        return None

    knobs.runtime.override_arch = f"sm{arch}"
    knobs.runtime.add_stages_inspection_hook = change_stages
