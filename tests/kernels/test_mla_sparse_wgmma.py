"""SM90's sparse MLA kernel against the float64 reference, interpreted on the CPU by gluon_interpreter.py.

What hardware alone shows, layouts, barriers and the order of its matrix instructions, is left to tests/gpu.
"""

import json
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
)

OPS = OVERLAY / "vllm/v1/attention/ops"
ROWS = json.loads((OPS / "triton_mla_sparse_configs.json").read_text())["9.0"]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 5e-3}
KV_FORMATS = ["16-bit", "fp8_e4m3", "fp8_ds_mla"]


def tiles(table_format: str) -> list[tuple[int, int, int, int]]:
    """Return block_h, num_warps, num_stages and group of the table's rows for this kernel."""
    rows = [row for kind in ROWS[table_format].values() for row in kind if row.get("wgmma")]
    return sorted({(row["block_h"], row["num_warps"], row["num_stages"], row.get("group", 1)) for row in rows})


def attention(inputs: Inputs, tile: tuple[int, int, int, int], num_splits: int = 1):
    from tests.kernels.gluon_interpreter import interpreted

    kernels = load_overlay("vllm.v1.attention.ops.triton_mla_sparse")
    block_h, num_warps, num_stages, group = tile
    config = kernels.SparseMLAConfig(block_h, 64, num_warps, num_stages, 1, group, wgmma=True)
    wgmma = interpreted(OPS / "gluon_mla_sparse.py").sparse_mla_wgmma
    with (
        patch.object(kernels, "attention_launcher", lambda config: wgmma),
        patch.object(kernels, "union_launcher", lambda: join_lists),
    ):
        return kernels.sparse_mla_attention(*inputs, kv_scale=inputs.kv_scale, num_splits=num_splits, config=config)


def check_matches_reference(
    tile: tuple[int, int, int, int], counts: list[int], num_heads: int, num_splits: int = 1, **options
) -> None:
    inputs = make_inputs(counts, num_heads, max(*counts, 1), **options)
    tolerance = TOLERANCE[inputs.q_nope.dtype]
    assert_matches_reference(*attention(inputs, tile, num_splits), inputs, out_tolerance=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("kv_format", "tile"), [(kv, tile) for kv in KV_FORMATS for tile in tiles(kv if kv == "16-bit" else "fp8")]
)
def test_every_tile_of_the_table(interpreter, kv_format, tile, dtype):
    args = tile, [130, 129, 64, 0, 1], 11
    interpreter.submit(check_matches_reference, *args, kv_format=kv_format, dtype=dtype).result()


@pytest.mark.parametrize("num_heads", [1, 4, 8, 16, 20, 64, 72])
def test_any_head_count(interpreter, num_heads):
    interpreter.submit(check_matches_reference, (16, 4, 2, 1), [70, 3], num_heads).result()


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("num_buffers", [1, 2])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_counts_around_the_tile_edges(interpreter, num_splits, num_buffers, kv_format):
    tile = (16, 4, num_buffers if kv_format == "16-bit" else 1, 1)
    counts = [0, 1, 63, 64, 65, 127, 128, 129, 193]
    interpreter.submit(check_matches_reference, tile, counts, 4, num_splits, kv_format=kv_format).result()


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_without_rope(interpreter, kv_format):
    args = (16, 4, 1, 1), [100, 64], 8
    interpreter.submit(check_matches_reference, *args, kv_format=kv_format, rope_dim=0).result()


def check_unused_rows_are_never_read(tile: tuple[int, int, int, int]) -> None:
    inputs = make_inputs([70, 5, 0, 96], 8, 96)
    poison_unused_rows(inputs)
    inputs.topk[3, 10:75] = -1
    assert_matches_reference(*attention(inputs, tile), inputs)


@pytest.mark.parametrize("tile", tiles("16-bit"))
def test_unused_rows_may_hold_nan(interpreter, tile):
    interpreter.submit(check_unused_rows_are_never_read, tile).result()


def check_strides() -> None:
    inputs = make_inputs([70, 96, 2], 20, 96)
    tile = (32, 4, 2, 1)
    expected = attention(inputs, tile)
    q = torch.cat((inputs.q_nope, inputs.q_pe), dim=-1)
    inputs.q_nope, inputs.q_pe = q[..., :RANK], q[..., RANK:]
    padded = torch.full((len(inputs.kv), 640), float("nan"), dtype=inputs.kv.dtype)
    padded[:, : inputs.kv.shape[1]] = inputs.kv
    inputs.kv = padded[:, : inputs.kv.shape[1]]
    torch.testing.assert_close(attention(inputs, tile), expected, rtol=0, atol=0)


def test_strided_query_and_padded_rows(interpreter):
    interpreter.submit(check_strides).result()


def check_large_values() -> None:
    """Of a bfloat16 model with fp8 rows, whose query is multiplied in float16."""
    inputs = make_inputs([70, 96], 8, 96, kv_format="fp8_e4m3", dtype=torch.bfloat16)
    inputs.q_nope *= 2.0**17  # beyond float16, and within it times the factor of the query
    inputs.sm_scale *= 2.0**-17
    inputs.q_pe *= 2.0**17
    assert_matches_reference(*attention(inputs, (16, 4, 1, 1)), inputs, out_tolerance=5e-3)


def test_query_beyond_the_range_of_float16(interpreter):
    interpreter.submit(check_large_values).result()


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_random_shapes(interpreter, data):
    kv_format = data.draw(st.sampled_from(KV_FORMATS), "KV format")
    tile = data.draw(st.sampled_from(tiles(kv_format if kv_format == "16-bit" else "fp8")), "tile")
    counts = data.draw(st.lists(st.integers(0, 150), min_size=1, max_size=3), "counts")
    num_heads = data.draw(st.integers(1, 40), "heads")
    rope_dim = data.draw(st.sampled_from([64, 0]), "RoPE width")
    num_splits = data.draw(st.integers(1, 6), "splits")
    options = {"kv_format": kv_format, "rope_dim": rope_dim}
    interpreter.submit(check_matches_reference, tile, counts, num_heads, num_splits, **options).result()
