"""Kernels that run as many programs on an SM as another GPU would."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import occupancy

SM90_SM_SHARED, SM90_MAX_SHARED = 233_472, 232_448


@given(shared=st.integers(0, 101_376), target=st.sampled_from(sorted(set(occupancy.SM_SHARED.values()))))
def test_an_sm_holds_as_many_programs_as_the_targets(shared, target):
    padded = occupancy.padded_shared(shared, target, SM90_SM_SHARED)
    assert padded >= shared
    assert occupancy.programs_per_sm(padded, SM90_SM_SHARED) == occupancy.programs_per_sm(shared, target)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with SM90's shared memory, and the sizes that functions were allowed."""
    properties = SimpleNamespace(
        shared_memory_per_multiprocessor=SM90_SM_SHARED, shared_memory_per_block_optin=SM90_MAX_SHARED
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    allowed = []
    monkeypatch.setattr(occupancy, "_allow_shared", lambda function, size: allowed.append((function, size)))
    return allowed


def compiled(function, shared):
    return SimpleNamespace(function=function, packed_metadata=(4, 1, shared))


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((12, 0), [232_448, 115_712]), ((8, 0), [232_448, 57_344]), ((9, 0), [94_464, 40_000])],
)
def test_kernels_ask_for_more_meanwhile(gpu, capability, expected):
    kernels = [compiled(1, 94_464), compiled(2, 40_000)]
    kernel = SimpleNamespace(device_caches={0: (dict(enumerate(kernels)), {}, None, None, None)})
    with occupancy.programs_as_on(capability, kernel):
        assert [one.packed_metadata[2] for one in kernels] == expected
        assert gpu == ([] if capability == (9, 0) else list(zip((1, 2), expected, strict=True)))
    assert [one.packed_metadata for one in kernels] == [(4, 1, 94_464), (4, 1, 40_000)]


def test_kernels_ask_for_what_they_need_again_after_an_error(gpu):
    one = compiled(1, 94_464)
    kernel = SimpleNamespace(device_caches={0: ({0: one}, {}, None, None, None)})
    with pytest.raises(ZeroDivisionError), occupancy.programs_as_on((12, 0), kernel):
        raise ZeroDivisionError
    assert one.packed_metadata == (4, 1, 94_464)
