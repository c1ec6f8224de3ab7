"""A readable reference of sparse MLA in float64, and the inputs the kernel tests share."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

RANK = 512  # latent values of a KV row; the RoPE key follows
TILE = 128  # latent values that share a scale in fp8_ds_mla
E4M3_MAX = 448.0


@dataclass
class Inputs:
    """Arguments of `sparse_mla_attention`."""

    q_nope: torch.Tensor  # [T, H, 512]
    q_pe: torch.Tensor  # [T, H, 64 or 0]
    kv: torch.Tensor  # [rows, 576 or 512], or bytes as `quantize` makes them
    topk: torch.Tensor  # int32 [T, K], -1 after the used entries
    valid_count: torch.Tensor  # int32 [T]
    sm_scale: float = 192**-0.5
    kv_scale: torch.Tensor | None = None  # fp32 scalar, for fp8_e4m3 only

    def __iter__(self):
        yield from (self.q_nope, self.q_pe, self.kv, self.topk, self.valid_count, self.sm_scale)


def quantize(kv: torch.Tensor, kv_format: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return KV rows as vLLM's cache writers store them, and their common scale if they have one.

    fp8_ds_mla: 512 e4m3 values, four fp32 scales that are powers of two, the
    64 RoPE values in bfloat16 (also without RoPE). fp8_e4m3: every value divided by one scale.
    """
    if kv_format == "16-bit":
        return kv, None
    latent, rope = kv[:, :RANK].float(), kv[:, RANK:]
    if kv_format == "fp8_e4m3":
        scale = (kv.float().abs().amax() / E4M3_MAX).to(torch.float32)
        return (kv.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8), scale
    tiles = latent.reshape(len(kv), RANK // TILE, TILE)
    scales = (tiles.abs().amax(-1) / E4M3_MAX).clamp(min=1e-4).log2().ceil().exp2()
    values = (tiles / scales[..., None]).to(torch.float8_e4m3fn)
    unread = torch.full((len(kv), 64 - rope.shape[-1]), float("nan"), device=kv.device)
    parts = [values.reshape(len(kv), RANK), scales, torch.cat((rope, unread), dim=-1).to(torch.bfloat16)]
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1), None


def dequantize(kv: torch.Tensor, kv_scale: torch.Tensor | None, rope_dim: int) -> torch.Tensor:
    """Return stored KV rows as float64 [rows, 512 + rope_dim]."""
    if kv.dtype != torch.uint8:
        return kv.double()
    if kv_scale is not None:
        return kv.view(torch.float8_e4m3fn).double() * kv_scale.double()
    latent, scales, rope, _ = kv.split([RANK, 16, 2 * rope_dim, 128 - 2 * rope_dim], dim=-1)
    scales = scales.contiguous().view(torch.float32).double().repeat_interleave(TILE, dim=-1)
    rope = rope.contiguous().view(torch.bfloat16).double()
    return torch.cat((latent.contiguous().view(torch.float8_e4m3fn).double() * scales, rope), dim=-1)


