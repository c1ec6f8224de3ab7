# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the doctor finds out, in plain data: no vLLM, no torch.

Every module of the doctor takes a `Case` and gives back some of these;
`report.Report` holds all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from vllm.config import VllmConfig

GIB = 2**30


class DoctorError(Exception):
    """The question cannot be answered as it was asked. `cure` says what to do."""

    def __init__(self, problem: str, cure: str = "") -> None:
        super().__init__(problem)
        self.cure = cure


@dataclass(frozen=True)
class Fact:
    """A value that JSON can hold, and where it was read."""

    value: Any
    source: str


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    memory: int | None  # bytes of one GPU; None if nobody said
    source: str


@dataclass(frozen=True)
class Model:
    """What the model is. `facts` keeps the order in which the report shows them."""

    path: str  # as the user gave it
    facts: dict[str, Fact] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """Return the value of a fact, or None if there is no such fact."""
        fact = self.facts.get(name)
        return None if fact is None else fact.value


@dataclass(frozen=True, eq=False)  # a key of caches by identity
class Case:
    """One question: this model with these options on this GPU.

    `vllm_config` is what vLLM itself made of it, and is vLLM's current config
    (`get_current_vllm_config()`) while the doctor works on the case.
    """

    arguments: argparse.Namespace
    gpu: Gpu
    model: Model
    vllm_config: VllmConfig


@dataclass(frozen=True)
class Backend:
    """An attention backend, in the order in which vLLM prefers them."""

    name: str
    fits: bool
    reasons: list[str]  # why it is refused, in vLLM's words
    cures: list[str]  # each would make it fit, in plain words


@dataclass(frozen=True)
class Row:
    """One line of a section: name, value and, if there is more to say, why."""

    name: str
    value: str | int | float | None
    why: str = ""
    unit: str = ""


@dataclass(frozen=True)
class Risk:
    """What may go wrong although a backend fits, and what to do about it."""

    what: str
    cure: str = ""
