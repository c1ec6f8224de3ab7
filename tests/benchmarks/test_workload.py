"""What the benchmark lets the kernels read."""

from itertools import pairwise

import pytest
import torch

from benchmarks import workload
from benchmarks.workload import DTYPES, NUM_TOPK, ROW_BYTES, WIDTH, Lists, Shape
from tests.kernels.reference import dequantize, sparse_mla_reference

MIB = 2**20


def test_decode_lists_share_no_row_and_stay_in_their_request() -> None:
    lists = workload.decode_lists("cpu", num_topk=64, rows_per_request=256)
    assert lists.shape == (4 * workload.NUM_REQUESTS, 64)
    assert len(lists.unique()) == lists.numel()
    request = torch.arange(len(lists)) % workload.NUM_REQUESTS
    assert torch.equal(lists // 256, request[:, None].expand_as(lists).int())


def test_the_pool_stays_within_32_bit_offsets() -> None:
    assert workload.NUM_ROWS * WIDTH < 2**31
    assert workload.NUM_ROWS >= workload.PREFILL_ROWS
    assert workload.ROWS_PER_REQUEST % NUM_TOPK == 0, "the dense peer's pages stay within a request"


@pytest.mark.parametrize("kv", ROW_BYTES)
@pytest.mark.parametrize("tokens", [1, 8, 32, 64, 128])
@pytest.mark.parametrize("l2", [24 * MIB, 60 * MIB, 128 * MIB])
def test_the_calls_of_a_graph_pass_four_times_l2(tokens: int, kv: str, l2: int) -> None:
    available = workload.ROWS_PER_REQUEST // NUM_TOPK * workload.NUM_REQUESTS
    calls = workload.num_calls(tokens, ROW_BYTES[kv], l2, available)
    assert calls * tokens <= available, "every list is read once"
    assert calls * tokens * NUM_TOPK * ROW_BYTES[kv] > 4 * l2
    assert calls >= workload.MIN_CALLS


def shared(lists: torch.Tensor) -> list[float]:
    rows = [set(row.tolist()) for row in lists]
    return [len(a & b) / lists.shape[1] for a, b in pairwise(rows)]


def test_overlapping_lists_replace_5_to_20_percent() -> None:
    torch.manual_seed(0)
    lists = workload.prefill_lists(40, "overlap", "cpu", num_topk=400, num_rows=4000)
    assert lists.shape == (40, 400)
    assert all(len(row.unique()) == 400 for row in lists)
    assert lists.min() >= 0
    assert lists.max() < 4000
    shares = shared(lists)
    assert min(shares) >= 0.8
    assert max(shares) <= 0.95
    assert max(shares) - min(shares) > 0.05, "the share varies"
    assert workload.mean_overlap(lists) == pytest.approx(sum(shares) / len(shares))
    moved = (lists[1:] != lists[:-1]).float().mean()
    assert moved > 0.9, "rows that stay change their place in the list"


def test_random_lists_share_what_chance_gives() -> None:
    torch.manual_seed(0)
    lists = workload.prefill_lists(20, "random", "cpu", num_topk=400, num_rows=4000)
    assert all(len(row.unique()) == 400 for row in lists)
    assert workload.mean_overlap(lists) == pytest.approx(0.1, abs=0.02)


def test_every_kernel_gets_the_same_lists() -> None:
    lists = Lists(l2_bytes=MIB, device="cpu")
    shape = Shape(8, 16, "bfloat16", "16-bit")
    first = lists.of(shape)
    assert all(torch.equal(a, b) for a, b in zip(first, lists.of(shape), strict=True))
    assert len(torch.cat(first).unique()) == len(first) * 8 * NUM_TOPK


@pytest.mark.parametrize("kv", ROW_BYTES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pools_hold_normal_values_in_each_format(kv: str, dtype: str) -> None:
    pool = workload.make_pool(kv, DTYPES[dtype], 64, "cpu")
    assert pool.rows.shape[1] * pool.rows.dtype.itemsize == ROW_BYTES[kv]
    values = dequantize(pool.rows, pool.scale, workload.ROPE)[1:]  # one value of the first row is set
    assert values.shape == (63, WIDTH)
    assert values.std().item() == pytest.approx(1, abs=0.05)
    assert len(values.unique()) > 20


def test_a_pool_of_many_parts_has_one_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of the per-tensor format is quantised by itself and must be right under the last one's scale."""
    scales = []

    def spy(values: torch.Tensor, kv: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        result = quantize(values, kv)
        scales.append(result[1])
        return result

    quantize = workload.quantize
    monkeypatch.setattr(workload, "quantize", spy)
    monkeypatch.setattr(workload, "PART_ROWS", 16)
    workload.make_pool("fp8_e4m3", torch.bfloat16, 64, "cpu")
    assert len(scales) == 4
    assert len({scale.item() for scale in scales}) == 1
    assert not float(scales[0]).hex().startswith("0x1.0000000"), "a power of two would hide a forgotten scale"


@pytest.mark.parametrize("kv", ROW_BYTES)
def test_some_tokens_have_the_reference_of_all(kv: str) -> None:
    torch.manual_seed(0)
    pool = workload.make_pool(kv, torch.float16, 64, "cpu")
    topk = torch.stack([torch.randperm(64)[:16] for _ in range(6)]).int()
    (inputs,) = workload.make_inputs(Shape(6, 2, "float16", kv), pool, [topk])
    tokens = workload.some_tokens(6, most=4)
    assert tokens.tolist() == [0, 1, 4, 5]
    part = sparse_mla_reference(workload.only_tokens(inputs, tokens))[0]
    torch.testing.assert_close(part, sparse_mla_reference(inputs)[0][tokens])


def test_shapes_that_share_a_pool_follow_each_other() -> None:
    shapes = list(workload.shapes([1, 2048], [8, 16], list(DTYPES), list(ROW_BYTES)))
    assert len(shapes) == len(set(shapes)) == 3 * 2 * (1 + 2) * 2
    pools = [(shape.kv, shape.dtype) for shape in shapes]
    assert sum(a != b for a, b in pairwise(pools)) == 5
    assert {shape.indices for shape in shapes if shape.tokens == 1} == {"random"}
    assert {shape.indices for shape in shapes if shape.is_prefill} == {"random", "overlap"}
    assert {shape.is_prefill for shape in shapes if shape.tokens == 2048} == {True}
