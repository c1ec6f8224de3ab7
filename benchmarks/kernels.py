"""This repository's sparse MLA kernels, whichever vLLM is installed. Importing it needs a GPU: vLLM looks for one."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.kernels.overlay import load_overlay
from tests.kernels.reference import Inputs

configs = load_overlay("vllm.v1.attention.ops.triton_mla_sparse_config")
attention = load_overlay("vllm.v1.attention.ops.triton_mla_sparse")

#: The configurations of every GPU; benchmarks/tune.py writes it.
TABLE = Path(configs.__file__).with_name("triton_mla_sparse_configs.json")


def describe(config: Any, num_splits: int) -> dict[str, Any]:
    """Return how the kernel is launched, as a field of a result row."""
    fields = {name: getattr(value, "name", value) for name, value in asdict(config).items()}
    return {**fields, "num_splits": num_splits}


def attend(inputs: Inputs, config: Any, num_splits: int, is_prefill: bool) -> torch.Tensor:
    """Return [T, H, 512]: the attention with a given configuration."""
    out, _ = attention.sparse_mla_attention(
        inputs.q_nope,
        inputs.q_pe,
        inputs.kv,
        inputs.topk,
        inputs.valid_count,
        inputs.sm_scale,
        kv_scale=inputs.kv_scale,
        is_prefill=is_prefill,
        config=config,
        num_splits=num_splits,
    )
    return out
