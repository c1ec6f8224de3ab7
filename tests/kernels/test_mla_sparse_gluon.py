"""The sparse MLA kernels in Gluon against the float64 reference, interpreted on the CPU by gluon_interpreter.py.

What hardware alone shows, layouts, barriers and the order of its matrix instructions, is left to tests/gpu.
"""

import json
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.overlay import OVERLAY, load_overlay
from tests.kernels.reference import (
    RANK,
    Inputs,
    assert_matches_reference,
    join_lists,
    make_inputs,
    poison_unused_rows,
    share_rows,
)

OPS = OVERLAY / "vllm/v1/attention/ops"
TABLE = json.loads((OPS / "triton_mla_sparse_configs.json").read_text())
SECTIONS = {"mma": "default", "wgmma": "9.0"}
MODULES = {"mma": "gluon_mla_sparse.py", "wgmma": "gluon_mla_sparse_sm90.py"}
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 5e-3}
KV_FORMATS = ["16-bit", "fp8_e4m3", "fp8_ds_mla"]
#: Those of `mma` that the table may lack: few and many KV rows a tile, with one buffer and two.
MMA_TILES = {"16-bit": [(16, 16, 1), (16, 16, 2), (16, 32, 1)], "fp8": [(16, 16, 1), (8, 16, 2), (8, 32, 1)]}


class Tile(NamedTuple):
    gluon: str
    block_h: int
    block_n: int
    num_stages: int = 1
    num_warps: int = 4
    group: int = 1
    has_e4m3: bool = True

    def __str__(self) -> str:
        more = f", {self.group} tokens" * (self.group > 1) + ", software e4m3" * (not self.has_e4m3)
        return f"{self.gluon} {self.block_h}x{self.block_n}, w{self.num_warps} s{self.num_stages}{more}"


#: One of each kernel for tests of what does not depend on it.
USUAL = [Tile("mma", 16, 16, 2), Tile("wgmma", 16, 64, 2)]


def tiles(kv_format: str) -> list[Tile]:
    """Return what the table uses, and some that it may use."""
    table_format = kv_format if kv_format == "16-bit" else "fp8"
    rows = [row for section in SECTIONS.values() for kind in TABLE[section][table_format].values() for row in kind]
    found = {Tile(**{name: row[name] for name in Tile._fields if name in row}) for row in rows if row.get("gluon")}
    found |= {Tile("mma", *tile) for tile in MMA_TILES[table_format]}
    if table_format == "fp8":
        found |= {tile._replace(has_e4m3=False) for tile in found if tile.gluon == "mma"}
    return sorted(found)


def attention(inputs: Inputs, tile: Tile, num_splits: int = 1):
    from tests.kernels.gluon_interpreter import interpreted

    kernels = load_overlay("vllm.v1.attention.ops.triton_mla_sparse")
    config = kernels.SparseMLAConfig(**tile._asdict(), programs_per_sm=1)
    launcher = getattr(interpreted(OPS / MODULES[tile.gluon]), f"sparse_mla_{tile.gluon}")
    with (
        patch.object(kernels, "attention_launcher", lambda config: launcher),
        patch.object(kernels, "union_launcher", lambda: join_lists),
    ):
        return kernels.sparse_mla_attention(*inputs, kv_scale=inputs.kv_scale, num_splits=num_splits, config=config)


