"""A readable reference of sparse MLA in float64, and the inputs the kernel tests share."""

from dataclasses import dataclass

import torch

RANK = 512  # latent values of a KV row; the RoPE key follows


@dataclass
class Inputs:
    """Arguments of `sparse_mla_attention`."""

    q_nope: torch.Tensor  # [T, H, 512]
    q_pe: torch.Tensor  # [T, H, 64 or 0]
    kv: torch.Tensor  # [rows, 576 or 512]
    topk: torch.Tensor  # int32 [T, K], -1 after the used entries
    valid_count: torch.Tensor  # int32 [T]
    sm_scale: float = 192**-0.5

    def __iter__(self):
        yield from (self.q_nope, self.q_pe, self.kv, self.topk, self.valid_count, self.sm_scale)


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
        kv = inputs.kv[rows].double()
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

    return Inputs(
        q_nope=draw(num_tokens, num_heads, RANK),
        q_pe=draw(num_tokens, num_heads, rope_dim),
        kv=draw(num_rows, RANK + rope_dim),
        topk=topk.to(device),
        valid_count=torch.tensor(counts, dtype=torch.int32, device=device),
    )


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
