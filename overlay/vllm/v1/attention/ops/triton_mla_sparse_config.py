# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How the sparse MLA kernel is launched: tile sizes, splits and scratch.

Tile sizes are data, in triton_mla_sparse_configs.json, written by the tuner
(benchmarks/tune.py of the distribution):

    capability -> "16-bit" | "fp8" -> "decode" | "prefill" -> rows

The first row whose "heads" and "tokens" are not below the launch's applies; a
missing "tokens" has no limit. A capability without a section uses "default",
whose rows fit the 99 KB of shared memory of SM86, SM89, SM120 and SM121.
"""

import functools
import json
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from vllm.triton_utils import triton
from vllm.utils.math_utils import cdiv

MAX_SPLITS = 32
# A prefill launch of fewer tokens is served like a decode: its grid is small.
MIN_PREFILL_TOKENS = 256
# Tokens of one prefill launch over unions, which bounds the scratch of the lists.
MAX_UNION_TOKENS = 2048

_TABLE_FILE = Path(__file__).with_name("triton_mla_sparse_configs.json")
# Triton's interpreter does not know Gluon.
_INTERPRETED_ROW = {
    "heads": 128, "block_h": 16, "block_n": 32,
    "num_warps": 4, "num_stages": 1, "programs_per_sm": 1,
}  # fmt: skip
# What a program costs beside its tiles, in tiles: launch, query, output.
_PROGRAM_OVERHEAD = 1
# Programs of one launch, in multiples of what the GPU runs at once. It bounds
# the partial results.
_MAX_WAVES = 4


class KVFormat(Enum):
    """What the rows of the KV cache hold."""

    MODEL = "16-bit"  # values of the model's dtype
    FP8 = "fp8_e4m3"  # e4m3 values, one fp32 scale per tensor
    FP8_DS_MLA = "fp8_ds_mla"  # 512 e4m3 values, 4 fp32 scales, 64 bf16 RoPE values


@dataclass(frozen=True)
class SparseMLAConfig:
    """Tile sizes and launch options of the attention kernel."""

    block_h: int  # rows of the query tile: tokens of the group times heads
    block_n: int  # KV rows per loop iteration
    num_warps: int
    num_stages: int  # tiles of KV rows in shared memory
    programs_per_sm: int  # lists are split until the grid has so many per SM
    group: int = 1  # tokens per program: 1, or 2 over the union of their lists
    # The kernel: "" is Triton's, "mma" gluon_mla_sparse.py's, and "wgmma" that of
    # gluon_mla_sparse_sm90.py, which SM90 alone runs.
    gluon: str = ""
    maxnreg: int | None = None  # registers per thread, for more programs per SM
    alone: bool = False  # for tokens that a launch over unions leaves alone
    # Not tuned, but given by the GPU: whether the merge is launched while the attention
    # ends, and whether an instruction decodes e4m3.
    launch_pdl: bool = False
    has_e4m3: bool = False


@functools.cache
def _read_table() -> dict[str, Any]:
    return json.loads(_TABLE_FILE.read_text())


def _rows(
    kv_format: KVFormat, capability: tuple[int, int], is_prefill: bool
) -> list[dict[str, Any]]:
    table = _read_table()
    section = table.get("{}.{}".format(*capability), table["default"])
    if triton.knobs.runtime.interpret:
        return [_INTERPRETED_ROW]
    formats = section["16-bit" if kv_format is KVFormat.MODEL else "fp8"]
    return formats["prefill" if is_prefill else "decode"]


def _make_config(row: dict[str, Any], capability: tuple[int, int]) -> SparseMLAConfig:
    return SparseMLAConfig(
        **{name: n for name, n in row.items() if name not in ("heads", "tokens")},
        launch_pdl=capability >= (9, 0) and not triton.knobs.runtime.interpret,
        has_e4m3=capability >= (8, 9),
    )


@functools.cache
def get_config(
    num_tokens: int,
    num_heads: int,
    kv_format: KVFormat,
    capability: tuple[int, int],
    is_prefill: bool = False,
) -> SparseMLAConfig:
    """Return the configuration of a launch.

    Args:
        num_tokens: query tokens, as a CUDA graph pads them.
        num_heads: query heads per token.
        kv_format: what the KV cache holds.
        capability: compute capability of the GPU.
        is_prefill: whether neighbouring tokens probably share rows.

    """
    is_prefill = is_prefill and num_tokens >= MIN_PREFILL_TOKENS
    rows = _rows(kv_format, capability, is_prefill)
    row = next(
        (
            row
            for row in rows
            if num_heads <= row["heads"] and num_tokens <= row.get("tokens", num_tokens)
        ),
        rows[-1],
    )
    return _make_config(row, capability)


def get_alone_config(config: SparseMLAConfig) -> SparseMLAConfig:
    """Return the configuration for tokens that a launch over unions leaves alone."""
    least = 16 if config.gluon == "wgmma" else 8
    block_h = max(config.block_h // config.group, least)
    return replace(config, group=1, block_h=block_h, alone=True)


def get_reachable_configs(
    num_heads: int, kv_format: KVFormat, capability: tuple[int, int]
) -> set[SparseMLAConfig]:
    """Return every configuration that launches of any token count may have."""
    edges = {
        row["tokens"]
        for row in _rows(kv_format, capability, is_prefill=False)
        if "tokens" in row
    }
    edges.update((MIN_PREFILL_TOKENS, max(edges, default=0) + 1))
    configs = {
        get_config(num_tokens, num_heads, kv_format, capability, is_prefill)
        for num_tokens in edges
        for is_prefill in (False, True)
    }
    return configs | {get_alone_config(one) for one in configs if one.group > 1}


def get_num_programs(num_tokens: int, num_heads: int, config: SparseMLAConfig) -> int:
    """Return the programs of an unsplit launch: token groups times head blocks."""
    heads_per_block = config.block_h // config.group
    return cdiv(num_tokens, config.group) * cdiv(num_heads, heads_per_block)


def _get_most_splits(programs: int, slots: int) -> int:
    """Return how many parts lists have at most: the more programs, the fewer."""
    return _MAX_WAVES * slots // max(programs, 1)


@functools.cache
def get_num_splits(
    num_tokens: int,
    num_heads: int,
    num_topk: int,
    config: SparseMLAConfig,
    num_sms: int,
) -> int:
    """Return into how many parts each list is cut.

    It minimises waves of programs times the work of one program. It may depend
    only on what a CUDA graph fixes: the padded token count, never the lists.
    """
    programs = get_num_programs(num_tokens, num_heads, config)
    slots = config.programs_per_sm * num_sms
    num_tiles = cdiv(num_topk * config.group, config.block_n)
    most = min(MAX_SPLITS, num_tiles, _get_most_splits(programs, slots))

    def cost(num_splits: int) -> int:
        waves = cdiv(programs * num_splits, slots)
        return waves * (cdiv(num_tiles, num_splits) + _PROGRAM_OVERHEAD)

    return min(range(1, max(most, 1) + 1), key=cost)


def get_union_specs(
    num_tokens: int, num_topk: int
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and dtypes of the unions' scratch.

    These are the lists, their counts, and the counts of tokens left alone.
    """
    num_tokens = min(num_tokens, MAX_UNION_TOKENS)
    num_pairs = cdiv(num_tokens, 2)
    return [
        ((num_pairs, 2 * num_topk), torch.int32),
        ((num_pairs,), torch.int32),
        ((num_tokens,), torch.int32),
    ]


