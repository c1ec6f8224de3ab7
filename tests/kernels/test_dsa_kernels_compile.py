"""The kernels of the installed package that surround DSA attention, compiled for every supported GPU.

Nothing is declared here: the launching functions run on the CPU with a fake GPU, and what they launch is compiled with
the signature that it has there. No GPU is needed.
"""

import importlib
import re
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

import pytest

from tests.kernels.compilation import SHARED_MEMORY, resource_usage
from tests.kernels.fake_gpu_pool import fake_gpu_pool, set_capability

ARCHS = [80, 86, 89, 90, 120, 121]
MODULES = [
    "vllm.models.deepseek_v32.common.kernels",
    "vllm.model_executor.layers.sparse_attn_indexer",
    "vllm.model_executor.layers.attention.mla_attention",
    "vllm.model_executor.layers.attention.sparse_mla_attention",
    "vllm.model_executor.kernels.attention.dsa.dcp_indexer_cutedsl",
    "vllm.models.glm5next.nvidia.ops.kpool_compress",
    "vllm.v1.attention.backends.mla.compressor_utils",
    "vllm.v1.attention.backends.mla.index_group",
    "vllm.v1.attention.backends.mla.indexer",
    "vllm.v1.attention.backends.mla.sparse_utils",
    "vllm.v1.attention.ops.common",
    "vllm.v1.attention.ops.dcp",
    "vllm.v1.attention.ops.pcp",
]
# What these modules define besides kernels of the path.
NOT_ON_THE_PATH = {
    "_rms_norm": "called by kernels",
    "_get_cos_sin": "called by kernels",
    "_fp8_ue8m0_quantize": "called by kernels",
    "_fp8_quant_and_cache_write": "called by kernels",
    "pack_ue8m0_x4": "called by kernels, on SM100 only",
    "_fused_indexer_q_rope_quant_kernel": "of the generic model classes, which no NVIDIA GPU gets",
    "_upcast_logits_kernel": "for bfloat16 logits, which only SM100 has",
    "_scatter_topk_kernel": "of masked prefill, on SM100 only",
    "_scatter_topk_single_req_kernel": "of masked prefill, on SM100 only",
    "sparse_mla_prepare_safe_lengths_kernel": "of FlashInfer's sparse backend",
    "CompressedSlotMappingKernel.kernel": "of models with compressed KV states",
    "_hadamard128_stage": "called by kernels",
    "_hadamard128": "called by kernels",
    "_fwht_stage": "called by kernels",
    "_kpool_tail_slot_mapping_kernel": "of GLM-5.3-Flash, on integers",
    "_kpool_tail_seed_kernel": "of GLM-5.3-Flash, on bfloat16",
    "_expand_pools_and_append_tail_kernel": "of GLM-5.3-Flash, on integers",
}
# Launches that convert to e4m3.
CONVERTING = {
    *("norm-rope-fp16", "norm-rope-bf16", "norm-rope-fp8", "norm-rope-fp8-unscaled"),
    *("norm-rope-ds-mla-fp16", "norm-rope-ds-mla-bf16", "norm-rope-shared"),
    *("query-fp16", "query-bf16", "query-fp8", "pack-queries", "pool-keys"),
}


@dataclass(frozen=True)
class Compiled:
    """A kernel that a launch compiled."""

    launch: str
    name: str
    shared: int  # bytes
    local: int  # bytes of spilled or indexed registers per thread
    converts: bool  # with the conversion instruction


def compile_path(arch: int) -> tuple[list[Compiled], bool]:
    """Compile all launches; also return whether start-up compiles the very packing that is launched later."""
    from tests.kernels import dsa_launches
    from tests.kernels.compile_launches import compile_launches

    # Otherwise a launch imports it, with a driver that is good for compiling only.
    importlib.import_module("vllm.models.glm5next.nvidia.ops.kpool_compress")
    set_capability(divmod(arch, 10))
    # Since SM100 upstream has a CuTe kernel for bfloat16 queries; Triton's is the one for float16.
    dsa_launches.fused_q_cutedsl.is_fused_q_cutedsl_supported = lambda *args, **kwargs: False
    launched = {}
    with compile_launches(arch) as warmed_up:
        for kernel, key in dsa_launches.warmed_up():
            kernel.compile(key)
    launched["warm-up"] = warmed_up
    for name, launch in {**dsa_launches.FUSED, **dsa_launches.OTHERS}.items():
        with compile_launches(arch) as launched[name]:
            launch()
    pack = dsa_launches.common.PackSeqTritonKernel.kernel
    at_start, later = (
        [kernel for function, kernel in launched[name] if function is pack] for name in ("warm-up", "pack-queries")
    )
    results = {
        Compiled(
            name,
            function.fn.__qualname__,
            kernel.metadata.shared,
            resource_usage(kernel.asm["cubin"])[1],
            re.search(r"\bcvt\.rn\.satfinite\.e4m3x2", kernel.asm["ptx"]) is not None,
        )
        for name, pairs in launched.items()
        for function, kernel in pairs
    }
    return sorted(results, key=str), len(later) == 1 and later[0] in at_start


def defined() -> set[str]:
    from tests.kernels.compile_launches import jit_functions

    return {name for module in MODULES for name in jit_functions(module)}


@pytest.fixture(scope="module")
def pools(tmp_path_factory) -> Iterator[dict[bool, ProcessPoolExecutor]]:
    """With and without fp8 instructions: modules find that out when they are imported."""
    caches = [tmp_path_factory.mktemp("triton-cache") for _ in range(2)]
    with fake_gpu_pool((8, 0), caches[0]) as software, fake_gpu_pool((9, 0), caches[1]) as hardware:
        yield {False: software, True: hardware}


@pytest.fixture(scope="module")
def compiled(pools) -> dict[int, Future[tuple[list[Compiled], bool]]]:
    return {arch: pools[arch >= 89].submit(compile_path, arch) for arch in ARCHS}


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile(compiled, arch):
    kernels, _ = compiled[arch].result()
    converting = {kernel.launch for kernel in kernels if kernel.converts} - {"warm-up"}
    assert converting == (CONVERTING if arch >= 89 else set())
    assert [kernel for kernel in kernels if kernel.local] == []
    assert max(kernel.shared for kernel in kernels) <= SHARED_MEMORY[arch] // 2


@pytest.mark.parametrize("arch", ARCHS)
def test_packing_is_compiled_at_start_up(compiled, arch):
    assert compiled[arch].result()[1]


def test_list_of_kernels_is_complete(compiled, pools):
    kernels, _ = compiled[80].result()
    assert {kernel.name for kernel in kernels}.isdisjoint(NOT_ON_THE_PATH)
    assert pools[False].submit(defined).result() == {kernel.name for kernel in kernels} | NOT_ON_THE_PATH.keys()
