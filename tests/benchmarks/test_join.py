"""Joining the parts of a benchmark."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import join

HEADER = {
    "hardware": {"gpu": "NVIDIA H200"},
    "versions": {"triton": "3.8.0"},
    "commit": "0123abc",
    "date": "2026-11-30",
    "neighbour_overlap": {"random": 0.016},
}


def part(dtype: str, rate: float, **header: Any) -> dict[str, Any]:
    rows = [
        {"kv": kv, "dtype": dtype, "tokens": tokens, "indices": "random", "heads": 8, "capability": "9.0", "us": rate}
        for kv in ("16-bit", "fp8_ds_mla")
        for tokens in (8, 1)
    ]
    own = {
        "matmul_tflops": {"bfloat16": rate, "float16": rate},
        "peers_left_out": {dtype: "why"},
        "failures": [dtype],
        "rows": rows,
    }
    return HEADER | own | header


def run(monkeypatch: pytest.MonkeyPatch, *arguments: Path | str) -> None:
    monkeypatch.setattr(sys, "argv", ["join", *map(str, arguments)])
    join.main()


def test_rows_stand_as_in_a_whole_run_and_rates_come_from_their_gpu(tmp_path, monkeypatch) -> None:
    files = tmp_path / "float16.json", tmp_path / "bfloat16.json"
    for file, one in zip(files, (part("float16", 700.0), part("bfloat16", 800.0)), strict=True):
        file.write_text(json.dumps(one))
    run(monkeypatch, *files, "--output", tmp_path / "out.json")
    joined = json.loads((tmp_path / "out.json").read_text())
    assert [(row["kv"], row["dtype"], row["tokens"]) for row in joined["rows"]] == [
        (kv, dtype, tokens) for kv in ("16-bit", "fp8_ds_mla") for dtype in ("bfloat16", "float16") for tokens in (8, 1)
    ]
    assert joined["matmul_tflops"] == {"bfloat16": 800.0, "float16": 700.0}
    assert joined["parts"] == 2
    assert joined["failures"] == ["float16", "bfloat16"]
    assert joined["peers_left_out"] == {"float16": "why", "bfloat16": "why"}
    assert {key: joined[key] for key in HEADER} == HEADER


@pytest.mark.parametrize("field", join.SAME)
def test_parts_of_different_runs_are_refused(field: str) -> None:
    other = part("float16", 700.0, **{field: "another"})
    with pytest.raises(join.PartsError, match=rf"b\.json: its {field}"):
        join.join({"a.json": part("bfloat16", 800.0), "b.json": other})


def test_a_row_in_two_parts_is_refused() -> None:
    with pytest.raises(join.PartsError, match=r"in a\.json as well"):
        join.join({"a.json": part("float16", 1.0), "b.json": part("float16", 2.0)})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{}]}'])
def test_a_file_that_is_no_result_is_an_error_and_nothing_is_written(tmp_path, monkeypatch, text) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(SystemExit, match="not a result"):
        run(monkeypatch, tmp_path / "a.json", "--output", tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()
