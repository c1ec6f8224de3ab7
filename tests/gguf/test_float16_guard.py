"""The residual of DeepseekV32ForCausalLM (GLM-5, DeepSeek-V3.2) and of its MTP layer in float16.

The real classes with their own forward; only what needs a GPU is replaced: attention and routed experts by matrix
products, and the two input kernels of the MTP layer by torch.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig

FLOAT16_MAX = torch.finfo(torch.float16).max
HIDDEN = 64
TOKENS = 5
# Large enough to matter beside a small embedding: an epsilon that is not scaled as the residual is shows.
EPSILON = 1e-2
SCALE = 1 / 16


class Attention(nn.Module):
    """Stands for DeepseekV32Attention, whose kernels need a GPU."""

    def __init__(self, **kwargs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(HIDDEN, HIDDEN), requires_grad=False)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states @ self.weight.T


class Experts(nn.Module):
    """Stands for the routed experts, and calls the shared ones and scales the routed ones as MoERunner does."""

    def __init__(self, shared_experts, routed_scaling_factor, apply_routed_scale_to_output, **kwargs):
        super().__init__()
        assert not apply_routed_scale_to_output
        self.weight = nn.Parameter(torch.empty(HIDDEN, HIDDEN), requires_grad=False)
        self.shared = [shared_experts]  # a list: the parameters are the MoE block's
        self.routed_scaling_factor = routed_scaling_factor

    def forward(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        output = hidden_states @ (self.weight * self.routed_scaling_factor).T
        return output + self.shared[0](hidden_states) if self.shared[0] is not None else output


def eh_norm(positions, embeds, previous, enorm_weight, hnorm_weight, eps) -> torch.Tensor:
    """What fused_eh_norm computes, less the zeroing of position 0."""
    normed = [
        nn.functional.rms_norm(x, (HIDDEN,), w, eps) for x, w in ((embeds, enorm_weight), (previous, hnorm_weight))
    ]
    return torch.cat(normed, dim=-1)


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory) -> Iterator[None]:
    """One rank of one, without a GPU."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    store = tmp_path_factory.mktemp("distributed") / "store"
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@pytest.fixture
def modules(monkeypatch) -> SimpleNamespace:
    """The two modules, with stand-ins for what needs a GPU."""
    from vllm.model_executor.models import deepseek_v2
    from vllm.models.deepseek_v32.nvidia import model, mtp

    monkeypatch.setattr(model, "DeepseekV32Attention", Attention)
    monkeypatch.setattr(deepseek_v2, "FusedMoEFactory", Experts)
    for module in (model, mtp):
        monkeypatch.setattr(module, "SparseMLAIndexGroupBuilder", lambda *args: None)
        monkeypatch.setattr(module, "get_sparse_mla_index_group_max_rows", lambda config: None)
    monkeypatch.setattr(mtp, "fused_eh_norm", eh_norm)
    monkeypatch.setattr(mtp.current_platform, "device_type", "cpu")
    return SimpleNamespace(model=model, mtp=mtp)


def make_config(dtype: torch.dtype, num_shared_experts: int | None = 1) -> SimpleNamespace:
    """What the classes read of a VllmConfig. Layer 0 is dense, 1 and 2 have experts, 3 is the MTP layer."""
    hf_config = PretrainedConfig(
        model_type="deepseek_v32",
        vocab_size=32,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        moe_intermediate_size=HIDDEN,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        hidden_act="silu",
        rms_norm_eps=EPSILON,
        n_routed_experts=4,
        n_shared_experts=num_shared_experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        index_topk=8,
    )
    model_config = SimpleNamespace(hf_config=hf_config, dtype=dtype)
    return SimpleNamespace(
        model_config=model_config,
        quant_config=None,
        parallel_config=SimpleNamespace(
            use_sequence_parallel_moe=False,
            pipeline_parallel_size=1,
            enable_eplb=False,
            eplb_config=SimpleNamespace(num_redundant_experts=0),
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=TOKENS),
        speculative_config=SimpleNamespace(draft_model_config=model_config),
    )


def fill(module: nn.Module, weight=lambda shape: torch.randn(shape) / shape[-1] ** 0.5) -> None:
    """Norms get weights around 1, matrices what `weight` makes of their shape."""
    torch.manual_seed(0)
    for name, parameter in module.named_parameters():
        near_one = 1 + 0.1 * torch.randn(parameter.shape)
        parameter.data.copy_(near_one if "norm" in name else weight(parameter.shape))


def build(modules, kind: str, dtype: torch.dtype, num_shared_experts: int | None = 1) -> nn.Module:
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = make_config(dtype, num_shared_experts)
    with set_default_torch_dtype(dtype):
        if kind == "model":
            return modules.model.DeepseekV32Model(vllm_config=config, prefix="model")
        return modules.mtp.DeepseekV32MultiTokenPredictorLayer(config, "model.layers.3")


