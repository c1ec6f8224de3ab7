# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What is in the GGUF files of a model, and whether the plugin can load all of it.

What keeps the model from being configured (a missing shard, a config.json that says
otherwise than the file) has ended the doctor before: the plugin says it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub

from vllm.sm120.doctor.facts import GIB, Case, Row
from vllm.sm120.doctor.model import RefusedError
from vllm.sm120.doctor.skeleton import build

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm_gguf_plugin.gguf_header import Tensor


def examine(case: Case) -> list[Row]:
    """Return the facts of the files, or nothing for a model that is not GGUF."""
    if not is_gguf(case.vllm_config):
        return []
    from vllm_gguf_plugin.gguf_files import read_headers
    from vllm_gguf_plugin.quantization.utils import MMQ_QUANT_TYPES

    model = read_headers(files(case.vllm_config))
    size = sum(tensor.size for tensor in model.tensors)
    types = Counter(tensor.type for tensor in model.tensors)
    rows = [
        Row("files", len(model.files), f"{len(model.tensors)} tensors"),
        Row("tensors", size / GIB, _list(types), "GiB"),
    ]
    if unsupported := [each for each in model.tensors if each.type not in _loadable()]:
        names = ", ".join(f"{each.name} ({each.type.name})" for each in unsupported[:5])
        more = f" and {len(unsupported) - 5} more" if unsupported[5:] else ""
        rows.append(Row("no kernel for", len(unsupported), f"{names}{more}"))
    slow = types.keys() & _quantized() - MMQ_QUANT_TYPES
    if slow:
        why = "decoded to 16 bits first for prompts and large batches"
        rows.append(Row("without MMQ", ", ".join(sorted(t.name for t in slow)), why))
    return rows + _loading(case)


def is_gguf(config: VllmConfig) -> bool:
    return config.load_config.load_format == "gguf"


def files(config: VllmConfig) -> list[Path]:
    """Return the files of the model, all of which must be here.

    Raises:
        FileNotFoundError: They would have to be downloaded.
    """
    from vllm_gguf_plugin.gguf_files import find_files

    name = config.model_config.model_weights or config.model_config.model
    is_here = Path(name).exists() or Path(name.rpartition(":")[0]).is_dir()
    if not (is_here or huggingface_hub.constants.HF_HUB_OFFLINE):
        raise FileNotFoundError(f"the files of {name} are not here")
    return find_files(name, config.model_config.revision)


def plan_loading(config: VllmConfig) -> Any:
    """Return the plugin's adapter after it has planned the loading, as its loader does.

    Raises:
        ValueError: A tensor is missing, unknown or cannot be loaded, in its words.
    """
    from vllm_gguf_plugin.weights_adapter import get_weights_adapter

    adapter = get_weights_adapter(config.model_config.hf_config)
    adapter.prepare_loading(str(files(config)[0]), config.model_config)
    return adapter


def quantized_tensors(adapter: Any) -> list[Tensor]:
    """Return the tensors of the files that stay quantised on the GPU."""
    plan = getattr(adapter, "_plan", None)
    if plan is not None:  # DSA models: what is dropped or decoded is known
        return [each for load in plan.loads if load.quantized for each in load.tensors]
    from vllm_gguf_plugin.gguf_files import find_files, read_headers

    model = read_headers(find_files(adapter.load_spec.weights_source[0]))
    return [each for each in model.tensors if each.type in _quantized()]


def _loading(case: Case) -> list[Row]:
    """Return what the plugin's plan for loading the files says."""
    try:
        adapter = build(case).gguf_adapter
    except RefusedError as error:
        return [Row("loading", "refused", str(error))]
    rows = [Row("loading", "every tensor has its place", type(adapter).__name__)]
    plan = getattr(adapter, "_plan", None)
    if plan is None:
        return rows
    if plan.dropped:
        dropped = [f"{count} of {part.value}" for part, count in plan.dropped.items()]
        rows.append(Row("not loaded", sum(plan.dropped.values()), ", ".join(dropped)))
    if plan.dequantized_modules:
        why = "in 16 bits, as some of their tensors are of a float type"
        rows.append(Row("loaded decoded", len(plan.dequantized_modules), why))
    return rows


def _quantized() -> set[Any]:
    """Return the types that the plugin has kernels for."""
    from vllm_gguf_plugin.quantization.utils import DEQUANT_TYPES

    return DEQUANT_TYPES


def _loadable() -> set[Any]:
    from vllm_gguf_plugin.quantization.utils import UNQUANTIZED_TYPES

    return UNQUANTIZED_TYPES | _quantized()


def _list(types: Counter[Any]) -> str:
    return ", ".join(f"{kind.name} {count}" for kind, count in types.most_common())
