# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The sparse MLA kernels: each configuration that this GPU uses, and what hurt others.

Every batch has a full list, one of a single row, an empty one, and one with holes.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from vllm.sm120.selftest.cases import Case, Target, need_memory
from vllm.sm120.selftest.reference import (
    RANK,
    ROPE,
    WrongError,
    attend,
    load,
    relative_error,
    store,
)
from vllm.v1.attention.ops import triton_mla_sparse as kernels
from vllm.v1.attention.ops.triton_mla_sparse_config import (
    MIN_PREFILL_TOKENS,
    KVFormat,
    SparseMLAConfig,
    get_alone_config,
    get_config,
    get_num_splits,
)

STAGE = "sparse MLA"
NUM_TOPK = 2048
NUM_ROWS = 3000
SM_SCALE = 192**-0.5
# Heads of one rank, of GLM-5 (64) and DeepSeek-V3.2 (128).
HEADS = (8, 16, 32, 64, 128)
DTYPES = (torch.float16, torch.bfloat16)
# Largest relative L2 error of the output. float16 has 11 bits, bfloat16 8.
LIMITS = {torch.float16: 1e-3, torch.bfloat16: 5e-3}
LSE_LIMIT = 1e-3  # absolute: the log-sum-exp is fp32
# A decode of more tokens is a batch that no configuration tells from a larger one.
MAX_DECODE = 512


@dataclass(frozen=True)
class Shape:
    """One launch."""

    tokens: int
    heads: int
    dtype: torch.dtype = torch.float16
    kv_format: KVFormat = KVFormat.MODEL
    is_prefill: bool = False
    num_topk: int = NUM_TOPK
    rope_dim: int = ROPE
    num_rows: int = NUM_ROWS

    def __str__(self) -> str:
        kind = "prefill" if self.is_prefill else "decode"
        dtype = str(self.dtype).removeprefix("torch.")
        size = f"{self.tokens} x {self.heads} heads"
        return f"{kind} {size}, {dtype}, {self.kv_format.value}"

    def config(self, target: Target) -> SparseMLAConfig:
        return get_config(
            self.tokens, self.heads, self.kv_format, target.capability, self.is_prefill
        )

    def launched(self, target: Target) -> list[SparseMLAConfig]:
        """Return the configuration, and that of tokens that share little with theirs.

        Of the lists that `make_inputs` draws some neighbours do, and some do not.
        """
        config = self.config(target)
        return [config] + [get_alone_config(config)] * (config.group > 1)

    def num_splits(self, target: Target) -> int:
        config = self.config(target)
        return get_num_splits(
            self.tokens, self.heads, self.num_topk, config, target.num_sms
        )


@dataclass
class Inputs:
    q: torch.Tensor  # [T, H, 512 + rope_dim]; the kernel sees views of it
    kv: torch.Tensor  # [rows, width]
    kv_scale: torch.Tensor | None
    topk: torch.Tensor  # int32 [T, num_topk], -1 after the used entries and in holes
    counts: torch.Tensor  # int32 [T], used entries


def cases(target: Target, wanted: Iterable[Shape] = ()) -> Iterator[Case]:
    """Yield a case for each configuration, then the others; or for `wanted` only."""
    for shape in wanted or every_configuration(target):
        yield _case(str(shape), shape, partial(check, shape, target))
    if wanted:
        return
    special = Shape(5, 8)
    for heads in (1, 11, 20):
        shape = replace(special, heads=heads)
        yield _case(f"odd heads: {shape}", shape, partial(check, shape, target))
    for change in ({"rope_dim": 0}, {"num_topk": 2176}, {"num_topk": 130}):
        shape = replace(special, **change)
        name = ", ".join(f"{key} {value}" for key, value in change.items())
        yield _case(f"{name}: {shape}", shape, partial(check, shape, target))
    for kv_format in KVFormat:
        shape = replace(special, kv_format=kv_format)
        name = f"NaN in rows of others: {shape}"
        yield _case(name, shape, partial(check, shape, target, poison))
        for tokens in (5, MIN_PREFILL_TOKENS):
            shape = replace(shape, tokens=tokens, is_prefill=tokens > 5)
            name = f"rows past 2^31 elements: {shape}"
            yield _case(name, shape, partial(check, shape, target, move_far))
    for dtype in DTYPES:
        shape = replace(special, dtype=dtype)
        name = f"graph replay with other lists: {shape}"
        yield _case(name, shape, partial(check_replay, shape, target))


def _case(name: str, shape: Shape, run: Callable[[], float]) -> Case:
    return Case(STAGE, name, run, LIMITS[shape.dtype], shape)


def every_configuration(target: Target) -> Iterator[Shape]:
    """Yield, by dtype and KV format, the smallest launch of each configuration."""
    launches = [(tokens, False) for tokens in range(1, MAX_DECODE + 1)]
    launches.append((MIN_PREFILL_TOKENS, True))
    for dtype in DTYPES:
        for kv_format in KVFormat:
            seen = set()
            for heads in HEADS:
                for tokens, is_prefill in launches:
                    shape = Shape(tokens, heads, dtype, kv_format, is_prefill)
                    config = shape.config(target)
                    if config not in seen:
                        seen.add(config)
                        yield shape


