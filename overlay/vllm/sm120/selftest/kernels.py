# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The stage that checks the kernels: python -m vllm.sm120.selftest.kernels EVENTS"""

import dataclasses
import sys
from typing import Any

import torch

from vllm.sm120.selftest.cases import Target, run
from vllm.sm120.selftest.child import Events
from vllm.sm120.selftest.report import FAILED


def hardware() -> dict[str, Any]:
    """Return what PyTorch says of the GPU that this process uses."""
    gpu = torch.cuda.get_device_properties(0)
    return {
        "gpu": gpu.name,
        "capability": f"{gpu.major}.{gpu.minor}",
        "multiprocessors": gpu.multi_processor_count,
        "memory_gib": round(gpu.total_memory / 2**30, 1),
        "l2_mib": gpu.L2_cache_size // 2**20,
        "shared_memory_kib": gpu.shared_memory_per_block_optin // 2**10,
    }


def target() -> Target:
    """Return the GPU as vLLM sees it, which decides the configurations."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    assert capability is not None
    return Target(
        (capability.major, capability.minor), current_platform.num_compute_units()
    )


def compile_ahead(keys: dict[Any, Any]) -> None:
    """Compile in threads, as vLLM's warm-up does; `keys` names the dispatchers."""
    from vllm.model_executor.warmup.jit_warmup_triton_helper import (
        compile_triton_warmup,
    )

    def compile_all() -> None:
        for key, dispatcher in keys.items():
            dispatcher.compile(key)

    try:
        compile_triton_warmup(compile_all, len(keys))
    except Exception as error:  # the case that it belongs to meets it again
        print(f"while compiling: {error!r}", flush=True)


def main() -> None:
    events = Events(sys.argv[1])
    if not torch.cuda.is_available():
        events.emit(
            "unusable", problem=f"PyTorch {torch.__version__} finds no CUDA GPU"
        )
        return
    events.emit("hardware", content=hardware())
    # Not before: without a GPU, vLLM has no Triton.
    from vllm.sm120.selftest import attention, indexer
    from vllm.v1.worker.workspace import init_workspace_manager

    gpu = target()
    init_workspace_manager(torch.device("cuda"))  # some top-k kernels take scratch
    cases = list(attention.cases(gpu))
    keys = attention.warmup_keys((case.shape for case in cases), gpu)
    keys |= indexer.warmup_keys(gpu)
    events.emit("step", what=f"compiling {len(keys)} kernels")
    compile_ahead(keys)
    for case in (*cases, *indexer.cases(gpu)):
        events.emit("doing", what=f"checking {case.stage}, {case.name}")
        check = run(case)
        events.emit("check", **dataclasses.asdict(check))
        if check.status == FAILED:
            torch.cuda.synchronize()  # raises, and ends the stage, if CUDA is lost
        torch.cuda.empty_cache()
    events.emit("done")


if __name__ == "__main__":
    main()
