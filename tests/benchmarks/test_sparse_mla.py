"""The command line of the kernel benchmark, and what `make bench` runs."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import peers, sparse_mla, workload
from benchmarks.workload import Shape
from tests.kernels.overlay import OVERLAY

ROOT = OVERLAY.parent


def parse(monkeypatch: pytest.MonkeyPatch, *arguments: str, gpu: bool = True):
    monkeypatch.setattr(sys, "argv", ["sparse_mla", *arguments])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    return sparse_mla.parse()


@pytest.mark.parametrize("part", [["--quick"], ["--tokens", "1"], ["--heads", "8"], ["--kv", "fp8_ds_mla"]])
def test_part_of_the_shapes_does_not_replace_the_results_of_all(monkeypatch, capsys, part):
    with pytest.raises(SystemExit):
        parse(monkeypatch, *part, "--results", "results")
    assert "--output FILE" in capsys.readouterr().err
    assert parse(monkeypatch, *part, "--output", "part.json")[1] == Path("part.json")


def test_a_full_run_is_all_shapes_and_names_its_file_after_the_gpu(monkeypatch):
    args, output = parse(monkeypatch, "--results", "results")
    assert output == Path("results/sparse-mla-h200.json")
    shapes = list(workload.shapes(args.tokens, args.heads, args.dtype, args.kv))
    assert len(shapes) == 7 * 5 * 2 * 3


def test_16_bit_comes_first_for_fp8_to_be_compared_with(monkeypatch):
    args, _ = parse(monkeypatch, "--kv", "fp8_ds_mla", "16-bit")
    assert args.kv == ["16-bit", "fp8_ds_mla"]


def test_without_a_gpu_it_says_so(monkeypatch):
    with pytest.raises(SystemExit, match="no CUDA GPU"):
        parse(monkeypatch, gpu=False)


@pytest.mark.parametrize("value", [1.1, float("nan")])
def test_wrong_results_are_refused(value: float) -> None:
    expected = torch.ones(4, dtype=torch.float64)
    assert sparse_mla.check("kernel", expected.half(), expected, 1e-3) == 0
    wrong = expected.clone()
    wrong[0] = value
    with pytest.raises(sparse_mla.WrongResultError, match="kernel: relative L2 error"):
        sparse_mla.check("kernel", wrong, expected, 1e-3)


def test_dense_pages_hold_as_many_rows_of_the_same_request() -> None:
    lists = workload.decode_lists("cpu", num_topk=128, rows_per_request=512)[:5]
    pool = workload.make_pool("16-bit", torch.float16, 8, "cpu")
    (inputs,) = workload.make_inputs(Shape(5, 8, "float16", "16-bit"), pool, [lists])
    rows = peers.dense_rows(inputs).topk
    assert rows.shape == lists.shape
    assert (rows.diff(dim=1) == 1).all()
    assert torch.equal(rows // 512, lists // 512)
    pages = peers.dense_inputs(inputs).topk
    assert pages.dtype == torch.int32
    offsets = torch.arange(peers.PAGE)
    assert torch.equal((pages[..., None] * peers.PAGE + offsets).flatten(1), rows.long())


@pytest.mark.parametrize(("shape", "served"), [
    (Shape(8, 8, "float16", "16-bit"), {"FLASH_ATTN_MLA_SPARSE", "TRITON_MLA dense", "XPU_MLA_SPARSE"}),
    (Shape(2048, 8, "float16", "16-bit", "overlap", True), {"FLASH_ATTN_MLA_SPARSE", "XPU_MLA_SPARSE"}),
    (Shape(8, 8, "bfloat16", "fp8_e4m3"), {"TRITON_MLA dense"}),
    (Shape(8, 8, "float16", "fp8_ds_mla"), set()),
])  # fmt: skip
def test_peers_say_what_they_do_not_serve(monkeypatch, shape, served):
    """A peer that serves the shape goes on to what needs a GPU, and fails there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    pool = SimpleNamespace(kv=shape.kv, rows=None, scale=None)
    refused = set()
    for peer in peers.PEERS:
        try:
            answer = peer.make_call(shape, pool, None)
        except Exception:
            continue
        if isinstance(answer, peers.Unavailable):
            assert answer.reason
            refused.add(peer.name)
    assert {peer.name for peer in peers.PEERS} - refused == served


def test_tilelang_is_named_with_the_reason() -> None:
    assert "no sparse MLA kernel" in peers.never_run()["tilelang"]


@pytest.mark.parametrize("capability", [(9, 0), (12, 0)])
def test_make_bench_runs_tests_benchmarks_and_report_in_this_order(monkeypatch, capability):
    calls = []
    failing = ""

    def fake(command: list[str], **_: object) -> SimpleNamespace:
        calls.append(command[2])
        return SimpleNamespace(returncode=int(command[2] == failing))

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(bench, "problem", lambda: "")
    monkeypatch.setattr(bench.subprocess, "run", fake)
    bench.main()
    engine = ["benchmarks.engine"] if capability[0] == 9 else []
    assert calls == ["pytest", "benchmarks.sparse_mla", "benchmarks.indexer", *engine, "benchmarks.report"]
    calls.clear()
    failing = "benchmarks.sparse_mla"
    with pytest.raises(SystemExit, match=r"benchmarks\.sparse_mla .*failed"):
        bench.main()
    assert calls == ["pytest", "benchmarks.sparse_mla"], "what follows a failure is not run"


def test_make_bench_needs_vllm_and_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: object())
    assert bench.problem().startswith("error: no CUDA GPU here\ncure: ")
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None if name == "vllm" else object())
    assert "vllm is not installed" in bench.problem()


def test_make_bench_is_this_command() -> None:
    result = subprocess.run(["make", "-n", "bench"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.search(r"^\.venv/bin/python -m benchmarks$", result.stdout, re.MULTILINE)
