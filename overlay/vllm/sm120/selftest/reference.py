# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the kernels must compute, in float64 and readable, and what a KV row holds."""

import torch

RANK = 512  # latent values of a KV row; the RoPE key follows
ROPE = 64
TILE = 128  # latent values that share a scale in fp8_ds_mla
E4M3_MAX = 448.0
E4M3 = torch.float8_e4m3fn


class WrongError(Exception):
    """A kernel gives something that no rounding explains."""


def store(kv: torch.Tensor, kv_format: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return KV rows as vLLM's cache writers store them, and their common scale.

    fp8_ds_mla is 512 e4m3 values, four fp32 scales that are powers of two, and 64
    bfloat16 RoPE values, which NoPE models have but never read.
    """
    if kv_format == "16-bit":
        return kv, None
    values = kv.float()
    if kv_format == "fp8_e4m3":
        scale = values.abs().amax() / E4M3_MAX
        return (values / scale).to(E4M3).view(torch.uint8), scale
    tiles = values[:, :RANK].unflatten(1, (-1, TILE))
    scales = (tiles.abs().amax(-1) / E4M3_MAX).clamp(min=1e-4).log2().ceil().exp2()
    rope = values.new_full((len(kv), ROPE), torch.nan)
    rope[:, : kv.shape[1] - RANK] = values[:, RANK:]
    parts = [(tiles / scales[..., None]).to(E4M3).flatten(1), scales, rope.bfloat16()]
    return torch.cat([part.view(torch.uint8) for part in parts], dim=1), None


def load(
    rows: torch.Tensor, kv_scale: torch.Tensor | None, rope_dim: int
) -> torch.Tensor:
    """Return stored KV rows as float64 [rows, 512 + rope_dim]."""
    if rows.dtype != torch.uint8:
        return rows.double()
    if kv_scale is not None:
        return rows.view(E4M3).double() * kv_scale.double()
    latent, scales, rope = rows.split([RANK, 16, 2 * ROPE], dim=1)
    scales = scales.contiguous().view(torch.float32).double()
    values = latent.contiguous().view(E4M3).double()
    values *= scales.repeat_interleave(TILE, dim=1)
    rope = rope.contiguous().view(torch.bfloat16)[:, :rope_dim]
    return torch.cat((values, rope.double()), dim=1)


def attend(
    q: torch.Tensor, kv: torch.Tensor, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [H, 512] and log-sum-exp [H] of one token, in float64.

    Args:
        q: [H, 512 + rope_dim].
        kv: float64 [keys, 512 + rope_dim]; without keys the result is 0 and -inf.
        sm_scale: of the scores.
    """
    if len(kv) == 0:
        zeros = kv.new_zeros(len(q), RANK)
        return zeros, zeros[:, 0] - torch.inf
    scores = q.double() @ kv.T * sm_scale
    return scores.softmax(-1) @ kv[:, :RANK], scores.logsumexp(-1)


def score(
    q: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the indexer's logits, float64 [N], of one token.

    q is [H, D], k [N, D], k_scale [N], weights [H]. Negative products count as 0.
    """
    products = (q.double() @ k.double().T).relu()
    return weights.double() @ products * k_scale.double()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative L2 error.

    Raises:
        WrongError: `found` is not finite everywhere.
    """
    if not torch.isfinite(found).all():
        raise WrongError("values that are not finite")
    norm = expected.norm().clamp(min=1e-30)
    return ((found.double() - expected).norm() / norm).item()
