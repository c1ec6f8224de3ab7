"""What the adapter of DSA models makes of a file's tensors, without reading them: names, types, shapes."""

from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
from gguf import GGMLQuantizationType as Q
from vllm_gguf_plugin.gguf_files import GGUFFileError, GGUFModel, Tensor, read_headers
from vllm_gguf_plugin.weights_adapter.glm_dsa import GlmDsaGGUFAdapter, Load, LoadPlan, plan_loading
from vllm_gguf_plugin.weights_adapter.glm_dsa_tensors import Part, has_indexer

from tests.gguf import tiny

PUBLISHED = Path(__file__).parent / "data/glm-5.2-ud-iq2_xxs.tsv"
GLM_5_2 = SimpleNamespace(
    **tiny.CONFIG
    | {
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 78,
        "first_k_dense_replace": 3,
        "num_attention_heads": 64,
        "n_routed_experts": 256,
        "q_lora_rank": 2048,
        "num_nextn_predict_layers": 1,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
    }
)


@pytest.fixture(scope="module")
def published() -> GGUFModel:
    """The headers of a published GLM-5.2, without the tokenizer."""
    tensors = []
    for line in PUBLISHED.read_text().splitlines():
        if line.startswith("#"):
            continue
        name, dims, type_name, blocks = line.split("\t")
        shape = tuple(int(dim) for dim in reversed(dims.split("x")))
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[Q[type_name]]
        size = prod(shape) // block_size * block_bytes
        names = [name] if blocks == "-" else [f"blk.{block}.{name}" for block in numbers(blocks)]
        tensors += [Tensor(name, shape, Q[type_name], Path("glm.gguf"), 0, size) for name in names]
    assert len(tensors) == 1809
    metadata = {"general.architecture": "glm-dsa", "glm-dsa.block_count": 79, "glm-dsa.nextn_predict_layers": 1}
    return GGUFModel([Path("glm.gguf")], metadata, tensors)


def numbers(ranges: str) -> list[int]:
    bounds = [part.partition("-") for part in ranges.split(",")]
    return [number for first, _, last in bounds for number in range(int(first), int(last or first) + 1)]


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_every_tensor_of_a_published_file_is_used_or_dropped(published: GGUFModel, tp_size: int) -> None:
    plan = plan_loading(published, GLM_5_2, is_draft=False, tp_size=tp_size)
    # 57 layers share a top-k, and have the five tensors of an indexer nevertheless.
    assert plan.dropped == {Part.SHARED_INDEXER: 57 * 5, Part.MTP: 27}
    assert count_tensors(plan) == 1809 - 57 * 5 - 27
    assert plan.dequantized_modules == []
    assert stored(plan) == {
        "kv_b_proj": {"float"},
        "embed_tokens": {"Q4_K"},
        "lm_head": {"Q4_K"},
        "q_a_proj": {"Q5_K", "Q6_K"},
        "q_b_proj": {"Q8_0"},
        "kv_a_proj_with_mqa": {"Q8_0"},
        "o_proj": {"Q5_K", "Q6_K"},
        "wq_b": {"Q8_0"},
        "wk": {"float"},
        "weights_proj": {"float"},
        "k_norm": {"float"},
        "gate": {"float"},
        "gate_proj": {"Q5_K", "Q6_K", "IQ2_XXS", "IQ2_S"},
        "up_proj": {"Q5_K", "Q6_K", "IQ2_XXS", "IQ2_S"},
        "down_proj": {"Q6_K", "Q8_0", "IQ3_XXS", "IQ4_XS"},
        "norm": {"float"},
        "input_layernorm": {"float"},
        "post_attention_layernorm": {"float"},
        "q_a_layernorm": {"float"},
        "kv_a_layernorm": {"float"},
    }


