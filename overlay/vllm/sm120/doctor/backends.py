# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which attention backends fit, why the others do not, and which one vLLM takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from vllm.platforms import current_platform
from vllm.sm120.doctor import cures
from vllm.sm120.doctor.facts import Backend, Case
from vllm.v1.attention import selector
from vllm.v1.attention.selector import AttentionSelectorConfig, get_attn_backend

if TYPE_CHECKING:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum


@dataclass(frozen=True)
class Selection:
    backends: list[Backend]  # in vLLM's order of preference
    chosen: str | None
    why: str


@dataclass(frozen=True)
class _Question:
    """What an attention layer of the model asks of the platform."""

    requested: AttentionBackendEnum | None  # --attention-backend
    config: AttentionSelectorConfig
    num_heads: int | None


class _AskedError(Exception):
    """Ends the selection once the question is known."""


def select(case: Case) -> Selection:
    """Ask vLLM's selector; the case's config must be vLLM's current one."""
    question = selector_question(case)
    capability = current_platform.get_device_capability()
    fitting, refused = current_platform.get_valid_backends(
        device_capability=capability,
        attn_selector_config=question.config,
        num_heads=question.num_heads,
    )
    rows = {each.priority: Backend(each.backend.name, True, [], []) for each in fitting}
    for backend, (priority, reasons) in refused.items():
        rows[priority] = _refused(backend, reasons, question, case)
    backends = [rows[priority] for priority in sorted(rows)]

    requested = question.requested
    if requested is None:
        chosen = next((row.name for row in backends if row.fits), None)
        return Selection(backends, chosen, "the first that fits" if chosen else "")
    row = next((row for row in backends if row.name == requested.name), None)
    if row is None:  # not in vLLM's list for this GPU; it may be asked for anyway
        reasons = _ask(requested, question.config)
        row = _refused(requested, reasons, question, case)
        backends.append(row)
    if not row.fits:
        return Selection(backends, None, "")
    return Selection(backends, row.name, "by --attention-backend")


def selector_question(case: Case) -> _Question:
    """Return what vLLM would ask for the layers of this model.

    `get_attn_backend` makes the question of vLLM's config. The arguments are those
    of MLAAttention and of Attention (vllm/model_executor/layers/attention).
    """
    config = case.vllm_config.model_config
    arguments: dict[str, Any] = {}
    if case.model["mla"]:
        arguments["use_mla"] = True
        arguments["use_sparse"] = case.model["sparse"]
        arguments["num_heads"] = case.model["heads_per_rank"]
    else:
        arguments["use_mm_prefix"] = config.is_mm_prefix_lm
        arguments["has_sliding_window"] = config.get_sliding_window() is not None
    asked: list[_Question] = []

    def record(
        backend: AttentionBackendEnum | None,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
        **_: Any,
    ) -> None:
        asked.append(_Question(backend, attn_selector_config, num_heads))
        raise _AskedError

    try:
        with patch.object(selector, "_cached_get_attn_backend", record):
            get_attn_backend(
                config.get_head_size(),
                config.dtype,
                case.vllm_config.cache_config.cache_dtype,
                **arguments,
            )
    except _AskedError:
        pass
    return asked[0]


def _ask(backend: AttentionBackendEnum, config: AttentionSelectorConfig) -> list[str]:
    """Return why the backend refuses, as `get_attn_backend_cls` asks it."""
    try:
        return backend.get_class().validate_configuration(
            device_capability=current_platform.get_device_capability(),
            **config._asdict(),
        )
    except (ImportError, OSError) as error:
        return [f"{type(error).__name__}: {error}"]


def _refused(
    backend: AttentionBackendEnum,
    reasons: list[str],
    question: _Question,
    case: Case,
) -> Backend:
    reasons = list(dict.fromkeys(reasons))  # some are given twice
    if not reasons:
        return Backend(backend.name, True, [], [])
    found = cures.find(
        reasons,
        question.config,
        case.vllm_config,
        lambda changed: _ask(backend, changed),
    )
    return Backend(backend.name, False, reasons, found)
