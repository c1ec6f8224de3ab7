"""Tables and plots of result files."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report

HEADER = {
    "hardware": {"gpu": "NVIDIA H200", "capability": "9.0"},
    "versions": {"triton": "3.8.0"},
    "commit": "0123abc",
    "date": "2026-11-29",
}


def row(tokens: int, us: float, capability: str = "9.0", indices: str = "random", **more: Any) -> dict[str, Any]:
    config = {
        "block_h": 16,
        "block_n": 64,
        "num_warps": 4,
        "num_stages": 3,
        "group": 2,
        "gluon": "mma",
        "num_splits": 8,
    }
    return {
        "tokens": tokens,
        "heads": 8,
        "dtype": "bfloat16",
        "kv": "16-bit",
        "topk": 2048,
        "indices": indices,
        "table": "9.0" if capability == "9.0" else "default",
        "capability": capability,
        "us": us,
        "native": "FLASH_ATTN_MLA_SPARSE",
        "native_us": 20.0,
        "ratio": us / 20,
        "floor_us": 5.0,
        "bound": "memory",
        "share_of_floor": 5 / us,
        "config": config,
    } | more


def kernel_result() -> dict[str, Any]:
    peers = {"FLASH_ATTN_MLA_SPARSE": 20.0, "XPU_MLA_SPARSE": 77.0}
    rows = [
        row(1, 10.0, peers=peers),
        row(1, 11.0, "12.0"),
        row(2048, 1000.0, peers={}),
        row(2048, 600.0, indices="overlap", peers={}),
        row(1, 8.0, kv="fp8_ds_mla", native=None, native_us=None, ratio=None, ratio_to_16bit=0.8, peers={}),
    ]
    common = {
        "matmul_tflops": {"bfloat16": 700.0},
        "neighbour_overlap": {"overlap": 0.875},
        "peers_left_out": {"tilelang": "not installed"},
    }
    return HEADER | common | {"rows": rows}


def test_kernel_tables_say_all_that_was_measured() -> None:
    text = report.kernel_report(kernel_result())
    sections = text.split("\n## ")
    assert [section.splitlines()[0] for section in sections[1:]] == [
        "bfloat16, 16-bit KV cache",
        "bfloat16, 16-bit KV cache, configurations of 12.0 (table: default)",
        "bfloat16, fp8_ds_mla KV cache",
        "Not compared",
    ]
    for word in ("NVIDIA H200", "triton 3.8.0", "0123abc", "2026-11-29", "700.0 TFLOP/s", "87.5%"):
        assert word in sections[0]
    own = sections[1].splitlines()
    assert own[2].startswith("| tokens | heads | rows | us | FLASH_ATTN_MLA_SPARSE | XPU_MLA_SPARSE | ratio")
    assert own[4] == (
        "| 1 | 8 | random | 10.0 | 20.0 | 77.0 | 0.5 | 5.0 | 50% | memory | 16x64, 2 tokens, w4 s3 mma, 8 splits |"
    )
    assert "| 2048 | 8 | overlap | 600.0 |  |  | 30.0 |" in sections[1]
    assert "| 1 | 8 | random | 11.0 | 0.55 |" in sections[2]
    assert "ratio to 16-bit" in sections[3]
    assert "| 0.8 |" in sections[3]
    assert "ratio to 16-bit" not in sections[1]
    assert "| tilelang | not installed |" in sections[4]


def test_lines_of_a_plot() -> None:
    rows = [one for one in kernel_result()["rows"] if one["kv"] == "16-bit"]
    assert report.lines(rows, own="9.0") == {
        "ours": [(1, 10.0), (2048, 1000.0)],
        "floor": [(1, 5.0), (2048, 5.0)],
        "FLASH_ATTN_MLA_SPARSE": [(1, 20.0)],
        "XPU_MLA_SPARSE": [(1, 77.0)],
        "ours, as on 12.0": [(1, 11.0)],
        "ours, shared rows": [(2048, 600.0)],
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sparse-mla-h200.json").write_text(json.dumps(kernel_result()))
    (tmp_path / "sparse-mla-h200.partial.json").write_text("not for the report")
    engine = HEADER | {"rows": [{"model": "tiny", "dtype": "float16"}, {"model": "tiny", "backends": ["A", "B"]}]}
    (tmp_path / "engine-h200.json").write_text(json.dumps(engine))
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path)])
    return tmp_path


def test_tables_are_written_without_matplotlib_and_its_absence_is_said(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"matplotlib\ncure: pip install -r benchmarks/requirements.txt"):
        report.main()
    assert {path.name for path in folder.glob("*.md")} == {"sparse-mla-h200.md", "engine-h200.md"}
    engine = (folder / "engine-h200.md").read_text()
    assert "| model | dtype | backends |" in engine
    assert "| tiny |  | A, B |" in engine


def test_plots_are_written_for_each_dtype_and_format(folder):
    pytest.importorskip("matplotlib", reason="matplotlib (benchmarks/requirements.txt) is not installed")
    report.main()
    plots = sorted(folder.glob("*.png"))
    assert [plot.name for plot in plots] == [
        "sparse-mla-h200-bfloat16-16-bit.png",
        "sparse-mla-h200-bfloat16-fp8_ds_mla.png",
    ]
    assert all(plot.read_bytes().startswith(b"\x89PNG") for plot in plots)


def test_results_of_another_benchmark_are_refused(folder):
    (folder / "sparse-mla-h200.json").write_text(json.dumps(HEADER | {"rows": [{"tokens": 1, "triton_us": 2}]}))
    with pytest.raises(SystemExit, match=r"sparse-mla-h200\.json has no rows of this benchmark"):
        report.main()


def test_an_empty_folder_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path)])
    with pytest.raises(SystemExit, match="cure: `make bench`"):
        report.main()
