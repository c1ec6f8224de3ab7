# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What may go wrong, or take long, although an attention backend fits."""

import importlib.util
from collections.abc import Iterator

import torch

from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.platforms import current_platform
from vllm.sm120.doctor import indexer, kernels
from vllm.sm120.doctor.facts import Case, Risk
from vllm.sm120.doctor.memory import backend_for
from vllm.sm120.doctor.skeleton import build
from vllm.utils.deep_gemm_nvcc import get_nvcc_problem
from vllm.utils.flashinfer import has_flashinfer, has_flashinfer_cubin
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

# What vLLM took: the name of a kernel or backend, and what uses it.
Users = list[tuple[str, str]]


def examine(case: Case, chosen: str | None) -> list[Risk]:
    """Return the risks of serving with the backend `chosen`, the worst first.

    Raises:
        RefusedError: vLLM does not build this model.
    """
    if chosen is None:
        return []
    users = [(chosen, "attention")]
    users += [(str(row.value), row.name) for row in kernels.examine(case)]
    users += [(str(row.value), "the indexer") for row in indexer.examine(case)[:1]]
    return [
        *_float16(case),
        *_deep_gemm(users),
        *_flashinfer(users),
        *_flash_attention_2(case, chosen),
        *_triton(users),
    ]


def _float16(case: Case) -> Iterator[Risk]:
    """A model trained in bfloat16 may have values beyond float16's 65504."""
    config = case.vllm_config.model_config
    trained = getattr(config.hf_text_config, "dtype", None)
    if config.dtype != torch.float16 or trained in (torch.float16, "float16"):
        return
    modules = build(case).model.modules()
    scales = {getattr(each, "residual_scale", 1.0) for each in modules} - {1.0}
    if scales:
        what = (
            f"float16: the residual is kept at {scales.pop()} of its value, so that "
            "its sums do not overflow; what one layer adds may still exceed 65504"
        )
    else:
        what = (
            "float16: this distribution's guard against values beyond 65504 is not in "
            "this model class; if the model was trained in bfloat16, the text may turn "
            "into nonsense"
        )
    fits = current_platform.has_device_capability(80) and backend_for(
        case, dtype=torch.bfloat16
    )
    yield Risk(what, "--dtype bfloat16" if fits else "")


def _deep_gemm(users: Users) -> Iterator[Risk]:
    using = _using(users, "deepgemm")
    if not using:
        return
    if problem := get_nvcc_problem():
        yield Risk(
            f"{using} can only use DeepGEMM here, which cannot compile: {problem}",
            "install nvcc 12.9 or newer on the machine that serves, and set CUDA_HOME",
        )
    else:
        yield Risk(
            f"{using}: DeepGEMM compiles its kernels with nvcc when the server starts "
            "for the first time, which takes minutes",
            "keep ~/.cache/vllm between starts",
        )


def _flashinfer(users: Users) -> Iterator[Risk]:
    cure = "run `vllm download-kernels` where the server runs"
    using = _using(users, "flashinfer")
    if not has_flashinfer() and current_platform.has_device_capability(90):
        yield Risk(
            "FlashInfer cannot be used: it is not installed, or has neither kernels "
            "(flashinfer-cubin) nor nvcc and ninja to compile them; what needs it was "
            "passed over",
            f"pip install flashinfer-python, and {cure}",
        )
    elif using and not (
        has_flashinfer_cubin() and importlib.util.find_spec("flashinfer_jit_cache")
    ):
        yield Risk(
            f"{using}: FlashInfer's compiled kernels are not installed here; it "
            "compiles them with nvcc and ninja at first use, which takes minutes",
            cure,
        )


def _flash_attention_2(case: Case, chosen: str) -> Iterator[Risk]:
    """The wheel's FlashAttention 2 has machine code for 8.0, and PTX."""
    layers = build(case).model.modules()
    used = chosen == "FLASH_ATTN" or any(
        getattr(each.impl, "supports_dense_mha_prefill", True)
        for each in layers
        if isinstance(each, MLAAttention)
    )
    capability = current_platform.get_device_capability()
    if used and capability.major > 8 and get_flash_attn_version() == 2:
        yield Risk(
            "the wheel has FlashAttention 2 for 8.x only: the driver compiles it for "
            f"{capability.as_version_str()} (PTX JIT) in the first request whose "
            "prompt it reads, 5 to 20 s",
            "send a short prompt after the first start; keep ~/.nv/ComputeCache",
        )


def _triton(users: Users) -> Iterator[Risk]:
    if using := _using(users, "triton"):
        yield Risk(
            f"{using}: Triton compiles its kernels when the server starts for the "
            "first time",
            "keep ~/.triton/cache between starts",
        )


def _using(users: Users, name: str) -> str:
    """Return what uses the kernels of a library, such as "attention, the indexer"."""
    found = [
        part
        for kernel, part in users
        if name in kernel.lower().replace("_", "").replace(" ", "")
    ]
    return ", ".join(dict.fromkeys(found))