def sparse_mla_reference(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [T, H, 512] and lse [T, H], natural log, both in float64.

    Tokens without rows give 0 and -inf.
    """
    q = torch.cat((inputs.q_nope, inputs.q_pe), dim=-1).double()
    num_tokens, num_heads, _ = q.shape
    out = q.new_zeros(num_tokens, num_heads, RANK)
    lse = q.new_full((num_tokens, num_heads), float("-inf"))
    for token, count in enumerate(inputs.valid_count.tolist()):
        rows = inputs.topk[token, :count].long()
        rows = rows[rows >= 0]
        if len(rows) == 0:
            continue
        kv = dequantize(inputs.kv[rows], inputs.kv_scale, inputs.q_pe.shape[-1])
        scores = q[token] @ kv.T * inputs.sm_scale
        out[token] = scores.softmax(dim=-1) @ kv[:, :RANK]
        lse[token] = scores.logsumexp(dim=-1)
    return out, lse


def make_inputs(
    counts: list[int],
    num_heads: int,
    num_topk: int,
    *,
    num_rows: int = 256,
    rope_dim: int = 64,
    dtype: torch.dtype = torch.float16,
    kv_format: str = "16-bit",
    device: str = "cpu",
    seed: int = 0,
) -> Inputs:
    """Draw random inputs in which token t uses `counts[t]` different rows."""
    g = torch.Generator().manual_seed(seed)
    num_tokens = len(counts)
    topk = torch.full((num_tokens, num_topk), -1, dtype=torch.int32)
    for token, count in enumerate(counts):
        topk[token, :count] = torch.randperm(num_rows, generator=g)[:count]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(dtype).to(device)

    kv, kv_scale = quantize(draw(num_rows, RANK + rope_dim), kv_format)
    return Inputs(
        q_nope=draw(num_tokens, num_heads, RANK),
        q_pe=draw(num_tokens, num_heads, rope_dim),
        kv=kv,
        topk=topk.to(device),
        valid_count=torch.tensor(counts, dtype=torch.int32, device=device),
        kv_scale=kv_scale,
    )


def share_rows(inputs: Inputs) -> None:
    """Have the second token list the rows of the first, in another order."""
    inputs.topk[1] = inputs.topk[0].flip(0)


def poison_unused_rows(inputs: Inputs) -> None:
    """Make the rows that no token uses NaN, and have the entries beyond each count name one of them."""
    used = torch.cat([row[:n] for row, n in zip(inputs.topk, inputs.valid_count, strict=True)]).long()
    unused = torch.ones(len(inputs.kv), dtype=torch.bool)
    unused[used] = False
    inputs.kv[unused] = float("nan")
    poison = int(unused.nonzero()[0])
    for row, count in zip(inputs.topk, inputs.valid_count, strict=True):
        row[count:] = poison


def join_lists(
    topk: torch.Tensor,
    valid_count: torch.Tensor,
    union: torch.Tensor,
    count: torch.Tensor,
    alone_count: torch.Tensor,
) -> None:
    """Do what the kernel of gluon_union_rows.py does."""
    for pair in range(len(union)):
        lists = [topk[token, : valid_count[token]].tolist() for token in (2 * pair, 2 * pair + 1) if token < len(topk)]
        # A row that a token lists twice counts twice.
        shared = {row for row in lists[0] if all(one.count(row) == 1 for one in lists) and row >= 0}
        shared &= set(lists[-1]) if len(lists) == 2 else set()
        entries = [-1 if row < 0 else row << 2 | (3 if row in shared else 1) for row in lists[0]]
        entries += [row << 2 | 2 for row in lists[1] if row >= 0 and row not in shared] if len(lists) == 2 else []
        union[pair, : len(entries)] = torch.tensor(entries, dtype=torch.int32)
        is_union = 8 * len(shared) >= sum(map(len, lists))
        count[pair] = len(entries) if is_union else -1
        for token, one in enumerate(lists, start=2 * pair):
            alone_count[token] = -1 if is_union else len(one)


def launch_unions(
    launch: Callable[..., None],
    specs: list[tuple[tuple[int, ...], torch.dtype]],
    lists: list[list[int]],
    num_topk: int,
    device: str = "cpu",
) -> list[list[int] | None]:
    """Return the used entries of the union of each two lists, or None where they are left alone."""
    topk = torch.full((len(lists), num_topk), -1, dtype=torch.int32)
    for row, one in zip(topk, lists, strict=True):
        row[: len(one)] = torch.tensor(one, dtype=torch.int32)
    valid_count = torch.tensor([len(one) for one in lists], dtype=torch.int32)
    outputs = [torch.full(shape, 99, dtype=dtype, device=device) for shape, dtype in specs]
    launch(topk.to(device), valid_count.to(device), *outputs)
    union, counts, alone_counts = (output.cpu() for output in outputs)
    for pair, count in enumerate(counts.tolist()):
        alone = slice(2 * pair, 2 * pair + 2)
        expected = valid_count[alone] if count < 0 else torch.full_like(valid_count[alone], -1)
        assert torch.equal(alone_counts[alone], expected)
    return [
        None if count < 0 else [entry for entry in entries[:count].tolist() if entry >= 0]
        for entries, count in zip(union, counts.tolist(), strict=True)
    ]


def assert_joined(union: list[int] | None, lists: list[list[int]]) -> None:
    """Check that each of one or two tokens finds its rows, as often as it lists them; or that they share little."""
    lists = [*lists, []][:2]
    counted = [Counter(row for row in one if row >= 0) for one in lists]
    shared = counted[0] & counted[1]
    num_entries = sum(map(len, lists))
    if union is None:
        # A row that a token lists twice need not count as shared, nor one lost to collisions in both hash tables.
        assert 8 * sum(max(rows[row] for rows in counted) == 1 for row in shared) < num_entries + 8
    else:
        assert 8 * shared.total() >= num_entries
        members = [sorted(entry >> 2 for entry in union if entry >> member & 1) for member in range(2)]
        assert members == [sorted(row for row in one if row >= 0) for one in lists]


def assert_matches_reference(
    out: torch.Tensor, lse: torch.Tensor, inputs: Inputs, *, out_tolerance: float = 1e-3
) -> None:
    """Compare out by its relative L2 error and lse to fp32 accuracy."""
    expected_out, expected_lse = sparse_mla_reference(inputs)
    assert out.shape == expected_out.shape
    assert out.dtype == inputs.q_nope.dtype
    assert lse.shape == expected_lse.shape
    assert lse.dtype == torch.float32
    assert torch.isfinite(out).all(), "out has values that are not finite"

    empty = torch.isneginf(expected_lse)
    assert torch.equal(torch.isneginf(lse), empty), "lse must be -inf exactly for empty tokens"
    assert (out[empty] == 0).all(), "out must be 0 for empty tokens"
    if empty.all():
        return
    out_error = (out.double() - expected_out).norm() / expected_out.norm()
    assert out_error <= out_tolerance, f"relative L2 error {out_error:.2e} > {out_tolerance:.0e}"
    torch.testing.assert_close(lse.double()[~empty], expected_lse[~empty], rtol=2e-6, atol=1e-4)
