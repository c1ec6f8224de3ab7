"""This repository's kernels for the indexer's logits, and DeepGEMM's. Importing it needs a GPU: vLLM looks for one."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from benchmarks.indexer_workload import PAGE, Decode, Prefill
from tests.kernels.overlay import load_overlay

configs = load_overlay("vllm.v1.attention.ops.triton_mqa_logits_config")
ops = load_overlay("vllm.v1.attention.ops.triton_mqa_logits")

Call = Callable[[], torch.Tensor]


def num_slots() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


class Triton:
    """Ours, with e4m3 multiplied as it is or decoded first, as GPUs below SM89 have to."""

    name = "Triton"

    def __init__(self, software: bool) -> None:
        self.software = software

    def config(self, inputs: Prefill | Decode) -> Any:
        choose = configs.get_contiguous_config if isinstance(inputs, Prefill) else configs.get_paged_config
        return choose(inputs.q.shape[-2], torch.cuda.get_device_capability(), self.software)

    def describe(self, inputs: Prefill | Decode) -> dict[str, Any]:
        """Return how the kernel is launched, as a field of a result row."""
        return asdict(self.config(inputs))

    def schedule(self, inputs: Decode) -> torch.Tensor:
        return ops.paged_mqa_schedule(inputs.context_lens, PAGE, num_slots())

    def prefill(self, i: Prefill) -> Call:
        arguments = i.q, i.k, i.k_scale, i.weights, i.starts, i.ends, len(i.k)
        return partial(ops.mqa_logits, *arguments, config=self.config(i))

    def decode(self, i: Decode, schedule: torch.Tensor) -> Call:
        max_model_len = i.block_tables.shape[1] * PAGE
        arguments = i.q, i.cache, i.weights, i.context_lens, i.block_tables, schedule, max_model_len
        return partial(ops.paged_mqa_logits, *arguments, config=self.config(i))


class DeepGemm:
    """What vLLM's wrappers in utils/deep_gemm.py call. The wrappers themselves may choose Triton.

    Raises:
        RuntimeError: it cannot run here.

    """

    name = "DeepGEMM"

    def __init__(self) -> None:
        from vllm.platforms import current_platform
        from vllm.utils import deep_gemm
        from vllm.utils.deep_gemm_nvcc import get_nvcc_problem

        if not current_platform.support_deep_gemm():
            raise RuntimeError("has no kernels for this GPU")
        if problem := get_nvcc_problem():
            raise RuntimeError(f"cannot compile its kernels: {problem}")
        deep_gemm._lazy_init()
        self._module = deep_gemm
        if deep_gemm._fp8_fp4_mqa_logits_impl is None:
            raise RuntimeError("is not installed")
        self.version = getattr(deep_gemm._import_deep_gemm(), "__version__", "unknown version")

    def schedule(self, inputs: Decode) -> torch.Tensor:
        slots = self._module._paged_mqa_logits_schedule_slots(num_slots(), inputs.context_lens.shape[1])
        return self._module._get_paged_mqa_logits_metadata_impl(inputs.context_lens, PAGE, slots)

    def prefill(self, i: Prefill) -> Call:
        arguments = (i.q, None), (i.k, i.k_scale), i.weights, i.starts, i.ends, len(i.k)
        return partial(self._module._fp8_fp4_mqa_logits_impl, *arguments)

    def decode(self, i: Decode, schedule: torch.Tensor) -> Call:
        max_model_len = i.block_tables.shape[1] * PAGE
        arguments = (i.q, None), i.cache, i.weights, i.context_lens, i.block_tables, schedule, max_model_len
        return partial(self._module._fp8_fp4_paged_mqa_logits_impl, *arguments)


def calls(kernels: Triton | DeepGemm, inputs: list[Prefill] | list[Decode]) -> list[Call]:
    """Return the calls of a graph. The schedule is made beforehand, as it is once for all layers of a step."""
    if isinstance(inputs[0], Prefill):
        return [kernels.prefill(one) for one in inputs]
    schedule = kernels.schedule(inputs[0])
    return [kernels.decode(one, schedule) for one in inputs]
