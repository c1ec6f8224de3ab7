"""The synthetic GGUF file of the load benchmark: a valid model of the wanted size."""

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
