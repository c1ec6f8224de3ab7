"""The self-test without a GPU: does it notice wrong kernels, wrong engines, and stages that crash or hang?

Kernels run in Triton's interpreter, in a process of their own; float16 only, as it multiplies bfloat16 as integers.
"""

import json
import re
import time
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from vllm.sm120 import ProvenanceError, doctor
from vllm.sm120.doctor import gpus, selftest
from vllm.sm120.doctor.facts import DoctorError, Gpu
from vllm.sm120.selftest import child, engine, report
from vllm.sm120.selftest.model import LONG, NUM_TOPK, SHORT, tokens
from vllm.sm120.selftest.report import FAILED, PASSED, SKIPPED, STAGES, Check, Report, Timing

ROOT = Path(__file__).parents[2]
TIMING = Timing("sparse MLA decode", "1 x 8 heads, float16, 16-bit", 8.4, 0.6, "memory")


@contextmanager
def process(**environment: str) -> Iterator[ProcessPoolExecutor]:
    """A process without a GPU. Its variables are set before it starts: Triton reads them when it is imported."""
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for name, value in {"CUDA_VISIBLE_DEVICES": "", **environment}.items():
            patch.setenv(name, value)
        pool.submit(int).result()
        patch.undo()
        yield pool


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    with process(TRITON_INTERPRET="1") as pool:
        yield pool


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> Iterator[ProcessPoolExecutor]:
    with process(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton"))) as pool:
        yield pool


# Kernels. The functions up to the tests run in the interpreter's process, count_configurations in one that compiles.


def target():
    from vllm.sm120.selftest.cases import Target

    return Target((12, 0), num_sms=4, device="cpu")


def check_attention(plant: str, kv_format: str, num_topk: int = 100) -> Check:
    """Check one launch of odd heads, with what `plant` names put in place of the kernel."""
    from unittest.mock import patch

    import torch
    from vllm.sm120.selftest import attention, cases
    from vllm.v1.attention.ops.triton_mla_sparse_config import KVFormat

    right = attention.kernels.sparse_mla_attention

    def wrong(q_nope, q_pe, kv, topk, counts, sm_scale, **options):
        if plant == "it loses a row":
            counts = counts - 1
        if plant == "it reads row 0 for -1":
            topk = topk.clamp(min=0)
        if plant == "it scales wrongly":
            sm_scale *= 1.02
        if plant == "it ignores RoPE":
            q_pe = torch.zeros_like(q_pe)
        out, lse = right(q_nope, q_pe, kv, topk, counts, sm_scale, **options)
        if plant == "it rounds through bfloat16":
            out = out.bfloat16().half()
        if plant == "its lse has base 2":
            lse = lse * 1.4427
        if plant == "it leaves NaN for tokens without rows":
            out = torch.where(torch.isneginf(lse)[..., None], torch.nan, out)
        if plant == "it raises":
            raise RuntimeError("out of resource: shared memory\nmore")
        return out, lse

    shape = attention.Shape(5, 11, num_topk=num_topk, num_rows=200, kv_format=KVFormat(kv_format))
    (case,) = attention.cases(target(), [shape])
    with patch.object(attention.kernels, "sparse_mla_attention", wrong):
        return cases.run(case)


def check_indexer(plant: str) -> dict[str, Check]:
    """Check the smallest cases of the indexer with a planted kernel: the results by kind."""
    from functools import partial
    from unittest.mock import patch

    import torch
    from vllm.sm120.selftest import cases, indexer

    contiguous, paged = indexer.kernels.mqa_logits, indexer.kernels.paged_mqa_logits

    def wrong_contiguous(q, k, k_scale, weights, starts, ends, width, **options):
        if plant == "it loses the ReLU":
            logits = torch.einsum("th,thd,nd->tn", weights, q.float(), k.float()) * k_scale
            own = [row[start:end] for row, start, end in zip(logits, starts, ends, strict=True)]
            return torch.nn.utils.rnn.pad_sequence(own, batch_first=True)
        if plant == "it loses the scales":
            k_scale = torch.ones_like(k_scale)
        return contiguous(q, k, k_scale, weights, starts, ends, width, **options)

    def wrong_paged(q, cache, weights, lengths, tables, *rest, **options):
        if plant == "it reads the wrong page":
            tables[:2, 0] = tables[:2, 0].flip(0)
        return paged(q, cache, weights, lengths, tables, *rest, **options)

    runs = {
        "contiguous": (partial(indexer.check_contiguous, 3, 32, target()), indexer.LIMIT),
        "relu": (partial(indexer.check_relu, 32, target()), 0.0),
        "paged": (partial(indexer.check_paged, [65, 64, 63, 0], 32, 2, target()), indexer.LIMIT),
    }
    with (
        patch.object(indexer.kernels, "mqa_logits", wrong_contiguous),
        patch.object(indexer.kernels, "paged_mqa_logits", wrong_paged),
    ):
        return {name: cases.run(cases.Case("indexer", name, *run)) for name, run in runs.items()}


def check_selection(found: list[int]) -> int:
    """Return the wrong values in a selection of three out of 5, 7, 7, 7, 9, 9."""
    import torch
    from vllm.sm120.selftest.indexer import wrong_selections

    logits = torch.tensor([[5.0, 7.0, 7.0, 7.0, 9.0, 9.0, -torch.inf]])
    return wrong_selections(logits, torch.tensor([6]), torch.tensor([found]))


def count_configurations(capability: tuple[int, int]) -> tuple[int, int]:
    """Return how many launches are checked, and how many configurations vLLM's warm-up has for the same heads."""
    from vllm.sm120.selftest import attention, cases
    from vllm.v1.attention.ops.triton_mla_sparse_config import KVFormat, get_reachable_configs

    checked = {
        (shape.dtype, shape.kv_format, config)
        for shape in attention.every_configuration(cases.Target(capability, 188))
        for config in shape.launched(cases.Target(capability, 188))
    }
    reachable = {
        (dtype, kv_format, config)
        for dtype in attention.DTYPES
        for kv_format in KVFormat
        for heads in attention.HEADS
        for config in get_reachable_configs(heads, kv_format, capability)
    }
    return len(checked), len(reachable - checked)


def count_unions() -> tuple[int, int]:
    """Return how many neighbours of a prefill share enough rows to work on their union, and how many are left alone."""
    from vllm.sm120.selftest import attention
    from vllm.v1.attention.ops.triton_mla_sparse_config import MIN_PREFILL_TOKENS

    inputs = attention.make_inputs(attention.Shape(MIN_PREFILL_TOKENS, 1, is_prefill=True), target())
    counts = inputs.counts.tolist()
    rows = [set(row[:count].tolist()) - {-1} for row, count in zip(inputs.topk, counts, strict=True)]
    pairs = range(0, MIN_PREFILL_TOKENS, 2)
    shared = [8 * len(rows[token] & rows[token + 1]) >= counts[token] + counts[token + 1] for token in pairs]
    return sum(shared), len(shared) - sum(shared)


def read_all() -> list[tuple[int, int]]:
    """Return for every way of reading the sum that it finds in random values, and the right one."""
    import torch
    from vllm.sm120.selftest import rates

    found = []
    for tile, num_tiles, num_warps in rates.READS:
        source = torch.randint(1000, (3 * tile * num_tiles,), dtype=torch.int32)
        sums = source.new_empty(3)
        rates.read(source, sums, tile, num_tiles, num_warps)
        found.append((sums.sum().item(), source.sum().item()))
    return found


def compile_reads(arch: int) -> list[tuple[str, tuple[int, int]]]:
    """Return the PTX, and the registers and bytes spilled, of every way of reading."""
    import torch
    from vllm.sm120.selftest import rates

    from tests.kernels.compilation import resource_usage
    from tests.kernels.compile_launches import compile_launches

    source = torch.ones(3 * rates.MOST_READ, dtype=torch.int32)
    with compile_launches(arch) as compiled:
        for tile, num_tiles, num_warps in rates.READS:
            rates.read(source, source[:3], tile, num_tiles, num_warps)
    return [(kernel.asm["ptx"], resource_usage(kernel.asm["cubin"])) for _, kernel in compiled]


def watch_a_compilation() -> list[list[str]]:
    """Return what a worker has seen of one kernel of ours, compiled under vLLM's JIT monitor, and one of upstream's."""
    from types import SimpleNamespace

    import torch
    from vllm.utils import jit_monitor
    from vllm.v1.attention.ops.triton_merge_attn_states import merge_attn_states
    from vllm.v1.attention.ops.triton_mqa_logits import paged_mqa_schedule

    from tests.kernels.compile_launches import compile_launches

    worker = SimpleNamespace()
    jit_monitor.activate(verbose=True)
    engine.watch_compilations(worker)
    with compile_launches(90):
        paged_mqa_schedule(torch.full((2, 1), 100, dtype=torch.int32), 64, 4)
        states, lse = torch.zeros(4, 8, 128), torch.zeros(8, 4)
        merge_attn_states(states, states, lse, states, lse)
    return engine.take_compilations(worker)


@pytest.mark.parametrize("kv_format", ["16-bit", "fp8_e4m3", "fp8_ds_mla"])
def test_the_attention_kernel_is_right(interpreter, kv_format):
    check = interpreter.submit(check_attention, "", kv_format).result()
    assert check.status == PASSED, check
    assert 0 < check.value < check.limit


PLANTS = [
    "it loses a row",
    "it reads row 0 for -1",
    "it scales wrongly",
    "it ignores RoPE",
    "it rounds through bfloat16",
    "its lse has base 2",
    "it leaves NaN for tokens without rows",
    "it raises",
]


@pytest.mark.parametrize("plant", PLANTS)
def test_a_wrong_attention_kernel_is_noticed(interpreter, plant):
    check = interpreter.submit(check_attention, plant, "16-bit", 66).result()
    assert check.status == FAILED, check
    if plant == "it raises":
        assert check.detail == "RuntimeError: out of resource: shared memory"


def test_the_indexers_kernels_are_right(interpreter):
    checks = interpreter.submit(check_indexer, "").result()
    assert {check.status for check in checks.values()} == {PASSED}, checks


@pytest.mark.parametrize(
    ("plant", "seen_by"),
    [
        ("it loses the ReLU", {"contiguous", "relu"}),
        ("it loses the scales", {"contiguous"}),
        ("it reads the wrong page", {"paged"}),
    ],
)
def test_a_wrong_indexer_kernel_is_noticed(interpreter, plant, seen_by):
    checks = interpreter.submit(check_indexer, plant).result()
    assert {name for name, check in checks.items() if check.status == FAILED} == seen_by


def test_ties_may_be_selected_in_any_way(interpreter):
    for found in ([4, 5, 1], [3, 4, 5], [5, 2, 4]):
        assert interpreter.submit(check_selection, found).result() == 0
    assert interpreter.submit(check_selection, [1, 2, 4]).result() == 1


@pytest.mark.parametrize("found", [[4, 5, 5], [4, 5, -1], [4, 5, 6]], ids=["twice", "missing", "outside"])
def test_a_wrong_selection_is_noticed(interpreter, found):
    with pytest.raises(Exception, match="columns"):
        interpreter.submit(check_selection, found).result()


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_every_configuration_of_the_warm_up_is_checked(compiler, capability):
    num_checked, num_missing = compiler.submit(count_configurations, capability).result()
    assert num_checked > 20
    assert num_missing == 0


def test_prefills_have_neighbours_that_share_rows_and_some_that_do_not(interpreter):
    shared, alone = interpreter.submit(count_unions).result()
    assert min(shared, alone) > 10


# Rates


def test_what_measures_the_memory_reads_all_of_it(interpreter):
    for found, right in interpreter.submit(read_all).result():
        assert found == right


@pytest.mark.parametrize("arch", [80, 90, 120])
def test_it_reads_16_bytes_at_once_and_keeps_them_in_registers(compiler, arch):
    for ptx, (_, spilled) in compiler.submit(compile_reads, arch).result():
        loads = re.findall(r"ld\.global\S*", ptx)
        assert loads
        assert all(load.endswith("v4.b32") for load in loads), loads
        assert spilled == 0


def test_a_floor():
    from vllm.sm120.selftest.rates import Rates

    rates = Rates(read=2e12, copy=1e12, matmul=1e14, fp8_matmul=2e14)
    assert rates.floor(1e9, 1e9) == (500.0, "memory")
    assert rates.floor(0, 1e12) == (10_000.0, "compute")
    assert rates.floor(0, 1e12, rates.fp8_matmul) == (5_000.0, "compute")
    assert Rates(read=1e12, copy=2e12, matmul=1, fp8_matmul=1).floor(1e9, 0) == (500.0, "memory")


# Engines


def reference() -> dict[str, list[float]]:
    return {str(length): [-5.0 - i % 3 for i in range(len(tokens(length)) - 1)] for length in (SHORT, LONG)}


def answers(error: float = 0.0, beyond: float = 0.0) -> list[dict[str, Any]]:
    """Return what an engine gives that is off by `error`, and by `beyond` where a token sees more than top-k."""
    found = []
    for length in (SHORT, LONG):
        right = reference()[str(length)]
        off = [value + error + (beyond if i >= NUM_TOPK else 0) for i, value in enumerate(right)]
        found += [{"prompt": off[: length - 1]}, {"decoded": off[length - 1 :]}]
    return found


@pytest.mark.parametrize("dtype", engine.DTYPES)
@pytest.mark.parametrize(
    ("off", "failed"),
    [
        ({}, set()),
        ({"error": 0.001}, set()),
        ({"beyond": 0.2}, {"beyond top-k", "decoded"}),
        ({"error": 0.2}, {"prompt", "beyond top-k", "decoded"}),
        ({"error": float("nan")}, {"prompt", "beyond top-k", "decoded"}),
    ],
)
def test_log_probabilities_are_compared_where_they_say(dtype, off, failed):
    checks = engine.compare(dtype, answers(**off), reference())
    assert {check.stage for check in checks} == {f"engine {dtype}"}
    names = {check.name.removeprefix("log-probabilities, ") for check in checks if check.status == FAILED}
    assert names == failed


def worker(**changes: Any) -> dict[str, Any]:
    return {"backends": ["TRITON_MLA_SPARSE"], "graphs": "FULL_AND_PIECEWISE", "is_watched": True, **changes}


OURS = ["Triton", "sparse_mla_kernel", "vllm.v1.attention.ops.triton_mla_sparse"]
UPSTREAMS = [
    ["Triton", "fused_moe_kernel", "vllm.model_executor.layers.fused_moe.fused_moe"],
    ["CuTeDSL", "a_kernel", ""],
]


@pytest.mark.parametrize(
    ("changes", "compiled", "failed"),
    [
        ({}, [], []),
        ({"backends": ["FLASHMLA_SPARSE"]}, [], ["backend"]),
        ({"graphs": "NONE"}, [], ["CUDA graphs"]),
        ({"is_watched": False}, [], ["the JIT monitor watches"]),
        ({}, [OURS], ["compiled after the warm-up"]),
        ({}, UPSTREAMS, []),
        ({}, [*UPSTREAMS, OURS], ["compiled after the warm-up"]),
    ],
)
def test_how_an_engine_ran(changes, compiled, failed):
    checks = engine.check_engine("float16", worker(**changes), compiled)
    assert [check.name for check in checks if check.status == FAILED] == failed


@pytest.mark.parametrize(
    ("compiled", "detail"),
    [
        ([], ""),
        ([OURS, OURS], "sparse_mla_kernel (Triton)"),
        (UPSTREAMS, "upstream's, which is no failure: a_kernel (CuTeDSL), fused_moe_kernel (Triton)"),
        (
            [OURS, UPSTREAMS[1]],
            "sparse_mla_kernel (Triton); besides, upstream's, which is no failure: a_kernel (CuTeDSL)",
        ),
    ],
)
def test_what_was_compiled_late_is_told(compiled, detail):
    (check,) = (each for each in engine.check_engine("float16", worker(), compiled) if "compiled" in each.name)
    assert check.detail == detail
    checks = [*good_report().checks, check]
    assert (f"compiled after the warm-up: {detail[:20]}" in good_report(checks=checks).as_text()) is bool(detail)


def test_compilations_are_seen_with_their_modules(compiler):
    seen = compiler.submit(watch_a_compilation).result()
    assert [event[0] for event in seen] == ["Triton", "Triton"]
    assert [event[2] in engine.OUR_MODULES for event in seen] == [True, False], seen


def test_our_modules_are_all_that_have_kernels():
    """A module is ours if the overlay has it or a patch changes it."""
    import vllm

    patches = (path.read_text() for path in (ROOT / "patches" / "vllm").glob("*.patch"))
    paths = {path for patch in patches for path in re.findall(r"^\+\+\+ b/(vllm/\S+\.py)$", patch, re.MULTILINE)}
    overlay = ROOT / "overlay"
    paths |= {str(path.relative_to(overlay)) for path in overlay.glob("vllm/**/*.py")}
    package = Path(vllm.__file__).parents[1]
    texts = {path: (package / path).read_text() for path in paths if not path.startswith("vllm/sm120/")}
    kernels = {path for path, text in texts.items() if re.search(r"\b(triton|gluon)\.jit", text)}
    assert {path.removesuffix(".py").replace("/", ".") for path in kernels} == set(engine.OUR_MODULES)
    assert not {path for path, text in texts.items() if re.search(r"cute\.(jit|kernel)|tilelang\.jit", text)}


# The report


def good_report(**changes: Any) -> Report:
    checks = [Check(stage, "a case", PASSED, 1e-4, 1e-3) for stage in STAGES]
    fields = {
        "started": "2026-11-30T12:00:00Z",
        "hardware": {"gpu": "NVIDIA RTX PRO 6000", "capability": "12.0"},
        "versions": {"vllm": "0.33.0"},
        "provenance": [],
        "checks": checks,
        "timings": [TIMING],
        "rates": {"GB/s copied": 1500.0},
    }
    return Report(**{**fields, **changes})


def test_passed():
    assert good_report().verdict == PASSED
    assert good_report().exit == 0


def test_a_skipped_check_does_not_fail():
    checks = [*good_report().checks, Check(STAGES[0], "far rows", SKIPPED, detail="needs 5 GiB")]
    passed = good_report(checks=checks)
    assert passed.verdict == PASSED
    assert "skipped: far rows: needs 5 GiB" in passed.as_text()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"checks": [*good_report().checks, Check("top-k", "ties", FAILED, 3.0, 0.0)]}, "top-k: ties: 3.00e+00"),
        ({"checks": good_report().checks[:-1]}, "engine bfloat16: nothing passed"),
        ({"checks": []}, "sparse MLA: nothing passed"),
        ({"timings": []}, "no kernel was timed"),
    ],
)
def test_what_fails(changes, problem):
    failed = good_report(**changes)
    assert (failed.verdict, failed.exit) == (FAILED, 3)
    assert any(problem in line for line in failed.problems)
    assert problem in failed.as_text()


