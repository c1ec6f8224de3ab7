"""The kernel that joins the lists of neighbours, interpreted on the CPU by gluon_interpreter.py."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.overlay import OVERLAY, load_overlay


def unions(lists: list[list[int]], num_topk: int) -> list[list[int] | None]:
    """Return the used entries of the union of each two lists, or None where they are left alone."""
    from tests.kernels.gluon_interpreter import interpreted

    topk = torch.full((len(lists), num_topk), -1, dtype=torch.int32)
    for row, one in zip(topk, lists, strict=True):
        row[: len(one)] = torch.tensor(one, dtype=torch.int32)
    valid_count = torch.tensor([len(one) for one in lists], dtype=torch.int32)
    specs = load_overlay("vllm.v1.attention.ops.triton_mla_sparse").get_union_specs(len(lists), num_topk)
    union, counts, alone_counts = (torch.full(shape, 99, dtype=dtype) for shape, dtype in specs)
    module = interpreted(OVERLAY / "vllm/v1/attention/ops/gluon_union_rows.py")
    module.union_rows(topk, valid_count, union, counts, alone_counts)
    for pair, count in enumerate(counts.tolist()):
        alone = slice(2 * pair, 2 * pair + 2)
        expected = valid_count[alone] if count < 0 else torch.full_like(valid_count[alone], -1)
        assert torch.equal(alone_counts[alone], expected)
    return [
        None if count < 0 else [e for e in entries[:count].tolist() if e >= 0]
        for entries, count in zip(union, counts.tolist(), strict=True)
    ]


@settings(max_examples=20, deadline=None)
@given(lists=st.lists(st.lists(st.sampled_from([-1, *range(12), 2**26]), max_size=16), min_size=1, max_size=4))
def test_unions_hold_both_lists(interpreter, lists):
    """Each token's rows, as often as it lists them; the last token may have no neighbour."""
    for pair, union in enumerate(interpreter.submit(unions, lists, 16).result()):
        pair_lists = [*lists[2 * pair : 2 * pair + 2], []][:2]
        counted = [Counter(row for row in one if row >= 0) for one in pair_lists]
        shared = counted[0] & counted[1]
        num_entries = sum(map(len, pair_lists))
        if union is None:
            # A row that a token lists twice need not count as shared, nor one lost to collisions in both hash tables.
            assert 8 * sum(max(rows[row] for rows in counted) == 1 for row in shared) < num_entries + 8
            continue
        assert 8 * shared.total() >= num_entries
        members = [sorted(entry >> 2 for entry in union if entry >> member & 1) for member in range(2)]
        assert members == [sorted(row for row in one if row >= 0) for one in pair_lists]


@pytest.mark.parametrize("num_topk", [512, 2176])
def test_shared_rows_have_one_entry(interpreter, num_topk):
    rows = torch.randperm(120_000, generator=torch.Generator().manual_seed(0))[: num_topk + 100].tolist()
    (union,) = interpreter.submit(unions, [rows[:num_topk], rows[:99:-1]], num_topk).result()
    # Few rows are lost to collisions in both hash tables.
    assert num_topk + 100 <= len(union) <= (num_topk + 100) * 1.03
    assert {entry >> 2 for entry in union} == set(rows)


@pytest.mark.parametrize(("num_shared", "is_union"), [(0, False), (60, False), (160, True)])
def test_lists_that_share_little_are_left_alone(interpreter, num_shared, is_union):
    rows = list(range(1024 - num_shared))
    lists = [rows[:512], rows[512 - num_shared :]]
    assert [len(one) for one in lists] == [512, 512]
    (union,) = interpreter.submit(unions, lists, 512).result()
    assert (union is not None) == is_union
