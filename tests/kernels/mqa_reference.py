"""A readable reference of the indexer's MQA logits in float64, and the inputs the kernel tests share."""

from dataclasses import dataclass

import torch

E4M3_MAX = 448.0


def score(q: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the float64 logits [M, N] of q [M, H, D] and weights [M, H] over k [N, D] and k_scale [N]."""
    scores = torch.einsum("mhd,nd->mhn", q.double(), k.double()).relu()
    return torch.einsum("mhn,mh->mn", scores, weights.double()) * k_scale.double()


@dataclass
class Contiguous:
    """Arguments of `mqa_logits`."""

    q: torch.Tensor  # e4m3 [M, H, D]
    k: torch.Tensor  # e4m3 [N, D]
    k_scale: torch.Tensor  # fp32 [N]
    weights: torch.Tensor  # fp32 [M, H]
    ks: torch.Tensor  # int32 [M]
    ke: torch.Tensor  # int32 [M]
    max_seqlen_k: int

    def __iter__(self):
        yield from (self.q, self.k, self.k_scale, self.weights, self.ks, self.ke, self.max_seqlen_k)

    def expected(self, tokens: slice = slice(None)) -> list[torch.Tensor]:
        """Return the logits of some tokens, each from its own first key on."""
        logits = score(self.q[tokens], self.k, self.k_scale, self.weights[tokens])
        bounds = zip(self.ks[tokens].tolist(), self.ke[tokens].tolist(), strict=True)
        return [row[start:end] for row, (start, end) in zip(logits, bounds, strict=True)]


@dataclass
class Paged:
    """Arguments of `paged_mqa_logits`, without the schedule, and what is in the cache."""

    q: torch.Tensor  # e4m3 [B, next_n, H, D]
    kv_cache: torch.Tensor  # uint8 [blocks, block_size, 1, D + 4]
    weights: torch.Tensor  # fp32 [B * next_n, H]
    context_lens: torch.Tensor  # int32 [B, next_n]
    block_tables: torch.Tensor  # int32 [B, max_blocks]
    max_model_len: int

    def expected(self) -> list[torch.Tensor]:
        """Return the logits of every token, [length of its context]."""
        batch, next_n, _, head_dim = self.q.shape
        block_size = self.kv_cache.shape[1]
        result = []
        for request in range(batch):
            length = max(int(self.context_lens[request].max()), 0)
            blocks = self.block_tables[request, : -(-length // block_size)].long()
            k, k_scale = read_blocks(self.kv_cache[blocks], head_dim)
            rows = slice(request * next_n, (request + 1) * next_n)
            logits = score(self.q[request], k, k_scale, self.weights[rows])
            own = self.context_lens[request].clamp(min=0).expand(next_n).tolist()
            result += [row[:n] for row, n in zip(logits, own, strict=True)]
        return result


def pack_blocks(k: torch.Tensor, k_scale: torch.Tensor) -> torch.Tensor:
    """Return e4m3 keys [blocks, block_size, D] as the indexer's cache stores them: values, then scales."""
    blocks, block_size, head_dim = k.shape
    values = k.view(torch.uint8).reshape(blocks, -1)
    scales = k_scale.contiguous().view(torch.uint8).reshape(blocks, -1)
    return torch.cat((values, scales), dim=1).view(blocks, block_size, 1, head_dim + 4)


def read_blocks(blocks: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the e4m3 keys [N, D] and the scales [N] of blocks of the cache, in their order."""
    count, block_size = blocks.shape[:2]
    flat = blocks.reshape(count, block_size * (head_dim + 4))
    values = flat[:, : block_size * head_dim].contiguous().view(torch.float8_e4m3fn)
    scales = flat[:, block_size * head_dim :].contiguous().view(torch.float32)
    return values.reshape(-1, head_dim), scales.reshape(-1)


class Source:
    """Random tensors, drawn on the CPU and the same everywhere."""

    def __init__(self, device: str, seed: int):
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def e4m3(self, *shape: int) -> torch.Tensor:
        return self.normal(*shape).to(torch.float8_e4m3fn)

    def scales(self, *shape: int) -> torch.Tensor:
        """Powers of two, as the cache's writers choose them, and other numbers between."""
        return torch.exp2(torch.randint(-6, 3, shape, generator=self.generator) / 2).to(self.device)


def make_contiguous(
    bounds: list[tuple[int, int]],
    num_keys: int,
    num_heads: int,
    *,
    head_dim: int = 128,
    device: str = "cpu",
    seed: int = 0,
) -> Contiguous:
    """Draw random inputs in which token m scores the keys from bounds[m][0] to bounds[m][1] - 1."""
    source = Source(device, seed)
    ks, ke = torch.tensor(bounds, dtype=torch.int32, device=device).T.contiguous()
    return Contiguous(
        q=source.e4m3(len(bounds), num_heads, head_dim),
        k=source.e4m3(num_keys, head_dim),
        k_scale=source.scales(num_keys),
        weights=source.normal(len(bounds), num_heads),
        ks=ks,
        ke=ke,
        max_seqlen_k=max((end - start for start, end in bounds), default=0),
    )


def make_paged(
    context_lens: list[int] | list[list[int]],
    num_heads: int,
    *,
    block_size: int = 64,
    head_dim: int = 128,
    next_n: int = 1,
    num_blocks: int | None = None,
    max_model_len: int | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Paged:
    """Draw random inputs; blocks are handed out in random order.

    One length for a request is that of its last token, as in speculative decoding; the tokens before have fewer.
    """
    source = Source(device, seed)
    lengths = torch.tensor(context_lens, dtype=torch.int32)
    if lengths.dim() == 1:
        lengths = lengths[:, None] - next_n + 1 + torch.arange(next_n, dtype=torch.int32)
    batch = len(lengths)
    longest = max(int(lengths.max()), 1)
    needed = -(-lengths.amax(dim=1).clamp(min=0) // block_size)
    num_blocks = num_blocks or int(needed.sum()) + 2
    order = torch.randperm(num_blocks, generator=source.generator).to(torch.int32)
    # Entries past a context name no block that exists.
    tables = torch.full((batch, -(-longest // block_size) + 1), 2**30, dtype=torch.int32)
    first = 0
    for row, count in zip(tables, needed.tolist(), strict=True):
        row[:count] = order[first : first + count]
        first += count
    k = source.e4m3(num_blocks, block_size, head_dim)
    return Paged(
        q=source.e4m3(batch, next_n, num_heads, head_dim),
        kv_cache=pack_blocks(k, source.scales(num_blocks, block_size)),
        weights=source.normal(batch * next_n, num_heads),
        context_lens=lengths.to(device),
        block_tables=tables.to(device),
        max_model_len=max_model_len or longest + 3,
    )


def assert_logits(logits: torch.Tensor, expected: list[torch.Tensor], *, tolerance: float = 1e-3) -> None:
    """Compare each row's own keys by their relative L2 error over all rows."""
    assert logits.dtype == torch.float32
    assert len(logits) == len(expected)
    got = torch.cat([row[: len(own)] for row, own in zip(logits, expected, strict=True)]).double()
    wanted = torch.cat(expected)
    if len(wanted) == 0:
        return
    assert torch.isfinite(got).all(), "logits that are not finite"
    error = float((got - wanted).norm() / wanted.norm())
    assert error <= tolerance, f"relative L2 error {error:.2e} > {tolerance:.0e}"
