"""A tiny random GLM-5.3-Flash (glm5next), and its log-probabilities in float32, by transformers.

One KDA layer, then two with sparse attention. Two things are simpler than in the published model: it is the text
model alone, and the hyper-connections are left out, for vLLM has them in TileLang only. transformers gets weights for
which they are plain residuals.
"""

from pathlib import Path
from typing import Any

import torch

from tests.gpu.tiny_glm import VOCAB_SIZE, Reference

TOPK_WIDTH = 2176  # of the rows of indices: the incomplete pool beside the top-k, in multiples of 128

_CONFIG = {
    "architectures": ["Glm5NextForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 3,
    # transformers has had two names for layers of sparse attention, and takes this one for either.
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "indexer_types": ["full", "full", "full"],
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 0,
    "v_head_dim": 256,
    "index_topk": 2048,
    "index_kpool": 16,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "linear_num_heads": 4,
    "max_position_embeddings": 32768,
    "hc_mult": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    # Read by vLLM only.
    "mhc": False,
    "mla_use_nope": True,
    "indexer_rope_interleave": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}


class _Model(torch.nn.Module):
    """The text model with its head, which transformers has as part of the multimodal model only."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

        self.config = config
        self.model = Glm5NextTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(input_ids=input_ids, use_cache=False).last_hidden_state)


class Glm5NextReference(Reference):
    """Each sequence in one piece: up to a few thousand tokens."""

    @torch.no_grad()
    def _compute(self, token_ids: list[int]) -> torch.Tensor:
        logits = self._model(torch.tensor([token_ids], device=self._model.device))[0]
        return logits.float().log_softmax(dim=-1).cpu()[:-1]


def make_model(path: Path) -> torch.nn.Module:
    """Draw random weights of unit gain, save them as a checkpoint of vLLM's and return the float32 model."""
    from safetensors.torch import save_file
    from transformers import Glm5NextTextConfig

    torch.manual_seed(0)
    config = Glm5NextTextConfig(**_CONFIG)
    config._attn_implementation = "eager"
    model = _Model(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "_hc." in name:
                _make_plain_residual(name, weight)
            elif name.endswith(("A_log", "dt_bias")):  # how fast the state decays: as transformers draws it
                weight.copy_(weight.bfloat16())
            else:
                value = torch.randn_like(weight)
                if weight.ndim > 1:
                    value /= weight.shape[-1] ** 0.5
                else:
                    value = 0.1 * value + (0 if name.endswith("bias") else 1)
                weight.copy_(value.bfloat16())
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.05 * torch.randn_like(buffer))
    path.mkdir(parents=True, exist_ok=True)
    save_file(_checkpoint(model), path / "model.safetensors")
    config.save_pretrained(path)
    return model


def _make_plain_residual(name: str, weight: torch.Tensor) -> None:
    """Fill a hyper-connection so that all streams stay equal: each gives a quarter, gets all, and they mix evenly."""
    weight.zero_()
    if name.endswith("base"):
        streams = _CONFIG["hc_mult"]
        weight[:streams] = torch.tensor(1 / streams).logit()


def _checkpoint(model: _Model) -> dict[str, torch.Tensor]:
    """Return the weights under the names of published checkpoints, in bfloat16 but for what vLLM has in float32."""
    weights: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        name = name.replace(".forget_gate.", ".")
        if "_hc." in name:
            continue
        if name.endswith(".experts.gate_up_proj"):
            for expert, pair in enumerate(weight):
                gate, up = pair.chunk(2)
                weights[name.replace("gate_up_proj", f"{expert}.gate_proj.weight")] = gate
                weights[name.replace("gate_up_proj", f"{expert}.up_proj.weight")] = up
        elif name.endswith(".experts.down_proj"):
            for expert, down in enumerate(weight):
                weights[name.replace("down_proj", f"{expert}.down_proj.weight")] = down
        elif name.endswith(".conv1d.weight"):
            for part, of_part in zip("qkv", weight.chunk(3), strict=True):
                weights[name.replace("conv1d", f"{part}_conv1d")] = of_part
        else:
            weights[name] = weight
    keep = ("e_score_correction_bias", "A_log", "dt_bias", "conv1d.weight")
    return {
        name: (weight if name.endswith(keep) else weight.bfloat16()).clone().contiguous()
        for name, weight in weights.items()
    }
