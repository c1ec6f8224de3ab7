"""Decode context parallelism, simulated in one process: every rank attends to its share of the rows.

Token p of a request lives on rank p % ranks. A rank's kernel gets all heads and
the rows of its own shard; vLLM merges the ranks' outputs by their log-sum-exp.
The merges here are vLLM's own, in Triton's interpreter, without the collective.
"""

from dataclasses import replace

import pytest
import torch

from tests.kernels.overlay import load_overlay
from tests.kernels.reference import RANK, Inputs, assert_matches_reference, make_inputs

RANKS = 4
NUM_HEADS = 4
NUM_TOPK = 160
# Lists that fill all shards, that leave shards with few rows or none, and none at all.
COUNTS = [NUM_TOPK, 131, 5, 1, 0]

Partial = tuple[torch.Tensor, torch.Tensor]  # out [T, H, 512] and lse fp32 [T, H] of one rank


def attention(inputs: Inputs, num_splits: int) -> Partial:
    kernels = load_overlay("vllm.v1.attention.ops.triton_mla_sparse")
    return kernels.sparse_mla_attention(*inputs, kv_scale=inputs.kv_scale, num_splits=num_splits)


def shard(inputs: Inputs, rank: int) -> Inputs:
    """Return what `rank` sees: its rows of the cache, and its entries of every list, moved to the front."""
    topk = torch.full_like(inputs.topk, -1)
    counts = torch.zeros_like(inputs.valid_count)
    for token, row in enumerate(inputs.topk):
        own = row[(row >= 0) & (row % RANKS == rank)] // RANKS
        topk[token, : len(own)] = own
        counts[token] = len(own)
    return replace(inputs, kv=inputs.kv[rank::RANKS].contiguous(), topk=topk, valid_count=counts)


def merge_in_float64(partials: list[Partial]) -> Partial:
    outs = torch.stack([out.double() for out, _ in partials])
    lses = torch.stack([lse.double() for _, lse in partials])
    lse = lses.logsumexp(dim=0)
    weights = (lses - lse.masked_fill(lse.isneginf(), 0)).exp()
    return (outs * weights[..., None]).sum(dim=0).to(partials[0][0].dtype), lse.float()


def merge_by_reduce_scatter(partials: list[Partial]) -> Partial:
    """Gather the lse of all ranks, scale each rank's output, sum: dcp_comm_backend="ag_rs"."""
    from vllm.v1.attention.ops.dcp import CorrectAttnCPOutKernel

    lses = torch.stack([lse for _, lse in partials])
    merged_lse = torch.empty_like(lses[0])
    scaled = [torch.empty_like(out) for out, _ in partials]
    for rank, (out, _) in enumerate(partials):
        # The kernel itself: what vLLM launches it with knows no interpreter.
        CorrectAttnCPOutKernel.kernel[(*lses.shape[1:], 1)](
            out,
            scaled[rank],
            lses,
            merged_lse,
            *out.stride(),
            *lses.stride(),
            rank,
            HEAD_DIM=RANK,
            N_ROUNDED=RANKS,
            IS_BASE_E=True,
        )
    return torch.stack(scaled).sum(dim=0), merged_lse


def merge_by_all_to_all(partials: list[Partial]) -> Partial:
    """Send every rank its heads, output and lse in one buffer: dcp_comm_backend="a2a", GLM-5's default."""
    from vllm.v1.attention.ops.dcp import _dcp_a2a_lse_pack_dim, _dcp_a2a_pack_send, _dcp_a2a_unpack_combine

    num_tokens, num_heads, width = partials[0][0].shape
    lse_width = _dcp_a2a_lse_pack_dim(partials[0][0].dtype)
    heads = num_heads // RANKS
    sent = partials[0][0].new_empty(RANKS, RANKS, num_tokens, heads, width + lse_width)
    for rank, (out, lse) in enumerate(partials):
        _dcp_a2a_pack_send(out, lse, sent[rank], RANKS, heads, width, lse_width)
    received = sent.transpose(0, 1).contiguous()
    merged = [_dcp_a2a_unpack_combine(buffer, width, lse_width, True, True) for buffer in received]
    return torch.cat([out for out, _ in merged], dim=1), torch.cat([lse for _, lse in merged], dim=1)


MERGES = [merge_in_float64, merge_by_reduce_scatter, merge_by_all_to_all]


def check_merges(kv_format: str, num_splits: int) -> None:
    inputs = make_inputs(COUNTS, NUM_HEADS, NUM_TOPK, kv_format=kv_format)
    shards = [shard(inputs, rank) for rank in range(RANKS)]
    assert sum(part.valid_count for part in shards).tolist() == COUNTS
    assert any(0 in part.valid_count[:-1] for part in shards), "some shard must be empty where its token is not"

    partials = [attention(part, num_splits) for part in shards]
    for (out, lse), part in zip(partials, shards, strict=True):
        assert_matches_reference(out, lse, part)
    serial_out, serial_lse = attention(inputs, 1)
    for merge in MERGES:
        out, lse = merge(partials)
        assert_matches_reference(out, lse, inputs)
        torch.testing.assert_close(out, serial_out, rtol=0, atol=2e-3)
        torch.testing.assert_close(lse, serial_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kv_format", "num_splits"), [("16-bit", 1), ("16-bit", 4), ("fp8_ds_mla", 4)])
def test_four_ranks_equal_one(interpreter, kv_format, num_splits):
    interpreter.submit(check_merges, kv_format, num_splits).result()
