"""Kernels that run as many programs on an SM as another GPU would."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import occupancy, sparse_mla, timing, tune
from benchmarks.workload import Shape

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
    never_launched = compiled(None, 94_464)
    kernel = SimpleNamespace(device_caches={0: (dict(enumerate([*kernels, never_launched])), {}, None, None, None)})
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


@pytest.fixture
def timed_as_on(monkeypatch):
    """The capabilities as on which something was timed; the kernels and the GPU are pretended."""
    inside, timed = [], []

    @contextmanager
    def programs_as_on(capability, kernel):
        assert kernel == "attention kernel"
        inside.append(capability)
        yield
        inside.pop()

    def graph_time(calls, **_):
        timed.append(inside[-1] if inside else None)
        return 7.0

    kernels = SimpleNamespace(
        attend=lambda inputs, **_: torch.ones(2),
        attention=SimpleNamespace(attention_launcher=lambda config: SimpleNamespace(kernel="attention kernel")),
        describe=lambda config, num_splits: {},
    )
    monkeypatch.setitem(sys.modules, "benchmarks.kernels", kernels)
    monkeypatch.setattr(occupancy, "programs_as_on", programs_as_on)
    monkeypatch.setattr(timing, "graph_time", graph_time)
    return timed


SHAPE = Shape(2, 8, "bfloat16", "16-bit")


def test_the_tuner_times_like_the_gpu_it_tunes_for(timed_as_on):
    run = object.__new__(tune.Run)
    run.shape, run.inputs, run.capability = SHAPE, [None], (12, 0)
    run.tokens, run.expected = torch.arange(2), torch.ones(2, dtype=torch.float64)
    assert run.time(None, 1, replays=3) == 7.0
    assert timed_as_on == [(12, 0)]


def test_the_benchmark_times_each_row_like_its_gpu(timed_as_on, monkeypatch):
    capabilities = [(9, 0), (12, 0), (8, 0)]
    monkeypatch.setattr(sparse_mla, "capabilities", lambda: capabilities)
    monkeypatch.setattr(sparse_mla, "configure", lambda shape, capability: ("the same for all", 1))
    monkeypatch.setattr(sparse_mla, "table_section", lambda capability: "default")
    monkeypatch.setattr(sparse_mla, "check", lambda *_: 0.0)
    monkeypatch.setattr(sparse_mla, "sparse_mla_reference", lambda inputs: [None])
    tokens = SimpleNamespace(to=lambda device: torch.arange(2))
    fakes = {"make_inputs": [None], "some_tokens": tokens, "only_tokens": None}
    for name, value in fakes.items():
        monkeypatch.setattr(sparse_mla.workload, name, lambda *_, value=value: value)
    benchmark = object.__new__(sparse_mla.Benchmark)
    benchmark.triton, benchmark.times_16_bit, benchmark.failures = "3.8.0", {}, []
    benchmark.lists = SimpleNamespace(of=lambda shape: [None])
    monkeypatch.setattr(benchmark, "_peers", lambda *_: ({}, None), raising=False)
    monkeypatch.setattr(benchmark, "_floor", lambda *_: (3.5, "memory"), raising=False)
    rows = benchmark.measure(SHAPE, None)
    assert [row["capability"] for row in rows] == ["9.0", "12.0", "8.0"], benchmark.failures
    assert timed_as_on == capabilities
