# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A tiny random GLM-5 and its log-probabilities in float32, by transformers.

python -m vllm.sm120.selftest.model EVENTS FOLDER
"""

import random
import sys
from typing import Any

from vllm.sm120.selftest.child import Events

VOCAB_SIZE = 256
NUM_TOPK = 2048
NUM_FORCED = 64  # tokens that are decoded after a prompt, one by one
NUM_LAYERS = 4
# Prompts that fit top-k, and that go beyond it.
SHORT, LONG = 900, 3000
CHUNK = 512  # tokens per forward: the scores of the indexer take the memory

# Attention, top-k and norms are GLM-5's; depth, width and experts are not. Every
# expert is active, so that rounding cannot change the routing.
_CONFIG: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
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
    "index_topk": NUM_TOPK,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "max_position_embeddings": 32768,
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


def tokens(length: int) -> list[int]:
    """Return a prompt of `length` tokens and the NUM_FORCED tokens after it."""
    draw = random.Random(length)
    return [draw.randrange(VOCAB_SIZE) for _ in range(length + NUM_FORCED)]


def make_config(num_layers: int, num_mtp_layers: int = 0, **changes: Any) -> Any:
    """Return the model's config; `changes` are of it."""
    from transformers import GlmMoeDsaConfig

    layers = {
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": num_mtp_layers,
    }
    return GlmMoeDsaConfig(**_CONFIG | changes | layers)


def build(num_layers: int, num_mtp_layers: int = 0, **changes: Any) -> Any:
    """Return the model in float32, not drawn yet; arguments as of `make_config`."""
    from transformers import GlmMoeDsaForCausalLM

    config = make_config(num_layers, num_mtp_layers, **changes)
    config._attn_implementation = "eager"
    return GlmMoeDsaForCausalLM(config).float().eval()


def draw_model(**changes: Any) -> Any:
    """Return a model of NUM_LAYERS + 1 layers with random weights of unit gain.

    They are rounded to bfloat16, as published checkpoints are, so that loading them
    in 16 bits changes nothing. The limits of `engine` are for this draw. They come
    from the tests of the distribution, which make an MTP layer of the last one.
    """
    import torch

    torch.manual_seed(0)
    drawn = build(NUM_LAYERS + 1, **changes)
    with torch.no_grad():
        for name, weight in drawn.named_parameters():
            value = torch.randn_like(weight)
            if weight.ndim > 1:
                value /= weight.shape[-1] ** 0.5
            else:
                value = 0.1 * value + (0 if name.endswith("bias") else 1)
            weight.copy_(value.bfloat16())
        for name, buffer in drawn.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.05 * torch.randn_like(buffer))
    return drawn


def first_layers(drawn: Any, num_mtp_layers: int = 0, **changes: Any) -> Any:
    """Return the model of a drawn one's first NUM_LAYERS layers."""
    model = build(NUM_LAYERS, num_mtp_layers, **changes)
    missing, _ = model.load_state_dict(drawn.state_dict(), strict=False)
    assert not missing, missing
    return model


def make_model(folder: str, **changes: Any) -> Any:
    """Draw the model, save it and return it in float32."""
    model = first_layers(draw_model(**changes), **changes)
    model.save_pretrained(folder)
    return model


def distributions(model: Any, token_ids: list[int]) -> Any:
    """Return fp32 [tokens - 1, vocabulary], on the CPU: the log-probabilities.

    Each token has a row but the first one, given the tokens before it.
    """
    import torch
    from transformers import DynamicCache

    ids = torch.tensor([token_ids], device=model.device)
    cache = DynamicCache(config=model.config)
    parts = []
    with torch.no_grad():
        for chunk in ids.split(CHUNK, dim=1):
            output = model(input_ids=chunk, past_key_values=cache, use_cache=True)
            parts.append(output.logits[0].float().log_softmax(-1).cpu())
    return torch.cat(parts)[:-1]


def logprobs(model: Any, token_ids: list[int]) -> list[float]:
    """Return the log-probability of every token but the first, given those before."""
    import torch

    chosen = torch.tensor(token_ids)[1:, None]
    return distributions(model, token_ids).gather(1, chosen)[:, 0].tolist()


def main() -> None:
    events = Events(sys.argv[1])
    events.emit("step", what="drawing a tiny GLM-5")
    model = make_model(sys.argv[2])
    events.emit("saved")
    events.emit("step", what="computing it in float32")
    model = model.cuda()
    expected = {
        str(length): logprobs(model, tokens(length)) for length in (SHORT, LONG)
    }
    events.emit("reference", content=expected)
    events.emit("done")


if __name__ == "__main__":
    main()
