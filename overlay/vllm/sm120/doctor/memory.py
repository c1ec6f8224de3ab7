# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How much memory of a GPU the weights and the KV cache take.

What a forward pass takes beside them (activations, CUDA graphs, NCCL) vLLM measures
when it starts; it is not known here, and comes off what is left for the KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch.nn.parameter import UninitializedParameter

from vllm.config.cache import KV_CACHE_DTYPES
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import (
    MLAAttention,
    _canonicalize_sparse_mla_kv_cache_dtype,
)
from vllm.platforms import current_platform
from vllm.sm120.doctor.backends import selector_question
from vllm.sm120.doctor.facts import GIB, Case, Row
from vllm.sm120.doctor.skeleton import Skeleton, build
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.core.kv_cache_planning import (
    estimate_max_model_len,
    max_memory_usage_bytes,
)
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.kv_cache_interface import KVCacheSpec

# Bits of a value with its share of the block's scale: OCP's MX formats have 8 bits
# for 32 values, NVFP4 has 8 bits for 16.
_ONLINE_BITS = {"fp8": 8, "int8": 8, "mxfp8": 8.25, "mxfp4": 4.25, "nvfp4": 4.5}


def examine(case: Case) -> list[Row]:
    """Return the sizes on one GPU (rank), and the contexts that fit.

    Raises:
        RefusedError: vLLM does not build this model.
    """
    skeleton = build(case)
    weights = weight_bytes(skeleton)
    ranks = case.vllm_config.parallel_config.world_size
    why = f"divided among {ranks} GPUs" if ranks > 1 else "all on one GPU"
    if case.vllm_config.speculative_config is not None:
        why += "; the draft model's weights and cache come on top"
    rows = [Row("weights per GPU", weights / GIB, why, "GiB")]
    room = room_for_cache(case, skeleton)
    if room is not None:
        share = case.vllm_config.cache_config.gpu_memory_utilization
        rows.append(
            Row(
                "left for the KV cache",
                room / GIB,
                f"{share:.0%} of {case.gpu.memory / GIB:.0f} GiB less the weights; "
                "activations and CUDA graphs come off this when vLLM starts",
                "GiB",
            )
        )
        if room <= 0:
            rows.append(Row("GPUs needed", *gpus_needed(case, weights)))
    rows += _cache_rows(case, room)
    if room is None:
        rows.append(Row("largest context", "unknown", "give --gpu, or --memory in GiB"))
    return rows


def weight_bytes(skeleton: Skeleton) -> int:
    """Return the bytes of a rank's parameters once they are loaded.

    The parameters of a GGUF model have no size before: the quantised bytes of the
    files are shared out as their values are, which is right if the tensors that every
    rank has whole are of the same types as the others.
    """
    known = gguf_values = 0
    seen: set[int] = set()  # tied weights have two owners
    for module in skeleton.model.modules():
        bits = _online_bits(getattr(module, "quant_method", None))
        for parameter in module.parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if isinstance(parameter, UninitializedParameter):
                gguf_values += torch.Size(
                    getattr(parameter, "tensor_shape", [0])
                ).numel()
            elif bits and parameter.dim() > 1:
                known += int(parameter.numel() * bits / 8)
            else:
                known += parameter.nbytes
    if not gguf_values:
        return known
    from vllm.sm120.doctor.gguf import quantized_tensors

    tensors = quantized_tensors(skeleton.gguf_adapter)
    values = sum(torch.Size(tensor.shape).numel() for tensor in tensors)
    return known + sum(tensor.size for tensor in tensors) * gguf_values // values


def _online_bits(method: Any) -> float | None:
    """Return the bits of a weight that vLLM quantises while it loads it, or None.

    Such a layer is built in 16 bits. The module of its method names the format.
    """
    if not getattr(method, "uses_meta_device", False):
        return None
    return _ONLINE_BITS.get(type(method).__module__.rpartition(".")[2])


def room_for_cache(case: Case, skeleton: Skeleton) -> int | None:
    """Return the bytes of a GPU that are left for the KV cache, at the most."""
    if case.gpu.memory is None:
        return None
    share = case.vllm_config.cache_config.gpu_memory_utilization
    used = weight_bytes(skeleton) + skeleton.workspace
    return int(case.gpu.memory * share) - used


def gpus_needed(case: Case, weights: int) -> tuple[int | str, str]:
    """Return how many GPUs at least hold the weights, and why that many."""
    share = case.vllm_config.cache_config.gpu_memory_utilization
    total = weights * case.vllm_config.parallel_config.world_size
    heads = case.model["heads"]
    for count in range(1, heads + 1):
        if heads % count == 0 and total < count * case.gpu.memory * share:
            return count, f"at least; --tensor-parallel-size must divide {heads} heads"
    return "too many", f"more than the {heads} heads can be divided among"


def _cache_rows(case: Case, room: int | None) -> Iterator[Row]:
    """Yield the context that fits, and a row for each size that a token can have."""
    config = case.vllm_config
    asked = config.cache_config.cache_dtype
    length = config.model_config.max_model_len
    sizes: dict[tuple[float, str], list[str]] = {}
    for name in sorted(KV_CACHE_DTYPES, key=lambda name: name != asked):
        backend = backend_for(case, kv_cache_dtype=name)
        if backend is None:
            continue
        specs = cache_specs(config, backend, name)
        needed = max_memory_usage_bytes(config, specs.values())
        if name == asked and room is not None:
            fitting = estimate_max_model_len(config, specs, max(room, 0))
            why = f"of {length:,}, which take {needed / GIB:.1f} GiB"
            yield Row("largest context", fitting, why, "tokens")
        sizes.setdefault((needed / length, backend.get_name()), []).append(name)
    for (size, backend_name), (name, *others) in sizes.items():
        why = f"as do {', '.join(others)}; {backend_name}" if others else backend_name
        if room and room > 0:
            why += f"; {int(room / size):,} tokens fit in all"
        yield Row(f"KV {name}", round(size), why, "bytes a token")


def backend_for(case: Case, **changes: Any) -> type[AttentionBackend] | None:
    """Return whom vLLM would choose if its question were another in these fields."""
    asked = selector_question(case)
    try:
        path = current_platform.get_attn_backend_cls(
            asked.requested,
            asked.config._replace(**changes),
            num_heads=asked.num_heads,
        )
    except ValueError:
        return None
    return resolve_obj_by_qualname(path)


def cache_specs(
    config: VllmConfig, backend: type[AttentionBackend], kv_cache_dtype: str
) -> dict[str, KVCacheSpec]:
    """Return what the layers of the built model would keep in another format."""
    layers = config.compilation_config.static_forward_context.values()
    with ExitStack() as stack:
        for layer in layers:
            for attribute, value in _format(layer, backend, kv_cache_dtype, config):
                stack.enter_context(patch.object(layer, attribute, value))
        return get_kv_cache_spec(config)


def _format(
    layer: Any,
    backend: type[AttentionBackend],
    kv_cache_dtype: str,
    config: VllmConfig,
) -> Iterator[tuple[str, Any]]:
    """Yield what an attention layer derives of the format when it is built."""
    if isinstance(layer, MLAAttention):
        if layer.use_sparse:
            kv_cache_dtype = _canonicalize_sparse_mla_kv_cache_dtype(
                backend, kv_cache_dtype
            )
    elif isinstance(layer, Attention):
        dtype = kv_cache_dtype_str_to_dtype(kv_cache_dtype, config.model_config)
        yield "kv_cache_torch_dtype", dtype
    else:  # an indexer's, which has one format only
        return
    yield "kv_cache_dtype", kv_cache_dtype
    yield "attn_backend", backend
