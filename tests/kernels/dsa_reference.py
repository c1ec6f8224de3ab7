"""The bytes that the fused DSA kernels must write, from what the same launch gives out unquantized.

In float32 the kernels' own values are at hand, and scales that are powers of two divide them exactly, so that nothing
but the conversion to e4m3 can make a difference. For processes that run or interpret the installed vLLM's kernels.
"""

import torch
from vllm.platforms import current_platform

from tests.kernels import dsa_launches as dsa

MAX = 448.0


def encode(x: torch.Tensor) -> torch.Tensor:
    """Return PyTorch's e4m3 patterns, saturated.

    For SM89 Triton converts by way of float16, which rounds a value near the middle of two patterns twice.
    """
    x = x.clamp(-MAX, MAX)
    if current_platform.get_device_capability() == (8, 9):
        x = x.half()
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def scales(x: torch.Tensor) -> torch.Tensor:
    """Return the power of two, one for each row, that keeps the row in range; not for rows of tiny values."""
    return (x.abs().amax(-1, keepdim=True) / MAX).log2().ceil().exp2()


def check_caches(kv_cache_dtype: str, device: str) -> None:
    """Both caches that `fused_norm_rope` writes."""
    k_scale = 2.0**-8
    launched = dsa.norm_rope(
        dsa.GLM, torch.float32, kv_cache_dtype, device, num_tokens=5, k_scale=k_scale, keep_index_k=True
    )
    out = {name: value.cpu() for name, value in launched.items()}
    used = out["slots"] >= 0
    slots, kv_c, k_pe, index_k = (out[name][used] for name in ("slots", "kv_c", "k_pe", "index_k"))

    mla = out["mla_cache"].flatten(0, 1)
    if kv_cache_dtype == "fp8":
        rows = encode(torch.cat([kv_c, k_pe], -1) / k_scale)
        assert ((rows & 0x7F) == 0x7E).any()  # too large
    else:
        tiles = kv_c.view(-1, 4, 128)
        scale = scales(tiles)
        rows = torch.cat([encode(tiles / scale).flatten(1), scale.view(torch.uint8).flatten(1)], -1)
        # The interpreter truncates to bfloat16.
        rope = mla[slots, rows.shape[1] :].view(torch.bfloat16)
        torch.testing.assert_close(rope.float(), k_pe, rtol=2**-7, atol=0)
    assert ((rows[:, : dsa.RANK] & 0x78) == 0).any()  # subnormal
    assert torch.equal(mla[slots, : rows.shape[1]], rows)

    blocks = out["indexer_cache"].flatten(1)
    values = blocks[:, : dsa.BLOCK * dsa.INDEX_DIM].reshape(-1, dsa.INDEX_DIM)
    value_scales = blocks[:, dsa.BLOCK * dsa.INDEX_DIM :].reshape(-1, 4)
    scale = scales(index_k)
    assert torch.equal(values[slots], encode(index_k / scale))
    assert torch.equal(value_scales[slots], scale.view(torch.uint8))

    unused = torch.ones(mla.shape[0], dtype=torch.bool)
    unused[slots] = False
    for rows in (mla, values, value_scales):
        assert not rows[unused].any()


def check_queries(device: str) -> None:
    """What `fused_q` quantizes: the indexer's queries, whose scales go into the weights, and attention's."""
    model, num_tokens = dsa.GLM, 2
    launched = dsa.query(model, torch.float32, device, num_tokens=num_tokens, quantize_mqa=True, rotated=False)
    out = {name: value.cpu() for name, value in launched.items()}
    q_pe, ql_nope, index_q, index_weights = dsa.query_inputs(model, torch.float32, "cpu", num_tokens)
    scale = scales(index_q)
    assert torch.equal(out["index_q"].view(torch.uint8), encode(index_q / scale))
    weights = index_weights * scale.squeeze(-1) * dsa.INDEX_DIM**-0.5 * model.num_index_heads**-0.5
    torch.testing.assert_close(out["index_weights"], weights, rtol=1e-6, atol=0)
    mqa_q = encode(torch.cat([ql_nope, q_pe], -1) / dsa.Q_SCALE)
    assert torch.equal(out["mqa_q"].view(torch.uint8), mqa_q)


def check_packing(device: str) -> None:
    """Queries padded to the longest sequence; padding is -inf, saturated."""
    out = dsa.pack_queries(device)
    q, packed = (out[name].cpu().view(torch.uint8) for name in ("queries", "packed"))
    padding = torch.full_like(q[0], 0xFE)
    rows = [[q[0], padding, padding], [q[1], q[2], q[3]], [q[4], q[5], padding]]
    assert torch.equal(packed, torch.stack([torch.stack(row) for row in rows]))