@functools.cache
def get_workspace_specs(
    max_num_tokens: int,
    num_heads: int,
    num_topk: int,
    num_sms: int,
    dtype: torch.dtype,
    kv_format: KVFormat,
    capability: tuple[int, int],
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and dtypes of the scratch for up to `max_num_tokens` tokens.

    These are the partial outputs and log-sum-exps of the splits and, where a
    prefill works on unions, those of `get_union_specs`. Partial outputs have the
    model's dtype, as the output: half the bytes of fp32 to write, read and reserve.
    """
    num_partials = 1  # a workspace of no bytes cannot be reserved
    configs = get_reachable_configs(num_heads, kv_format, capability)
    for config in configs:
        slots = config.programs_per_sm * num_sms
        for num_tokens in range(1, max_num_tokens + 1):
            programs = get_num_programs(num_tokens, num_heads, config)
            if _get_most_splits(programs, slots) < 2:
                break  # nor are those of more tokens split
            splits = get_num_splits(num_tokens, num_heads, num_topk, config, num_sms)
            if splits > 1:
                num_partials = max(num_partials, num_tokens * num_heads * splits)
    specs = [
        ((num_partials, 512), dtype),
        ((num_partials,), torch.float32),
    ]
    if any(config.group > 1 for config in configs):
        specs += get_union_specs(max_num_tokens, num_topk)
    return specs
