# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The configuration of GLM-5 and DeepSeek-V3.2 models from their GGUF files.

llama.cpp's converter writes a key for each number of config.json that llama.cpp reads
(conversion/glm.py, conversion/deepseek.py); what its model code has built in
(src/models/glm-dsa.cpp, src/models/deepseek32.cpp) is added here. A config.json
beside the file, or at --hf-config-path, may say more but nothing else.
"""

import json
import math
import re
import shutil
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import huggingface_hub
from transformers import PreTrainedConfig

from vllm.logger import init_logger

from .gguf_files import GGUFModel, find_files, nearest, read_headers
from .gguf_header import GGUFFileError, read_header, show

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

# vLLM shows what its own loggers say.
logger = init_logger(f"vllm.{__name__}")

_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "glm-dsa": {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "indexer_rope_interleave": True,
    },
    "deepseek32": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "indexer_rope_interleave": False,
    },
}
_BUILT_IN = {
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "rope_interleave": True,
    "attention_bias": False,
    "moe_layer_freq": 1,
    "dtype": "bfloat16",
}
# The field of config.json, and the key without the architecture's prefix.
_INTEGERS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "v_head_dim": "attention.value_length_mla",
    "qk_rope_head_dim": "rope.dimension_count",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "num_experts_per_tok": "expert_used_count",
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
}
_SCORING = {1: "softmax", 2: "sigmoid"}  # llama.cpp's expert_gating_func
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_REQUIRED = object()
# llama.cpp's LLAMA_MAX_LAYERS. Lists of a layer's properties are made from the number.
_MAX_BLOCKS = 512


@dataclass
class _Fields:
    """The fields of a config, with the key of each that the file itself states."""

    model: GGUFModel
    arch: str
    values: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)

    def fail(self, what: str) -> None:
        raise GGUFFileError(
            f"{show(self.model.files[0])}: {what}. Take a file that a current "
            "llama.cpp has converted."
        )

    def number(
        self,
        key: str,
        kind: type,
        default: Any = _REQUIRED,
        least: float = 1,
        most: float = (1 << 31) - 1,
    ) -> Any:
        """Return the value of `<arch>.<key>`, a number from `least` to `most`."""
        key = f"{self.arch}.{key}"
        value = self.model.metadata.get(key)
        if value is None:
            if default is _REQUIRED:
                self.fail(f"the metadata key {key} is missing")
            return default
        types = (int,) if kind is int else (int, float)
        if (
            isinstance(value, bool)
            or not isinstance(value, types)
            or not least <= value <= most  # nor NaN
        ):
            self.fail(f"the metadata key {key} is {show(value)}")
        # A float is a float32 in the file: 1e-05 there is 9.999999747378752e-06 here.
        return value if kind is int else float(f"{value:.7g}")

    def set(self, name: str, value: Any, key: str) -> None:
        self.values[name] = value
        self.keys[name] = f"{self.arch}.{key}"

    def read(self, name: str, key: str, kind: type, **options: Any) -> None:
        value = self.number(key, kind, **options)
        if f"{self.arch}.{key}" in self.model.metadata:
            self.set(name, value, key)
        else:
            self.values[name] = value


def is_dsa(model: GGUFModel) -> bool:
    """Return whether this module knows the file's architecture."""
    arch = model.metadata.get("general.architecture")
    return isinstance(arch, str) and arch in _ARCHITECTURES


def build(model: GGUFModel) -> dict[str, Any]:
    """Return the config.json that the file of a DSA model stands for."""
    return _read(model).values


