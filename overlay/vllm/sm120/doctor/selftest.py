# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm doctor --selftest`: run the stages, tell how they go, write what they found."""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

from vllm.sm120 import ProvenanceError, plugin_provenance, provenance
from vllm.sm120.doctor import gpus
from vllm.sm120.doctor.facts import DoctorError, Gpu
from vllm.sm120.selftest.child import Child, Event
from vllm.sm120.selftest.engine import DTYPES, ENVIRONMENT, check_engine, compare
from vllm.sm120.selftest.report import FAILED, Check, Report, Timing, counts, outcome

_PACKAGES = ("vllm", "torch", "triton", "transformers", "flashinfer-python")
_POLL = 0.2  # seconds
# From which compute capability on this distribution has a sparse MLA backend.
_OLDEST = (8, 0)


def run(arguments: argparse.Namespace) -> int:
    """Run the self-test; returns 0 if it passed and 3 if not.

    Raises:
        DoctorError: There is no GPU to test, or the file cannot be written.
    """
    gpu = find_gpu()
    path = Path(arguments.output or default_file(gpu.name))
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise DoctorError(
            f"{path.absolute()} is not a file that can be written",
            "say where the result goes: --output FILE",
        )
    progress = Progress(sys.stderr if arguments.json else sys.stdout)
    major, minor = gpu.capability
    progress.say(f"testing {gpu.name} (compute capability {major}.{minor})")
    report = Report(
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        hardware={"gpu": gpu.name, "capability": f"{major}.{minor}", **host()},
        versions=versions(),
        provenance=builds(),
    )
    with tempfile.TemporaryDirectory(prefix="vllm-selftest-") as folder:
        try:
            _Run(report, Path(folder), progress).execute()
        except KeyboardInterrupt:
            progress.say("interrupted; nothing is written")
            raise SystemExit(130) from None  # as a shell says it
    report.seconds = progress.seconds
    report.write(path)
    if arguments.json:
        json.dump(report.as_dict(), sys.stdout, indent=1)
        print()
    else:
        print(report.as_text(), end="")
    progress.say(f"written: {path}; attach it to a report")
    return report.exit


class Progress:
    """Lines with the seconds since the start."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        print(f"[{self.seconds:3.0f} s] {text}", file=self._stream, flush=True)


class _Run:
    """The stages: the model, the kernels, the engines side by side; then the times."""

    def __init__(self, report: Report, folder: Path, progress: Progress) -> None:
        self._report = report
        self._folder = folder
        self._say = progress.say
        self._running: list[Child] = []
        self._reference: dict[str, list[float]] | None = None
        self._answers: dict[str, Event] = {}  # by dtype
        self._group = ""  # of the kernel checks: what is being checked

    def execute(self) -> None:
        try:
            self._start("model", "model", self._model, **ENVIRONMENT)
            threads = str(os.cpu_count() or 4)
            self._start(
                "kernels", "kernels", VLLM_TRITON_JIT_WARMUP_NUM_THREADS=threads
            )
            self._wait()
            self._compare_engines()
            self._say("timing the kernels")
            self._start("timing", "timing")
            self._wait()
        finally:
            for child in self._running:
                child.end()

    @property
    def _model(self) -> str:
        return str(self._folder / "tiny-glm")

    def _start(
        self, name: str, module: str, *arguments: str, **environment: str
    ) -> None:
        child = Child(name, self._folder, module, *arguments, **environment)
        self._running.append(child)

    def _wait(self) -> None:
        """Handle what the stages report until all have ended."""
        while self._running:
            time.sleep(_POLL)
            for child in list(self._running):
                has_ended = child.has_ended()  # before its last events are read
                for event in child.take():
                    self._handle(child, event)
                if not has_ended:
                    continue
                child.end()
                self._running.remove(child)
                if problem := child.failure():
                    self._add(Check(child.name, "the stage", FAILED, detail=problem))

    def _handle(self, child: Child, event: Event) -> None:
        kind = event.pop("event")
        if kind == "unusable":
            raise DoctorError(
                f"the GPU cannot be used: {event['problem']}",
                "update its driver, or set CUDA_VISIBLE_DEVICES to a GPU that works",
            )
        if kind == "hardware":
            self._report.hardware |= event["content"]
        elif kind == "check":
            self._add(Check(**event))
        elif kind == "saved":
            self._say("a tiny random GLM-5 is drawn; the engines start")
            for dtype in DTYPES:
                arguments = "engine", self._model, dtype
                self._start(f"engine {dtype}", *arguments, **ENVIRONMENT)
        elif kind == "reference":
            self._reference = event["content"]
        elif kind == "answers":
            self._answers[child.name.split()[1]] = event
        elif kind == "rates":
            self._report.rates = event["content"]
        elif kind == "timing":
            self._report.timings.append(Timing(**event))
        elif kind == "step":
            self._say(f"{child.name}: {event['what']}")
        elif kind == "done" and child.name == "kernels":
            self._end_group()

    def _add(self, check: Check) -> None:
        """Keep a check; say it if it failed, and where a group of them ends."""
        if check.stage != self._group:
            self._end_group()
            self._group = check.stage
        self._report.checks.append(check)
        if check.status == FAILED:
            first_line = outcome(check).partition("\n")[0]
            self._say(f"FAILED {check.stage}: {check.name}: {first_line}")

    def _end_group(self) -> None:
        group = [each for each in self._report.checks if each.stage == self._group]
        if group:
            self._say(f"{self._group}: {counts(group)}")
        self._group = ""

    def _compare_engines(self) -> None:
        for dtype, answers in self._answers.items():
            worker, compiled = answers["worker"], answers["compiled"]
            self._report.engines[dtype] = worker
            for check in check_engine(dtype, worker, compiled):
                self._add(check)
            if self._reference is not None:
                for check in compare(dtype, answers["content"], self._reference):
                    self._add(check)
        self._end_group()


def find_gpu() -> Gpu:
    """Return the GPU of this machine, as the driver names it.

    Raises:
        DoctorError: There is none, or it is too old.
    """
    nothing = argparse.Namespace(capability=None, gpu=None, memory=None)
    try:
        gpu = gpus.find(nothing)
    except DoctorError as error:
        raise DoctorError(
            f"no usable GPU: {error}",
            "the self-test needs one; `vllm doctor MODEL --gpu NAME` does not",
        ) from error
    if gpu.capability < _OLDEST:
        major, minor = gpu.capability
        raise DoctorError(
            f"no usable GPU: {gpu.name} has compute capability {major}.{minor}, "
            "expected 8.0 or newer"
        )
    return gpu


def default_file(gpu_name: str) -> str:
    """Return a file name: "NVIDIA RTX PRO 6000" -> vllm-selftest-rtx-pro-6000.json."""
    words = re.findall(r"[a-z0-9]+", gpu_name.lower().replace("nvidia", ""))
    return f"vllm-selftest-{'-'.join(words)}.json"


def host() -> dict[str, Any]:
    """Return the driver's version, with which the GPU was found, and the cores."""
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
    finally:
        pynvml.nvmlShutdown()
    return {"driver": driver, "cpu_cores": os.cpu_count()}


def versions() -> dict[str, str]:
    """Return what is installed."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def builds() -> list[dict[str, Any]]:
    """Return which upstream and which patches this is, of vLLM and of the plugin."""
    found = []
    packages = {"vllm": provenance, "vllm-gguf-plugin": plugin_provenance}
    for name, read in packages.items():
        try:
            build = read()
        except ProvenanceError as error:
            build = {"name": name, "error": str(error)}
        if build is not None:
            found.append(build)
    return found
