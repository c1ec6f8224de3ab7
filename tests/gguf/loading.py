"""Load GGUF files into vLLM's own model classes where there is no GPU, and compare each weight with what it should be.

Only for a child process: `install` changes vLLM for good.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import gguf
import torch

from tests.gguf import tiny

BACKEND_TESTS = Path(__file__).parents[1] / "backend"


def install() -> None:
    """Fake a GPU and a process group, and register the plugin."""
    os.environ |= {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_PLUGINS": "", "VLLM_CONFIGURE_LOGGING": "0"}
    path = list(sys.path)
    sys.path.insert(0, str(BACKEND_TESTS))
    import fake_gpu

    fake_gpu.install(Path(importlib.util.find_spec("vllm").origin).parent).capability = (9, 0)
    sys.path[:] = path

    import vllm.utils.torch_utils
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm_gguf_plugin import register

    # Looked up when a model is built, and needed only when it runs.
    torch.ops._C.silu_and_mul = None
    vllm.utils.torch_utils._aux_stream = object()
    register()
    with set_current_vllm_config(VllmConfig()):
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        init_distributed_environment(1, 0, local_rank=0, backend="gloo")
        initialize_model_parallel()


def check(folder: Path, *, tp_size=1, draft=False, dtype="bfloat16", **options) -> list[str]:
    """Write a file (tiny.write with `options`), load it as up to three ranks of a group, and return what is wrong.

    An error that ends the loading is one thing wrong.
    """
    from vllm_gguf_plugin.gguf_files import GGUFFileError

    files = tiny.write(folder, **({"mtp": draft} | options))
    config = SimpleNamespace(**files.config)
    problems = []
    for rank in sorted({0, tp_size // 2, tp_size - 1}):
        try:
            model = load(files, rank=rank, tp_size=tp_size, draft=draft, dtype=dtype)
        except GGUFFileError as error:
            return [f"GGUFFileError: {error}"]
        found = differences(model, files.weights, config, rank, tp_size, draft)
        problems += [f"rank {rank}: {problem}" for problem in found]
    return problems


def check_without(folder: Path, lost: str, **options) -> list[str]:
    """Do as `check`, with an adapter that leaves out a weight."""
    from vllm_gguf_plugin.weights_adapter import GlmDsaGGUFAdapter

    prepare_weights = GlmDsaGGUFAdapter.prepare_weights

    def prepare_others(self, model_config):
        return ((name, weight) for name, weight in prepare_weights(self, model_config) if name != lost)

    with mock.patch.object(GlmDsaGGUFAdapter, "prepare_weights", prepare_others):
        return check(folder, **options)


def copied_weights(folder: Path, **options) -> list[str]:
    """Write a file; return the names of the weights that the adapter hands over from elsewhere than its mapping."""
    from vllm_gguf_plugin.weights_adapter import GlmDsaGGUFAdapter

    files = tiny.write(folder, **options)
    config = SimpleNamespace(**files.config)
    adapter = GlmDsaGGUFAdapter(config)
    adapter.prepare_loading(str(files.files[0]), SimpleNamespace(hf_config=config))
    copied = []
    for name, weight in adapter.prepare_weights(None):
        maps = Path("/proc/self/maps").read_text().splitlines()
        ranges = [line.split()[0].split("-") for line in maps if line.endswith(str(files.files[0]))]
        if not any(int(start, 16) <= weight.data_ptr() < int(end, 16) for start, end in ranges):
            copied.append(name)
    return copied


def load(files: tiny.Tiny, *, rank: int, tp_size: int, draft: bool, dtype: str) -> torch.nn.Module:
    """Return the model, or its draft model, as one rank of a tensor-parallel group has it."""
    from vllm.config import (
        DeviceConfig,
        LoadConfig,
        ModelConfig,
        ParallelConfig,
        SpeculativeConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.distributed import get_tp_group
    from vllm.model_executor.model_loader import get_model_loader

    folder = files.files[0].parent
    (folder / "config.json").write_text(json.dumps(files.config))
    model_config = ModelConfig(
        str(folder),
        model_weights=str(files.files[-1]),
        skip_tokenizer_init=True,
        quantization="gguf",
        config_format="gguf",
        dtype=dtype,
        max_model_len=4096,
        enforce_eager=True,
    )
    speculative_config = None
    if draft:
        speculative_config = SpeculativeConfig(
            method="mtp",
            num_speculative_tokens=1,
            target_model_config=model_config,
            target_parallel_config=ParallelConfig(),
        )
    vllm_config = VllmConfig(
        model_config=model_config,
        speculative_config=speculative_config,
        device_config=DeviceConfig("cpu"),
        load_config=LoadConfig(load_format="gguf"),
    )
    if draft:
        model_config = speculative_config.draft_model_config
    group = get_tp_group()
    group.world_size, group.rank_in_group = tp_size, rank
    try:
        with set_current_vllm_config(vllm_config):
            return get_model_loader(vllm_config.load_config).load_model(vllm_config, model_config)
    finally:
        group.world_size, group.rank_in_group = 1, 0


def differences(
    model: torch.nn.Module,
    weights: dict[str, torch.Tensor],
    config: SimpleNamespace,
    rank: int,
    tp_size: int,
    draft: bool,
) -> Iterator[str]:
    """Say which layers of the model do not hold what they should, or should not be there, or are missing."""
    expected = expected_layers(weights, config, rank, tp_size, draft)
    # attention itself has what vLLM derives from kv_b_proj
    actual = {
        name: module
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False)) and not name.endswith("self_attn")
    }
    yield from (f"{name} is not in the model" for name in expected.keys() - actual)
    yield from (f"{name} is not expected" for name in actual.keys() - expected.keys())
    for name in expected.keys() & actual:
        for param, value in expected[name].items():
            stored, weight_type = stored_value(actual[name], param)
            if stored.shape != value.shape:
                yield f"{name}: {param} has shape {list(stored.shape)}, not {list(value.shape)}"
            elif not torch.equal(stored, value.to(stored.dtype)):
                yield f"{name}: {param} ({weight_type}) has other values"


def stored_value(module: torch.nn.Module, param: str) -> tuple[torch.Tensor, str]:
    """Return a parameter, dequantised if it is quantised, and its type or types."""
    if hasattr(module, param):
        value = getattr(module, param)
        return value.detach(), str(value.dtype)
    stem = param.removesuffix("weight")
    data, weight_type = getattr(module, f"{stem}qweight"), getattr(module, f"{stem}qweight_type")
    offsets = getattr(data, "shard_offset_map", None)
    if offsets is None:
        types = {weight_type.weight_type}
        parts = [dequantize(data, weight_type.weight_type)]
    else:
        types = weight_type.shard_weight_type
        parts = [dequantize(data[start:end, :size], types[shard]) for shard, (start, end, size) in offsets.items()]
        types = set(types.values())
    return torch.cat(parts), "+".join(sorted(gguf.GGMLQuantizationType(each).name for each in types))


def dequantize(data: torch.Tensor, weight_type: int) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(data.detach().contiguous().numpy(), weight_type))


def expected_layers(
    weights: dict[str, torch.Tensor], config: SimpleNamespace, rank: int, tp_size: int, draft: bool
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the value of each parameter of each layer of the model class, for one rank, float32."""

    def rows(name: str) -> torch.Tensor:
        return weights[f"{name}.weight"].chunk(tp_size, 0)[rank]

    def columns(name: str) -> torch.Tensor:
        return weights[f"{name}.weight"].chunk(tp_size, 1)[rank]

    def whole(*names: str) -> torch.Tensor:
        return torch.cat([weights[f"{name}.weight"] for name in names])

    def mlp(prefix: str, module: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{module}.gate_up_proj", torch.cat([rows(f"{prefix}.{half}_proj") for half in ("gate", "up")])
        yield f"{module}.down_proj", columns(f"{prefix}.down_proj")

    def decoder_layer(layer: int, module: str) -> Iterator[tuple[str, torch.Tensor]]:
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{module}.{norm}", whole(f"{prefix}.{norm}")
        for norm in ("q_a_layernorm", "kv_a_layernorm"):
            yield f"{module}.self_attn.{norm}", whole(f"{attention}.{norm}")
        fused = whole(f"{attention}.q_a_proj", f"{attention}.kv_a_proj_with_mqa")
        yield f"{module}.self_attn.fused_qkv_a_proj", fused
        for column_parallel in ("q_b_proj", "kv_b_proj"):
            yield f"{module}.self_attn.{column_parallel}", rows(f"{attention}.{column_parallel}")
        yield f"{module}.self_attn.o_proj", columns(f"{attention}.o_proj")
        if layer in full_indexers(config):
            indexer = f"{attention}.indexer"
            yield f"{module}.self_attn.indexer.wq_b", whole(f"{indexer}.wq_b")
            fused = whole(f"{indexer}.wk", f"{indexer}.weights_proj")
            yield f"{module}.self_attn.indexer.wk_weights_proj", fused
        if layer < config.first_k_dense_replace:
            yield from mlp(f"{prefix}.mlp", f"{module}.mlp")
        else:
            yield from mlp(f"{prefix}.mlp.shared_experts", f"{module}.mlp.shared_experts")

    layers: dict[str, dict[str, torch.Tensor]] = {}

    def add(module: str, value: torch.Tensor) -> None:
        layers[module] = {"weight": value}

    def add_decoder_layer(layer: int, module: str) -> None:
        for name, value in decoder_layer(layer, module):
            add(name, value)
        prefix = f"model.layers.{layer}"
        if layer in full_indexers(config):
            norm = f"{prefix}.self_attn.indexer.k_norm"
            layers[f"{module}.self_attn.indexer.k_norm"] = {
                "weight": weights[f"{norm}.weight"],
                "bias": weights[f"{norm}.bias"],
            }
        if layer >= config.first_k_dense_replace:
            gate = f"{prefix}.mlp.gate"
            layers[f"{module}.mlp.gate"] = {
                "weight": weights[f"{gate}.weight"],
                "e_score_correction_bias": weights[f"{gate}.e_score_correction_bias"],
            }
            experts = [f"{prefix}.mlp.experts.{expert}" for expert in range(config.n_routed_experts)]
            layers[f"{module}.mlp.experts.routed_experts"] = {
                "w13_weight": torch.stack([torch.cat([rows(f"{e}.gate_proj"), rows(f"{e}.up_proj")]) for e in experts]),
                "w2_weight": torch.stack([columns(f"{e}.down_proj") for e in experts]),
            }

    if not draft:
        add("model.embed_tokens", rows("model.embed_tokens"))
        add("model.norm", whole("model.norm"))
        add("lm_head", rows("lm_head"))
        for layer in range(config.num_hidden_layers):
            add_decoder_layer(layer, f"model.layers.{layer}")
        return layers

    layer = config.num_hidden_layers
    prefix = f"model.layers.{layer}"
    own = f"{prefix}.embed_tokens.weight" in weights
    add("model.embed_tokens", rows(f"{prefix}.embed_tokens" if own else "model.embed_tokens"))
    add(f"{prefix}.shared_head.head", rows(f"{prefix}.shared_head.head" if own else "lm_head"))
    for module in ("enorm", "hnorm", "eh_proj", "shared_head.norm"):
        add(f"{prefix}.{module}", whole(f"{prefix}.{module}"))
    add_decoder_layer(layer, f"{prefix}.mtp_block")
    return layers


def full_indexers(config: SimpleNamespace) -> set[int]:
    """Return the layers that compute a top-k of their own."""
    if hasattr(config, "index_topk_freq"):
        assert (config.index_topk_freq, config.index_skip_topk_offset) == (4, 3)
        return {0, 1, 2, config.num_hidden_layers}
    return set(range(config.num_hidden_layers + 1))