def _read(model: GGUFModel) -> _Fields:
    arch = model.metadata["general.architecture"]
    fields = _Fields(model, arch, {**_BUILT_IN, **_ARCHITECTURES[arch]})
    values = fields.values
    for name, key in _INTEGERS.items():
        fields.read(name, key, int)
    values["num_key_value_heads"] = values["num_attention_heads"]

    blocks = fields.number("block_count", int, most=_MAX_BLOCKS)
    mtp = fields.number("nextn_predict_layers", int, default=0, least=0)
    if mtp >= blocks:
        fields.fail(f"of {blocks} blocks {mtp} are for multi-token prediction")
    fields.set("num_hidden_layers", blocks - mtp, "block_count")
    fields.set("num_nextn_predict_layers", mtp, "nextn_predict_layers")
    fields.read(
        "first_k_dense_replace", "leading_dense_block_count", int, default=0, least=0
    )

    head = fields.number("attention.key_length_mla", int)
    nope = head - values["qk_rope_head_dim"]
    if nope <= 0:
        fields.fail(f"attention heads of {head} have no part without RoPE")
    fields.set("qk_nope_head_dim", nope, "attention.key_length_mla")
    fields.read("n_group", "expert_group_count", int, default=1)
    fields.read("topk_group", "expert_group_used_count", int, default=1)
    if (
        values["num_experts_per_tok"] > values["n_routed_experts"]
        or values["topk_group"] > values["n_group"]
        or values["n_routed_experts"] % values["n_group"]
    ):
        fields.fail("the numbers of experts and of groups contradict each other")
    gating = fields.number("expert_gating_func", int, default=2, least=0)
    if gating not in _SCORING:
        fields.fail(f"the gating function {gating} of the experts is unknown")
    fields.set("scoring_func", _SCORING[gating], "expert_gating_func")
    fields.read(
        "routed_scaling_factor", "expert_weights_scale", float, default=1.0, least=0
    )
    norm = model.metadata.get(f"{arch}.expert_weights_norm", False)
    if not isinstance(norm, bool):
        fields.fail(f"the metadata key {arch}.expert_weights_norm is {show(norm)}")
    fields.set("norm_topk_prob", norm, "expert_weights_norm")
    fields.read("rms_norm_eps", "attention.layer_norm_rms_epsilon", float, least=1e-12)
    values["rope_parameters"] = _rope(fields)
    if arch == "glm-dsa":
        _index_pattern(fields)
    _vocabulary(fields)
    return fields


def _rope(fields: _Fields) -> dict[str, Any]:
    metadata, prefix = fields.model.metadata, f"{fields.arch}.rope.scaling."
    rope = {"rope_theta": fields.number("rope.freq_base", float)}
    kind = metadata.get(f"{prefix}type", "none")
    factor = fields.number("rope.scaling.factor", float, default=1.0)
    if kind == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": fields.number(
                "rope.scaling.original_context_length", int
            ),
            "beta_fast": fields.number(
                "rope.scaling.yarn_beta_fast", float, default=32.0
            ),
            "beta_slow": fields.number(
                "rope.scaling.yarn_beta_slow", float, default=1.0
            ),
        }
        # The converter writes a tenth of mscale_all_dim and leaves mscale out:
        # published models have the same value for both.
        tenth = fields.number("rope.scaling.yarn_log_multiplier", float, 0.0, least=0)
        if tenth:
            mscale = round(10 * tenth, 6)
            rope |= {"mscale": mscale, "mscale_all_dim": mscale}
    elif kind == "none" or (kind == "linear" and factor == 1):
        rope["rope_type"] = "default"
    else:
        fields.fail(f"the RoPE scaling {show(kind)} is unknown for {fields.arch}")
    return rope


def _index_pattern(fields: _Fields) -> None:
    """Set which layers choose their top-k (F) and which share the last one (S)."""
    key = "attention.indexer.types"
    layers = fields.values["num_hidden_layers"]
    types = fields.model.metadata.get(f"{fields.arch}.{key}")
    if types is None:
        # As llama.cpp: files from before the key are told apart by their context.
        # GLM-5 and 5.1 have an indexer in each layer, GLM-5.2 in the first three and
        # then in every fourth.
        shared = fields.values["max_position_embeddings"] >= 1 << 20
        pattern = "".join(
            "S" if shared and layer > 2 and layer % 4 != 2 else "F"
            for layer in range(layers)
        )
        fields.values["index_topk_pattern"] = pattern
        return
    if isinstance(types, (bool, int)):
        types = [types] * layers
    pattern = _pattern(types)
    if pattern is None or len(pattern) < layers or pattern[0] == "S":
        fields.fail(
            f"the metadata key {fields.arch}.{key} is {show(types)}, not one of full "
            f"(1) and shared (0) for each of {layers} layers, the first one full"
        )
    fields.set("index_topk_pattern", pattern[:layers], key)


def _pattern(types: Any) -> str | None:
    """Return `full` and `shared`, 1 and 0, or F and S in the letters of the latter."""
    letters = {1: "F", 0: "S", "full": "F", "shared": "S", "F": "F", "S": "S"}
    try:
        return "".join(letters[kind] for kind in types)
    except (KeyError, TypeError):
        return None


