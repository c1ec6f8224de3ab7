# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One question, from its options to the report."""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import os
import sys
from typing import TYPE_CHECKING, Any

from vllm.sm120 import ProvenanceError, plugin_provenance, provenance
from vllm.sm120.doctor import FITS, NOTHING_FITS, gpus, host, model
from vllm.sm120.doctor.arguments import SERVE_OPTIONS, command
from vllm.sm120.doctor.facts import Case, Model, Risk, Row
from vllm.sm120.doctor.report import Report

if TYPE_CHECKING:
    from vllm.sm120.doctor.backends import Selection

# What a report tells beside the choice of the backend: a module and a field each.
SECTIONS = ("indexer", "kernels", "gguf", "memory", "risks")


def run(arguments: argparse.Namespace) -> int:
    """Print the report on what `arguments` asks; returns its exit code."""
    gc.disable()  # a fifth of the time goes into it, for a process that ends soon
    if model.is_checkpoint(arguments):
        _leave_out_the_gguf_plugin()
    report = diagnose(arguments)
    report.print(sys.stdout, as_json=arguments.json)
    gc.freeze()  # another fifth: what Python collects when it ends
    return report.exit


def _leave_out_the_gguf_plugin() -> None:
    """Let vLLM load the other plugins only: importing this one takes seconds."""
    names = {
        plugin.name
        for distribution in importlib.metadata.distributions()
        for plugin in distribution.entry_points
        if plugin.group.startswith("vllm.") and plugin.name != "gguf"
    }
    os.environ.setdefault("VLLM_PLUGINS", ",".join(sorted(names)))


def diagnose(arguments: argparse.Namespace) -> Report:
    """Return the report. Changes vLLM for good: the process has one GPU.

    Raises:
        DoctorError: The question is not understood.
    """
    gpu = gpus.find(arguments)
    path = model.locate(arguments)
    host.pretend(gpu)
    installation = _installation()
    try:
        vllm_config, refusal = model.configure(path, arguments)
    except model.RefusedError as error:
        facts = Model(arguments.model)
        reason = f"vLLM refuses this configuration: {error}"
        return Report(gpu, installation, facts, reason=reason, exit=NOTHING_FITS)

    from vllm.config import set_current_vllm_config

    case = Case(arguments, gpu, model.describe(arguments, vllm_config), vllm_config)
    with set_current_vllm_config(vllm_config):
        report, refusal_at_start = _examine(case, installation)
    refusal = refusal or refusal_at_start
    if refusal and report.command:
        report.command, report.exit = None, NOTHING_FITS
        report.reason = f"{report.chosen} fits, but vLLM would not start: {refusal}"
    return report


def _examine(case: Case, installation: list[Row]) -> tuple[Report, str | None]:
    """Return the report and, if there is one, why vLLM would end at its start."""
    from vllm.sm120.doctor import backends

    selection = backends.select(case)
    report = Report(
        case.gpu,
        installation,
        case.model,
        backends=selection.backends,
        chosen=selection.chosen,
        why=selection.why,
    )
    refusal = None
    for name in SECTIONS:
        try:
            setattr(report, name, _section(name, case, selection.chosen))
        except model.RefusedError as error:
            refusal = str(error)
    if selection.chosen:
        options = {name: getattr(case.arguments, name) for name in SERVE_OPTIONS}
        options, shortage = _shortage(report.memory, options)
        refusal = refusal or shortage
        served = model.served_name(case.arguments.model)
        report.command = command("serve", served, options)
        report.exit = FITS
    else:
        report.exit = NOTHING_FITS
        report.reason = _reason(selection)
    return report, refusal


def _shortage(
    memory: list[Row], options: dict[str, Any]
) -> tuple[dict[str, Any], str | None]:
    """Return `options` with as many GPUs as the weights need, or why they do not fit.

    How many there are is the user's to say. If he did not, the command does.
    """
    rows = {row.name: row.value for row in memory}
    needed = rows.get("GPUs needed")
    if needed is None:
        return options, None
    if options["tensor_parallel_size"] is None and isinstance(needed, int):
        return options | {"tensor_parallel_size": needed}, None
    return options, (
        f"the weights take {rows['weights per GPU']:.0f} GiB of each GPU and leave "
        f"nothing for the KV cache; GPUs needed: {needed}"
    )


def _section(name: str, case: Case, chosen: str | None) -> list[Any]:
    """Return what a module of the doctor has to say.

    It asks parts of vLLM that may expect more than the doctor can pretend. That
    must not hide the verdict, nor be silent.
    """
    try:
        module = importlib.import_module(f"vllm.sm120.doctor.{name}")
        if name == "risks":
            return module.examine(case, chosen)
        return module.examine(case)
    except model.RefusedError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        if name == "risks":
            return [Risk(f"the risks were not found out: {problem}")]
        return [Row(name, "not found out", problem)]


def _reason(selection: Selection) -> str:
    """Return in one line why no backend is taken, and the nearest way out."""
    fitting = [each.name for each in selection.backends if each.fits]
    if fitting:
        return (
            "the backend of --attention-backend refuses, and vLLM tries no other: "
            f"without the option it takes {fitting[0]}"
        )
    cured = [each for each in selection.backends if each.cures]
    if not cured:
        return "no attention backend fits this model on this GPU, whatever the options"
    nearest = min(cured, key=lambda each: len(each.cures[0].split()))
    return f"no attention backend fits; cure: {nearest.cures[0]} ({nearest.name})"


def _installation() -> list[Row]:
    """Return which vLLM this is made of, and which patches it carries."""
    rows = []
    for name, read in (("vllm", provenance), ("vllm-gguf-plugin", plugin_provenance)):
        try:
            build = read()
        except ProvenanceError:
            version = importlib.metadata.version(name)
            rows.append(Row(name, version, "unpatched: not of this distribution"))
            continue
        if build is None:
            continue
        patches = [each["name"].removesuffix(".patch") for each in build["patches"]]
        rows.append(
            Row(
                build["name"],
                build["version"],
                f"upstream {build['upstream']['tag']}; patches: {', '.join(patches)}",
            )
        )
    return rows