def test_the_file(tmp_path):
    checks = [*good_report().checks, Check("indexer", "NaN", FAILED, float("nan"), 1e-3)]
    good_report(checks=checks).write(tmp_path / "result.json")
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    content = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)
    assert content["schema"] == 1
    assert (content["verdict"], content["exit"]) == (FAILED, 3)
    assert content["checks"][-1]["value"] is None
    names = "schema verdict exit problems started hardware versions provenance checks rates timings engines seconds"
    assert list(content) == names.split()
    assert content["timings"] == [
        {"kernel": TIMING.kernel, "shape": TIMING.shape, "us": 8.4, "floor_us": 0.6, "bound": "memory"}
    ]


def test_the_text_says_what_was_tested(monkeypatch):
    def missing() -> None:
        raise ProvenanceError("/somewhere/provenance.json is missing: this is a source tree")

    build = {"name": "vllm-gguf-plugin", "version": "0.0.5+sm120.4", "patches": [{}] * 18}
    monkeypatch.setattr(selftest, "provenance", missing)
    monkeypatch.setattr(selftest, "plugin_provenance", lambda: build)
    lines = good_report(provenance=selftest.builds()).as_text().splitlines()
    assert lines[1:6] == [
        "Tested",
        "  NVIDIA RTX PRO 6000, compute capability 12.0",
        "  vllm 0.33.0",
        "  vllm: provenance missing: which patches it has is not known",
        "  vllm-gguf-plugin: 0.0.5+sm120.4, 18 patches",
    ]


