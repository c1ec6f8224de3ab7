"""The self-test's tiny random GLM-5, with a layer for multi-token prediction; its log-probabilities in float32."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from vllm.sm120.selftest import model as selftest

VOCAB_SIZE = selftest.VOCAB_SIZE
INDEX_TOPK = selftest.NUM_TOPK
NUM_LAYERS = selftest.NUM_LAYERS
NUM_HEADS = 8
LATENT = 512  # values of the KV latent; 64 RoPE values follow


def make_model(path: Path) -> torch.nn.Module:
    """Draw the weights, save them and return the float32 model.

    What is saved has a layer for multi-token prediction (MTP) as well, which the
    returned model has not.
    """
    from safetensors.torch import save_file

    # transformers knows no MTP layer: it is one decoder layer more, and what _draw_mtp_weights adds.
    drawn = selftest.draw_model()
    drawn.save_pretrained(path)
    save_file(_draw_mtp_weights(drawn), path / "mtp.safetensors")
    model = selftest.first_layers(drawn, num_mtp_layers=1)
    model.config.save_pretrained(path)
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

    CHUNK = selftest.CHUNK

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

    def _compute(self, token_ids: list[int]) -> torch.Tensor:
        result = selftest.distributions(self._model, token_ids)
        torch.cuda.empty_cache()  # long sequences leave 100 GB in it, which the engines beside need
        return result


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