def check_matches_reference(tile: Tile, counts: list[int], num_heads: int, num_splits: int = 1, **options) -> None:
    inputs = make_inputs(counts, num_heads, max(*counts, 1), **options)
    tolerance = TOLERANCE[inputs.q_nope.dtype]
    assert_matches_reference(*attention(inputs, tile, num_splits), inputs, out_tolerance=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kv_format", "tile"), [(kv, tile) for kv in KV_FORMATS for tile in tiles(kv)], ids=str)
def test_every_tile_of_the_table(interpreter, kv_format, tile, dtype):
    args = tile, [130, 129, 64, 0, 1], 11
    interpreter.submit(check_matches_reference, *args, kv_format=kv_format, dtype=dtype).result()


@pytest.mark.parametrize("tile", USUAL, ids=str)
@pytest.mark.parametrize("num_heads", [1, 4, 8, 16, 20, 64, 72])
def test_any_head_count(interpreter, num_heads, tile):
    interpreter.submit(check_matches_reference, tile, [70, 3], num_heads).result()


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("num_buffers", [1, 2])
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("tile", USUAL, ids=str)
def test_counts_around_the_tile_edges(interpreter, tile, num_splits, num_buffers, kv_format):
    tile = tile._replace(num_stages=num_buffers if tile.gluon == "mma" or kv_format == "16-bit" else 1)
    size = tile.block_n
    counts = [0, 1, *(tiles * size + more for tiles in (1, 2) for more in (-1, 0, 1)), 3 * size + 1]
    interpreter.submit(check_matches_reference, tile, counts, 4, num_splits, kv_format=kv_format).result()


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("tile", USUAL, ids=str)
def test_without_rope(interpreter, tile, kv_format):
    args = tile._replace(num_stages=1), [100, 64], 8
    interpreter.submit(check_matches_reference, *args, kv_format=kv_format, rope_dim=0).result()


def check_unused_rows_are_never_read(tile: Tile) -> None:
    inputs = make_inputs([70, 5, 0, 96], 8, 96)
    poison_unused_rows(inputs)
    inputs.topk[3, 10:75] = -1
    assert_matches_reference(*attention(inputs, tile), inputs)


@pytest.mark.parametrize("tile", tiles("16-bit"), ids=str)
def test_unused_rows_may_hold_nan(interpreter, tile):
    interpreter.submit(check_unused_rows_are_never_read, tile).result()


def check_strides(tile: Tile) -> None:
    inputs = make_inputs([70, 96, 2], 20, 96)
    expected = attention(inputs, tile)
    q = torch.cat((inputs.q_nope, inputs.q_pe), dim=-1)
    inputs.q_nope, inputs.q_pe = q[..., :RANK], q[..., RANK:]
    padded = torch.full((len(inputs.kv), 640), float("nan"), dtype=inputs.kv.dtype)
    padded[:, : inputs.kv.shape[1]] = inputs.kv
    inputs.kv = padded[:, : inputs.kv.shape[1]]
    torch.testing.assert_close(attention(inputs, tile), expected, rtol=0, atol=0)


@pytest.mark.parametrize("tile", USUAL, ids=str)
def test_strided_query_and_padded_rows(interpreter, tile):
    interpreter.submit(check_strides, tile).result()


def check_tokens_left_alone(tile: Tile, num_splits: int) -> None:
    inputs = make_inputs([64, 64, 50, 64, 7], 8, 64, num_rows=1000)
    share_rows(inputs)
    tile = tile._replace(block_h=16, num_stages=1, group=2)
    assert_matches_reference(*attention(inputs, tile, num_splits), inputs)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("tile", USUAL, ids=str)
def test_pairs_that_share_little_are_left_alone(interpreter, tile, num_splits):
    interpreter.submit(check_tokens_left_alone, tile, num_splits).result()


def check_large_values(tile: Tile) -> None:
    """Of a bfloat16 model with fp8 rows, whose query is multiplied in float16."""
    inputs = make_inputs([70, 96], 8, 96, kv_format="fp8_e4m3", dtype=torch.bfloat16)
    inputs.q_nope *= 2.0**17  # beyond float16, and within it times the factor of the query
    inputs.sm_scale *= 2.0**-17
    inputs.q_pe *= 2.0**17
    assert_matches_reference(*attention(inputs, tile._replace(num_stages=1)), inputs, out_tolerance=5e-3)
    inputs.q_nope[0, 0, 0] = 1e8  # clamped: wrong, but no NaN
    assert attention(inputs, tile._replace(num_stages=1))[0].isfinite().all()


@pytest.mark.parametrize("tile", USUAL, ids=str)
def test_query_beyond_the_range_of_float16(interpreter, tile):
    interpreter.submit(check_large_values, tile).result()


def check_growing_scores(tile: Tile) -> None:
    """Each key scores higher than the ones before, by steps of which some rescale the accumulators and some do not."""
    inputs = make_inputs([96, 96], 8, 96, dtype=torch.float16)
    rows = inputs.topk[0].long()
    inputs.topk[1] = inputs.topk[0].flip(0)
    inputs.q_nope[:] = inputs.q_nope[:1, :1]
    inputs.kv[rows, :RANK] += (inputs.q_nope[0, 0] * torch.linspace(-3, 3, 96)[:, None]).half()
    assert_matches_reference(*attention(inputs, tile), inputs)


@pytest.mark.parametrize("tile", USUAL, ids=str)
def test_scores_that_grow_and_fall(interpreter, tile):
    interpreter.submit(check_growing_scores, tile).result()


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_random_shapes(interpreter, data):
    kv_format = data.draw(st.sampled_from(KV_FORMATS), "KV format")
    tile = data.draw(st.sampled_from(tiles(kv_format)), "tile")
    counts = data.draw(st.lists(st.integers(0, 150), min_size=1, max_size=3), "counts")
    num_heads = data.draw(st.integers(1, 40), "heads")
    rope_dim = data.draw(st.sampled_from([64, 0]), "RoPE width")
    num_splits = data.draw(st.integers(1, 6), "splits")
    options = {"kv_format": kv_format, "rope_dim": rope_dim}
    interpreter.submit(check_matches_reference, tile, counts, num_heads, num_splits, **options).result()
