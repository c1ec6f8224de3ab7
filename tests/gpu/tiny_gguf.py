"""Tiny GGUF files for the engine, the same models as safetensors, and what transformers computes of them in float32.

The files are those of tests/gguf/tiny.py. The safetensors hold what the files stand for, dequantised to float32.
"""

import json
from functools import cached_property
from pathlib import Path

import torch
from gguf import GGMLQuantizationType as Q
from safetensors.torch import save_file

from tests.gguf import tiny
from tests.gpu.tiny_glm import Reference

# Weights that differ by type, and what published files have beside: shards of which the first has no tensors, layers
# that share another's top-k but have an indexer in the file, a block for multi-token prediction (MTP).
MODELS = {
    "F32": {"types": Q.F32, "num_hidden_layers": 3},
    "Q8_0": {"types": Q.Q8_0, "num_hidden_layers": 3, "shards": 4},
    "mixed": {"types": tiny.MIXED, "shards": 4, "shared_indexers": True, "mtp": True},
}
# transformers has it for the norms of q_a and kv_a, whatever the configuration says.
EPSILON = 1e-6


class TinyGguf:
    """A model in both formats, in `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._draft_folder = folder / "draft"
        self._files = tiny.write(folder / "gguf", rms_norm_eps=EPSILON, **MODELS[name])
        self.gguf = self._files.files[-1]
        self.safetensors = _save(folder / "safetensors", self._files.config, _without_shared_indexers(self._files))

    @cached_property
    def reference(self) -> "GgufReference":
        """What the files stand for, on the GPU if there is one."""
        has_draft = self._files.config["num_nextn_predict_layers"]
        draft = DraftReference.load(self._draft_folder, self._files) if has_draft else None
        return GgufReference(_load(self.safetensors), draft)


def _save(folder: Path, config: dict, weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: weight.contiguous().clone() for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _load(folder: Path) -> torch.nn.Module:
    from transformers import GlmMoeDsaForCausalLM

    model, info = GlmMoeDsaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"], info["missing_keys"]
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _without_shared_indexers(files: tiny.Tiny) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint, which has no indexers that are not used."""
    shared = [f"model.layers.{layer}.self_attn.indexer." for layer in shared_layers(files.config)]
    return {name: weight for name, weight in files.weights.items() if not name.startswith(tuple(shared))}


def shared_layers(config: dict) -> list[int]:
    """Return the layers that use another layer's top-k."""
    frequency, offset = config.get("index_topk_freq", 1), config.get("index_skip_topk_offset", 2)
    return [layer for layer in range(config["num_hidden_layers"]) if max(layer - offset + 1, 0) % frequency]


class GgufReference(Reference):
    """A model's log-probabilities in float32, and its draft model's."""

    def __init__(self, model: torch.nn.Module, draft: "DraftReference | None") -> None:
        super().__init__(model)
        self._draft = draft

    @torch.no_grad()
    def draft_logits(self, token_ids: list[int]) -> torch.Tensor:
        """Return fp32 [tokens - 1, vocabulary]: row i proposes token i + 2, given the tokens up to i + 1."""
        from transformers import DynamicCache

        assert self._draft is not None, "the file has no MTP block"
        ids = torch.tensor([token_ids], device=self._model.device)
        cache = DynamicCache(config=self._model.config)
        parts = [
            self._model.model(input_ids=chunk, past_key_values=cache, use_cache=True).last_hidden_state
            for chunk in ids.split(self.CHUNK, dim=1)
        ]
        return self._draft.logits(ids, torch.cat(parts, dim=1), self.CHUNK)


class DraftReference:
    """An MTP block in float32.

    It is a decoder layer, its norm and the language model's head, which transformers has as a model of one layer, and
    what makes that layer's input of two normed halves: the next token's embedding (zeros in front of the second
    token) and the target's last hidden state.
    """

    def __init__(self, model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
        self._model = model
        self._weights = weights

    @classmethod
    def load(cls, folder: Path, files: tiny.Tiny) -> "DraftReference":
        block = f"model.layers.{files.config['num_hidden_layers']}."
        own = {name.removeprefix(block): weight for name, weight in files.weights.items() if name.startswith(block)}
        # The layer is the first one here, and no dense one.
        config = {key: value for key, value in files.config.items() if not key.startswith("index_topk_")}
        config |= {"num_hidden_layers": 1, "first_k_dense_replace": 0}
        weights = {f"model.layers.0.{name}": weight for name, weight in own.items()}
        weights["model.embed_tokens.weight"] = files.weights["model.embed_tokens.weight"]
        weights["model.norm.weight"] = own["shared_head.norm.weight"]
        weights["lm_head.weight"] = files.weights["lm_head.weight"]
        model = _load(_save(folder, config, weights))
        inputs = {name: own[f"{name}.weight"].to(model.device) for name in ("enorm", "hnorm", "eh_proj")}
        return cls(model, inputs)

    def logits(self, ids: torch.Tensor, hidden_states: torch.Tensor, chunk: int) -> torch.Tensor:
        """Return fp32 [tokens - 1, vocabulary] for ids [1, tokens] and the target's states [1, tokens, hidden]."""
        from transformers import DynamicCache

        embeddings = self._model.get_input_embeddings()(ids[:, 1:])
        embeddings[:, 0] = 0
        halves = (self._norm(embeddings, "enorm"), self._norm(hidden_states[:, :-1], "hnorm"))
        inputs = torch.nn.functional.linear(torch.cat(halves, dim=-1), self._weights["eh_proj"])
        cache = DynamicCache(config=self._model.config)
        parts = [
            self._model(inputs_embeds=part, past_key_values=cache, use_cache=True).logits[0]
            for part in inputs.split(chunk, dim=1)
        ]
        return torch.cat(parts).cpu()

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self._weights[name], EPSILON)
