"""A tiny random GLM-5, and its log-probabilities in float32, by transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

VOCAB_SIZE = 256
INDEX_TOPK = 2048
NUM_LAYERS = 4
NUM_HEADS = 8
LATENT = 512  # values of the KV latent; 64 RoPE values follow

# Attention dimensions, top-k and norms are GLM-5's; depth, width and experts are
# not. Every expert is active, so that rounding cannot change the routing.
_CONFIG = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
    "first_k_dense_replace": 1,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_HEADS,
    "n_routed_experts": 8,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 256,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_topk": INDEX_TOPK,
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


def make_model(path: Path) -> torch.nn.Module:
    """Draw random weights of unit gain, save them and return the float32 model.

    The weights are rounded to bfloat16, as published checkpoints are, so that
    loading them in 16 bits changes nothing. What is saved has a layer for
    multi-token prediction (MTP) as well, which the returned model has not.
    """
    from safetensors.torch import save_file
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    torch.manual_seed(0)
    # transformers knows no MTP layer: it is one decoder layer more, and what _draw_mtp_weights adds.
    saved = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(num_hidden_layers=NUM_LAYERS + 1, **_CONFIG)).float()
    with torch.no_grad():
        for name, weight in saved.named_parameters():
            value = torch.randn_like(weight)
            if weight.ndim > 1:
                value /= weight.shape[-1] ** 0.5
            else:
                value = 0.1 * value + (0 if name.endswith("bias") else 1)
            weight.copy_(value.bfloat16())
        for name, buffer in saved.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.05 * torch.randn_like(buffer))
    saved.save_pretrained(path)
    save_file(_draw_mtp_weights(saved), path / "mtp.safetensors")

    config = GlmMoeDsaConfig(num_hidden_layers=NUM_LAYERS, num_nextn_predict_layers=1, **_CONFIG)
    config.save_pretrained(path)
    config._attn_implementation = "eager"
    model = GlmMoeDsaForCausalLM(config).float().eval()
    missing, _ = model.load_state_dict(saved.state_dict(), strict=False)
    assert not missing
    return model


def _draw_mtp_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what an MTP layer has beside a decoder layer, under its checkpoint names."""
    embedding, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    width = embedding.shape[1]
    norms = {name: 1 + 0.1 * torch.randn(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    weights = {f"{name}.weight": norm for name, norm in norms.items()}
    # As small as the embeddings beside what the layer adds, so that its attention matters as much as theirs.
    weights["eh_proj.weight"] = torch.randn(width, 2 * width) / (2 * width) ** 0.5 / width**0.5
    weights["embed_tokens.weight"] = embedding
    weights["shared_head.head.weight"] = head
    return {f"model.layers.{NUM_LAYERS}.{name}": weight.bfloat16().clone() for name, weight in weights.items()}


class Reference:
    """A model's log-probabilities in float32. Each sequence is computed once."""

    CHUNK = 512  # tokens per forward: the indexer's scores take 32 heads * 4 bytes for each of them and each key

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._cache: dict[tuple[tuple[int, ...], str], torch.Tensor] = {}
        self._selections: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def logprobs(self, token_ids: list[int], kv: str = "auto") -> torch.Tensor:
        """Return fp32 [tokens - 1, vocabulary]: every token's distribution but the first's, given those before it.

        With `kv` "fp8" or "fp8_ds_mla" the KV values are rounded as a cache in
        that format rounds them; everything else stays in float32.
        """
        key = (tuple(token_ids), kv)
        if key not in self._cache:
            with rounded_kv(self._model, kv):
                self._cache[key] = self._compute(token_ids)
        return self._cache[key]

    def chosen(self, token_ids: list[int], kv: str = "auto") -> torch.Tensor:
        """Return fp32 [tokens - 1]: the log-probability of every token but the first."""
        return self.logprobs(token_ids, kv).gather(1, torch.tensor(token_ids)[1:, None])[:, 0]

    def selections(self, token_ids: list[int]) -> list[torch.Tensor]:
        """Return for each layer what its indexer selects, int32 [tokens, top-k]: positions, in any order.

        Rows that see fewer than top-k tokens hold others, too, and -1.
        """
        key = tuple(token_ids)
        if key not in self._selections:
            layers: list[list[torch.Tensor]] = [[] for _ in self._model.model.layers]
            hooks = []
            for layer, kept in zip(self._model.model.layers, layers, strict=True):

                def keep(module, args, out, kept=kept):
                    kept.append(torch.nn.functional.pad(out[0], (0, INDEX_TOPK - out.shape[-1]), value=-1).cpu())

                hooks.append(layer.self_attn.indexer.register_forward_hook(keep))
            self._compute(token_ids)
            for hook in hooks:
                hook.remove()
            self._selections[key] = [torch.cat(kept) for kept in layers]
        return self._selections[key]

    @torch.no_grad()
    def _compute(self, token_ids: list[int]) -> torch.Tensor:
        from transformers import DynamicCache

        ids = torch.tensor([token_ids], device=self._model.device)
        cache = DynamicCache(config=self._model.config)
        parts = []
        for chunk in ids.split(self.CHUNK, dim=1):
            logits = self._model(input_ids=chunk, past_key_values=cache, use_cache=True).logits[0]
            parts.append(logits.float().log_softmax(dim=-1).cpu())
        return torch.cat(parts)[:-1]


@contextmanager
def rounded_kv(model: torch.nn.Module, kv: str) -> Iterator[None]:
    """Round the KV values of every layer to what a cache of vLLM's format `kv` holds.

    The RoPE key is rounded before its rotation, not after it. The error has the
    same size.
    """
    hooks = []
    if kv != "auto":
        round_latent, round_rope = {
            "fp8": (_to_e4m3, _to_e4m3),
            "fp8_ds_mla": (_to_scaled_e4m3, lambda x: x.bfloat16().float()),
        }[kv]

        def on_projection(module, args, out):
            return torch.cat((out[..., :LATENT], round_rope(out[..., LATENT:])), dim=-1)

        for attention in (layer.self_attn for layer in model.model.layers):
            if not hasattr(attention, "kv_a_layernorm"):
                continue  # not MLA
            hooks.append(attention.kv_a_layernorm.register_forward_hook(lambda module, args, out: round_latent(out)))
            hooks.append(attention.kv_a_proj_with_mqa.register_forward_hook(on_projection))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _to_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _to_scaled_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round to e4m3 with one scale, a power of two, per 128 values."""
    tiles = x.unflatten(-1, (-1, 128))
    scale = (tiles.abs().amax(dim=-1, keepdim=True) / 448).clamp(min=1e-4).log2().ceil().exp2()
    return (_to_e4m3(tiles / scale) * scale).flatten(-2)
