# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Weights of DSA models (GLM-5, DeepSeek-V3.2) and of their MTP draft models.

Every tensor of the files is used or named as dropped, and every parameter of
the model gets a value; otherwise loading ends with an error that says which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import gguf
import torch
from gguf import GGMLQuantizationType as WeightType
from tqdm.auto import tqdm

from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader.weight_utils import enable_tqdm

from ..gguf_files import GGUFFileError, GGUFModel, Tensor, find_files, read_headers
from ..quantization.utils import DEQUANT_TYPES, UNQUANTIZED_TYPES
from ..read_ahead import ReadAhead
from ..tensor_reader import TensorReader, dequantize
from .base import BaseGGUFWeightsAdapter, GGUFLoadSpec
from .glm_dsa_tensors import (
    ExpectedTensor,
    Part,
    Use,
    draft_tensors,
    target_tensors,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from vllm.config import ModelConfig

logger = init_logger(__name__)

ARCHITECTURES = ("glm-dsa", "deepseek32")
# Q8_1 is what the kernels make of activations: no file holds it.
QUANTIZED_TYPES = DEQUANT_TYPES - {WeightType.Q8_1}


@dataclass
class Load:
    """A parameter of the model, and the tensors that it is made of."""

    expected: ExpectedTensor
    tensors: list[Tensor]
    quantized: bool


@dataclass
class LoadPlan:
    """What is loaded, in the order of the files, and what is not."""

    loads: list[Load] = field(default_factory=list)
    dropped: Counter[Part] = field(default_factory=Counter)
    unquantized_modules: list[str] = field(default_factory=list)
    dequantized_modules: list[str] = field(default_factory=list)


def plan_loading(
    model: GGUFModel, config: PretrainedConfig, *, is_draft: bool, tp_size: int
) -> LoadPlan:
    """Account for every tensor of the files.

    Raises a GGUFFileError that names tensor and file where one is missing, is
    none of the model's, or has a shape or type that cannot be loaded.
    """
    tensors = {tensor.name: tensor for tensor in model.tensors}
    num_mtp_layers = _num_mtp_layers(model, config, is_draft)
    known = {entry.name: entry for entry in target_tensors(config, num_mtp_layers)}
    if is_draft:
        wanted = list(draft_tensors(config, num_mtp_layers, tensors.keys()))
    else:
        wanted = [entry for entry in known.values() if entry.part is Part.TRUNK]
    _check_names(model, known, wanted)
    wanted = [entry for entry in wanted if entry.name in tensors]
    for entry in wanted:
        _check_tensor(entry, tensors[entry.name], tp_size)

    plan = LoadPlan()
    used = {entry.name for entry in wanted}
    plan.dropped.update(
        entry.part for entry in known.values() if entry.name in tensors.keys() - used
    )
    unquantized = _unquantized_modules(plan, wanted, tensors)
    _check_gate_and_up(wanted, tensors, unquantized)

    loads: dict[str, Load] = {}
    for entry in wanted:
        tensor = tensors[entry.name]
        quantized = entry.module is not None and entry.module not in unquantized
        load = loads.setdefault(entry.param, Load(entry, [], quantized))
        load.tensors.append(tensor)

    def position(load: Load) -> tuple[int, int]:
        return model.files.index(load.tensors[0].file), load.tensors[0].offset

    plan.loads = sorted(loads.values(), key=position)
    return plan


def _num_mtp_layers(model: GGUFModel, config: PretrainedConfig, is_draft: bool) -> int:
    """Return how many of the files' last blocks are MTP layers."""
    file, metadata = model.files[0], model.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise GGUFFileError(
            f"{file}: the architecture is {architecture!r}, but the configuration "
            f"({config.model_type}) is of a model whose files say "
            f"{' or '.join(ARCHITECTURES)}. Give the configuration of this model."
        )
    blocks = metadata.get(f"{architecture}.block_count")
    num_mtp_layers = metadata.get(f"{architecture}.nextn_predict_layers", 0)
    if (
        not isinstance(num_mtp_layers, int)
        or not 0 <= num_mtp_layers <= len(model.tensors)
        or blocks != config.num_hidden_layers + num_mtp_layers
    ):
        raise GGUFFileError(
            f"{file}: {blocks!r} blocks (block_count), of which {num_mtp_layers!r} for "
            "multi-token prediction (nextn_predict_layers), but the configuration has "
            f"num_hidden_layers={config.num_hidden_layers}. Give the configuration of "
            "this model."
        )
    if is_draft and num_mtp_layers != config.num_nextn_predict_layers:
        raise GGUFFileError(
            f"{file}: {num_mtp_layers} blocks for multi-token prediction "
            "(nextn_predict_layers), but the draft model's configuration has "
            f"num_nextn_predict_layers={config.num_nextn_predict_layers}. Serve "
            "without speculative decoding, or use files that have these blocks."
        )
    return num_mtp_layers


def _check_names(
    model: GGUFModel, known: dict[str, ExpectedTensor], wanted: list[ExpectedTensor]
) -> None:
    names = {tensor.name for tensor in model.tensors}
    missing = [e.name for e in wanted if e.name not in names and not e.optional]
    unknown = [tensor for tensor in model.tensors if tensor.name not in known]
    faults = []
    if missing:
        faults.append(f"needs {_some(missing)}, which no file has")
    if unknown:
        extra = _some([tensor.name for tensor in unknown])
        faults.append(f"has no place for {extra} of {unknown[0].file}")
    if faults:
        raise GGUFFileError(
            f"{', '.join(str(file) for file in model.files)}: the model "
            f"{', and '.join(faults)}. The conversion was of another kind or version, "
            "or the configuration is another model's."
        )


def _check_tensor(entry: ExpectedTensor, tensor: Tensor, tp_size: int) -> None:
    where = f"{tensor.file}: tensor {tensor.name}"
    if tuple(tensor.shape) != entry.shape:
        raise GGUFFileError(
            f"{where} has shape {list(tensor.shape)}, but the configuration makes it "
            f"{list(entry.shape)}. Give the configuration of this model."
        )
    if tensor.type not in UNQUANTIZED_TYPES | QUANTIZED_TYPES:
        supported = sorted(t.name for t in UNQUANTIZED_TYPES | QUANTIZED_TYPES)
        raise GGUFFileError(
            f"{where} is of type {tensor.type.name}, for which there is "
            f"no kernel. Use a file with {', '.join(supported)} only."
        )
    block_size, _ = gguf.GGML_QUANT_SIZES[tensor.type]
    columns = tensor.shape[-1]
    if entry.row_parallel and columns % (block_size * tp_size):
        raise GGUFFileError(
            f"{where}: rows of {columns} values in {tensor.type.name} "
            f"blocks of {block_size} cannot be divided among {tp_size} GPUs. Use a "
            f"--tensor-parallel-size that divides {columns // block_size}."
        )


def _unquantized_modules(
    plan: LoadPlan, wanted: list[ExpectedTensor], tensors: dict[str, Tensor]
) -> set[str]:
    """Find the layers that are loaded in 16 bits, and tell the plan.

    These are kv_b_proj, whose transposed half has no blocks any more, and each
    layer of which any tensor is in a float type: a layer is in one format.
    """
    entries: dict[str, list[ExpectedTensor]] = {}
    for entry in wanted:
        if entry.module is not None:
            entries.setdefault(entry.module, []).append(entry)
    unquantized = set()
    for module, parts in entries.items():
        is_float = [tensors[part.name].type in UNQUANTIZED_TYPES for part in parts]
        is_kv_b = parts[0].use in (Use.K_B, Use.V_B)
        if not any(is_float) and not is_kv_b:
            continue
        unquantized.add(module)
        if not all(is_float) and not is_kv_b:
            plan.dequantized_modules.append(module)
        # A model class that declares its fused layers is asked for their parts
        # (gate_proj), another one for the layer itself (gate_up_proj).
        names = [part.param.removesuffix(".weight") for part in parts]
        plan.unquantized_modules += dict.fromkeys([module, *names])
    return unquantized


def _check_gate_and_up(
    wanted: list[ExpectedTensor], tensors: dict[str, Tensor], unquantized: set[str]
) -> None:
    """The MoE kernels know one type for both halves of w13."""
    for entry in wanted:
        if not entry.name.endswith("ffn_gate_exps.weight"):
            continue
        gate = tensors[entry.name]
        up = tensors[entry.name.replace("ffn_gate_exps", "ffn_up_exps")]
        if gate.type != up.type and entry.module not in unquantized:
            raise GGUFFileError(
                f"{gate.file}: tensor {gate.name} is of type "
                f"{gate.type.name}, but {up.name} (in {up.file}) of type "
                f"{up.type.name}: there is no kernel for experts of two "
                "types. Use a file in which they are the same."
            )


def _some(names: list[str], count: int = 5) -> str:
    rest = f" and {len(names) - count} more" if len(names) > count else ""
    noun = "tensors" if len(names) > 1 else "tensor"
    return f"{noun} {', '.join(names[:count])}{rest}"


def merge_kv_b(k_b: torch.Tensor, v_b: torch.Tensor) -> torch.Tensor:
    """Return kv_b_proj's weight, [heads * (nope + v_dim), kv_rank].

    `k_b` [heads, kv_rank, nope] is transposed in the file, `v_b`
    [heads, v_dim, kv_rank] is not.
    """
    dtype = torch.promote_types(k_b.dtype, v_b.dtype)
    kv_b = torch.cat([k_b.transpose(1, 2).to(dtype), v_b.to(dtype)], dim=1)
    return kv_b.flatten(0, 1)


class GlmDsaGGUFAdapter(BaseGGUFWeightsAdapter):
    """Adapter for GLM-5, DeepSeek-V3.2 and their MTP draft models.

    Tensors are handed over one at a time, as views of the files. A rank reads
    what it keeps of a tensor that is divided by rows (or by experts' rows), up
    to the page size. It reads all of a tensor that is divided by columns, whose
    pages hold every rank's values, and of the few that are dequantised first.
    """

    @classmethod
    def matches(cls, config: PretrainedConfig) -> bool:
        return config.model_type in ("glm_moe_dsa", "deepseek_v32") or cls._is_draft(
            config
        )

    @staticmethod
    def _is_draft(config: PretrainedConfig) -> bool:
        # Of the many models that vLLM calls deepseek_mtp, the DSA models'.
        return config.model_type == "deepseek_mtp" and config.architectures == [
            "DeepseekV32MTPModel"
        ]

    def prepare_loading(
        self, model_path: str, model_config: ModelConfig
    ) -> GGUFLoadSpec:
        files = find_files(model_path)
        model = read_headers(files)
        self._plan = plan = plan_loading(
            model,
            model_config.hf_config,
            is_draft=self._is_draft(model_config.hf_config),
            tp_size=get_tensor_model_parallel_world_size(),
        )
        self._source = str(files[0])
        dropped = [f"{count} of {part.value}" for part, count in plan.dropped.items()]
        logger.info(
            "GGUF: %d files with %d tensors, of which %d are loaded%s.",
            len(files),
            len(model.tensors),
            len(model.tensors) - plan.dropped.total(),
            f" and {', '.join(dropped)} dropped" if dropped else "",
        )
        if plan.dequantized_modules:
            logger.warning(
                "GGUF: loaded in 16 bits, because some of their tensors are not "
                "quantised: %s.",
                ", ".join(plan.dequantized_modules),
            )
        self.load_spec = GGUFLoadSpec(
            weights_source=[str(file) for file in files],
            unquantized_modules=plan.unquantized_modules,
        )
        return self.load_spec

    def prepare_weights(
        self, model_config: ModelConfig
    ) -> Iterator[tuple[str, torch.Tensor]]:
        del model_config
        reader = TensorReader()
        tensors = [tensor for load in self._plan.loads for tensor in load.tensors]
        read_ahead = ReadAhead(
            tensors,
            get_tensor_model_parallel_rank(),
            get_tensor_model_parallel_world_size(),
        )
        progress = tqdm(
            total=sum(tensor.size for tensor in tensors),
            desc="Loading GGUF tensors",
            unit="B",
            unit_scale=True,
            disable=not enable_tqdm(True),
        )
        with read_ahead, progress:
            for load in self._plan.loads:
                for name, weight, size in _weights(load, reader):
                    yield name, weight
                    read_ahead.advance(size)
                    progress.update(size)

    def check_loaded(self, model: torch.nn.Module, loaded: Iterable[str]) -> None:
        """Raise a GGUFFileError if a parameter of the model has got no value."""
        missing = dict(model.named_parameters()).keys() - loaded
        if missing:
            raise GGUFFileError(
                f"{self._source}: nothing in these files is for {len(missing)} "
                f"parameters of {type(model).__name__}: "
                f"{', '.join(sorted(missing)[:5])}. The configuration is another "
                "model's."
            )


def _weights(
    load: Load, reader: TensorReader
) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Yield a parameter's weight, after its type if it stays quantised.

    Each with the number of bytes that it takes in the files.
    """
    param, use = load.expected.param, load.expected.use
    views = [reader.view(tensor) for tensor in load.tensors]
    size = sum(tensor.size for tensor in load.tensors)
    weight_type = load.tensors[0].type
    if use is Use.K_B:
        halves = zip(views, load.tensors, strict=True)
        kv_b = merge_kv_b(*(dequantize(view, t.type) for view, t in halves))
        yield param, kv_b, size
        return
    weights = views[0].unbind() if use is Use.EXPERTS else views
    if load.quantized:
        param = f"{param.removesuffix('weight')}qweight"
        # Experts have their type in common: one time is enough.
        yield f"{param.format(0)}_type", torch.tensor(int(weight_type)), 0
    for index, weight in enumerate(weights):
        yield (
            param.format(index),
            weight if load.quantized else dequantize(weight, weight_type),
            size // len(weights),
        )
