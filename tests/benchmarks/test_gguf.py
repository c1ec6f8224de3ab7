"""The synthetic GGUF file of the benchmarks, a valid model of the wanted size, and how engines are timed in turns."""

import sys
import textwrap
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from tests.gguf import tiny


@pytest.fixture
def benchmark(monkeypatch):
    """The benchmark with a model of a few megabytes."""
    from benchmarks import gguf as benchmark

    monkeypatch.setattr(benchmark, "CONFIG", tiny.CONFIG | {"num_hidden_layers": 3})
    monkeypatch.setattr(benchmark, "CHUNK_VALUES", 1 << 14)
    return benchmark


@pytest.mark.parametrize("size", [20e9, 8e9])
def test_size(size):
    from benchmarks import gguf as benchmark

    tensors = benchmark.tensors(benchmark.choose_config(int(size)))
    total = sum(benchmark.num_bytes(*tensor) for tensor in tensors.values())
    assert 0.8 * size <= total <= size
    assert {weight_type for _, weight_type in tensors.values()} == {Q.F32, Q.Q8_0, Q.Q4_K}


def test_the_plugin_takes_the_file(benchmark, tmp_path):
    from vllm_gguf_plugin import glm_dsa_config
    from vllm_gguf_plugin.gguf_files import find_files, read_headers
    from vllm_gguf_plugin.weights_adapter.glm_dsa import plan_loading

    path = tmp_path / "model.gguf"
    benchmark.write(path, benchmark.CONFIG)
    model = read_headers(find_files(str(path)))
    config = SimpleNamespace(**glm_dsa_config.build(model))
    plan = plan_loading(model, config, is_draft=False, tp_size=1)
    loaded = [tensor for load in plan.loads for tensor in load.tensors]
    assert len(loaded) == len(model.tensors) == len(benchmark.tensors(benchmark.CONFIG))
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(values).all()
        assert 0.5 < values.std() / benchmark.DEVIATION < 2, tensor.name


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Let a script stand for Python, so that it is started instead of an engine."""

    def stand_in(measure: str) -> None:
        script = tmp_path / "python"
        script.write_text(
            textwrap.dedent(
                """\
                #!/bin/sh
                # -m benchmarks.gguf run-engine PATH --dtype DTYPE
                dtype=$6
                echo "$dtype starts" >&2
                echo "{\\"dtype\\": \\"$dtype\\", \\"backend\\": \\"B\\"}"
                """
            )
            + measure
        )
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return stand_in


def test_engines_are_timed_in_turns(engine, tmp_path, capfd):
    from benchmarks.gguf import MEASUREMENTS, measure_dtypes

    engine(f"""
        for step in {" ".join(MEASUREMENTS)}; do
            read line
            echo "$dtype $step" >> {tmp_path}/order
            echo "{{\\"dtype\\": \\"$dtype\\", \\"$step\\": 1}}"
        done
        echo "{{\\"dtype\\": \\"$dtype\\", \\"memory\\": 2}}"
    """)
    kept = []
    measure_dtypes(tmp_path, None, kept.append)
    order = [f"{dtype} {step}" for step in MEASUREMENTS for dtype in ("float16", "bfloat16")]
    assert (tmp_path / "order").read_text().splitlines() == order
    assert [len(rows) for rows in kept] == [2] * (len(order) + 2)
    for row, dtype in zip(kept[-1], ("float16", "bfloat16"), strict=True):
        steps = dict.fromkeys(MEASUREMENTS, 1)
        assert row == {"dtype": dtype, "backend": "B", **steps, "memory": 2, "error": None, "error_past_topk": None}
    assert "[bfloat16] bfloat16 starts" in capfd.readouterr().out


def test_what_was_measured_is_kept_where_an_engine_fails(engine, tmp_path, capfd):
    from benchmarks.gguf import measure_dtypes

    engine("""
        read line
        echo "{\\"dtype\\": \\"$dtype\\", \\"prefill\\": 1}"
        read line
        echo out of memory >&2
        exit 7
    """)
    kept = []
    with pytest.raises(SystemExit, match="the engine in float16 ended with 7"):
        measure_dtypes(tmp_path, None, kept.append)
    assert kept[-1][0]["prefill"] == 1
    assert "[float16] out of memory" in capfd.readouterr().out
