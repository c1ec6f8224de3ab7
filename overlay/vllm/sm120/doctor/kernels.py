# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which kernels multiply the weights, as vLLM's layers chose them when they were built.

What a layer chooses while it runs, such as by the number of tokens, is not known here.
"""

from collections import Counter
from enum import Enum
from typing import Any

from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.sm120.doctor.facts import Case, Row
from vllm.sm120.doctor.skeleton import build

_KINDS = {
    RoutedExperts: "MoE experts",
    VocabParallelEmbedding: "embedding, output",
    LinearBase: "linear layers",
}


def examine(case: Case) -> list[Row]:
    """Return a row for each kind of layer and kernel, the most frequent first.

    Raises:
        RefusedError: vLLM does not build this model.
    """
    choices: Counter[tuple[str, str, str]] = Counter()
    for module in build(case).model.modules():
        kind = next(
            (text for cls, text in _KINDS.items() if isinstance(module, cls)), ""
        )
        if kind and (method := getattr(module, "quant_method", None)) is not None:
            choices[kind, kernel_name(module), type(method).__name__] += 1
    return [
        Row(kind, kernel, f"{count} {'layers' if count > 1 else 'layer'}, {method}")
        for (kind, kernel, method), count in sorted(
            choices.items(), key=lambda item: (item[0][0], -item[1])
        )
    ]


def kernel_name(layer: Any) -> str:
    """Return the kernel of a layer: its class, or vLLM's name of the MoE backend.

    Quantisation methods keep it as an attribute of their own or of their scheme.
    """
    method = layer.quant_method
    found: list[str] = []
    for owner in (method, getattr(layer, "scheme", None)):
        for value in vars(owner).values() if owner is not None else ():
            if isinstance(value, Enum) and type(value).__name__.endswith("Backend"):
                found.append(value.name)
            elif type(value).__module__.startswith("vllm.model_executor.kernels."):
                found.append(type(value).__name__)
    if found:
        return ", ".join(dict.fromkeys(found))
    if type(method).__name__.startswith("Unquantized"):
        return "torch (cuBLAS)"
    # Methods that are no choice between kernels: name who brings them.
    return f"{type(method).__module__.partition('.')[0].replace('_', '-')}'s own"
