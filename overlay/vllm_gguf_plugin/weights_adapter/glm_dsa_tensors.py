# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tensors of a DSA model in GGUF, and the parameters that they become.

Architectures `glm-dsa` (GLM-5, 5.1, 5.2) and `deepseek32` (DeepSeek-V3.2) name
and lay out their tensors alike. The format is what llama.cpp's conversion
writes (conversion/glm.py, conversion/deepseek.py) and its src/models/ read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Use(Enum):
    """What becomes of a tensor."""

    MATRIX = auto()
    """A linear layer's weight, which the kernels read quantised."""
    EXPERTS = auto()
    """The weights of all experts, [experts, rows, columns]."""
    K_B = auto()
    """The key half of kv_b_proj, [heads, kv_lora_rank, qk_nope_head_dim]."""
    V_B = auto()
    """The value half of kv_b_proj, [heads, v_head_dim, kv_lora_rank]."""
    FLOAT = auto()
    """A parameter that the model holds unquantised."""


class Part(Enum):
    """What a tensor belongs to; the value names it in messages."""

    TRUNK = "the target model"
    SHARED_INDEXER = "indexers of layers that use another layer's top-k"
    MTP = "multi-token prediction (MTP)"


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor of the file, and the parameter that it becomes.

    `shape` is in torch's order. `param` is the name under which the model's
    load_weights() wants it, with `{}` for the number of an expert. `module` is
    the quantisable layer that holds it: the tensors of one layer are quantised
    or not together.
    """

    name: str
    param: str
    shape: tuple[int, ...]
    use: Use = Use.FLOAT
    module: str | None = None
    part: Part = Part.TRUNK
    row_parallel: bool = False
    optional: bool = False


def has_indexer(config: PretrainedConfig, layer: int) -> bool:
    """Whether vLLM's DeepseekV32Attention gives this layer an indexer."""
    pattern = getattr(config, "index_topk_pattern", None)
    if pattern is not None:
        return not layer < len(pattern) or pattern[layer] != "S"
    freq = getattr(config, "index_topk_freq", 1)
    offset = getattr(config, "index_skip_topk_offset", 2)
    return max(layer - offset + 1, 0) % freq == 0


def target_tensors(
    config: PretrainedConfig, num_mtp_layers: int
) -> Iterator[ExpectedTensor]:
    """Yield every tensor that a file with this configuration may hold."""
    hidden, vocab = config.hidden_size, config.vocab_size
    yield _embedding("token_embd.weight", "model.embed_tokens", vocab, hidden)
    yield ExpectedTensor("output_norm.weight", "model.norm.weight", (hidden,))
    yield _embedding("output.weight", "lm_head", vocab, hidden)
    for layer in range(config.num_hidden_layers):
        yield from _decoder_layer(config, layer)
    for layer in _mtp_layers(config, num_mtp_layers):
        yield from _mtp_layer(config, layer)


def draft_tensors(
    config: PretrainedConfig, num_mtp_layers: int, names: set[str]
) -> Iterator[ExpectedTensor]:
    """Yield what the draft model takes from a file that holds `names`.

    A file without embeddings of the MTP layer's own has it use the target's.
    """
    layers = _mtp_layers(config, num_mtp_layers)
    for layer in layers:
        yield from _mtp_layer(config, layer)
    hidden, vocab = config.hidden_size, config.vocab_size
    # The embeddings are the first MTP layer's: vLLM ignores those of others.
    if layers and f"blk.{layers[0]}.nextn.embed_tokens.weight" not in names:
        param = f"model.layers.{layers[0]}.embed_tokens"
        yield _embedding(
            "token_embd.weight", param, vocab, hidden, module="model.embed_tokens"
        )
    for layer in layers:
        if f"blk.{layer}.nextn.shared_head_head.weight" not in names:
            prefix = f"model.layers.{layer}"
            param, module = f"{prefix}.shared_head.head", f"{prefix}.head"
            yield _embedding("output.weight", param, vocab, hidden, module=module)


def _mtp_layers(config: PretrainedConfig, num_mtp_layers: int) -> range:
    start = config.num_hidden_layers
    return range(start, start + num_mtp_layers)


def _embedding(
    name: str, param: str, vocab: int, hidden: int, module: str | None = None, **rest
) -> ExpectedTensor:
    return ExpectedTensor(
        name,
        f"{param}.weight",
        (vocab, hidden),
        Use.MATRIX,
        module or param,
        **rest,
    )


def _decoder_layer(
    config: PretrainedConfig, layer: int, part: Part = Part.TRUNK
) -> Iterator[ExpectedTensor]:
    yield from _attention(config, layer, part)
    yield from _indexer(config, layer, part)
    is_moe = (
        config.n_routed_experts is not None
        and layer >= config.first_k_dense_replace
        and layer % getattr(config, "moe_layer_freq", 1) == 0
    )
    if is_moe:
        yield from _experts(config, layer, part)
    else:
        yield from _mlp(config, layer, part, "mlp", "", config.intermediate_size)


