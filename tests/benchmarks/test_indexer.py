"""The indexer benchmark as far as it needs no GPU: shapes, inputs, reference, command line, report."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import indexer, report
from benchmarks import indexer_workload as workload
from benchmarks.indexer_workload import HEAD_DIM, PAGE, PAGE_BYTES, Pool, Shape


def parse(monkeypatch: pytest.MonkeyPatch, *arguments: str, gpu: bool = True):
    monkeypatch.setattr(sys, "argv", ["indexer", *arguments])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    return indexer.parse()


@pytest.mark.parametrize("part", [["--quick"], ["--batch", "1"], ["--heads", "64"], ["--kind", "decode"]])
def test_part_of_the_shapes_does_not_replace_the_results_of_all(monkeypatch, capsys, part):
    with pytest.raises(SystemExit):
        parse(monkeypatch, *part, "--results", "results")
    assert "--output FILE" in capsys.readouterr().err
    assert parse(monkeypatch, *part, "--output", "part.json")[1] == Path("part.json")


def test_a_full_run_is_all_shapes_and_names_its_file_after_the_gpu(monkeypatch):
    args, output = parse(monkeypatch, "--results", "results")
    assert output == Path("results/indexer-h200.json")
    shapes = list(workload.shapes(args.kind, args.batch, args.context, args.heads))
    assert len(set(shapes)) == len(shapes)
    plain = [shape for shape in shapes if shape.next_n == 1]
    assert len(plain) == 3 * 2 + 8 * 3 * 2
    assert {shape.next_n for shape in shapes} == {1, 2, 4}
    assert all(shape.batch == 4096 for shape in shapes if shape.kind == "prefill")


def test_without_a_gpu_it_says_so(monkeypatch):
    with pytest.raises(SystemExit, match="no CUDA GPU"):
        parse(monkeypatch, gpu=False)


def test_contexts_are_whole_pages(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parse(monkeypatch, "--context", "100", "--output", "part.json")
    assert "multiples of 64" in capsys.readouterr().err


@pytest.mark.parametrize("shape", [Shape("prefill", 3, 10, 2), Shape("decode", 5, 128, 4, next_n=3)], ids=str)
def test_operations_are_those_of_the_keys_that_are_seen(shape):
    if shape.kind == "prefill":
        seen = int(workload.make_prefill(shape, calls=1, device="cpu")[0].ends.sum())
    else:
        seen = int(Pool(10, 0, "cpu").make_decode(shape, calls=1)[0].context_lens.sum())
    assert shape.flop == 2 * HEAD_DIM * shape.heads * seen


def test_a_prefill_is_the_end_of_a_prompt():
    calls = workload.make_prefill(Shape("prefill", 16, 100, 4), device="cpu")
    assert len(calls) == workload.PREFILL_CALLS
    assert calls[0].ends.tolist() == list(range(85, 101))
    assert not calls[0].starts.any()
    assert calls[0].k.data_ptr() != calls[1].k.data_ptr()


def test_requests_share_no_page_and_calls_do_not_find_theirs_in_l2():
    shape = Shape("decode", 4, 4 * PAGE, 2, next_n=2)
    l2_bytes = 10 * shape.pages * PAGE_BYTES
    pool = Pool(50 * shape.pages, l2_bytes, "cpu")
    calls = pool.make_decode(shape)
    read = torch.cat([call.block_tables.flatten() for call in calls])
    assert len(read) * PAGE_BYTES > 4 * l2_bytes
    assert len(read.unique()) == len(read)
    assert calls[0].block_tables.dtype == torch.int32
    assert calls[0].context_lens.tolist() == [[255, 256]] * 4


def test_few_pages_are_used_over_and_over():
    shape = Shape("decode", 4, 4 * PAGE, 2)
    (call,) = Pool(5, 0, "cpu").make_decode(shape, calls=1)
    assert call.block_tables.shape == (4, 4)
    assert set(call.block_tables.flatten().tolist()) == set(range(5))


def test_the_floor_reads_each_byte_of_the_pages_once():
    (call,) = Pool(30, 0, "cpu").make_decode(Shape("decode", 2, 5 * PAGE, 2), calls=1)
    rows, (lists,) = workload.pieces([call])
    assert lists.dtype == torch.int32
    assert rows.view(torch.int32).shape[1] % 32 == 0, "whole cache lines"
    pages = call.cache.flatten(1)[call.block_tables[1].long()]
    assert torch.equal(rows[lists[1].long()].flatten(), pages.flatten())


def test_reference_of_a_decode_is_that_of_a_prefill_over_the_same_keys():
    torch.manual_seed(0)
    shape = Shape("decode", 3, 3 * PAGE, 4, next_n=2)
    (decode,) = Pool(20, 0, "cpu").make_decode(shape, calls=1)
    expected = indexer.reference(decode, [0, 3, 5])
    for token, logits in expected.items():
        k, k_scale = decode.keys(token)
        assert len(logits) == len(k) == 3 * PAGE - 1 + token % 2
        q, weights = decode.q.flatten(0, 1)[token].double(), decode.weights[token].double()
        n = 70
        products = [max(0.0, float(q[head] @ k[n].double())) * float(weights[head]) for head in range(4)]
        assert float(logits[n]) == pytest.approx(sum(products) * float(k_scale[n]), rel=1e-9)
        page = decode.cache[decode.block_tables[token // 2, 1]].flatten()
        assert torch.equal(page[6 * HEAD_DIM : 7 * HEAD_DIM], k[n].view(torch.uint8))
        assert torch.equal(page[PAGE * HEAD_DIM :].view(torch.float32)[6], k_scale[n])


def test_some_tokens_are_the_first_and_the_last_as_well():
    assert workload.some_tokens(Shape("decode", 1, 64, 2)) == [0]
    assert workload.some_tokens(Shape("decode", 2, 64, 2, next_n=2)) == [0, 1, 2, 3]
    tokens = workload.some_tokens(Shape("prefill", 4096, 8192, 2))
    assert len(set(tokens)) == 8
    assert (tokens[0], tokens[-1]) == (0, 4095)


@pytest.mark.parametrize("value", [1.1, float("nan")])
def test_wrong_logits_are_refused(value):
    expected = {3: torch.ones(5, dtype=torch.float64), 1: torch.ones(2, dtype=torch.float64)}
    logits = torch.full((4, 6), float("nan"))
    for token, values in expected.items():
        logits[token, : len(values)] = 1
    assert indexer.check("Triton", logits, expected) == 0
    logits[1, 1] = value
    with pytest.raises(indexer.WrongResultError, match="Triton: relative L2 error"):
        indexer.check("Triton", logits, expected)


def test_shapes_that_do_not_fit_are_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 << 30, 2 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("Gpu", (), {"L2_cache_size": 1 << 20}))
    monkeypatch.setattr(indexer, "Pool", lambda num_pages, l2_bytes: num_pages)
    shapes = list(workload.shapes(indexer.KINDS, [1, 128], [8192, 131_072], [64]))
    benchmark = indexer.Benchmark(shapes)
    kept = {(shape.kind, shape.batch, shape.context) for shape in benchmark.shapes}
    assert kept == {("prefill", 4096, 8192), *(("decode", batch, 8192) for batch in (1, 128)), ("decode", 1, 131_072)}
    reason = benchmark.shapes_left_out["decode 128 x 131072, 64 heads, next_n 1"]
    assert reason == "needs 2.1 GiB, of which 1.6 GiB may be used"
    assert benchmark.pool == 128 * 8192 // PAGE


# The report


def row(kind: str, batch: int, us: float, dtype: str = "fp8", **more: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "batch": batch,
        "context": 8192,
        "heads": 64,
        "next_n": 1,
        "dtype": dtype,
        "us": us,
        "deepgemm": "2.8.0",
        "deepgemm_us": 10.0,
        "ratio": us / 10,
        "floor_us": 5.0,
        "bound": "memory",
        "share_of_floor": 5 / us,
        "config": {"block_n": 128, "num_warps": 4, "maxnreg": None},
    } | more


def result() -> dict[str, Any]:
    missing = {"deepgemm": None, "deepgemm_us": None, "ratio": None}
    return {
        "hardware": {"gpu": "NVIDIA H200", "capability": "9.0"},
        "versions": {"triton": "3.8.0"},
        "matmul_tflops": {"fp8": 1300.0, "fp8 (software)": 700.0},
        "peers_left_out": {"DeepGEMM prefill": "no nvcc"},
        "shapes_left_out": {"decode 128": "needs more"},
        "rows": [
            row("prefill", 4096, 2000.0, **missing),
            row("decode", 1, 8.0, schedule_us=2.0, deepgemm_schedule_us=3.0),
            row("decode", 8, 20.0),
            row("decode", 8, 25.0, next_n=2),
            row("decode", 1, 12.0, "fp8 (software)"),
        ],
    }


def test_tables_say_all_that_was_measured():
    sections = report.indexer_report(result()).split("\n## ")
    titles = [section.splitlines()[0] for section in sections[1:]]
    assert titles == ["prefill, fp8", "decode, fp8", "decode, fp8 (software)", "Left out"]
    assert "1300.0 TFLOP/s for fp8, 700.0 TFLOP/s for fp8 (software)" in sections[0]
    assert "| 4096 | 8192 | 64 | 2000.0 |  |  | 5.0 | 0% | memory | block_n 128, num_warps 4 |" in sections[1]
    assert "| 1 | 1 | 8192 | 64 | 8.0 | 10.0 | 0.8 | 5.0 | 62% | memory | 2.0 | 3.0 | block_n 128" in sections[2]
    assert "schedule" not in sections[3]
    assert "| DeepGEMM prefill | no nvcc |" in sections[4]
    assert "| decode 128 | needs more |" in sections[4]


def test_lines_of_the_plot():
    rows = [one for one in result()["rows"] if (one["kind"], one["next_n"]) == ("decode", 1)]
    assert report.indexer_lines(rows) == {
        "ours": [(1, 8.0), (8, 20.0)],
        "DeepGEMM": [(1, 10.0), (8, 10.0)],
        "floor": [(1, 5.0), (8, 5.0)],
        "ours, e4m3 in software": [(1, 12.0)],
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "indexer-h200.json").write_text(json.dumps(result()))
    (tmp_path / "indexer-h200.partial.json").write_text("not for the report")
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path)])
    return tmp_path


def test_a_folder_of_indexer_results_alone_has_a_report(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="matplotlib"):
        report.main()
    assert [path.name for path in folder.glob("*.md")] == ["indexer-h200.md"]


def test_the_plot_is_written(folder):
    pytest.importorskip("matplotlib", reason="matplotlib (benchmarks/requirements.txt) is not installed")
    report.main()
    (plot,) = folder.glob("*.png")
    assert plot.name == "indexer-h200.png"
    assert plot.read_bytes().startswith(b"\x89PNG")