def warmup_keys(shapes: Iterable[Shape], target: Target) -> dict[Any, Any]:
    """Return what the shapes launch as vLLM's warm-up knows it: key -> dispatcher."""
    keys = {}
    for shape in shapes:
        is_split = shape.num_splits(target) > 1
        for config in shape.launched(target):
            launcher = kernels.attention_launcher(config)
            for key in launcher.get_warmup_keys(
                num_heads=shape.heads,
                dtype=shape.dtype,
                kv_format=shape.kv_format,
                has_rope=shape.rope_dim > 0,
                config=config,
            ):
                if (dict(key.inputs)["num_splits"] > 1) == is_split:
                    keys[key] = launcher
    return keys


def make_inputs(shape: Shape, target: Target, seed: int = 0) -> Inputs:
    """Draw normal values, and for each token a list of different rows."""
    device = target.device
    generator = torch.Generator(device).manual_seed(seed)
    width = RANK + shape.rope_dim

    def draw(*size: int) -> torch.Tensor:
        values = torch.randn(size, generator=generator, device=device)
        return values.to(shape.dtype)

    size = shape.tokens, shape.num_rows
    shuffled = torch.rand(size, generator=generator, device=device).argsort(1)
    topk = shuffled[:, : shape.num_topk].int()
    full = shape.num_topk
    cycle = torch.tensor([full, full - 1, 65, 1, 0], dtype=torch.int32, device=device)
    counts = cycle.repeat(shape.tokens // 5 + 1)[: shape.tokens].contiguous()
    topk[torch.arange(full, device=device) >= counts[:, None]] = -1
    topk[1::5, 10 : full // 2] = -1
    kv, kv_scale = store(draw(shape.num_rows, width), shape.kv_format.value)
    q = draw(shape.tokens, shape.heads, width)
    return Inputs(q, kv, kv_scale, topk.contiguous(), counts)


def launch(
    shape: Shape, target: Target, inputs: Inputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the kernel as the backend does on the target."""
    return kernels.sparse_mla_attention(
        inputs.q[..., :RANK],
        inputs.q[..., RANK:],
        inputs.kv,
        inputs.topk,
        inputs.counts,
        SM_SCALE,
        kv_scale=inputs.kv_scale,
        config=shape.config(target),
        num_splits=shape.num_splits(target),
    )


def compare(
    shape: Shape, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor
) -> float:
    """Return the relative error of the output of the first ten and last ten tokens."""
    if not torch.isfinite(out).all():
        raise WrongError("values that are not finite")
    found, expected = [], []
    for token in sorted({*range(shape.tokens)[:10], *range(shape.tokens)[-10:]}):
        rows = inputs.topk[token, : inputs.counts[token]].long()
        kv = load(inputs.kv[rows[rows >= 0]], inputs.kv_scale, shape.rope_dim)
        right_out, right_lse = attend(inputs.q[token], kv, SM_SCALE)
        if len(kv) == 0:
            if not (out[token] == 0).all() or not torch.isneginf(lse[token]).all():
                raise WrongError("a token without rows must give 0 and -inf")
            continue
        lse_error = (lse[token] - right_lse).abs().max().item()
        if not lse_error <= LSE_LIMIT:
            raise WrongError(f"log-sum-exp is off by {lse_error:.2e} at token {token}")
        found.append(out[token])
        expected.append(right_out)
    return relative_error(torch.cat(found), torch.cat(expected))


def check(
    shape: Shape,
    target: Target,
    change: Callable[[Inputs], None] | None = None,
) -> float:
    """Return the error of one launch."""
    inputs = make_inputs(shape, target)
    if change is not None:
        change(inputs)
    return compare(shape, inputs, *launch(shape, target, inputs))


def poison(inputs: Inputs) -> None:
    """Fill the rows that no list names with NaN, as a cache may hold anything."""
    inputs.counts.clamp_(max=300)
    inputs.topk[:, 300:] = -1
    unused = torch.ones(len(inputs.kv), dtype=torch.bool, device=inputs.kv.device)
    unused[inputs.topk[inputs.topk >= 0].long()] = False
    inputs.kv[unused] = 0xFF if inputs.kv.dtype == torch.uint8 else torch.nan


def move_far(inputs: Inputs) -> None:
    """Move the rows to where 32 bits no longer count the elements before them."""
    num_rows, width = inputs.kv.shape
    first = 2**31 // width + 1
    need_memory((first + num_rows) * width * inputs.kv.element_size())
    cache = inputs.kv.new_empty(first + num_rows, width)
    cache[first:] = inputs.kv
    inputs.kv = cache
    inputs.topk[inputs.topk >= 0] += first


def check_replay(shape: Shape, target: Target) -> float:
    """Return the error of a CUDA graph whose lists and query change after capture."""
    captured = make_inputs(shape, target)
    launch(shape, target, captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = launch(shape, target, captured)
    errors = []
    for seed in (1, 2):
        other = make_inputs(shape, target, seed)
        other.counts = other.counts.roll(seed)
        for name in ("q", "kv", "topk", "counts"):
            getattr(captured, name).copy_(getattr(other, name))
        graph.replay()
        errors.append(compare(shape, captured, out, lse))
    return max(errors)
