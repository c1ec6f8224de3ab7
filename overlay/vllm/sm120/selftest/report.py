# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the self-test found: as a verdict, as text and as the JSON file to share."""

import dataclasses
import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.sm120.doctor.report import wrap

SCHEMA = 1
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
# Of each, one check at least must have passed: what never ran has not passed.
STAGES = ("sparse MLA", "indexer", "top-k", "engine float16", "engine bfloat16")

_HARDWARE = {
    "gpu": "{}",
    "capability": "compute capability {}",
    "multiprocessors": "{} multiprocessors",
    "memory_gib": "{} GiB",
    "l2_mib": "{} MiB of L2 cache",
    "driver": "driver {}",
}
_TIMES = (
    "The median of a call in a CUDA graph. Sizes: tokens x heads of a GPU, dtype, KV "
    "cache format; for the indexer and top-k: tokens x keys. The floor is the least "
    "time that this GPU needs: to read the call's rows or keys (memory), or for its "
    "products (compute), at the rates measured here. The share is the floor over the "
    "time: a kernel at 100% cannot be made faster."
)


@dataclass(frozen=True)
class Check:
    """One comparison. `value` must not be above `limit`, if there are any."""

    stage: str  # one of STAGES
    name: str
    status: str  # PASSED, FAILED or SKIPPED
    value: float | None = None
    limit: float | None = None
    detail: str = ""  # why it failed or was skipped, or what is worth telling


@dataclass(frozen=True)
class Timing:
    """One kernel at one size; microseconds of a call in a CUDA graph, the median."""

    kernel: str
    shape: str
    us: float
    floor_us: float
    bound: str  # what sets the floor: "memory" or "compute"


@dataclass
class Report:
    """Schema 1 of the JSON is these fields, and `schema`, `verdict` and `exit`."""

    started: str  # ISO 8601, UTC
    hardware: dict[str, Any]
    versions: dict[str, str]
    provenance: list[dict[str, Any]]  # of a package; "name" and "error" if missing
    checks: list[Check] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    timings: list[Timing] = field(default_factory=list)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def problems(self) -> list[str]:
        """Return why the verdict is not "passed", a line each."""
        failed = [
            f"{check.stage}: {check.name}: {outcome(check).splitlines()[0]}"
            for check in self.checks
            if check.status == FAILED
        ]
        tested = {check.stage for check in self.checks if check.status == PASSED}
        untested = [f"{s}: nothing passed" for s in STAGES if s not in tested]
        if not self.timings:
            untested.append("timing: no kernel was timed")
        return failed + untested

    @property
    def verdict(self) -> str:
        return FAILED if self.problems else PASSED

    @property
    def exit(self) -> int:
        return 3 if self.problems else 0

    def as_dict(self) -> dict[str, Any]:
        head = {"schema": SCHEMA, "verdict": self.verdict, "exit": self.exit}
        return _plain({**head, "problems": self.problems, **dataclasses.asdict(self)})

    def write(self, path: Path) -> None:
        """Write the JSON, all or nothing."""
        unfinished = path.with_name(f"{path.name}.tmp")
        content = json.dumps(self.as_dict(), indent=1, allow_nan=False)
        unfinished.write_text(content + "\n", encoding="utf-8")
        unfinished.replace(path)

    def as_text(self) -> str:
        """Return the summary, at most 100 columns wide but for the logs of others."""
        lines = ["", "Tested", *self._tested(), "", "Checks"]
        for stage in dict.fromkeys((*STAGES, *(check.stage for check in self.checks))):
            of_stage = [check for check in self.checks if check.stage == stage]
            found = ", ".join(filter(None, [counts(of_stage), closest(of_stage)]))
            lines.append(f"  {stage:<22} {found}")
            for check in of_stage:
                if check.status != PASSED:
                    lines += _lines(check.status, f"{check.name}: {outcome(check)}")
                elif check.detail:
                    lines += _lines(check.name, check.detail)
        lines += self._times()
        lines += ["", "Verdict"]
        for problem in self.problems:
            lines += wrap("  - ", problem)
        lines.append(f"  {self.verdict} in {self.seconds:.0f} s")
        return "\n".join(lines) + "\n"

    def _tested(self) -> list[str]:
        hardware = [
            words.format(self.hardware[name])
            for name, words in _HARDWARE.items()
            if name in self.hardware
        ]
        versions = [
            f"{name} {version}"
            for name, version in self.versions.items()
            if name != "platform"
        ]
        lines = wrap("  ", ", ".join(hardware)) + wrap("  ", ", ".join(versions))
        for build in self.provenance:
            if "error" in build:
                what = "provenance missing: which patches it has is not known"
            else:
                what = f"{build['version']}, {len(build['patches'])} patches"
            lines += wrap("  ", f"{build['name']}: {what}")
        return lines

    def _times(self) -> list[str]:
        if not self.timings:
            return []
        rates = ", ".join(f"{value:g} {name}" for name, value in self.rates.items())
        lines = ["", "Times", *wrap("  ", _TIMES), *wrap("  measured: ", rates)]
        for kernel in dict.fromkeys(timing.kernel for timing in self.timings):
            lines += ["", f"  {kernel:<42} {'us':>9} {'floor us':>9} {'share':>6}"]
            for timing in self.timings:
                if timing.kernel == kernel:
                    share = timing.floor_us / timing.us
                    lines.append(
                        f"    {timing.shape:<40} {timing.us:>9.1f} "
                        f"{timing.floor_us:>9.1f} {share:>6.0%} of {timing.bound}"
                    )
        return lines


def outcome(check: Check) -> str:
    """Return in words what a check found."""
    found = "" if check.value is None else f"{check.value:.2e}"
    if found and check.limit is not None:
        found += f", limit {check.limit:.2e}"
    return "; ".join(filter(None, [found, check.detail])) or check.status


def counts(checks: list[Check]) -> str:
    """Return how many passed, failed and were skipped."""
    number = Counter(check.status for check in checks)
    statuses = [status for status in (PASSED, FAILED, SKIPPED) if number[status]]
    return ", ".join(f"{number[status]} {status}" for status in statuses) or "not run"


def closest(checks: list[Check]) -> str:
    """Return how near to its limit the worst check that passed has come."""
    shares = [
        check.value / check.limit
        for check in checks
        if check.status == PASSED and check.limit and check.value is not None
    ]
    return f"the worst at {max(shares):.0%} of its limit" if shares else ""


def _lines(what: str, text: str) -> list[str]:
    """Return indented lines; what follows the first line of `text` is a log."""
    first, *log = text.splitlines()
    return wrap(f"    {what}: ", first) + [f"      {line}" for line in log]


def _plain(value: Any) -> Any:
    """Return `value` for JSON, which has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