def run(module: nn.Module, embeds: torch.Tensor) -> torch.Tensor:
    """The last hidden states, of the model with those before each layer beside them."""
    positions = torch.arange(TOKENS)
    with torch.no_grad():
        if hasattr(module, "mtp_block"):
            return module(None, positions, embeds.flip(0), inputs_embeds=embeds)[0]
        module.aux_hidden_state_layers = (0, 1, 2)
        hidden_states, aux_hidden_states = module(None, positions, inputs_embeds=embeds)
        return torch.cat([hidden_states, *aux_hidden_states])


@pytest.mark.parametrize("num_shared_experts", [1, None])
@pytest.mark.parametrize("kind", ["model", "mtp"])
def test_the_guard_changes_no_output(kind, num_shared_experts, modules, monkeypatch):
    embeds = 0.05 * torch.randn(TOKENS, HIDDEN)
    outputs = []
    for scale in (1.0, SCALE):
        monkeypatch.setattr(modules.model, "get_residual_scale", lambda dtype, scale=scale: scale)
        module = build(modules, kind, torch.float32, num_shared_experts)
        fill(module)
        before = embeds.clone()
        outputs.append(run(module, embeds))
        assert torch.equal(embeds, before)
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)


def test_the_first_layer_takes_a_norm_that_is_done_already(modules, monkeypatch):
    """fused_embed_norm hands over the embedding and its norm, neither of them scaled."""
    monkeypatch.setattr(modules.model, "get_residual_scale", lambda dtype: SCALE)
    layer = build(modules, "model", torch.float32).layers[0]
    fill(layer)
    embeds = torch.randn(TOKENS, HIDDEN)
    attn_in = nn.functional.rms_norm(embeds, (HIDDEN,), layer.input_layernorm.weight, EPSILON)
    with torch.no_grad():
        expected = layer(torch.arange(TOKENS), embeds, None)
        torch.testing.assert_close(layer(torch.arange(TOKENS), embeds, None, attn_in), expected)


def test_bfloat16_and_float32_are_as_upstream_has_them(modules):
    for dtype in (torch.bfloat16, torch.float32):
        model = build(modules, "model", dtype)
        assert {model.norm.variance_epsilon, *(layer.input_layernorm.variance_epsilon for layer in model.layers)} == {
            EPSILON
        }
        assert model.layers[1].mlp.experts.routed_scaling_factor == 2.5
        embeds = torch.randn(TOKENS, HIDDEN, dtype=dtype)
        fill(model)
        with torch.no_grad():
            _, residual = model.layers[0](torch.arange(TOKENS), embeds.clone(), None)
            attention = model.layers[0].self_attn(None, model.layers[0].input_layernorm(embeds))
        assert torch.equal(residual, embeds + attention)


def same_direction(shape: torch.Size, size: float) -> torch.Tensor:
    """A matrix whose output is `size` where the input is 1: every branch adds to the same sum."""
    return torch.full(shape, size / shape[-1])


def fill_branches(module: nn.Module, size: float) -> None:
    """Every branch yields about `size`; an MTP layer's input projection, too."""
    fill(module, lambda shape: same_direction(shape, 1.0))
    silu_of_1 = 0.731
    for name, each in module.named_modules():
        if isinstance(each, Attention) or name == "eh_proj":
            each.weight.data.copy_(same_direction(each.weight.shape, size))
        elif isinstance(each, Experts):
            each.weight.data.copy_(same_direction(each.weight.shape, size / 2 / 2.5))
        elif name.endswith("down_proj"):
            part = size / 2 if "shared" in name else size
            each.weight.data.copy_(same_direction(each.weight.shape, part / silu_of_1))


@pytest.mark.parametrize(("kind", "size"), [("model", 25_000.0), ("mtp", 40_000.0)])
def test_a_sum_beyond_float16_of_branches_within_it(kind, size, modules, monkeypatch):
    embeds = torch.ones(TOKENS, HIDDEN)
    branches: list[float] = []
    sums: list[float] = []

    def outputs(dtype: torch.dtype) -> torch.Tensor:
        module = build(modules, kind, dtype)
        fill_branches(module, size)
        for layer in [module.mtp_block] if kind == "mtp" else module.layers:
            for branch in (layer.self_attn, layer.mlp):
                branch.register_forward_hook(lambda *call: branches.append(call[-1].abs().max().item()))
            layer.register_forward_hook(lambda *call: sums.append(call[-1][1].abs().max().item()))
        return run(module, embeds.to(dtype))[:TOKENS].float()

    reference = outputs(torch.float32)
    assert max(branches) < FLOAT16_MAX, "a branch is beyond float16: nothing could guard it"
    assert FLOAT16_MAX < max(sums) < FLOAT16_MAX / SCALE

    torch.testing.assert_close(outputs(torch.float16), reference, rtol=1e-2, atol=1e-2)

    monkeypatch.setattr(modules.model, "get_residual_scale", lambda dtype: 1.0)
    unguarded = outputs(torch.float16)
    assert not torch.allclose(unguarded, reference, rtol=0.5, atol=0.5), "float16 would do without a guard"
