"""Tiny GGUF files for the engine, the same models as safetensors, and what transformers computes of them in float32.

The files are those of tests/gguf/tiny.py. The safetensors hold what the files stand for, dequantised to float32.

What ggml's kernels compute is not quite that: they round the inputs of quantised layers to 8 bits. `Rounding` does the
same to the reference, which tells what it costs.
"""

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import gguf
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode

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

# Values that ggml's Q8_1 gives a scale in common.
BLOCK = 32
# Types for which the kernels for many tokens multiply a block's minimum by the sum of its inputs (vec_dot_*_impl_mmq),
# with the bytes that a block begins with: what else there is are the weights without that minimum.
HEADER_BYTES = {Q.Q4_K: 16, Q.Q5_K: 16}
# Matrices that the engine holds in 16 bits, whatever their type in the file.
IN_16_BITS = ("embed_tokens", "kv_b_proj", "indexer.wk", "indexer.weights_proj", "mlp.gate")
# How often the reference is computed with rounded inputs: the error of a single logit is to be known from them.
NUM_ROUNDINGS = 8


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
        return GgufReference(_load(self.safetensors), draft, minima(self._files.files))


def minima(files: Iterable[Path]) -> dict[str, torch.Tensor]:
    """Return what the kernels for many tokens subtract apart, by tensor: float32 [rows, columns / BLOCK]."""
    found = {}
    for tensor in (tensor for file in files for tensor in gguf.GGUFReader(file).tensors):
        if tensor.tensor_type in HEADER_BYTES:
            blocks = tensor.data.reshape(-1, gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]).copy()
            blocks[:, HEADER_BYTES[tensor.tensor_type] :] = 0
            values = gguf.quants.dequantize(blocks, tensor.tensor_type)[:, ::BLOCK]
            found[tensor.name] = -torch.from_numpy(values.copy()).reshape(len(tensor.data), -1)
    return found


def _save(folder: Path, config: dict, weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: weight.contiguous().clone() for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _load(folder: Path) -> torch.nn.Module:
    from transformers import GlmMoeDsaForCausalLM

    model, info = GlmMoeDsaForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",  # which calls `linear` for each expert
        output_loading_info=True,
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


class Rounding(TorchFunctionMode):
    """Rounds the inputs of quantised layers as ggml's kernels do, and subtracts minima as they do.

    A block of 32 inputs x becomes whole numbers q in -127 to 127, times d = max |x| / 127 in float16 (quantize_q8_1 of
    the plugin's csrc/gguf/gguf_kernel.cu). A Q4_K or Q5_K weight is a positive number w less its block's minimum m.
    The kernels for many tokens compute d w q - m sum(x), the latter in float16: the errors of x meet w, which is
    larger than the weight. Those for few tokens compute d w q - m d sum(q), and so do all kernels of other types.

    Rounding is dithered: a random number in -1/2 to 1/2 is added before and subtracted after it. The error has the same
    size, and another value in every run.
    """

    def __init__(self, weights: dict[int, torch.Tensor | None], seed: int) -> None:
        """`weights`: by the address of a quantised weight's storage, its minima if it has any."""
        super().__init__()
        self.many_tokens = True
        self.seen: set[int] = set()
        self._weights = weights
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            x, weight, *_ = args
            address = weight.untyped_storage().data_ptr()
            if address in self._weights:
                self.seen.add(address)
                return self._linear(x, weight, self._weights[address])
        return func(*args, **(kwargs or {}))

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, minima: torch.Tensor | None) -> torch.Tensor:
        rounded = self._round(x)
        out = torch.nn.functional.linear(rounded, weight)
        if self.many_tokens and minima is not None:
            out -= torch.nn.functional.linear(_sums(x).half().float() - _sums(rounded), minima)
        return out

    def _round(self, x: torch.Tensor) -> torch.Tensor:
        if x.device not in self._generators:
            self._generators[x.device] = torch.Generator(x.device).manual_seed(self._seed)
        blocks = x.unflatten(-1, (-1, BLOCK))
        scale = blocks.abs().amax(dim=-1, keepdim=True) / 127
        dither = torch.rand(blocks.shape, generator=self._generators[x.device], device=x.device) - 0.5
        whole = (blocks / scale.clamp(min=1e-30) + dither).round() - dither
        return (whole * scale.half().float()).flatten(-2)


def _sums(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, BLOCK)).sum(dim=-1)


