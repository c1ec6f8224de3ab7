"""The kernel that joins the lists of neighbours, interpreted on the CPU by gluon_interpreter.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.overlay import OVERLAY, load_overlay
from tests.kernels.reference import assert_joined, launch_unions


def unions(lists: list[list[int]], num_topk: int) -> list[list[int] | None]:
    from tests.kernels.gluon_interpreter import interpreted

    specs = load_overlay("vllm.v1.attention.ops.triton_mla_sparse").get_union_specs(len(lists), num_topk)
    module = interpreted(OVERLAY / "vllm/v1/attention/ops/gluon_union_rows.py")
    return launch_unions(module.union_rows, specs, lists, num_topk)


@settings(max_examples=20, deadline=None)
@given(lists=st.lists(st.lists(st.sampled_from([-1, *range(12), 2**26]), max_size=16), min_size=1, max_size=4))
def test_unions_hold_both_lists(interpreter, lists):
    """Each token's rows, as often as it lists them; the last token may have no neighbour."""
    for pair, union in enumerate(interpreter.submit(unions, lists, 16).result()):
        assert_joined(union, lists[2 * pair : 2 * pair + 2])


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
