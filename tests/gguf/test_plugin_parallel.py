"""Weights divided among GPUs: vLLM's own linear layers with the plugin's parameters, one rank at a time."""

from types import SimpleNamespace

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Q

HIDDEN = 512


@pytest.fixture
def rank(monkeypatch):
    """Make the layers believe in another rank: `rank(1, 2)` is the second of two."""
    import vllm.model_executor.layers.linear as linear
    import vllm.model_executor.parameter as parameter

    def become(index: int, size: int) -> None:
        for module in (linear, parameter):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: index)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size)

    become(0, 1)
    return become


def blocks(rows: int, weight_type: Q, columns: int = HIDDEN) -> torch.Tensor:
    block_size, type_size = gguf.GGML_QUANT_SIZES[weight_type]
    return torch.randint(0, 256, (rows, columns // block_size * type_size), dtype=torch.uint8)


def load(layer, weight: torch.Tensor, weight_type: Q, *shard) -> None:
    """Load a tensor as the model classes do: its type, then its bytes."""
    layer.qweight_type.weight_loader(layer.qweight_type, torch.tensor(int(weight_type)), *shard)
    layer.qweight.weight_loader(layer.qweight, weight, *shard)


def finish(layer) -> torch.Tensor:
    layer.quant_method.process_weights_after_loading(layer)
    return layer.qweight.data


def quant_config():
    from vllm_gguf_plugin import GGUFConfig

    return GGUFConfig()


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_a_merged_column_weight_is_divided_by_the_rank(tp_size, rank):
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    gate, up = blocks(64, Q.Q4_K), blocks(64, Q.Q4_K)
    for index in range(tp_size):
        rank(index, tp_size)
        layer = MergedColumnParallelLinear(HIDDEN, [64, 64], bias=False, quant_config=quant_config())
        load(layer, gate, Q.Q4_K, 0)
        load(layer, up, Q.Q4_K, 1)
        expected = torch.cat([gate.chunk(tp_size)[index], up.chunk(tp_size)[index]])
        assert torch.equal(finish(layer), expected), f"rank {index}"


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_a_qkv_weight_is_divided_by_the_rank(tp_size, rank):
    from vllm.model_executor.layers.linear import QKVParallelLinear

    # Two key heads: with four ranks, two of them share one.
    q, k, v = blocks(8 * 16, Q.Q8_0), blocks(2 * 16, Q.Q8_0), blocks(2 * 16, Q.Q8_0)
    for index in range(tp_size):
        rank(index, tp_size)
        layer = QKVParallelLinear(HIDDEN, 16, 8, 2, bias=False, quant_config=quant_config())
        for shard, weight in (("v", v), ("q", q), ("k", k)):
            load(layer, weight, Q.Q8_0, shard)
        kv = min(tp_size, 2)
        parts = [q.chunk(tp_size)[index], *(each.chunk(kv)[index * kv // tp_size] for each in (k, v))]
        assert torch.equal(finish(layer), torch.cat(parts)), f"rank {index}"


def test_a_layer_that_is_not_divided_stays_whole(rank):
    from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear

    rank(1, 2)
    weight = blocks(64, Q.Q4_K)
    for layer_class in (ColumnParallelLinear, RowParallelLinear):
        layer = layer_class(HIDDEN, 64, bias=False, quant_config=quant_config(), disable_tp=True)
        load(layer, weight, Q.Q4_K)
        assert torch.equal(finish(layer), weight), layer_class.__name__
    layer = MergedColumnParallelLinear(HIDDEN, [64, 64], bias=False, quant_config=quant_config(), disable_tp=True)
    load(layer, weight, Q.Q4_K, 0)
    load(layer, weight, Q.Q4_K, 1)
    assert torch.equal(finish(layer), torch.cat([weight, weight]))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_replicated_weight_is_on_every_rank(tp_size, rank):
    from vllm.model_executor.layers.linear import ReplicatedLinear

    weight = blocks(64, Q.Q8_0)
    for index in range(tp_size):
        rank(index, tp_size)
        layer = ReplicatedLinear(HIDDEN, 64, bias=False, quant_config=quant_config())
        load(layer, weight, Q.Q8_0)
        assert torch.equal(finish(layer), weight)
        assert layer.qweight_type.weight_type == Q.Q8_0


def test_a_row_parallel_weight_is_divided_at_blocks(rank):
    from vllm.model_executor.layers.linear import RowParallelLinear

    weight = blocks(8, Q.Q6_K)
    for index in range(2):
        rank(index, 2)
        layer = RowParallelLinear(HIDDEN, 8, bias=False, quant_config=quant_config())
        load(layer, weight, Q.Q6_K)
        assert torch.equal(finish(layer), weight.chunk(2, dim=1)[index])


@pytest.mark.parametrize("weight_type", [Q.Q4_K, Q.IQ2_XXS])
def test_a_row_parallel_weight_is_not_cut_in_a_block(weight_type, rank):
    from vllm.model_executor.layers.linear import RowParallelLinear

    rank(0, 4)
    layer = RowParallelLinear(HIDDEN, 8, bias=False, quant_config=quant_config(), prefix="model.layers.0.o_proj")
    with pytest.raises(ValueError, match=r"o_proj: rows of 512 values .* blocks of 256 .* among 4 GPUs.*divides 2"):
        load(layer, blocks(8, weight_type), weight_type)


def test_a_float_weight_has_no_blocks(rank):
    from vllm.model_executor.layers.linear import RowParallelLinear

    rank(3, 4)
    layer = RowParallelLinear(HIDDEN, 8, bias=False, quant_config=quant_config())
    weight = torch.randn(8, HIDDEN)
    load(layer, weight, Q.F32)
    assert torch.equal(finish(layer), weight.chunk(4, dim=1)[3])


def test_an_experts_row_is_not_cut_in_a_block():
    from vllm_gguf_plugin.quantization.params import _gguf_moe_weight_loader

    layer = SimpleNamespace(
        layer_name="model.layers.3.mlp.experts",
        w2_qweight_type=SimpleNamespace(weight_type=Q.IQ3_XXS),
        moe_config=SimpleNamespace(moe_parallel_config=SimpleNamespace(tp_size=16)),
    )
    weight = torch.zeros(6144, 2048 // 256 * 98, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"layers.3.mlp.experts: rows of 2048 values in IQ3_XXS .* 16 GPUs.*divides 8"):
        _gguf_moe_weight_loader(layer, None, None, weight, "w2_qweight", "w2", 0)