def test_the_draft_model_of_a_published_file(published: GGUFModel) -> None:
    plan = plan_loading(published, GLM_5_2, is_draft=True, tp_size=1)
    assert count_tensors(plan) == 27 + 2  # the block has no embeddings of its own
    assert plan.dropped == {Part.TRUNK: 1809 - 27 - 2 - 57 * 5, Part.SHARED_INDEXER: 57 * 5}
    params = {load.expected.param for load in plan.loads}
    assert all(param.startswith("model.layers.78.") for param in params)
    assert {"model.layers.78.embed_tokens.weight", "model.layers.78.shared_head.head.weight"} <= params
    assert stored(plan)["down_proj"] == {"Q3_K", "Q6_K"}


def count_tensors(plan: LoadPlan) -> int:
    return sum(len(load.tensors) for load in plan.loads)


def stored(plan: LoadPlan) -> dict[str, set[str]]:
    """Return in which types the weights of each kind of layer stay."""
    kinds: dict[str, set[str]] = {}
    for load in plan.loads:
        kind = load.expected.param.split(".")[-2]
        kinds.setdefault(kind, set()).add(type_name(load))
    return kinds


def type_name(load: Load) -> str:
    return load.tensors[0].type.name if load.quantized else "float"


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, range(8)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [0, 1, 2, 6]),
        ({"index_topk_freq": 4}, [0, 1, 5]),
        ({"index_topk_pattern": "FFSSFS"}, [0, 1, 4, 6, 7]),
        ({"index_topk_pattern": None}, range(8)),
    ],
)
def test_layers_with_an_indexer(config: dict, layers) -> None:
    assert [layer for layer in range(8) if has_indexer(SimpleNamespace(**config), layer)] == list(layers)


def test_models_that_are_matched() -> None:
    def matches(model_type: str, architecture: str = "") -> bool:
        config = SimpleNamespace(model_type=model_type, architectures=[architecture])
        return GlmDsaGGUFAdapter.matches(config)

    assert matches("glm_moe_dsa")
    assert matches("deepseek_v32")
    assert matches("deepseek_mtp", "DeepseekV32MTPModel")
    assert not matches("deepseek_mtp", "DeepSeekMTPModel")
    assert not matches("deepseek_v3")


def test_float_layers_are_named_by_layer_and_by_part(published: GGUFModel) -> None:
    """vLLM asks for fused layers by their parts where the model class declares them, else by their own name."""
    plan = plan_loading(change(published, "blk.0.ffn_up.weight", type=Q.BF16), GLM_5_2, is_draft=False, tp_size=1)
    assert plan.dequantized_modules == ["model.layers.0.mlp.gate_up_proj"]
    others = [name for name in plan.unquantized_modules if not name.endswith("kv_b_proj")]
    assert others == [f"model.layers.0.mlp.{name}" for name in ("gate_up_proj", "gate_proj", "up_proj")]


def change(model: GGUFModel, old_name: str, **changes) -> GGUFModel:
    """Return the model with one tensor changed; without it if there are no changes."""
    others = [tensor for tensor in model.tensors if tensor.name != old_name]
    [tensor] = [tensor for tensor in model.tensors if tensor.name == old_name]
    return replace(model, tensors=[*others, *([replace(tensor, **changes)] if changes else [])])


def with_metadata(model: GGUFModel, **changes) -> GGUFModel:
    return replace(model, metadata=model.metadata | {f"glm-dsa.{key}": value for key, value in changes.items()})