def test_the_text_says_how_close_a_check_was():
    checks = [Check("indexer", name, PASSED, value, 1e-3) for name, value in (("a", 1e-4), ("b", 4e-4))]
    checks.append(Check("top-k", "ties", PASSED, 0.0, 0.0))
    lines = good_report(checks=checks).as_text().splitlines()
    assert "  indexer                2 passed, the worst at 40% of its limit" in lines
    assert "  top-k                  1 passed" in lines


def test_times_are_grouped_by_kernel():
    prefill = Timing("sparse MLA prefill", "2048 x 8 heads, float16, 16-bit", 1000.0, 190.0, "compute")
    lines = good_report(timings=[TIMING, prefill, TIMING]).as_text().splitlines()
    rows = [line.split() for line in lines if line.startswith("    ")]
    assert [row[-5:] for row in rows] == [
        ["8.4", "0.6", "7%", "of", "memory"],
        ["8.4", "0.6", "7%", "of", "memory"],
        ["1000.0", "190.0", "19%", "of", "compute"],
    ]
    assert sum(line.endswith("us  floor us  share") for line in lines) == 2


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    path.write_text("old")
    monkeypatch.setattr(report.json, "dumps", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        good_report().write(path)
    assert path.read_text() == "old"


def test_the_text_has_100_columns():
    timings = [TIMING, Timing("sparse MLA prefill", "2048 x 64 heads, bfloat16, fp8_ds_mla", 12345.6, 999.9, "compute")]
    skipped = Check(STAGES[0], "rows past 2^31 elements", SKIPPED, detail="needs " + "much more memory, " * 9)
    text = good_report(timings=timings, checks=[*good_report().checks, skipped]).as_text()
    assert max(map(len, text.splitlines())) <= 100
    assert text.splitlines()[-1] == "  passed in 0 s"


# Stages and the command


def test_a_stage_that_crashes(tmp_path):
    """What failed says how, and ends with the log."""
    crashed = child.Child("engine float16", tmp_path, "engine")  # without its arguments
    while not crashed.has_ended():
        time.sleep(0.05)
    assert crashed.take() == []
    assert crashed.failure().startswith("ended with 1 while starting")
    assert "ValueError: not enough values to unpack" in crashed.failure()


def test_a_stage_that_hangs_is_ended(tmp_path, monkeypatch):
    hanging = child.Child("model", tmp_path, "model", str(tmp_path / "model"))
    assert not hanging.has_ended()
    monkeypatch.setattr(child, "SILENCE", -1.0)
    assert hanging.has_ended()
    assert "no answer for" in hanging.failure()


def test_events_arrive_once_and_whole(tmp_path):
    stage = child.Child("some stage", tmp_path, "report")
    events = child.Events(tmp_path / "some-stage.jsonl")
    events.emit("doing", what="something")
    with (tmp_path / "some-stage.jsonl").open("a") as file:
        file.write('{"event": "do')
        file.flush()
        assert [event["what"] for event in stage.take()] == ["something"]
        file.write('ne"}\n')
    assert stage.take() == [{"event": "done"}]
    assert stage.take() == []
    stage.end()
    assert stage.failure() is None


class Scripted:
    """Stages that report what SCRIPT says."""

    def __init__(self, name: str, folder: Any, module: str, *arguments: str, **environment: str) -> None:
        self.name = name
        self._events = [dict(event) for event in SCRIPT[name]]

    def take(self) -> list[dict[str, Any]]:
        events, self._events = self._events, []
        return events

    def has_ended(self) -> bool:
        return True

    def failure(self) -> str | None:
        return SCRIPT.get(f"{self.name} fails")

    def end(self) -> None:
        pass


def event(kind: str, **content: Any) -> dict[str, Any]:
    return {"event": kind, **content}


def case(stage: str) -> dict[str, Any]:
    checked = {"stage": stage, "name": "a case", "status": PASSED, "value": 1e-4, "limit": 1e-3, "detail": ""}
    return event("check", **checked)


ANSWERS = event("answers", worker=worker(), compiled=UPSTREAMS, content=answers())
GOOD = {
    "model": [event("saved"), event("reference", content=reference()), event("done")],
    "kernels": [
        event("hardware", content={"l2_mib": 128}),
        event("step", what="compiling 26 kernels"),
        *map(case, STAGES[:3]),
        event("done"),
    ],
    "engine float16": [event("step", what="starting the engine"), ANSWERS, event("done")],
    "engine bfloat16": [ANSWERS, event("done")],
    "timing": [event("rates", content={"GB/s copied": 1.0}), event("timing", **vars(TIMING)), event("done")],
}
SCRIPT: dict[str, Any] = {}


@pytest.fixture
def scripted(monkeypatch):
    gpu = Gpu("NVIDIA RTX PRO 6000", (12, 0), 96 << 30, "the driver of this machine")
    monkeypatch.setattr(gpus, "_local", lambda: gpu)
    monkeypatch.setattr(selftest, "host", lambda: {"driver": "999.1"})
    monkeypatch.setattr(selftest, "Child", Scripted)
    monkeypatch.setattr(selftest, "_POLL", 0.0)
    SCRIPT.clear()
    SCRIPT.update(GOOD)


def run(capsys, path: Any, *, as_json: bool = False) -> tuple[int, dict[str, Any], str]:
    code = selftest.run(Namespace(output=str(path), json=as_json))
    return code, json.loads(path.read_text()), capsys.readouterr().out


@pytest.mark.usefixtures("scripted")
def test_everything_is_right(tmp_path, capsys):
    code, content, out = run(capsys, tmp_path / "result.json")
    assert code == 0
    assert content["verdict"] == PASSED
    assert {check["stage"] for check in content["checks"]} == set(STAGES)
    assert content["hardware"] == {
        "gpu": "NVIDIA RTX PRO 6000",
        "capability": "12.0",
        "driver": "999.1",
        "l2_mib": 128,
    }
    assert set(content["engines"]) == set(engine.DTYPES)
    assert "kernels: compiling 26 kernels" in out
    assert "engine float16: starting the engine" in out
    assert "passed in" in out


@pytest.mark.usefixtures("scripted")
def test_json_alone_on_stdout(tmp_path, capsys):
    code, content, out = run(capsys, tmp_path / "result.json", as_json=True)
    assert code == 0
    assert json.loads(out) == content


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("stage", [name for name in GOOD if name != "timing"])
def test_a_stage_that_dies_fails_the_test(tmp_path, capsys, stage):
    SCRIPT[stage] = []
    SCRIPT[f"{stage} fails"] = "ended with -11 while checking a kernel\nSegmentation fault"
    code, content, out = run(capsys, tmp_path / "result.json")
    assert code == 3
    assert f"FAILED {stage}: the stage: ended with -11 while checking a kernel" in out
    assert any("Segmentation fault" in check["detail"] for check in content["checks"])
    assert content["timings"], "what is left is still measured"


@pytest.mark.usefixtures("scripted")
def test_a_gpu_that_pytorch_cannot_use(tmp_path):
    SCRIPT["kernels"] = [event("unusable", problem="PyTorch 2.14 finds no CUDA GPU")]
    with pytest.raises(DoctorError, match="finds no CUDA GPU"):
        selftest.run(Namespace(output=str(tmp_path / "result.json"), json=False))


def test_without_a_gpu(monkeypatch, capsys):
    from vllm.third_party import pynvml

    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert doctor.main(["--selftest"]) == 2
    error = capsys.readouterr().err
    assert "error: no usable GPU: this machine has no NVIDIA GPU" in error
    assert "cure: " in error


def test_a_gpu_that_is_too_old(monkeypatch, capsys):
    monkeypatch.setattr(gpus, "_local", lambda: Gpu("Tesla T4", (7, 5), None, ""))
    assert doctor.main(["--selftest"]) == 2
    assert "Tesla T4 has compute capability 7.5, expected 8.0 or newer" in capsys.readouterr().err


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("output", ["missing/result.json", "."])
def test_a_file_that_cannot_be_written(tmp_path, output):
    with pytest.raises(DoctorError, match="is not a file that can be written"):
        selftest.run(Namespace(output=str(tmp_path / output), json=False))


def test_the_name_of_the_file():
    assert selftest.default_file("NVIDIA GeForce RTX 5090") == "vllm-selftest-geforce-rtx-5090.json"
    assert selftest.default_file("NVIDIA H200") == "vllm-selftest-h200.json"
