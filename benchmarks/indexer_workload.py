"""What the indexer's kernels read: queries, and keys in one tensor (prefill) or in the pages of a cache (decode).

The tokens of a prefill are the last of a prompt and see all keys before them. The requests of a decode share nothing,
and no two calls read the same page before four times the L2 cache has been read, so no key is found in L2.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.workload import num_calls
from tests.kernels.mqa_reference import read_blocks

HEAD_DIM = 128
PAGE = 64
PAGE_BYTES = PAGE * (HEAD_DIM + 4)  # the values, then an fp32 scale for each key
PREFILL_CALLS = 2
MAX_CALLS = 256
#: Pages that are made at once.
PART = 4096
#: The memory floor reads pages in so many pieces: 22 of 384 bytes.
PIECES = 22


@dataclass(frozen=True)
class Shape:
    """One point of the benchmark."""

    kind: str  # "prefill" or "decode"
    batch: int  # tokens of a prefill, requests of a decode
    context: int  # keys that the last token sees
    heads: int
    next_n: int = 1  # tokens of a request in a decode

    def __str__(self) -> str:
        return f"{self.kind} {self.batch} x {self.context}, {self.heads} heads, next_n {self.next_n}"

    @property
    def tokens(self) -> int:
        return self.batch * self.next_n

    @property
    def pages(self) -> int:
        """Pages that a decode reads."""
        return self.batch * self.context // PAGE

    @property
    def flop(self) -> int:
        """Operations of all products of a query head and a key that the token sees."""
        in_a_row = self.batch if self.kind == "prefill" else self.next_n
        seen = self.tokens * self.context - self.tokens // in_a_row * (in_a_row * (in_a_row - 1) // 2)
        return 2 * HEAD_DIM * self.heads * seen


@dataclass(frozen=True)
class Prefill:
    """Arguments of `mqa_logits`."""

    q: torch.Tensor  # e4m3 [tokens, heads, HEAD_DIM]
    k: torch.Tensor  # e4m3 [context, HEAD_DIM]
    k_scale: torch.Tensor  # fp32 [context]
    weights: torch.Tensor  # fp32 [tokens, heads]
    starts: torch.Tensor  # int32 [tokens], zeros
    ends: torch.Tensor  # int32 [tokens]

    def keys(self, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys that a token sees, and their scales."""
        return self.k[: self.ends[token]], self.k_scale[: self.ends[token]]


@dataclass(frozen=True)
class Decode:
    """Arguments of `paged_mqa_logits`."""

    q: torch.Tensor  # e4m3 [requests, next_n, heads, HEAD_DIM]
    cache: torch.Tensor  # uint8 [pages, PAGE, 1, HEAD_DIM + 4]
    weights: torch.Tensor  # fp32 [tokens, heads]
    context_lens: torch.Tensor  # int32 [requests, next_n]
    block_tables: torch.Tensor  # int32 [requests, pages of a request]

    def keys(self, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys that a token sees, and their scales."""
        pages = self.cache[self.block_tables[token // self.context_lens.shape[1]].long()]
        k, k_scale = read_blocks(pages, HEAD_DIM)
        count = self.context_lens.flatten()[token]
        return k[:count], k_scale[:count]


def e4m3(*size: int, device: str = "cuda") -> torch.Tensor:
    return torch.randn(*size, device=device).to(torch.float8_e4m3fn)


def scales(*size: int, device: str = "cuda") -> torch.Tensor:
    """Draw powers of two, as the indexer's writer rounds its scales to."""
    return torch.exp2(torch.randint(-6, 1, size, device=device).float())


def make_prefill(shape: Shape, calls: int = PREFILL_CALLS, device: str = "cuda") -> list[Prefill]:
    """Return the arguments of each call; no two read the same tensor."""
    ends = torch.arange(shape.context - shape.batch + 1, shape.context + 1, dtype=torch.int32, device=device)
    return [
        Prefill(
            q=e4m3(shape.batch, shape.heads, HEAD_DIM, device=device),
            k=e4m3(shape.context, HEAD_DIM, device=device),
            k_scale=scales(shape.context, device=device),
            weights=torch.randn(shape.batch, shape.heads, device=device),
            starts=torch.zeros_like(ends),
            ends=ends,
        )
        for _ in range(calls)
    ]


class Pool:
    """The pages of a cache, in an order that has nothing to do with the requests'."""

    def __init__(self, num_pages: int, l2_bytes: int, device: str = "cuda") -> None:
        self.l2_bytes = l2_bytes
        self.device = device
        pages = torch.empty(num_pages, PAGE_BYTES, dtype=torch.uint8, device=device)
        for part in pages.split(PART):
            part[:, : PAGE * HEAD_DIM] = e4m3(len(part), PAGE * HEAD_DIM, device=device).view(torch.uint8)
            part[:, PAGE * HEAD_DIM :] = scales(len(part), PAGE, device=device).view(torch.uint8)
        self.cache = pages.view(num_pages, PAGE, 1, HEAD_DIM + 4)
        self.order = torch.randperm(num_pages, dtype=torch.int32, device=device)

    def make_decode(self, shape: Shape, calls: int | None = None) -> list[Decode]:
        """Return the arguments of each call. The query is the same: in serving it comes out of L2 as well."""
        device = self.device
        if calls is None:
            calls = num_calls(shape.batch, PAGE_BYTES, self.l2_bytes, MAX_CALLS * shape.batch, shape.context // PAGE)
        q = e4m3(shape.batch, shape.next_n, shape.heads, HEAD_DIM, device=device)
        weights = torch.randn(shape.tokens, shape.heads, device=device)
        first = shape.context - shape.next_n + 1
        lens = torch.arange(first, shape.context + 1, dtype=torch.int32, device=device).repeat(shape.batch, 1)
        taken = torch.arange(calls * shape.pages, device=device) % len(self.order)
        tables = self.order[taken].view(calls, shape.batch, -1)
        return [Decode(q, self.cache, weights, lens, table) for table in tables]


def pieces(inputs: list[Decode]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return what `timing.memory_floor` wants of the pages of each call: rows of bytes, and lists of rows."""
    rows = inputs[0].cache.view(-1, PAGE_BYTES // PIECES)
    within = torch.arange(PIECES, dtype=torch.int32, device=rows.device)
    return rows, [(one.block_tables[..., None] * PIECES + within).flatten(1) for one in inputs]


def some_tokens(shape: Shape, most: int = 8) -> list[int]:
    """Return up to `most` tokens to compare with the reference, the first and the last included."""
    count = min(shape.tokens, most)
    return [index * (shape.tokens - 1) // max(count - 1, 1) for index in range(count)]


def shapes(kinds: list[str], batches: list[int], contexts: list[int], heads: list[int]) -> Iterator[Shape]:
    """Yield every combination; decodes of some batches with draft tokens as well."""
    for kind in kinds:
        for context in contexts:
            for num_heads in heads:
                if kind == "prefill":
                    yield Shape(kind, PREFILL_TOKENS, context, num_heads)
                    continue
                for batch in batches:
                    yield Shape(kind, batch, context, num_heads)
                    if context == DRAFT_CONTEXT and batch in DRAFT_BATCHES:
                        for next_n in DRAFT_NEXT_N:
                            yield Shape(kind, batch, context, num_heads, next_n)


PREFILL_TOKENS = 4096
DRAFT_CONTEXT, DRAFT_BATCHES, DRAFT_NEXT_N = 32_768, (1, 16, 64), (2, 4)