REFUSED = {
    "a tensor is missing": (
        lambda model: change(model, "blk.5.attn_v_b.weight"),
        "glm.gguf: the model needs tensor blk.5.attn_v_b.weight, which no file has",
    ),
    "an indexer is missing": (
        lambda model: change(model, "blk.6.indexer.k_norm.bias"),
        "glm.gguf: the model needs tensor blk.6.indexer.k_norm.bias, which no file has",
    ),
    "a tensor is not known": (
        lambda model: change(model, "blk.7.attn_k_b.weight", name="blk.7.attn_kv_b.weight"),
        "blk.7.attn_k_b.weight, which no file has, and has no place for tensor blk.7.attn_kv_b.weight of glm.gguf.",
    ),
    "a tensor is too many": (
        lambda model: replace(model, tensors=[*model.tensors, replace(model.tensors[0], name="rope_freqs.weight")]),
        "glm.gguf: the model has no place for tensor rope_freqs.weight of glm.gguf.",
    ),
    "a block is too many": (
        lambda model: replace(model, tensors=[*model.tensors, replace(model.tensors[0], name="blk.79.x.weight")]),
        "glm.gguf: the model has no place for tensor blk.79.x.weight of glm.gguf.",
    ),
    "a shape is another": (
        lambda model: change(model, "blk.5.attn_k_b.weight", shape=(64, 192, 512)),
        "glm.gguf: tensor blk.5.attn_k_b.weight has shape [64, 192, 512], but the configuration makes it [64, 512, ",
    ),
    "a type has no kernel": (
        lambda model: change(model, "blk.5.ffn_down_exps.weight", type=Q.MXFP4),
        "glm.gguf: tensor blk.5.ffn_down_exps.weight is of type MXFP4, for which there is no kernel",
    ),
    "a type of activations": (
        lambda model: change(model, "blk.5.attn_q_b.weight", type=Q.Q8_1),
        "glm.gguf: tensor blk.5.attn_q_b.weight is of type Q8_1, for which there is no kernel",
    ),
    "gate and up differ": (
        lambda model: change(model, "blk.5.ffn_up_exps.weight", type=Q.IQ2_S),
        "blk.5.ffn_gate_exps.weight is of type IQ2_XXS, but blk.5.ffn_up_exps.weight (in glm.gguf) of type IQ2_S",
    ),
    "another architecture": (
        lambda model: replace(model, metadata={"general.architecture": "deepseek2"}),
        "glm.gguf: the architecture is 'deepseek2', but the configuration (glm_moe_dsa)",
    ),
    "another depth": (
        lambda model: with_metadata(model, block_count=62),
        "62 blocks (block_count), of which 1 for multi-token prediction (nextn_predict_layers), but the configuration ",
    ),
    "no depth": (
        lambda model: replace(model, metadata={"general.architecture": "glm-dsa"}),
        "glm.gguf: None blocks (block_count)",
    ),
    "MTP blocks beyond reason": (
        lambda model: with_metadata(model, nextn_predict_layers=2**40),
        f"of which {2**40} for multi-token prediction",
    ),
    "no tensors": (
        lambda model: replace(model, tensors=[]),
        "glm.gguf: 79 blocks (block_count)",
    ),
}


@pytest.mark.parametrize(("edit", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(published: GGUFModel, edit, message: str) -> None:
    with pytest.raises(GGUFFileError) as refusal:
        plan_loading(edit(published), GLM_5_2, is_draft=False, tp_size=1)
    assert message in str(refusal.value)


def test_a_row_that_cannot_be_divided_is_refused(published: GGUFModel) -> None:
    """2048 columns are 8 blocks of 256. Column-parallel rows need no such care."""
    with pytest.raises(GGUFFileError) as refusal:
        plan_loading(published, GLM_5_2, is_draft=False, tp_size=16)
    assert "rows of 2048 values in IQ3_XXS blocks of 256 cannot be divided among 16 GPUs" in str(refusal.value)
    assert "divides 8." in str(refusal.value)


def test_a_draft_model_without_its_block_is_refused(tmp_path: Path) -> None:
    files = tiny.write(tmp_path, num_hidden_layers=1)
    config = SimpleNamespace(**files.config | {"num_nextn_predict_layers": 1})
    with pytest.raises(GGUFFileError, match=r"0 blocks for multi-token prediction .* num_nextn_predict_layers=1"):
        plan_loading(read_headers(files.files), config, is_draft=True, tp_size=1)


def test_weights_come_in_the_order_of_the_files(tmp_path: Path) -> None:
    files = tiny.write(tmp_path, num_hidden_layers=2, shards=4)
    plan = plan_loading(read_headers(files.files), SimpleNamespace(**files.config), is_draft=False, tp_size=1)
    positions = [(load.tensors[0].file, load.tensors[0].offset) for load in plan.loads]
    assert positions == sorted(positions)
    assert Counter(file for file, _ in positions).keys() == set(files.files[1:])
