# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the compiled MoE kernels cannot do in one launch, done in several, or refused.

Limits of csrc/gguf in 0.0.5, and of the Triton kernels where they share them.
"""

from collections.abc import Callable
from functools import wraps

import torch

from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

# moe_vec.cuh has a block in grid.z for every pair of a token and an expert.
MAX_ROUTES = 65535
# moe.cuh returns where `exp_idx > 255`.
MAX_EXPERTS = 256
# moe.cuh and the Triton kernels multiply expert and stride in 32 bits.
MAX_OFFSET = 2**31 - 1


def in_token_chunks(fused_moe: Callable[..., torch.Tensor]):
    """Call `fused_moe` for as many tokens at a time as one launch can take.

    The first and the fourth and fifth arguments have a row for each token:
    x [tokens, hidden], topk_weights and topk_ids [tokens, top_k].
    """

    @wraps(fused_moe)
    def chunked(
        x: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *args,
        **kwargs,
    ) -> torch.Tensor:
        max_tokens = MAX_ROUTES // topk_ids.shape[1]
        if x.shape[0] <= max_tokens:
            return fused_moe(x, w1, w2, topk_weights, topk_ids, *args, **kwargs)
        chunks = (each.split(max_tokens) for each in (x, topk_weights, topk_ids))
        return torch.cat(
            [
                fused_moe(chunk, w1, w2, weights, ids, *args, **kwargs)
                for chunk, weights, ids in zip(*chunks, strict=True)
            ]
        )

    return chunked


def in_expert_slices(moe_a8: Callable[..., torch.Tensor]):
    """Call `moe_a8` for as many experts at a time as it can address.

    It leaves zeros for routes to other experts (-1), so that results add up.
    W [experts, rows, bytes], expert_ids [blocks] int32.
    """

    @wraps(moe_a8)
    def sliced(
        X: torch.Tensor,
        W: torch.Tensor,
        sorted_token_ids: torch.Tensor,
        expert_ids: torch.Tensor,
        *args,
        **kwargs,
    ) -> torch.Tensor:
        num_experts = W.shape[0]
        size = min(MAX_EXPERTS, MAX_OFFSET // W.stride(0) + 1)
        if num_experts <= size:
            return moe_a8(X, W, sorted_token_ids, expert_ids, *args, **kwargs)
        out = None
        for start in range(0, num_experts, size):
            local_ids = expert_ids - start
            local_ids.masked_fill_((local_ids < 0) | (local_ids >= size), -1)
            part = moe_a8(
                X,
                W[start : start + size],
                sorted_token_ids,
                local_ids,
                *args,
                **kwargs,
            )
            out = part if out is None else out.add_(part)
        return out

    return sliced


def refuse_expert_parallel(config: FusedMoEParallelConfig) -> None:
    """Raise a ValueError where a GPU would hold some of the experts only.

    The kernels take a route's expert for its place in the weights.
    """
    if config.use_ep or config.enable_eplb:
        option = "--enable-eplb" if config.enable_eplb else "--enable-expert-parallel"
        raise ValueError(
            f"GGUF experts cannot be spread over GPUs ({option}): the kernels need "
            f"all of them. Leave {option} out: each expert is divided by "
            "--tensor-parallel-size then."
        )
