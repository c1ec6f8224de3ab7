"""What the user sees: messages and progress on stderr, results on stdout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

#: Messages and progress. Plain text where it is not a terminal.
console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
#: Results, which may be piped.
output = Console(highlight=False, markup=False, soft_wrap=True)


class DownloadProgress:
    """The progress of one download; on a pipe one line at the start says what goes on."""

    def __init__(self, name: str) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        self._name = name
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self.progress.add_task(name, total=None)

    def begin(self, done: int, total: int) -> None:
        """The transfer starts, or starts again, with `done` of `total` bytes already here."""
        self.progress.update(self._task, completed=done, total=total)
        if not console.is_terminal:
            resumed = f", from {done / 1e6:.0f} MB on" if done else ""
            console.print(f"fetching {self._name} ({total / 1e6:.1f} MB{resumed})")

    def advance(self, count: int) -> None:
        """`count` more bytes have come."""
        self.progress.advance(self._task, count)


@contextmanager
def download_progress(name: str) -> Iterator[DownloadProgress]:
    """Show the progress of a download while it runs."""
    shown = DownloadProgress(name)
    with shown.progress:
        yield shown
