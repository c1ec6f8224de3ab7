"""`make status`: the series as a table."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from scripts.series import Applied

_COLUMNS = ("#", "patch", "verdict", "files", "+", "-", "upstream status", "remove when")


def rows(applied: Applied) -> list[dict[str, Any]]:
    """One record a patch, in order; the values of a JSON report."""
    return [
        {
            "order": number,
            "patch": step.patch.name,
            "subject": step.patch.subject,
            "verdict": str(step.verdict),
            "good": step.verdict.good,
            "explanation": step.verdict.explanation,
            "files": [file.path for file in step.patch.files],
            "added": sum(file.added for file in step.patch.files),
            "removed": sum(file.removed for file in step.patch.files),
            "upstream_status": step.patch.trailers.get("Upstream-Status", ""),
            "upstream_link": step.patch.trailers.get("Upstream-Link", ""),
            "remove_when": step.patch.trailers.get("Remove-When", ""),
        }
        for number, step in enumerate(applied.steps, 1)
    ]


def table(applied: Applied) -> Table:
    """The same for people."""
    project = applied.project
    shown = Table(
        title=f"{project.name} {project.version} -> {project.local_version}",
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for column in _COLUMNS:
        number = column in ("#", "files", "+", "-")
        shown.add_column(
            column, justify="right" if number else "left", no_wrap=number or column == "patch", overflow="fold"
        )
    for row in rows(applied):
        numbers = (str(len(row["files"])), str(row["added"]), str(row["removed"]))
        cells = (str(row["order"]), row["patch"], row["verdict"], *numbers, row["upstream_status"], row["remove_when"])
        shown.add_row(*cells, style="" if row["good"] else "red")
    return shown
