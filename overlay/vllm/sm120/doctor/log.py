# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a server's log says of failures whose cause and cure are known.

The failures are data: known_failures.toml beside this file.
"""

import argparse
import dataclasses
import json
import re
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vllm.sm120.doctor import FITS, NOTHING_FITS
from vllm.sm120.doctor.facts import DoctorError
from vllm.sm120.doctor.report import SCHEMA, wrap

_LONGEST_TEXT = 300  # characters of a line that are shown
_LONGEST_LINE = 65536  # characters that are searched: a log may be no text at all
# Colours, and all else that could do something to a terminal.
_CONTROLS = re.compile(r"\x1b\[[\d;]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Failure:
    """A row of the table. Cause and cure may name groups of the pattern: {limit}."""

    name: str
    pattern: re.Pattern[str]  # found within one line
    cause: str
    cure: str
    source: str  # who says so: the code that prints the line, or a report


@dataclass
class Finding:
    name: str
    line: int  # the first one, counted from 1
    count: int  # lines that say so
    text: str
    cause: str
    cure: str
    source: str


def run(arguments: argparse.Namespace) -> int:
    """Print what is known of the failures in a log; returns the exit code."""
    findings = explain(arguments.log)
    code = NOTHING_FITS if findings else FITS
    if arguments.json:
        rows = [dataclasses.asdict(each) for each in findings]
        answer = {"schema": SCHEMA, "log": arguments.log, "findings": rows}
        json.dump({**answer, "exit": code}, sys.stdout, indent=2)
        print()
    else:
        print(_as_text(arguments.log, findings, colour=sys.stdout.isatty()))
    return code


def explain(path: str) -> list[Finding]:
    """Return the known failures in the file, or on standard input for "-".

    Raises:
        DoctorError: There is nothing to read.
    """
    try:
        if path == "-":
            sys.stdin.reconfigure(errors="replace")
            return find(sys.stdin)
        with Path(path).open(encoding="utf-8", errors="replace") as lines:
            return find(lines)
    except OSError as error:
        problem = f"the log {path} cannot be read: {error.strerror}"
        raise DoctorError(problem, "name the file, or - for standard input") from error


def find(lines: Iterable[str]) -> list[Finding]:
    """Return the known failures in the order in which they appear.

    A line counts for the first failure of the table that it matches. Every process
    logs an error once more: what says the same is one finding.

    Raises:
        DoctorError: There is no line.
    """
    table = known_failures()
    findings: dict[tuple[str, str], Finding] = {}
    number = 0
    for number, line in enumerate(lines, 1):
        line = line[:_LONGEST_LINE]
        for failure in table:
            if match := failure.pattern.search(line):
                found = _finding(failure, match, number)
                findings.setdefault((found.name, found.cause), found).count += 1
                break
    if number == 0:
        cure = "write all that the server prints to it: vllm serve ... > FILE 2>&1"
        raise DoctorError("the log is empty", cure)
    return list(findings.values())


def known_failures() -> list[Failure]:
    table = Path(__file__).with_name("known_failures.toml").read_text("utf-8")
    return [
        Failure(**{**row, "pattern": re.compile(row["pattern"])})
        for row in tomllib.loads(table)["failure"]
    ]


def _finding(failure: Failure, match: re.Match[str], number: int) -> Finding:
    groups = {
        name: _CONTROLS.sub("", text or "") for name, text in match.groupdict().items()
    }
    text = _CONTROLS.sub("", match[0])
    if len(text) > _LONGEST_TEXT:
        text = text[:_LONGEST_TEXT] + " ..."
    return Finding(
        failure.name,
        number,
        0,
        text,
        failure.cause.format(**groups),
        failure.cure.format(**groups),
        failure.source,
    )


def _as_text(path: str, findings: list[Finding], *, colour: bool) -> str:
    if not findings:
        return f"no known failure in {path}"
    lines = []
    for each in findings:
        times = f", {each.count} times" if each.count > 1 else ""
        heading = f"{each.name}: line {each.line}{times}"
        lines.append(f"\033[1m{heading}\033[0m" if colour else heading)
        for name in ("text", "cause", "cure", "source"):
            lines += wrap(f"  {name + ':':<8}", getattr(each, name))
        lines.append("")
    others = ", the first often the cause of the others" if len(findings) > 1 else ""
    lines.append(f"known failures: {len(findings)}{others}")
    return "\n".join(lines)
