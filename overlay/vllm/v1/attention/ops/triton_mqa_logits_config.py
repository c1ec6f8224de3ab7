# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How the MQA logits kernels are launched: tile sizes, by GPU.

A sweep may vary every field; `software_e4m3` needs nothing of the GPU, its opposite
SM89. `block_q`, `block_n` and `keys_per_program` are powers of two, `block_q` at
least the number of heads and `block_n` at least the block size of a paged cache.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class MQALogitsConfig:
    """Tile sizes and launch options of one of the two kernels."""

    block_q: int  # columns of the score tile: tokens times heads, at most
    block_n: int  # its rows: keys per loop iteration
    num_warps: int
    num_stages: int
    software_e4m3: bool  # decode to float16, exactly, instead of multiplying e4m3
    maxnreg: int | None = None  # registers per thread


@dataclass(frozen=True, kw_only=True)
class ContiguousConfig(MQALogitsConfig):
    """For keys in one tensor (prefill)."""

    keys_per_program: int  # fewer where that leaves the grid small


@dataclass(frozen=True, kw_only=True)
class PagedConfig(MQALogitsConfig):
    """For keys in a paged cache (decode)."""

    programs_per_slot: int  # programs that share the keys of a slot of the schedule


# SM90 reads both operands of its matrix instructions from shared memory. Elsewhere the
# query stays in registers, which limits block_q. All but SM90's fit 99 KB of shared
# memory, what SM86, SM89, SM120 and SM121 have.
_CONTIGUOUS = {
    "sm90": ContiguousConfig(
        block_q=256,
        block_n=64,
        num_warps=8,
        num_stages=3,
        software_e4m3=False,
        keys_per_program=8192,
    ),
    "native": ContiguousConfig(
        block_q=128,
        block_n=128,
        num_warps=8,
        num_stages=3,
        software_e4m3=False,
        keys_per_program=8192,
    ),
    "software": ContiguousConfig(
        block_q=64,
        block_n=128,
        num_warps=8,
        num_stages=3,
        software_e4m3=True,
        keys_per_program=8192,
    ),
}
_PAGED = {
    "sm90": PagedConfig(
        block_q=128,
        block_n=128,
        num_warps=4,
        num_stages=3,
        software_e4m3=False,
        programs_per_slot=2,
    ),
    "native": PagedConfig(
        block_q=64,
        block_n=64,
        num_warps=4,
        num_stages=4,
        software_e4m3=False,
        programs_per_slot=4,
    ),
    "software": PagedConfig(
        block_q=64,
        block_n=64,
        num_warps=4,
        num_stages=4,
        software_e4m3=True,
        programs_per_slot=2,
    ),
}


def _key(capability: tuple[int, int], software_e4m3: bool) -> str:
    if software_e4m3:
        return "software"
    return "sm90" if capability[0] == 9 else "native"


def get_contiguous_config(
    num_heads: int, capability: tuple[int, int], software_e4m3: bool
) -> ContiguousConfig:
    """Return the configuration for keys in one tensor."""
    config = _CONTIGUOUS[_key(capability, software_e4m3)]
    return replace(config, block_q=max(config.block_q, num_heads))


def get_paged_config(
    num_heads: int, capability: tuple[int, int], software_e4m3: bool
) -> PagedConfig:
    """Return the configuration for keys in a paged cache."""
    config = _PAGED[_key(capability, software_e4m3)]
    return replace(config, block_q=max(config.block_q, num_heads))