def quantised_weights(
    model: torch.nn.Module, minima: dict[str, torch.Tensor], first_layer: int = 0
) -> dict[int, torch.Tensor | None]:
    """Return a Rounding's `weights` for a model whose layers are those of the file from `first_layer` on."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM_DSA, first_layer + model.config.num_hidden_layers)
    found = {}
    for name, weight in model.named_parameters():
        layer = name.removesuffix(".weight")
        if weight.ndim == 1 or layer.endswith(IN_16_BITS):
            continue
        address = weight.untyped_storage().data_ptr()
        assert address not in found, f"{name} has no storage of its own"
        if first_layer:
            layer = layer.replace("model.layers.0.", f"model.layers.{first_layer}.")
        own = minima.get(f"{names.get_name(layer)}.weight") if ".experts." not in layer else None
        found[address] = own if own is None else own.to(weight.device)
    return found


class GgufReference(Reference):
    """A model's log-probabilities in float32, and its draft model's; both also with inputs rounded to 8 bits.

    `minima` are those of the files.
    """

    def __init__(
        self, model: torch.nn.Module, draft: "DraftReference | None", minima: dict[str, torch.Tensor] | None = None
    ) -> None:
        super().__init__(model)
        self._draft = draft
        self._minima = minima or {}
        self._rounded: dict[tuple[tuple[int, ...], int], torch.Tensor] = {}

    @torch.no_grad()
    def rounded(self, token_ids: list[int], num_prompt: int) -> torch.Tensor:
        """Return `logprobs` with rounded inputs, fp32 [NUM_ROUNDINGS, tokens - 1, vocabulary].

        The first `num_prompt` tokens are computed many at a time, the rest few at a time.
        """
        key = (tuple(token_ids), num_prompt)
        if key not in self._rounded:
            weights = quantised_weights(self._model, self._minima)
            found = []
            for seed in range(NUM_ROUNDINGS):
                with Rounding(weights, seed) as rounding:
                    states = self._states(token_ids, num_prompt, rounding)
                    parts = [self._head(part, many, rounding) for part, many in _split(states, num_prompt)]
                assert rounding.seen == weights.keys(), "layers were not computed by `linear`"
                found.append(torch.cat(parts)[:-1])
            self._rounded[key] = torch.stack(found)
        return self._rounded[key]

    def _head(self, states: torch.Tensor, many_tokens: bool, rounding: Rounding) -> torch.Tensor:
        rounding.many_tokens = many_tokens
        return self._model.lm_head(states)[0].log_softmax(dim=-1).cpu()

    def _states(self, token_ids: list[int], num_prompt: int = 0, rounding: Rounding | None = None) -> torch.Tensor:
        """Return the last hidden states, [1, tokens, hidden]."""
        from transformers import DynamicCache

        ids = torch.tensor([token_ids], device=self._model.device)
        cache = DynamicCache(config=self._model.config)
        states = []
        for part, many in _split(ids, num_prompt):
            if rounding:
                rounding.many_tokens = many
            for chunk in part.split(self.CHUNK, dim=1):
                out = self._model.model(input_ids=chunk, past_key_values=cache, use_cache=True)
                states.append(out.last_hidden_state)
        return torch.cat(states, dim=1)

    @torch.no_grad()
    def draft_logits(self, token_ids: list[int]) -> torch.Tensor:
        """Return fp32 [tokens - 1, vocabulary]: row i proposes token i + 2, given the tokens up to i + 1."""
        assert self._draft is not None, "the file has no MTP block"
        return self._draft.logits(token_ids, self._states(token_ids), self.CHUNK)

    @torch.no_grad()
    def rounded_draft_logits(self, token_ids: list[int], num_prompt: int) -> torch.Tensor:
        """Return `draft_logits` with rounded inputs, fp32 [NUM_ROUNDINGS, tokens - 1, vocabulary]."""
        assert self._draft is not None, "the file has no MTP block"
        weights = quantised_weights(self._model, self._minima) | self._draft.quantised_weights(self._minima)
        found = []
        for seed in range(NUM_ROUNDINGS):
            with Rounding(weights, seed) as rounding:
                states = self._states(token_ids, num_prompt, rounding)
                found.append(self._draft.logits(token_ids, states, self.CHUNK, num_prompt, rounding))
        return torch.stack(found)


def _split(x: torch.Tensor, num_prompt: int) -> list[tuple[torch.Tensor, bool]]:
    """Return the parts of x [1, tokens, ...] that are computed many tokens at a time, and few."""
    parts = (x[:, :num_prompt], True), (x[:, num_prompt:], False)
    return [(part, many) for part, many in parts if part.shape[1]]


class DraftReference:
    """An MTP block in float32.

    It is a decoder layer, its norm and the language model's head, which transformers has as a model of one layer, and
    what makes that layer's input of two normed halves: the next token's embedding (zeros in front of the second
    token) and the target's last hidden state.
    """

    def __init__(self, model: torch.nn.Module, weights: dict[str, torch.Tensor], layer: int) -> None:
        self._model = model
        self._weights = weights
        self._layer = layer  # the block's number in the file

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
        return cls(model, inputs, files.config["num_hidden_layers"])

    def quantised_weights(self, minima: dict[str, torch.Tensor]) -> dict[int, torch.Tensor | None]:
        return quantised_weights(self._model, minima, self._layer)

    def logits(
        self,
        token_ids: list[int],
        hidden_states: torch.Tensor,
        chunk: int,
        num_prompt: int = 0,
        rounding: Rounding | None = None,
    ) -> torch.Tensor:
        """Return fp32 [tokens - 1, vocabulary] for the target's states [1, tokens, hidden]."""
        from transformers import DynamicCache

        ids = torch.tensor([token_ids], device=self._model.device)
        embeddings = self._model.get_input_embeddings()(ids[:, 1:])
        embeddings[:, 0] = 0
        halves = (self._norm(embeddings, "enorm"), self._norm(hidden_states[:, :-1], "hnorm"))
        inputs = torch.nn.functional.linear(torch.cat(halves, dim=-1), self._weights["eh_proj"])
        cache = DynamicCache(config=self._model.config)
        logits = []
        for part, many in _split(inputs, num_prompt):
            if rounding:
                rounding.many_tokens = many
            logits += [
                self._model(inputs_embeds=each, past_key_values=cache, use_cache=True).logits[0]
                for each in part.split(chunk, dim=1)
            ]
        return torch.cat(logits).cpu()

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self._weights[name], EPSILON)
