"""Ask DeepGEMM's own binary which nvcc it would run: environments as JSON on stdin, one answer each on stdout.

    python ask_deep_gemm.py PATH/TO/_C_extension.abi3.so < environments.json > answers.json

An answer is [path or null, whether the version is good enough]. A refusal is a C++ exception, which ends the
process that called: each environment has one of its own, forked when the library is there.
"""

import ctypes
import json
import os
import sys

import torch

FIND_CUDA_TOOLKIT = "_ZN8deep_jit4CUDA17find_cuda_toolkitERKNS_3EnvE"  # Toolkit(const Env&), static
GET_COMPILER_INFO = "_ZNK8deep_jit4CUDA17get_compiler_infoEv"  # CompilerInfo() const; a CUDA begins with its Toolkit
ENOUGH_FOR_EACH_RESULT = 4096


class String(ctypes.Structure):
    """libstdc++'s std::string; Env holds one, and so does the path with which Toolkit begins."""

    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("short", ctypes.c_char * 16))

    def read(self) -> str:
        return ctypes.string_at(self.data, self.size).decode()


def ask(library: ctypes.CDLL, environment: dict[str, str], answer: int) -> None:
    """Write what DeepGEMM finds to the file descriptor `answer`, as far as it gets."""
    os.environ.clear()
    os.environ.update(environment)
    prefix = String(size=2, short=b"DG")
    prefix.data = ctypes.addressof(prefix) + String.short.offset
    toolkit, info = (ctypes.create_string_buffer(ENOUGH_FOR_EACH_RESULT) for _ in range(2))
    for function, arguments in (
        (FIND_CUDA_TOOLKIT, (ctypes.byref(toolkit), ctypes.byref(prefix))),
        (GET_COMPILER_INFO, (ctypes.byref(info), ctypes.byref(toolkit))),
    ):
        # Both return a structure: its address is the first argument.
        getattr(library, function)(*arguments)
        os.write(answer, f"{String.from_buffer(toolkit).read()}\n".encode())


def ask_in_a_child(library: ctypes.CDLL, environment: dict[str, str]) -> tuple[str | None, bool]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        ask(library, environment, writer)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        lines = answers.read().splitlines()
    os.waitpid(child, 0)
    return (lines[0] if lines else None), len(lines) == 2


if __name__ == "__main__":
    torch.ops.load_library(sys.argv[1])
    binary = ctypes.CDLL(sys.argv[1])
    getattr(binary, FIND_CUDA_TOOLKIT)
    getattr(binary, GET_COMPILER_INFO)
    json.dump([ask_in_a_child(binary, environment) for environment in json.load(sys.stdin)], sys.stdout)
