"""Tiny random GGUF files of DSA models, and the weights that they stand for.

They are made as llama.cpp's converter makes them from a checkpoint (conversion/glm.py, conversion/deepseek.py):
kv_b_proj in two halves, of which the keys' is transposed; a layer's experts in one tensor; blocks in alphabetical
order. `weights` says what a file holds, under the checkpoint's names and dequantised: the reference of all tests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q

# Attention dimensions are GLM-5's; depth, width and experts are not. What is divided by columns among GPUs has 2048 of
# them: 8 GPUs get a block of 256 values each. Every expert is active, so that rounding cannot change the routing.
CONFIG = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 2048,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_topk": 2048,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "dtype": "bfloat16",
    "num_nextn_predict_layers": 0,
    # Read by vLLM only; transformers has these behaviours built in.
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "indexer_rope_interleave": True,
}
DEEPSEEK = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "qk_nope_head_dim": 128,
    "v_head_dim": 256,
    "indexer_rope_interleave": False,
}
SHARED_INDEXERS = {"num_hidden_layers": 5, "index_topk_freq": 4, "index_skip_topk_offset": 3}

STORED_AS_FLOAT = ("norm", "ffn_gate_inp", "exp_probs_b", "indexer.proj")

# Types by tensor as in unsloth's GLM-5.2-UD-IQ2_XXS.
MIXED = {
    "token_embd": Q.Q4_K,
    "output": Q.Q4_K,
    "attn_q_a": Q.Q5_K,
    "attn_output": Q.Q5_K,
    "ffn_gate": Q.Q5_K,
    "ffn_up": Q.Q5_K,
    "ffn_down": Q.Q6_K,
    "ffn_gate_shexp": Q.Q5_K,
    "ffn_up_shexp": Q.Q5_K,
    "ffn_down_shexp": Q.Q6_K,
    "ffn_gate_exps": Q.IQ2_XXS,
    "ffn_up_exps": Q.IQ2_XXS,
    "ffn_down_exps": Q.IQ3_XXS,
    # The last layers are quantised less, as there.
    "blk.3.attn_output": Q.Q6_K,
    "blk.3.ffn_down_exps": Q.IQ4_XS,
    "blk.4.ffn_gate_exps": Q.Q2_K,
    "blk.4.ffn_up_exps": Q.Q2_K,
    "blk.4.ffn_down_exps": Q.Q3_K,
}


@dataclass
class Tiny:
    files: list[Path]
    config: dict
    weights: dict[str, torch.Tensor]
    """By checkpoint name, float32."""


def write(
    folder: Path,
    *,
    arch: str = "glm-dsa",
    types: Q | dict[str, Q] = Q.F32,
    shared_indexers: bool = False,
    mtp: bool = False,
    mtp_embeddings: bool = False,
    shards: int = 1,
    change: Callable[[dict[str, tuple[np.ndarray, Q]]], None] = lambda tensors: None,
    **config,
) -> Tiny:
    """Write model.gguf, or `shards` files of which the first has no tensors.

    `types` is one type for all matrices, or types by the names of tensors, with or without their block (Q8_0 where it
    has none). `shared_indexers`: layers 3 and 4 use the top-k of layer 2, and have indexers nevertheless, as unsloth's
    files do. `mtp` adds a block for multi-token prediction, `mtp_embeddings` gives it embeddings of its own. `change`
    may edit what is written, by name.
    """
    config = (
        CONFIG
        | (DEEPSEEK if arch == "deepseek32" else {})
        | (SHARED_INDEXERS if shared_indexers else {})
        | {"num_nextn_predict_layers": int(mtp)}
        | config
    )
    encoder = _Encoder(SimpleNamespace(**config), types)
    encoder.encode(mtp_embeddings)
    change(encoder.tensors)

    folder.mkdir(parents=True, exist_ok=True)
    per_shard = ceil(len(encoder.tensors) / (shards - 1)) if shards > 1 else 0
    writer = gguf.GGUFWriter(folder / "model.gguf", arch, split_max_tensors=per_shard, small_first_shard=shards > 1)
    _add_metadata(writer, arch, encoder.config)
    for name, (data, weight_type) in sorted(encoder.tensors.items(), key=lambda item: _position(item[0])):
        writer.add_tensor(name, data, raw_dtype=weight_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = sorted(folder.glob("*.gguf"))
    assert len(files) == shards
    return Tiny(files, config, encoder.weights)


def _position(name: str) -> tuple[int, str]:
    return (int(name.split(".")[1]) if name.startswith("blk.") else -1, name)


class _Encoder:
    """Draws a checkpoint's weights and quantises them into a file's tensors."""

    def __init__(self, config: SimpleNamespace, types: Q | dict[str, Q]) -> None:
        self.config = config
        self.tensors: dict[str, tuple[np.ndarray, Q]] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self._types = types
        self._rng = np.random.default_rng(0)

    def encode(self, mtp_embeddings: bool) -> None:
        config = self.config
        vocabulary = (config.vocab_size, config.hidden_size)
        self._matrix("token_embd", "model.embed_tokens", vocabulary)
        self._norm("output_norm", "model.norm", config.hidden_size)
        self._matrix("output", "lm_head", vocabulary)
        blocks = config.num_hidden_layers + config.num_nextn_predict_layers
        for layer in range(blocks):
            block, prefix = f"blk.{layer}.", f"model.layers.{layer}."
            self._norm(f"{block}attn_norm", f"{prefix}input_layernorm", config.hidden_size)
            self._norm(f"{block}ffn_norm", f"{prefix}post_attention_layernorm", config.hidden_size)
            self._attention(block, f"{prefix}self_attn.")
            self._indexer(f"{block}indexer.", f"{prefix}self_attn.indexer.")
            if layer < config.first_k_dense_replace:
                self._mlp(block, "", f"{prefix}mlp.", config.intermediate_size)
            else:
                self._moe(block, f"{prefix}mlp.")
            if layer >= config.num_hidden_layers:
                self._mtp(f"{block}nextn.", prefix, mtp_embeddings)

    def _attention(self, block: str, prefix: str) -> None:
        c = self.config
        heads, nope, rope, v_dim, rank = (
            c.num_attention_heads,
            c.qk_nope_head_dim,
            c.qk_rope_head_dim,
            c.v_head_dim,
            c.kv_lora_rank,
        )
        self._matrix(f"{block}attn_q_a", f"{prefix}q_a_proj", (c.q_lora_rank, c.hidden_size))
        self._norm(f"{block}attn_q_a_norm", f"{prefix}q_a_layernorm", c.q_lora_rank)
        self._matrix(f"{block}attn_q_b", f"{prefix}q_b_proj", (heads * (nope + rope), c.q_lora_rank))
        self._matrix(f"{block}attn_kv_a_mqa", f"{prefix}kv_a_proj_with_mqa", (rank + rope, c.hidden_size))
        self._norm(f"{block}attn_kv_a_norm", f"{prefix}kv_a_layernorm", rank)
        self._matrix(f"{block}attn_output", f"{prefix}o_proj", (c.hidden_size, heads * v_dim))
        kv_b = self._draw((heads, nope + v_dim, rank))
        keys, values = kv_b[:, :nope], kv_b[:, nope:]
        keys = self._put(f"{block}attn_k_b.weight", keys.transpose(0, 2, 1)).transpose(1, 2)
        values = self._put(f"{block}attn_v_b.weight", values)
        self.weights[f"{prefix}kv_b_proj.weight"] = torch.cat([keys, values], dim=1).reshape(-1, rank)

    def _indexer(self, block: str, prefix: str) -> None:
        c = self.config
        self._matrix(f"{block}attn_q_b", f"{prefix}wq_b", (c.index_n_heads * c.index_head_dim, c.q_lora_rank))
        self._matrix(f"{block}attn_k", f"{prefix}wk", (c.index_head_dim, c.hidden_size))
        self._matrix(f"{block}proj", f"{prefix}weights_proj", (c.index_n_heads, c.hidden_size))
        self._norm(f"{block}k_norm", f"{prefix}k_norm", c.index_head_dim)
        bias = 0.1 * self._rng.standard_normal(c.index_head_dim, np.float32)
        self.weights[f"{prefix}k_norm.bias"] = self._put(f"{block}k_norm.bias", bias)

    def _mlp(self, block: str, suffix: str, prefix: str, width: int) -> None:
        for half in ("gate", "up", "down"):
            shape = (width, self.config.hidden_size)
            self._matrix(f"{block}ffn_{half}{suffix}", f"{prefix}{half}_proj", shape[::-1] if half == "down" else shape)

    def _moe(self, block: str, prefix: str) -> None:
        c = self.config
        self._matrix(f"{block}ffn_gate_inp", f"{prefix}gate", (c.n_routed_experts, c.hidden_size))
        bias = 0.05 * self._rng.standard_normal(c.n_routed_experts, np.float32)
        self.weights[f"{prefix}gate.e_score_correction_bias"] = self._put(f"{block}exp_probs_b.bias", bias)
        for half in ("gate", "up", "down"):
            shape = (c.moe_intermediate_size, c.hidden_size)
            shape = shape[::-1] if half == "down" else shape
            stored = self._put(f"{block}ffn_{half}_exps.weight", self._draw((c.n_routed_experts, *shape)))
            for expert, weight in enumerate(stored):
                self.weights[f"{prefix}experts.{expert}.{half}_proj.weight"] = weight
        width = c.moe_intermediate_size * c.n_shared_experts
        self._mlp(block, "_shexp", f"{prefix}shared_experts.", width)

    def _mtp(self, block: str, prefix: str, embeddings: bool) -> None:
        c = self.config
        self._matrix(f"{block}eh_proj", f"{prefix}eh_proj", (c.hidden_size, 2 * c.hidden_size))
        for name, param in (("enorm", "enorm"), ("hnorm", "hnorm"), ("shared_head_norm", "shared_head.norm")):
            self._norm(f"{block}{name}", f"{prefix}{param}", c.hidden_size)
        if embeddings:
            vocabulary = (c.vocab_size, c.hidden_size)
            self._matrix(f"{block}embed_tokens", f"{prefix}embed_tokens", vocabulary)
            self._matrix(f"{block}shared_head_head", f"{prefix}shared_head.head", vocabulary)

    def _matrix(self, name: str, param: str, shape: tuple[int, ...]) -> None:
        self.weights[f"{param}.weight"] = self._put(f"{name}.weight", self._draw(shape))

    def _norm(self, name: str, param: str, size: int) -> None:
        weight = 1 + 0.1 * self._rng.standard_normal(size, np.float32)
        self.weights[f"{param}.weight"] = self._put(f"{name}.weight", weight)

    def _draw(self, shape: tuple[int, ...]) -> np.ndarray:
        """Draw a matrix of unit gain."""
        return self._rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)

    def _put(self, name: str, value: np.ndarray) -> torch.Tensor:
        """Store a tensor; return what a reader will see, float32."""
        weight_type = self._type(name.rpartition(".")[0])
        if weight_type == Q.F32:
            # Float tensors of published files are copies of a checkpoint in bfloat16.
            data = torch.from_numpy(value.copy()).bfloat16().float().numpy()
        else:
            data = quantize(value, weight_type, self._rng)
        self.tensors[name] = data, weight_type
        seen = gguf.quants.dequantize(data, weight_type).reshape(value.shape)
        return torch.from_numpy(np.array(seen, np.float32))

    def _type(self, name: str) -> Q:
        types = self._types if isinstance(self._types, dict) else {}
        in_block = name.split(".", 2)[2] if name.startswith("blk.") else name
        if name in types or in_block in types:
            wanted = types[name] if name in types else types[in_block]
        elif any(part in name for part in STORED_AS_FLOAT):
            wanted = Q.F32
        else:
            wanted = Q.Q8_0 if isinstance(self._types, dict) else self._types
        # The rows of attn_k_b are shorter than a block of 256: converters take Q8_0 then.
        block_size = gguf.GGML_QUANT_SIZES[wanted][0]
        return Q.Q8_0 if in_block == "attn_k_b" and self.config.qk_nope_head_dim % block_size else wanted


# Where the float16 scales of a block are (byte offsets), of types that gguf-py can decode but not encode. A second one
# belongs to the block's minimum: by this factor larger, random blocks have a mean of about 0.
_SCALES = {
    Q.Q2_K: {80: 1, 82: 1.5},
    Q.Q3_K: {108: 1},
    Q.Q4_K: {0: 1, 2: 7.5},
    Q.Q5_K: {0: 1, 2: 15.5},
    Q.Q6_K: {208: 1},
    Q.IQ1_S: {0: 1},
    Q.IQ1_M: {},
    Q.IQ2_XXS: {0: 1},
    Q.IQ2_XS: {0: 1},
    Q.IQ2_S: {0: 1},
    Q.IQ3_XXS: {0: 1},
    Q.IQ3_S: {0: 1},
    Q.IQ4_NL: {0: 1},
    Q.IQ4_XS: {0: 1},
}


def quantize(value: np.ndarray, weight_type: Q, rng: np.random.Generator) -> np.ndarray:
    """Quantise; a type that gguf-py cannot encode gets random blocks, scaled to the value's deviation."""
    if weight_type not in _SCALES:
        return gguf.quants.quantize(value, weight_type)
    block_size, num_bytes = gguf.GGML_QUANT_SIZES[weight_type]
    blocks = rng.integers(0, 256, (value.size // block_size, num_bytes), np.uint8)
    relative = rng.uniform(0.5, 1, len(blocks))
    _set_scales(blocks, weight_type, 0.001 * relative)
    factor = 0.001 * value.std() / gguf.quants.dequantize(blocks, weight_type).std()
    _set_scales(blocks, weight_type, factor * relative)
    return blocks.reshape(*value.shape[:-1], -1)


def _set_scales(blocks: np.ndarray, weight_type: Q, scale: np.ndarray) -> None:
    for offset, factor in _SCALES[weight_type].items():
        blocks[:, offset : offset + 2] = (factor * scale).astype(np.float16)[:, None].view(np.uint8)
    if weight_type == Q.IQ1_M:  # four bits at the top of each of the last four 16-bit words
        bits = scale.astype(np.float16).view(np.uint16)
        words = blocks[:, 48:].copy().view(np.uint16) & 0x0FFF
        for index in range(4):
            words[:, index] |= (bits >> (4 * index) & 0xF) << 12
        blocks[:, 48:] = words.view(np.uint8)


def _add_metadata(writer: gguf.GGUFWriter, arch: str, c: SimpleNamespace) -> None:
    """Add the keys of a published file that describe the model."""
    writer.add_type("model")
    writer.add_name("tiny")
    writer.add_block_count(c.num_hidden_layers + c.num_nextn_predict_layers)
    if c.num_nextn_predict_layers:
        writer.add_nextn_predict_layers(c.num_nextn_predict_layers)
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_leading_dense_block_count(c.first_k_dense_replace)
    # MLA is stored as attention with one KV head, whose key is the latent with the RoPE part.
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(1)
    writer.add_key_length(c.kv_lora_rank + c.qk_rope_head_dim)
    writer.add_value_length(c.kv_lora_rank)
    writer.add_key_length_mla(c.qk_nope_head_dim + c.qk_rope_head_dim)
    writer.add_value_length_mla(c.v_head_dim)
    writer.add_q_lora_rank(c.q_lora_rank)
    writer.add_kv_lora_rank(c.kv_lora_rank)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_dimension_count(c.qk_rope_head_dim)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_expert_count(c.n_routed_experts)
    writer.add_expert_used_count(c.num_experts_per_tok)
    writer.add_expert_shared_count(c.n_shared_experts)
    writer.add_expert_group_count(c.n_group)
    writer.add_expert_group_used_count(c.topk_group)
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(c.routed_scaling_factor)
    writer.add_expert_weights_norm(c.norm_topk_prob)
    writer.add_indexer_head_count(c.index_n_heads)
    writer.add_indexer_key_length(c.index_head_dim)
    writer.add_indexer_top_k(c.index_topk)
    if hasattr(c, "index_topk_freq"):
        skipped = (max(i - c.index_skip_topk_offset + 1, 0) for i in range(c.num_hidden_layers))
        writer.add_array(f"{arch}.attention.indexer.types", [i % c.index_topk_freq == 0 for i in skipped])
    tokens = [f"<{index}>" for index in range(c.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("glm4")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(["< 0"])