def _vocabulary(fields: _Fields) -> None:
    model, values = fields.model, fields.values
    shapes = {tensor.name: tensor.shape for tensor in model.tensors}
    rows = shapes.get("token_embd.weight", (None,))[0]
    size = fields.number("vocab_size", int, default=rows)
    if size is None or rows not in (None, size):
        fields.fail(
            f"{fields.arch}.vocab_size is {size}, and token_embd.weight has {rows} rows"
        )
    fields.set("vocab_size", size, "vocab_size")
    values["tie_word_embeddings"] = bool(shapes) and "output.weight" not in shapes

    def token(name: str) -> int | None:
        value = model.metadata.get(f"tokenizer.ggml.{name}_token_id")
        valid = isinstance(value, int) and not isinstance(value, bool)
        return value if valid and 0 <= value < size else None

    values["bos_token_id"] = token("bos")
    values["pad_token_id"] = token("padding")
    # A turn ends with any of these, as in GLM-5's own config.json.
    ends = [token(name) for name in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(i for i in ends if i is not None))
    values["eos_token_id"] = ends or None


def merge(model: GGUFModel, config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return `config` with what it leaves out taken from the file.

    Args:
        model: A DSA model
        config: The content of a config.json
        source: Where it was read

    Raises:
        GGUFFileError: The two contradict each other

    """
    fields = _read(model)
    stated = {name: fields.values[name] for name in fields.keys}
    stated["model_type"] = fields.values["model_type"]
    merged = {**fields.values, **config}
    # How the original checkpoint is stored says nothing about this file.
    for name in ("quantization_config", "auto_map", "torch_dtype"):
        merged.pop(name, None)

    pattern = _config_pattern(config, fields.values["num_hidden_layers"], source)
    if pattern is not None:
        merged["index_topk_pattern"] = pattern
    # A converter may leave the MTP block out of the file.
    if stated["num_nextn_predict_layers"] == 0:
        merged["num_nextn_predict_layers"] = 0

    conflicts = []
    for name, value in stated.items():
        if not _same(value, merged[name]):
            key = fields.keys.get(name, "general.architecture")
            conflicts.append((name, key, value, merged[name]))
    if any(name in config for name in ("rope_parameters", "rope_theta")):
        theirs = _rope_fields(config)
        for name, value in _rope_fields(fields.values).items():
            if not _same(value, theirs.get(name)):
                key = f"{fields.arch}.rope.*"
                conflicts.append((name, key, value, theirs.get(name)))
        if "rope_parameters" not in config:  # rope_theta and rope_scaling
            merged["rope_parameters"] = fields.values["rope_parameters"]
            merged.pop("rope_scaling", None)
    if conflicts:
        path = show(model.files[0])
        lines = "\n".join(
            f"  {name}: {show(ours)} in {path} ({key}), {show(theirs)} in {source}"
            for name, key, ours, theirs in conflicts
        )
        raise GGUFFileError(
            f"The GGUF file and the config contradict each other:\n{lines}\nGive the "
            "config.json of this very model with --hf-config-path, or move the other "
            "away: without one the file's metadata are enough."
        )
    return merged


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, bool) != isinstance(theirs, bool):
        return False
    if isinstance(ours, float) and isinstance(theirs, (int, float)):
        return math.isclose(ours, theirs, rel_tol=1e-6)  # seven digits of a float32
    return ours == theirs


def _config_pattern(config: dict[str, Any], layers: int, source: str) -> str | None:
    """Return a config's pattern of indexers, None if it has none."""
    for name in ("index_topk_pattern", "indexer_types"):
        if config.get(name) is not None:
            pattern = _pattern(config[name])
            if pattern is None or len(pattern) < layers:
                raise GGUFFileError(
                    f"{name} is {show(config[name])} in {source}, not full or shared "
                    f"for each of {layers} layers. Correct or remove it."
                )
            return pattern[:layers]
    frequency = config.get("index_topk_freq")
    offset = config.get("index_skip_topk_offset", 2)
    if frequency is None:
        return None
    if not (isinstance(frequency, int) and isinstance(offset, int) and frequency > 0):
        raise GGUFFileError(
            f"index_topk_freq is {show(frequency)} and index_skip_topk_offset "
            f"{show(offset)} in {source}. Correct or remove them."
        )
    return "".join(
        "S" if max(layer - offset + 1, 0) % frequency else "F"
        for layer in range(layers)
    )


def _rope_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return what must agree of RoPE, of a config in the new or the old form."""
    rope: dict[str, Any] = {"rope_theta": config.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(part := config.get(name), dict):
            rope |= part
    kind = rope.get("rope_type", rope.get("type")) or "default"
    names = ["rope_theta"]
    if kind != "default":
        names += ["factor", "original_max_position_embeddings"]
    return {"rope_type": kind} | {name: rope.get(name) for name in names}


def _read_config(source: str, **kwargs: Any) -> dict[str, Any]:
    """Return the config.json of a folder or a repository."""
    path = Path(source, "config.json")
    if not path.is_file():
        return PreTrainedConfig.get_config_dict(source, **kwargs)[0]
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as e:
        raise GGUFFileError(f"{show(path)} is not JSON: {e}. Replace it.") from e
    if not isinstance(config, dict):
        raise GGUFFileError(f"{show(path)} is not a JSON object. Replace it.")
    return config


# The folders of this process's models by first file; they go when it ends.
_folders: dict[str, TemporaryDirectory] = {}


def config_folder(
    path: str | PathLike, hf_config_path: str | None = None, **kwargs: Any
) -> str | None:
    """Return a folder with the config.json of a DSA model, or None for other models.

    Args:
        path: The model's first file
        hf_config_path: Where the config.json is, if not beside the file or above it
        **kwargs: For reading `hf_config_path`, as of `PreTrainedConfig`

    """
    path = str(path)
    if path in _folders and hf_config_path is None:
        return _folders[path].name
    model = read_headers(find_files(path))
    if not is_dsa(model):
        return None
    beside = nearest(path, "config.json")
    if hf_config_path is not None or beside is not None:
        source = hf_config_path or str(beside)
        config = merge(model, _read_config(source, **kwargs), source)
    else:
        source = "its metadata"
        config = build(model)
    logger.info("The configuration of %s is from %s", path, source)
    _folders[path] = folder = TemporaryDirectory(prefix="vllm-gguf-config-")
    Path(folder.name, "config.json").write_text(json.dumps(config, indent=2))
    generation = nearest(path, "generation_config.json")
    if generation is not None:
        shutil.copy(generation / "generation_config.json", folder.name)
    elif sampling := _sampling(model, config):
        text = json.dumps(sampling, indent=2)
        Path(folder.name, "generation_config.json").write_text(text)
    return folder.name


def _sampling(model: GGUFModel, config: dict[str, Any]) -> dict[str, Any]:
    """Return the generation config that the file recommends, empty if it does not."""
    sampling = {}
    for name, key in (("temperature", "temp"), ("top_p", "top_p"), ("top_k", "top_k")):
        value = model.metadata.get(f"general.sampling.{key}")
        if isinstance(value, (int, float)) and 0 < value < 1 << 31:
            sampling[name] = float(f"{value:.7g}") if name != "top_k" else int(value)
    if sampling:
        sampling |= {"do_sample": True, "eos_token_id": config.get("eos_token_id")}
    return sampling


def configure(args: "EngineArgs", path: str) -> None:
    """Let `args` take config and tokenizer of the DSA model whose first file is `path`.

    For other models nothing changes.
    """
    user_config = args.hf_config_path
    folder = config_folder(
        path,
        user_config,
        revision=args.revision,
        token=args.hf_token,
        local_files_only=huggingface_hub.constants.HF_HUB_OFFLINE,
    )
    if folder is None:
        return
    args.hf_config_path = folder
    if user_config is not None and args.generation_config == "auto":
        args.generation_config = user_config
    if args.tokenizer is None and not args.skip_tokenizer_init:
        if (found := nearest(path, *_TOKENIZER_FILES)) is not None:
            args.tokenizer = str(found)
        elif user_config is not None:
            args.tokenizer = user_config
        else:
            url = str(read_header(path)[0].get("general.base_model.0.repo_url"))
            base = re.fullmatch(r"https://huggingface\.co/([\w.-]+/[\w.-]+)", url)
            raise GGUFFileError(
                f"{show(path)} has no tokenizer beside it, and transformers makes none "
                "from files of this architecture. Add the original model's, for "
                f"example --tokenizer {base[1] if base else 'zai-org/GLM-5'}, or a "
                "folder with its tokenizer.json."
            )
