"""The floors that times are compared with."""

import pytest
import torch

from benchmarks import timing, workload
from benchmarks.workload import Shape


def check_gather(kv: str, parts: int, block_n: int) -> None:
    torch.manual_seed(0)
    pool = workload.make_pool(kv, torch.float16, 96, "cpu")
    topk = torch.stack([torch.randperm(96)[:50] for _ in range(3)]).int()
    sums = timing.gather(pool.rows, topk, parts, block_n, num_warps=4)
    assert sums.shape == (3, parts, 32)
    expected = pool.rows.view(torch.int32)[topk.long()].long().sum((1, 2))
    assert torch.equal(sums.long().sum((1, 2)).int(), expected.int())


@pytest.mark.parametrize("kv", workload.ROW_BYTES)
@pytest.mark.parametrize(("parts", "block_n"), [(1, 16), (4, 16), (7, 32)])
def test_the_gather_kernel_reads_every_byte_of_the_listed_rows(interpreter, kv, parts, block_n):
    interpreter.submit(check_gather, kv, parts, block_n).result()


def test_compute_floor_counts_both_products_and_at_least_16_heads() -> None:
    def floor(tokens: int, heads: int) -> float:
        return timing.compute_floor(Shape(tokens, heads, "bfloat16", "16-bit"), rate=1e12)

    assert floor(1, 128) == pytest.approx(2 * 128 * 2048 * (576 + 512) / 1e6)
    assert floor(64, 128) == pytest.approx(64 * floor(1, 128))
    assert floor(1, 8) == floor(1, 16) == pytest.approx(floor(1, 128) / 8)
