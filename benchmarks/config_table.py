"""From measured times to rows of the kernel's configuration table; no GPU is needed here.

The table is a JSON file beside the kernel: capability or "default" -> "16-bit" or "fp8" -> "decode" or "prefill" ->
rows. The first row whose "heads" and "tokens" are not below the launch's applies; without "tokens" it has no limit.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

FORMATS = ("16-bit", "fp8")
KINDS = ("decode", "prefill")

#: A measured point: query heads, query tokens.
Cell = tuple[int, int]
Row = dict[str, Any]


@dataclass(frozen=True, order=True)
class Candidate:
    """The tuned fields of a configuration."""

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    group: int = 1
    gluon: str = ""
    maxnreg: int = 0  # no limit

    def __str__(self) -> str:
        text = f"{self.block_h} x {self.block_n}, {self.num_warps} warps, {self.num_stages} stages"
        text += f", {self.group} tokens" if self.group > 1 else ""
        text += f", {self.gluon}" if self.gluon else ""
        text += f", {self.maxnreg} registers" if self.maxnreg else ""
        return text + (f", {self.programs_per_sm} programs" if self.programs_per_sm else "")

    @property
    def kernel(self) -> "Candidate":
        """What is compiled: the number of programs is a matter of the launch."""
        return replace(self, programs_per_sm=0)

    def row(self) -> Row:
        usual = {"group": 1, "gluon": "", "maxnreg": 0}
        return {name: value for name, value in asdict(self).items() if usual.get(name) != value}


def choose(times: Mapping[Cell, Mapping[Candidate, float]], tolerance: float) -> dict[Cell, Candidate]:
    """Return a candidate for each cell, at most `tolerance` slower than the fastest there.

    Of each head count as few kernels as possible are chosen, since a server compiles each one when it starts, and
    what was chosen for fewer tokens stays as long as it is good enough.
    """
    chosen: dict[Cell, Candidate] = {}
    for heads in sorted({heads for heads, _ in times}):
        good = {}
        for cell in sorted(cell for cell in times if cell[0] == heads and times[cell]):
            best = min(times[cell].values())
            good[cell] = {one: time / best for one, time in times[cell].items() if time <= best * (1 + tolerance)}
        kernels = _fewest_kernels(good)
        previous = None
        for cell, slowdowns in good.items():
            if previous not in slowdowns:
                usable = [one for one in slowdowns if one.kernel in kernels]
                previous = min(usable, key=lambda one, slowdowns=slowdowns: (slowdowns[one], one))
            chosen[cell] = previous
    return chosen


def _fewest_kernels(good: Mapping[Cell, Mapping[Candidate, float]]) -> set[Candidate]:
    """Return kernels of which each cell has a good one, found greedily."""
    covered_by: dict[Candidate, dict[Cell, float]] = {}
    for cell, slowdowns in good.items():
        for candidate, slowdown in slowdowns.items():
            cells = covered_by.setdefault(candidate.kernel, {})
            cells[cell] = min(slowdown, cells.get(cell, slowdown))
    kernels: set[Candidate] = set()
    left = set(good)

    def merit(kernel: Candidate) -> tuple[int, float, Candidate]:
        slowdowns = [slowdown for cell, slowdown in covered_by[kernel].items() if cell in left]
        return -len(slowdowns), sum(slowdowns), kernel

    while left:
        kernel = min(covered_by, key=merit)
        kernels.add(kernel)
        left -= covered_by[kernel].keys()
    return kernels


def merge(chosen: Mapping[Cell, Candidate], max_heads: int = 128) -> list[Row]:
    """Return the rows of the chosen candidates; equal neighbours become one row.

    A row holds up to its token count; the last one of a head count, and the last head count, hold for all above.
    """
    groups: list[tuple[int, list[Row]]] = []
    for heads in sorted({heads for heads, _ in chosen}):
        rows: list[Row] = []
        for tokens in sorted(tokens for other, tokens in chosen if other == heads):
            row = {"tokens": tokens, **chosen[heads, tokens].row()}
            if rows and rows[-1] | {"tokens": tokens} == row:
                rows.pop()
            rows.append(row)
        del rows[-1]["tokens"]
        if groups and groups[-1][1] == rows:
            groups.pop()
        groups.append((heads, rows))
    if groups:
        groups[-1] = max_heads, groups[-1][1]
    return [{"heads": heads, **row} for heads, rows in groups for row in rows]


def with_rows(
    table: Mapping[str, Any], section: str, kv_format: str, kind: str, rows: list[Row], tuned: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the table with other rows in one place. A new section starts as a copy of "default"."""
    if not rows:
        raise ValueError(f"no rows for {section} {kv_format} {kind}")
    result = json.loads(json.dumps(table))
    if section not in result:
        result[section] = {kv_format: result["default"][kv_format] for kv_format in FORMATS}
        result = json.loads(json.dumps(result))
    result[section][kv_format][kind] = rows
    result[section].setdefault("tuned", {})[kv_format] = dict(tuned)
    return result


def render(table: Mapping[str, Any]) -> str:
    """Return the text of the file: "default" first, then by capability; a row a line."""

    def version(name: str) -> tuple[int, ...]:
        return tuple(map(int, name.split("."))) if name != "default" else ()

    ordered = {}
    for name in sorted(table, key=version):
        section = table[name]
        ordered[name] = {"tuned": section["tuned"]} if "tuned" in section else {}
        for kv_format in FORMATS:
            ordered[name][kv_format] = {kind: section[kv_format][kind] for kind in KINDS}
    # Objects that hold no others are rows and notes: one line each.
    text = json.dumps(ordered, indent=2)
    return re.sub(r"\{[^{}]*\}", lambda match: json.dumps(json.loads(match[0])), text) + "\n"


def write(path: Path, table: Mapping[str, Any]) -> None:
    """Put the table in place of the file, all or nothing."""
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(render(table))
    unfinished.replace(path)
