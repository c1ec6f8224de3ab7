# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The doctor's answer, as text of 100 columns and as JSON."""

import dataclasses
import json
import textwrap
from dataclasses import dataclass, field
from typing import Any, TextIO

from vllm.sm120.doctor.facts import GIB, Backend, Gpu, Model, Risk, Row

SCHEMA = 1
_WIDTH = 100
_INDENT = 26  # where the second column begins
_COLOURS = {"good": "32", "bad": "31", "head": "1"}

# What vLLM means. A reason that is a sentence of its own needs no other words.
_PLAIN_WORDS = {
    "head_size not supported": "has no kernel for this head size",
    "dtype not supported": "does not compute in this dtype",
    "kv_cache_dtype not supported": "cannot read this KV cache format",
    "block_size not supported": "cannot read KV cache blocks of this size",
    "MLA not supported": "has no multi-head latent attention, which the model has",
    "non-MLA not supported": "is for multi-head latent attention only",
    "sparse not supported": "reads every key, but the model picks its top-k (DSA)",
    "non-sparse not supported": "is for models that pick the top-k keys only",
    "compute capability not supported": "has no kernel for this GPU",
    "sliding window not supported": "has no sliding window, which the model has",
    "attention sinks not supported": "has no attention sinks, which the model has",
    "PCP not supported": "cannot split a prompt over GPUs",
    "DCP not supported": "cannot split the KV cache's tokens over GPUs",
    "batch invariance not supported": "is not batch invariant",
    "KV connector not supported": "cannot hand its KV cache to a connector",
}


@dataclass
class Report:
    """Schema 1 of the JSON is these fields; docs/doctor.md describes it."""

    gpu: Gpu
    installation: list[Row]
    model: Model
    backends: list[Backend] = field(default_factory=list)
    chosen: str | None = None
    why: str = ""  # this backend
    indexer: list[Row] = field(default_factory=list)
    kernels: list[Row] = field(default_factory=list)
    gguf: list[Row] = field(default_factory=list)
    memory: list[Row] = field(default_factory=list)
    risks: list[Risk] = field(default_factory=list)
    command: str | None = None
    reason: str | None = None  # why there is no command: nothing works
    exit: int = 0

    def print(self, stream: TextIO, *, as_json: bool) -> None:
        if as_json:
            json.dump(self.as_dict(), stream, indent=2)
            stream.write("\n")
        else:
            stream.write(self.as_text(colour=stream.isatty()))

    def as_dict(self) -> dict[str, Any]:
        """Return what --json prints."""
        content = dataclasses.asdict(self)
        capability = ".".join(map(str, self.gpu.capability))
        content["gpu"]["capability"] = capability
        return {"schema": SCHEMA, "capability": capability, **content}

    def as_text(self, *, colour: bool = False) -> str:
        """Return the report; its last line is the command or why there is none."""
        return "\n".join(_Text(colour).render(self)) + "\n"


def wrap(prefix: str, text: str) -> list[str]:
    """Return lines of 100 columns; all begin where the prefix of the first ends."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=prefix,
        subsequent_indent=" " * len(prefix),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [prefix.rstrip()]


class _Text:
    def __init__(self, colour: bool) -> None:
        self.colour = colour
        self.lines: list[str] = []

    def render(self, report: Report) -> list[str]:
        self._heading("GPU")
        self._gpu(report.gpu)
        self._rows("Installation", report.installation)
        self._heading("Model")
        for name, fact in report.model.facts.items():
            self._line(name.replace("_", " "), _value(fact.value), fact.source)
        if report.backends:
            self._heading("Attention backends, in vLLM's order")
        for backend in report.backends:
            self._backend(backend, backend.name == report.chosen, report.why)
        self._rows("Indexer", report.indexer)
        self._rows("Linear and MoE kernels", report.kernels)
        self._rows("GGUF", report.gguf)
        self._rows("Memory", report.memory)
        if report.risks:
            self._heading("Risks")
        for risk in report.risks:
            self._wrap("  - ", risk.what)
            if risk.cure:
                self._wrap("    cure: ", risk.cure)
        self._last(report)
        return self.lines

    def _gpu(self, gpu: Gpu) -> None:
        major, minor = gpu.capability
        self._line("name", gpu.name, gpu.source)
        self._line("compute capability", f"{major}.{minor}", "")
        if gpu.memory:
            self._line("memory", f"{gpu.memory / GIB:.0f} GiB", "")

    def _rows(self, title: str, rows: list[Row]) -> None:
        if rows:
            self._heading(title)
        for row in rows:
            value = _value(row.value)
            self._line(row.name, f"{value} {row.unit}".strip(), row.why)

    def _backend(self, backend: Backend, chosen: bool, why: str) -> None:
        name = f"  {backend.name:<30}"
        if backend.fits:
            text = f"{name} fits" + (f", chosen: {why}" if chosen else "")
            self.lines.append(self._paint("good", text))
            return
        self.lines.append(self._paint("bad", f"{name} refuses"))
        for reason in backend.reasons:
            plain = _PLAIN_WORDS.get(reason)
            self._wrap("      ", f"{reason}: it {plain}" if plain else reason)
        for cure in backend.cures:
            self._wrap("      cure: ", cure)

    def _last(self, report: Report) -> None:
        self._heading("Verdict")
        if report.command:
            # One line, however long: it is there to be copied.
            self.lines.append(self._paint("good", report.command))
        else:
            self.lines.append(self._paint("bad", report.reason or ""))

    def _heading(self, title: str) -> None:
        if self.lines:
            self.lines.append("")
        self.lines.append(self._paint("head", title))

    def _line(self, name: str, value: str, note: str) -> None:
        text = f"{value}  ({note})" if note else value
        self._wrap(f"  {name:<{_INDENT - 3}} ", text)

    def _wrap(self, prefix: str, text: str) -> None:
        self.lines += wrap(prefix, text)

    def _paint(self, style: str, text: str) -> str:
        return f"\033[{_COLOURS[style]}m{text}\033[0m" if self.colour else text


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.1f}" if isinstance(value, float) else str(value)
