"""The kernel that joins the lists of neighbours, interpreted on the CPU by gluon_interpreter.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.overlay import OVERLAY, load_overlay


def unions(lists: list[list[int]], num_topk: int) -> list[list[int]]:
    """Return the used entries of the union of each two lists."""
    from tests.kernels.gluon_interpreter import interpreted

    topk = torch.full((len(lists), num_topk), -1, dtype=torch.int32)
    for row, one in zip(topk, lists, strict=True):
        row[: len(one)] = torch.tensor(one, dtype=torch.int32)
    valid_count = torch.tensor([len(one) for one in lists], dtype=torch.int32)
    specs = load_overlay("vllm.v1.attention.ops.triton_mla_sparse").get_union_specs(len(lists), num_topk)
    union, counts = (torch.full(shape, 1, dtype=dtype) for shape, dtype in specs)
    interpreted(OVERLAY / "vllm/v1/attention/ops/gluon_union_rows.py").union_rows(topk, valid_count, union, counts)
    return [[e for e in entries[:count].tolist() if e >= 0] for entries, count in zip(union, counts, strict=True)]


@settings(max_examples=20, deadline=None)
@given(lists=st.lists(st.lists(st.sampled_from([-1, *range(12), 2**26]), max_size=16), min_size=1, max_size=4))
def test_unions_hold_both_lists(interpreter, lists):
    """Each token's rows, as often as it lists them; the last token may be alone."""
    members = [
        sorted(entry >> 2 for entry in union if entry >> member & 1)
        for union in interpreter.submit(unions, lists, 16).result()
        for member in range(2)
    ]
    assert members[: len(lists)] == [sorted(row for row in one if row >= 0) for one in lists]
    assert not any(members[len(lists) :])


@pytest.mark.parametrize("num_topk", [512, 2176])
def test_shared_rows_have_one_entry(interpreter, num_topk):
    rows = torch.randperm(120_000, generator=torch.Generator().manual_seed(0))[: num_topk + 100].tolist()
    (union,) = interpreter.submit(unions, [rows[:num_topk], rows[:99:-1]], num_topk).result()
    # Few rows are lost to collisions in both hash tables.
    assert num_topk + 100 <= len(union) <= (num_topk + 100) * 1.03
    assert {entry >> 2 for entry in union} == set(rows)
