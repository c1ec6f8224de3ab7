"""Compiling Triton kernels for GPUs that are not there, and reading what came out."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Shared memory one block may have, in bytes, by compute capability.
SHARED_MEMORY = {
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    120: 101_376,
    121: 101_376,
}


@dataclass(frozen=True)
class Binary:
    """What the compiler and the assembler say about one compiled kernel."""

    shared: int  # bytes
    registers: int  # per thread
    local: int  # bytes of spilled or indexed registers per thread
    ptx: str

    def count(self, instruction: str) -> int:
        """Return how many PTX instructions match a regular expression."""
        return len(re.findall(instruction, self.ptx))


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Return the registers and the bytes of spilled or indexed registers per thread of a compiled kernel."""
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [cuobjdump, "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack, local = (int(re.search(rf"{field}:(\d+)", usage)[1]) for field in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def compile_kernel(
    kernel: Any,
    arch: int,
    pointers: dict[str, str],
    scalars: dict[str, str],
    constants: dict[str, Any],
    **options: Any,
) -> Binary:
    """Compile `kernel`, of Triton or of Gluon, as the runtime does when it is called.

    Pointers and strides are divisible by 16, as every tensor of the backend is;
    other scalars are `do_not_specialize` or of a type that has no alignment.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    assert set(names) == {*pointers, *scalars, *constants}
    signature = {**pointers, **scalars, **dict.fromkeys(constants, "constexpr")}
    aligned = [*pointers, *(name for name in scalars if "stride" in name)]
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel,
        {name: signature[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options=options,
    )
    registers, local = resource_usage(compiled.asm["cubin"])
    return Binary(
        shared=compiled.metadata.shared,
        registers=registers,
        local=local,
        ptx=compiled.asm["ptx"],
    )
