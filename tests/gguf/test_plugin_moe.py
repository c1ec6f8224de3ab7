"""The plugin's MoE around its kernels, which are replaced by torch: what reaches them is within their limits."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from gguf import GGMLQuantizationType as Q

NUM_EXPERTS, HIDDEN, INTERMEDIATE = 6, 16, 8


def expert_products(x: torch.Tensor, weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """x [tokens, in], weights [experts, out, in], topk_ids [tokens, top_k] -> [tokens * top_k, out]."""
    repeats = topk_ids.numel() // x.shape[0]
    out = x.new_zeros(topk_ids.numel(), weights.shape[1])
    routes = topk_ids.flatten()
    for expert in range(weights.shape[0]):
        (rows,) = (routes == expert).nonzero(as_tuple=True)
        out[rows] = x[rows // repeats] @ weights[expert].T
    return out


def silu_and_mul(activation, out: torch.Tensor, x: torch.Tensor) -> None:
    gate, up = x.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def moe_vec(calls: list[int]):
    """ggml_moe_a8_vec, with the number of routes of each launch in `calls`."""

    def kernel(x, weights, topk_ids, top_k, quant_type, row, tokens):
        assert x.shape[0] == tokens
        calls.append(tokens * top_k)
        return expert_products(x, weights, topk_ids)

    return kernel


@pytest.mark.parametrize(
    ("tokens", "launches"), [(1, 1), (8191, 1), (8192, 2), (20000, 3)], ids=["decode", "largest", "too-large", "three"]
)
def test_no_launch_has_more_routes_than_a_grid(tokens, launches, monkeypatch):
    from vllm_gguf_plugin.quantization import fused_moe

    calls: list[int] = []
    kernels = SimpleNamespace(ggml_moe_a8_vec=moe_vec(calls), moe_sum=lambda routes, out: out.copy_(routes.sum(1)))
    monkeypatch.setattr(fused_moe, "ops", kernels)
    monkeypatch.setattr(fused_moe, "apply_moe_activation", silu_and_mul)
    torch.manual_seed(0)
    x = torch.randn(tokens, HIDDEN)
    w13 = torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN)
    w2 = torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE)
    topk_weights = torch.rand(tokens, 8)
    topk_ids = torch.randint(0, NUM_EXPERTS, (tokens, 8), dtype=torch.int32)

    out = fused_moe._fused_moe_gguf(x, w13, w2, topk_weights, topk_ids, Q.IQ2_XXS, Q.IQ3_XXS, "silu")

    hidden = x.new_empty(tokens * 8, INTERMEDIATE)
    silu_and_mul(None, hidden, expert_products(x, w13, topk_ids))
    expected = expert_products(hidden, w2, topk_ids).view(tokens, 8, HIDDEN)
    torch.testing.assert_close(out, (expected * topk_weights[..., None]).sum(1), rtol=1e-4, atol=1e-4)
    assert len(calls) == 2 * launches
    assert max(calls) <= 65535


@pytest.fixture
def slices(monkeypatch) -> list[int]:
    """Replace the grouped kernel; one entry for each launch, the number of its experts."""
    from vllm_gguf_plugin import ops

    calls: list[int] = []

    def moe_a8(x, weights, sorted_token_ids, expert_ids, num_tokens_post_padded, quant_type, row, top_k, tokens):
        calls.append(weights.shape[0])
        if x.is_meta:
            return x.new_empty(tokens * top_k, row)
        # Blocks of one route, in the order of the routes.
        return expert_products(x, weights, expert_ids.view(tokens, top_k))

    monkeypatch.setattr(ops, "_cuda_kernel_available", lambda *args: False)
    monkeypatch.setattr(ops, "ggml_moe_a8_triton", moe_a8)
    return calls


def grouped(x: torch.Tensor, weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    from vllm_gguf_plugin import ops

    tokens, top_k = topk_ids.shape
    args = (topk_ids.flatten(), topk_ids.flatten(), None, Q.Q4_K, weights.shape[1], top_k, tokens)
    return ops.ggml_moe_a8(x, weights, *args)


def vectorised(x: torch.Tensor, weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    from vllm_gguf_plugin import ops

    tokens, top_k = topk_ids.shape
    return ops.ggml_moe_a8_vec(x, weights, topk_ids, top_k, Q.Q4_K, weights.shape[1], tokens)


@pytest.fixture(params=[grouped, vectorised], ids=lambda each: each.__name__)
def kernel(request, monkeypatch):
    """Both functions that end in the grouped kernel, the second one if there is no other."""
    from vllm.model_executor.layers.fused_moe import fused_moe

    def align(topk_ids, block_size, num_experts):
        return topk_ids.flatten(), topk_ids.flatten(), None

    monkeypatch.setattr(fused_moe, "moe_align_block_size", align)
    return request.param


def test_experts_of_several_slices_add_up(kernel, slices, monkeypatch):
    from vllm_gguf_plugin import moe_limits

    x, weights = torch.randn(32, HIDDEN), torch.randn(NUM_EXPERTS, INTERMEDIATE, HIDDEN)
    topk_ids = torch.randint(0, NUM_EXPERTS, (32, 3), dtype=torch.int32)
    before = topk_ids.clone()
    whole = kernel(x, weights, topk_ids)
    assert slices == [NUM_EXPERTS]
    # The last expert's offset may be the largest number, not more.
    monkeypatch.setattr(moe_limits, "MAX_OFFSET", 3 * weights.stride(0))
    assert torch.equal(kernel(x, weights, topk_ids), whole)
    assert slices[1:] == [4, 2]
    assert torch.equal(topk_ids, before)


@pytest.mark.parametrize(
    ("num_experts", "expert_bytes", "expected"),
    [
        (256, 2048 // 8 * 6144 // 256 * 144 * 2, [256]),  # GLM-5, w13 at TP 8 in Q4_K
        (256, 2048 * 2 * 6144 // 256 * 144, [152, 104]),  # at TP 1
        (256, 2048 * 2 * 6144 // 32 * 34, [81, 81, 81, 13]),  # in Q8_0
        (384, 1024, [256, 128]),
    ],
)
def test_a_slice_is_what_32_bits_and_the_kernel_can_address(num_experts, expert_bytes, expected, slices):
    weights = torch.empty(num_experts, 1, expert_bytes, dtype=torch.uint8, device="meta")
    x, topk_ids = torch.empty(32, HIDDEN, device="meta"), torch.empty(32, 8, dtype=torch.int32, device="meta")
    grouped(x, weights, topk_ids)
    assert slices == expected
    assert all((size - 1) * expert_bytes < 2**31 for size in slices)


def test_padding_tokens_are_given_an_expert(monkeypatch):
    from vllm_gguf_plugin import ops

    seen: list[torch.Tensor] = []
    monkeypatch.setattr(ops, "_cuda_kernel_available", lambda *args: True)
    monkeypatch.setattr(torch.ops._C_gguf, "ggml_moe_a8_vec", lambda x, w, ids, *rest: seen.append(ids), raising=False)
    topk_ids = torch.tensor([[3, 1], [-1, -1]], dtype=torch.int32)
    vectorised(torch.randn(2, HIDDEN), torch.randn(NUM_EXPERTS, INTERMEDIATE, HIDDEN), topk_ids)
    assert seen[0].tolist() == [[3, 1], [0, 0]]
    assert seen[0].dtype == torch.int32


@pytest.mark.parametrize(
    ("parallel", "option"),
    [
        ({"use_ep": True, "ep_size": 2}, "--enable-expert-parallel"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"use_ep": True, "ep_size": 2, "enable_eplb": True}, "--enable-eplb"),
    ],
)
def test_experts_on_several_gpus_are_refused(parallel, option):
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
    from vllm_gguf_plugin.quantization import GGUFMoEMethod

    config = FusedMoEParallelConfig.make_no_parallel()
    assert GGUFMoEMethod(None, SimpleNamespace(moe_parallel_config=replace(config, tp_size=2))).moe_quant_config is None
    with pytest.raises(ValueError, match=f"{option}.*Leave {option} out"):
        GGUFMoEMethod(None, SimpleNamespace(moe_parallel_config=replace(config, **parallel)))
