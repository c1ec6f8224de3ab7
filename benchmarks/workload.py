"""What the kernels read: a KV pool in each format, and the row lists of decoding and of prefilling tokens.

Decoding requests share nothing, so every list takes rows of its own and no call finds its rows in L2. The tokens
of a prefill share one context; how much of it neighbours share is what `indices` says.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tests.kernels.reference import Inputs, quantize

RANK = 512
ROPE = 64
WIDTH = RANK + ROPE
SM_SCALE = 192**-0.5
NUM_TOPK = 2048
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

#: Largest relative L2 error against the reference.
TOLERANCE = {"bfloat16": 5e-3, "float16": 1e-3}
#: Bytes of a KV row by format.
ROW_BYTES = {"16-bit": 2 * WIDTH, "fp8_e4m3": WIDTH, "fp8_ds_mla": RANK + 16 + 2 * ROPE}
#: The largest value of an fp8 pool, and how many of its rows are made at once.
LARGEST = 8.0
PART_ROWS = 1 << 18

#: The pool: a context for each of 128 requests. Together they stay below 2^31 elements, which is as far as the
#: 32-bit offsets of the XPU kernel reach.
NUM_REQUESTS = 128
ROWS_PER_REQUEST = 28_672
NUM_ROWS = NUM_REQUESTS * ROWS_PER_REQUEST
#: The context of a prefill, at the start of the pool.
PREFILL_ROWS = 131_072

#: How much of a list is replaced from one token of a prefill to the next, where indices are "overlap".
REPLACED = (0.05, 0.20)
#: A graph holds at least so many calls, so that what a replay costs by itself does not count.
MIN_CALLS = 8
PREFILL_CALLS = 2


@dataclass(frozen=True)
class Shape:
    """One point of the benchmark."""

    tokens: int
    heads: int
    dtype: str  # of the query: a key of DTYPES
    kv: str  # a key of ROW_BYTES
    indices: str = "random"  # or "overlap"
    is_prefill: bool = False

    def __str__(self) -> str:
        return f"{self.tokens} x {self.heads} {self.dtype} {self.kv} {self.indices}"


@dataclass(frozen=True)
class Pool:
    """KV cache rows in one format."""

    rows: torch.Tensor  # [n, 576] in the model's dtype, or bytes: [n, 576] of fp8_e4m3, [n, 656] of fp8_ds_mla
    kv: str  # the format
    scale: torch.Tensor | None = None  # fp32 scalar, of fp8_e4m3


def make_pool(kv: str, dtype: torch.dtype, num_rows: int, device: str = "cuda") -> Pool:
    """Draw `num_rows` normally distributed KV rows in format `kv` for a model of `dtype`."""
    if kv == "16-bit":
        return Pool(torch.randn(num_rows, WIDTH, dtype=dtype, device=device), kv)
    rows = torch.empty(num_rows, ROW_BYTES[kv], dtype=torch.uint8, device=device)
    scale = None
    for part in rows.split(PART_ROWS):
        values = torch.randn(len(part), WIDTH, device=device).clamp_(-LARGEST, LARGEST)
        values[0, 0] = LARGEST  # gives every part the same scale
        quantized, scale = quantize(values, kv)
        part.copy_(quantized)
    return Pool(rows, kv, scale)


def decode_lists(
    device: str = "cuda", num_topk: int = NUM_TOPK, rows_per_request: int = ROWS_PER_REQUEST
) -> torch.Tensor:
    """Return int32 [n, num_topk]: list i belongs to request i % 128, and no row is in two lists."""
    shuffled = torch.rand(NUM_REQUESTS, rows_per_request, device=device).argsort(dim=1)
    shuffled += torch.arange(NUM_REQUESTS, device=device)[:, None] * rows_per_request
    parts = rows_per_request // num_topk
    lists = shuffled[:, : parts * num_topk].view(NUM_REQUESTS, parts, num_topk)
    return lists.transpose(0, 1).reshape(-1, num_topk).int()


def prefill_lists(
    num_tokens: int, indices: str, device: str = "cuda", num_topk: int = NUM_TOPK, num_rows: int = PREFILL_ROWS
) -> torch.Tensor:
    """Return int32 [num_tokens, num_topk]: distinct rows of the shared context for each token, in random order.

    "random": independent draws. "overlap": from one token to the next a share of the list, drawn evenly between
    5 and 20 %, gives way to rows that were not in it.
    """

    def shuffled(count: int) -> torch.Tensor:
        return torch.randperm(count, device=device)

    if indices == "random":
        return torch.stack([shuffled(num_rows)[:num_topk] for _ in range(num_tokens)]).int()
    # The first num_topk entries of `order` are the list; replacing is swapping with the rest.
    order = shuffled(num_rows)
    lists = torch.empty(num_tokens, num_topk, dtype=torch.int32, device=device)
    low, high = REPLACED
    shares = (low + (high - low) * torch.rand(num_tokens)).tolist()
    for token, share in enumerate(shares):
        lists[token] = order[:num_topk][shuffled(num_topk)]
        count = round(share * num_topk)
        leaving = shuffled(num_topk)[:count]
        coming = num_topk + shuffled(num_rows - num_topk)[:count]
        order[leaving], order[coming] = order[coming], order[leaving]
    return lists


def mean_overlap(lists: torch.Tensor) -> float:
    """Return which share of its rows a token has in common with the next, on average."""
    pairs = torch.cat((lists[:-1], lists[1:]), dim=1).sort(dim=1).values
    return ((pairs[:, 1:] == pairs[:, :-1]).sum() / lists[1:].numel()).item()


def num_calls(tokens: int, row_bytes: int, l2_bytes: int, available: int, num_topk: int = NUM_TOPK) -> int:
    """Return how many decode calls with lists of their own pass four times the L2 cache, of `available` lists."""
    needed = 4 * l2_bytes // (tokens * num_topk * row_bytes) + 1
    return max(1, min(max(MIN_CALLS, needed), available // tokens))


class Lists:
    """The row lists of the calls of one graph, the same for every kernel."""

    def __init__(self, l2_bytes: int, device: str = "cuda") -> None:
        self._l2_bytes = l2_bytes
        self._device = device
        self._decode = decode_lists(device)
        self._prefill: dict[tuple[int, str], list[torch.Tensor]] = {}
        self.overlaps: dict[str, float] = {}  # what `mean_overlap` says of the prefill lists made so far

    def of(self, shape: Shape) -> list[torch.Tensor]:
        """Return int32 [tokens, 2048] for each call."""
        if not shape.is_prefill:
            calls = num_calls(shape.tokens, ROW_BYTES[shape.kv], self._l2_bytes, len(self._decode))
            return [self._decode[i * shape.tokens :][: shape.tokens] for i in range(calls)]
        key = shape.tokens, shape.indices
        if key not in self._prefill:
            made = [prefill_lists(*key, device=self._device) for _ in range(PREFILL_CALLS)]
            self._prefill[key] = made
            self.overlaps[shape.indices] = round(mean_overlap(made[0]), 3)
        return self._prefill[key]


def make_inputs(shape: Shape, pool: Pool, lists: list[torch.Tensor]) -> list[Inputs]:
    """Return the arguments of each call. The query is the same: in serving it comes out of L2 as well."""
    device, dtype = pool.rows.device, DTYPES[shape.dtype]
    q_nope = torch.randn(shape.tokens, shape.heads, RANK, dtype=dtype, device=device)
    q_pe = torch.randn(shape.tokens, shape.heads, ROPE, dtype=dtype, device=device)
    valid_count = torch.full((shape.tokens,), lists[0].shape[1], dtype=torch.int32, device=device)
    return [
        Inputs(
            q_nope=q_nope,
            q_pe=q_pe,
            kv=pool.rows,
            topk=topk,
            valid_count=valid_count,
            sm_scale=SM_SCALE,
            kv_scale=pool.scale,
        )
        for topk in lists
    ]


def some_tokens(num_tokens: int, most: int = 32) -> torch.Tensor:
    """Return up to `most` tokens to compare with the reference: the first ones, and the last ones."""
    if num_tokens <= most:
        return torch.arange(num_tokens)
    half = most // 2
    return torch.cat((torch.arange(half), torch.arange(num_tokens - half, num_tokens)))


def only_tokens(inputs: Inputs, tokens: torch.Tensor) -> Inputs:
    """Return the inputs of some tokens."""
    names = ("q_nope", "q_pe", "topk", "valid_count")
    return replace(inputs, **{name: getattr(inputs, name)[tokens.to(inputs.topk.device)] for name in names})


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative L2 error."""
    return ((out.double() - expected).norm() / expected.norm()).item()


def shapes(
    tokens: list[int], heads: list[int], dtypes: list[str], formats: list[str], decode_limit: int = 512
) -> Iterator[Shape]:
    """Yield every combination; those that share a KV pool follow each other."""
    for kv in formats:
        for dtype in dtypes:
            for count in tokens:
                is_prefill = count > decode_limit
                for indices in ("random", "overlap") if is_prefill else ("random",):
                    for num_heads in heads:
                        yield Shape(count, num_heads, dtype, kv, indices, is_prefill)
