"""How a report reaches stdout: text for a terminal or a pipe, or JSON. And progress, on stderr.

Not here: what a report says (`report`).
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO

import click
from rich.console import Console

from meshwise.cli.streams import discard, tell
from meshwise.report import Report

#: Columns when nobody looks at a terminal.
WIDTH = 80

#: Seconds of silence at the start, and between two lines of progress.
PATIENCE, PACE = 1.0, 0.5


class Output:
    """Where a verb's answer goes, as `--json`, `--details` and `--explain` ask; a `Screen` of `commands`.

    Args:
        as_json: whether reports are printed as JSON.
        explain: whether they show the workings of each number.
        details: whether they show all tables and lists.
    """

    def __init__(self, as_json: bool, explain: bool, details: bool) -> None:
        self.as_json, self.explain, self.details = as_json, explain, details
        self.progress = Progress()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.wipe()

    @property
    def terminal_progress(self) -> Callable[[str], None] | None:
        """Progress where stderr is a terminal; else, and with JSON, None: nothing need be counted."""
        return None if self.as_json or sys.stderr is None or not sys.stderr.isatty() else self.progress

    def say(self, line: str) -> None:
        """Tell something at once, on stderr, whatever the form of the answer."""
        tell(f"{line}\n")

    def write(self, text: str) -> None:
        """Print text on stdout as it is; a reader that has gone (head, less) stops nothing else: files are written."""
        self.progress.wipe()
        try:
            click.echo(text, nl=False)
        except BrokenPipeError:
            discard(sys.stdout)

    def show(self, report: Report) -> None:
        """Print a report on stdout."""
        if self.as_json:
            self.write(json.dumps(report.envelope(explain=self.explain), indent=2, allow_nan=False) + "\n")
        else:
            self.write(to_text(report.renderable(explain=self.explain, whole=self.details)))


class Progress:
    """Progress of what takes over a second: on a terminal one line that changes, elsewhere lines below each other.

    Args:
        stream: where to write (default: stderr; where that is closed, nothing is told).
        clock: seconds; tests pass their own.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream: TextIO | None = stream or sys.stderr
        self.clock = clock
        self.begun = self.last = clock()
        self.shown = False
        self.line = ""

    def wipe(self) -> None:
        """Clear the line on a terminal."""
        if self.shown and self.stream is not None and self.stream.isatty():
            tell("\r\x1b[K", self.stream)
        self.shown = False

    def __call__(self, line: str) -> None:
        """Tell what is being done; most lines are swallowed."""
        now = self.clock()
        if self.stream is None or line == self.line:
            return
        # Below each other they pile up in logs: each waits for half as long again as all before it took.
        pace = PACE if self.stream.isatty() else max(PACE, (self.last - self.begun) / 2)
        if now - self.begun < PATIENCE or now - self.last < pace:
            return
        self.last, self.shown, self.line = now, True, line
        tell(f"\r\x1b[K{line}" if self.stream.isatty() else f"{line}\n", self.stream)


def to_text(renderable: Any) -> str:
    """Lay out for stdout: its width and colours if it is a terminal (NO_COLOR is heeded), else 80 columns and none."""
    terminal = sys.stdout.isatty()
    console = Console(
        file=io.StringIO(),
        force_terminal=terminal,
        force_jupyter=False,
        width=None if terminal else WIDTH,
        color_system="auto" if terminal else None,
        markup=False,
        highlight=False,
        emoji=False,
    )
    console.print(renderable)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text if terminal else "\n".join(line.rstrip() for line in text.split("\n"))
