# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A stage in a process of its own, and the events that it reports to its parent.

"doing" is what a failure is then said to have interrupted; "step" is that and worth
telling at once; "done" is the last. The other kinds bring results.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# A kernel that hangs ends with its stage. No stage takes so long without reporting,
# compiling with cold caches on two cores included.
SILENCE = 600.0

Event = dict[str, Any]  # "event" is its kind; the rest depends on that


class Events:
    """The child's side: what it reports, a JSON object a line."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def emit(self, event: str, **content: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **content}) + "\n")


class Child:
    """The parent's side of a stage: `python -m vllm.sm120.selftest.MODULE EVENTS ...`.

    `name` is what the report calls it; the process finds its files in `folder`.
    """

    def __init__(
        self, name: str, folder: Path, module: str, *arguments: str, **environment: str
    ) -> None:
        self.name = name
        slug = name.replace(" ", "-")
        self._events = folder / f"{slug}.jsonl"
        self._events.touch()
        self._log = folder / f"{slug}.log"
        self._position = 0
        self._heard = time.monotonic()
        self._doing = "starting"
        self._is_done = False
        module = f"vllm.sm120.selftest.{module}"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(self._events), *arguments],
                cwd=folder,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def take(self) -> list[Event]:
        """Return what was reported since the last call."""
        with self._events.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._position += len(complete)
        events = [json.loads(line) for line in complete.splitlines()]
        for event in events:
            self._heard = time.monotonic()
            if event["event"] in ("doing", "step"):
                self._doing = event["what"]
            self._is_done |= event["event"] == "done"
        return events

    def has_ended(self) -> bool:
        """Return whether the process is over, or has told all that it had to tell.

        One that is silent too long is ended.
        """
        if time.monotonic() - self._heard > SILENCE:
            self.end()
        return self._is_done or self._process.poll() is not None

    def failure(self) -> str | None:
        """Return how an ended process failed, or None if it did all it had to."""
        if self._is_done:
            return None
        if time.monotonic() - self._heard > SILENCE:
            how = f"no answer for {SILENCE:.0f} s"
        else:
            how = f"ended with {self._process.returncode}"
        return f"{how} while {self._doing}\n{self.log_tail()}".rstrip()

    def log_tail(self, num_lines: int = 40) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def end(self) -> None:
        """End the process and all that it started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()
