"""A tiny random GLM-5 and its log-probabilities in float32, by transformers."""

from pathlib import Path

import torch

VOCAB_SIZE = 256
INDEX_TOPK = 2048

# Attention dimensions, top-k and norms are GLM-5's; depth, width and experts are
# not. Every expert is active, so that rounding cannot change the routing.
_CONFIG = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 8,
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
    "index_topk": INDEX_TOPK,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    # Read by vLLM only; transformers has these behaviours built in.
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "indexer_rope_interleave": True,
}


def make_model(path: Path) -> torch.nn.Module:
    """Draw random weights of unit gain, save them and return the float32 model.

    The weights are rounded to bfloat16, as published checkpoints are, so that
    loading them in float16 changes nothing.
    """
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    torch.manual_seed(0)
    config = GlmMoeDsaConfig(**_CONFIG)
    config._attn_implementation = "eager"
    model = GlmMoeDsaForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            value = torch.randn_like(weight)
            if weight.ndim > 1:
                value /= weight.shape[-1] ** 0.5
            else:
                value = 0.1 * value + (0 if name.endswith("bias") else 1)
            weight.copy_(value.bfloat16())
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.05 * torch.randn_like(buffer))
    model.save_pretrained(path)
    return model


@torch.no_grad()
def next_token_logprobs(model: torch.nn.Module, token_ids: list[int]) -> list[float]:
    """Return the log-probability of every token but the first, given those before it."""
    ids = torch.tensor([token_ids], device=model.device)
    logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(dim=-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
