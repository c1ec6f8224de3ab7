# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What makes a refused backend fit: found by asking the backend again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations, product
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm.config import VllmConfig
from vllm.config.cache import KV_CACHE_DTYPES

if TYPE_CHECKING:
    from vllm.v1.attention.selector import AttentionSelectorConfig

# Asks a backend: the reasons for which it refuses such a configuration.
Ask = Callable[["AttentionSelectorConfig"], list[str]]

# Reasons that lie in the installation, and what to install.
INSTALLATION = {
    r"requires FlashInfer": "pip install -U flashinfer-python",
    r"No module named '([\w.]+)'": r"install the Python package that has the module \1",
}


class Change(NamedTuple):
    """One option of `vllm serve` and what it changes in the question."""

    option: str  # e.g. --dtype bfloat16; or without --block-size
    fields: dict[str, object]


def find(
    reasons: list[str],
    config: AttentionSelectorConfig,
    vllm_config: VllmConfig,
    ask: Ask,
) -> list[str]:
    """Return the smallest changes after which `ask` has no reason left.

    Reasons of the installation cannot be tried: their cure is named as well.
    """
    packages = {reason: _package(reason) for reason in reasons}
    installs = sorted({text for text in packages.values() if text})
    if all(packages.values()):
        return [" and ".join(installs)]
    groups = list(_changes(config))
    for count in (1, 2):
        cures = []
        for chosen in combinations(groups, count):
            for changes in product(*chosen):
                with _changed(config, vllm_config, changes) as question:
                    fits = all(_package(reason) for reason in ask(question))
                if fits and _is_allowed(question):
                    options = " ".join(change.option for change in changes)
                    cures.append(" and ".join([options, *installs]))
                    break  # one value of an option is enough
        if cures:
            return cures
    return []


def _is_allowed(question: AttentionSelectorConfig) -> bool:
    """Tell whether vLLM takes these options together, whatever the backend."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=question.dtype),
        cache_config=SimpleNamespace(cache_dtype=question.kv_cache_dtype),
    )
    try:
        VllmConfig._reject_mismatched_float_kv_cache(config)
    except ValueError:
        return False
    return True


def _package(reason: str) -> str | None:
    for pattern, cure in INSTALLATION.items():
        if match := re.search(pattern, reason):
            return match.expand(cure)
    return None


def _changes(config: AttentionSelectorConfig) -> Iterator[list[Change]]:
    """Yield for each option the other values that it could have."""
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    yield [
        Change(f"--dtype {name}", {"dtype": dtype})
        for name, dtype in dtypes.items()
        if dtype != config.dtype
    ]
    # The nearest first: no cure should double the cache that was asked for.
    asked = str(config.kv_cache_dtype)
    near = sorted(KV_CACHE_DTYPES, key=lambda name: name[:3] != asked[:3])
    yield [
        Change(f"--kv-cache-dtype {name}", {"kv_cache_dtype": name})
        for name in near
        if name != asked
    ]
    if config.block_size is not None:
        yield [Change("without --block-size", {"block_size": None})]
    if config.use_dcp:
        yield [Change("without --decode-context-parallel-size", {"use_dcp": False})]


@contextmanager
def _changed(
    config: AttentionSelectorConfig, vllm_config: VllmConfig, changes: tuple[Change]
) -> Iterator[AttentionSelectorConfig]:
    """Yield the changed question; vLLM's config follows it meanwhile."""
    fields = {name: value for each in changes for name, value in each.fields.items()}
    parallel = vllm_config.parallel_config
    size = parallel.decode_context_parallel_size
    if fields.get("use_dcp") is False:
        parallel.decode_context_parallel_size = 1
    try:
        yield config._replace(**fields)
    finally:
        parallel.decode_context_parallel_size = size