def _attention(
    config: PretrainedConfig, layer: int, part: Part
) -> Iterator[ExpectedTensor]:
    block, prefix = f"blk.{layer}.", f"model.layers.{layer}."
    attention = prefix + "self_attn."
    hidden, heads = config.hidden_size, config.num_attention_heads
    q_rank, kv_rank = config.q_lora_rank, config.kv_lora_rank
    nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
    v_dim = config.v_head_dim

    def vector(name: str, param: str, size: int) -> ExpectedTensor:
        return ExpectedTensor(
            f"{block}{name}.weight", f"{prefix}{param}.weight", (size,), part=part
        )

    def matrix(name, param, shape, module=None, use=Use.MATRIX, row_parallel=False):
        return ExpectedTensor(
            f"{block}{name}.weight",
            f"{attention}{param}.weight",
            shape,
            use,
            attention + (module or param),
            part,
            row_parallel,
        )

    yield vector("attn_norm", "input_layernorm", hidden)
    yield vector("attn_q_a_norm", "self_attn.q_a_layernorm", q_rank)
    yield vector("attn_kv_a_norm", "self_attn.kv_a_layernorm", kv_rank)
    yield vector("ffn_norm", "post_attention_layernorm", hidden)
    yield matrix("attn_q_a", "q_a_proj", (q_rank, hidden), "fused_qkv_a_proj")
    yield matrix(
        "attn_kv_a_mqa",
        "kv_a_proj_with_mqa",
        (kv_rank + rope, hidden),
        "fused_qkv_a_proj",
    )
    yield matrix("attn_q_b", "q_b_proj", (heads * (nope + rope), q_rank))
    yield matrix("attn_k_b", "kv_b_proj", (heads, kv_rank, nope), use=Use.K_B)
    yield matrix("attn_v_b", "kv_b_proj", (heads, v_dim, kv_rank), use=Use.V_B)
    yield matrix("attn_output", "o_proj", (hidden, heads * v_dim), row_parallel=True)


def _indexer(
    config: PretrainedConfig, layer: int, part: Part
) -> Iterator[ExpectedTensor]:
    block, prefix = f"blk.{layer}.indexer.", f"model.layers.{layer}.self_attn.indexer."
    heads, dim = config.index_n_heads, config.index_head_dim
    if part is Part.TRUNK and not has_indexer(config, layer):
        part = Part.SHARED_INDEXER

    def tensor(name, param, shape, use=Use.FLOAT, module=None):
        return ExpectedTensor(block + name, prefix + param, shape, use, module, part)

    yield tensor(
        "attn_q_b.weight",
        "wq_b.weight",
        (heads * dim, config.q_lora_rank),
        Use.MATRIX,
        prefix + "wq_b",
    )
    # vLLM keeps these two in one unquantised layer.
    yield tensor("attn_k.weight", "wk.weight", (dim, config.hidden_size))
    yield tensor("proj.weight", "weights_proj.weight", (heads, config.hidden_size))
    yield tensor("k_norm.weight", "k_norm.weight", (dim,))
    yield tensor("k_norm.bias", "k_norm.bias", (dim,))


def _experts(
    config: PretrainedConfig, layer: int, part: Part
) -> Iterator[ExpectedTensor]:
    block, mlp = f"blk.{layer}.", f"model.layers.{layer}.mlp."
    hidden, width = config.hidden_size, config.moe_intermediate_size
    experts = config.n_routed_experts
    yield ExpectedTensor(
        f"{block}ffn_gate_inp.weight",
        f"{mlp}gate.weight",
        (experts, hidden),
        part=part,
    )
    if getattr(config, "topk_method", None) == "noaux_tc":
        yield ExpectedTensor(
            f"{block}exp_probs_b.bias",
            f"{mlp}gate.e_score_correction_bias",
            (experts,),
            part=part,
        )
    for half, shape in (
        ("gate", (experts, width, hidden)),
        ("up", (experts, width, hidden)),
        ("down", (experts, hidden, width)),
    ):
        yield ExpectedTensor(
            f"{block}ffn_{half}_exps.weight",
            f"{mlp}experts.{{}}.{half}_proj.weight",
            shape,
            Use.EXPERTS,
            f"{mlp}experts",
            part,
            row_parallel=half == "down",
        )
    if config.n_shared_experts:
        yield from _mlp(
            config,
            layer,
            part,
            "mlp.shared_experts",
            "_shexp",
            width * config.n_shared_experts,
        )


def _mlp(
    config: PretrainedConfig,
    layer: int,
    part: Part,
    module: str,
    suffix: str,
    width: int,
) -> Iterator[ExpectedTensor]:
    prefix = f"model.layers.{layer}.{module}."
    hidden = config.hidden_size
    for half, shape, layer_name in (
        ("gate", (width, hidden), "gate_up_proj"),
        ("up", (width, hidden), "gate_up_proj"),
        ("down", (hidden, width), "down_proj"),
    ):
        yield ExpectedTensor(
            f"blk.{layer}.ffn_{half}{suffix}.weight",
            f"{prefix}{half}_proj.weight",
            shape,
            Use.MATRIX,
            prefix + layer_name,
            part,
            row_parallel=half == "down",
        )


def _mtp_layer(config: PretrainedConfig, layer: int) -> Iterator[ExpectedTensor]:
    block, prefix = f"blk.{layer}.nextn.", f"model.layers.{layer}."
    hidden, vocab = config.hidden_size, config.vocab_size
    yield from _decoder_layer(config, layer, Part.MTP)
    for name, param, shape in (
        ("enorm", "enorm", (hidden,)),
        ("hnorm", "hnorm", (hidden,)),
        ("shared_head_norm", "shared_head.norm", (hidden,)),
        ("eh_proj", "eh_proj", (hidden, 2 * hidden)),
    ):
        yield ExpectedTensor(
            f"{block}{name}.weight", f"{prefix}{param}.weight", shape, part=Part.MTP
        )
    # vLLM's modules for these two have other names than their weights.
    for name, param, module in (
        ("embed_tokens", f"{prefix}embed_tokens", "model.embed_tokens"),
        ("shared_head_head", f"{prefix}shared_head.head", f"{prefix}head"),
    ):
        yield _embedding(
            f"{block}{name}.weight",
            param,
            vocab,
            hidden,
            module,
            part=Part.MTP,
            optional=True,
        )
