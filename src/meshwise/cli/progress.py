"""Progress on stderr for what takes over a second. Not here: what is told (the caller's lines)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Self, TextIO

#: Seconds of silence at the start, and between two lines.
PATIENCE, PACE = 1.0, 0.5


class Progress:
    """A context manager that is told lines: on a terminal one line that changes, elsewhere lines below each other.

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wipe the line on a terminal."""
        if self.shown and self.stream is not None and self.stream.isatty():
            self.stream.write("\r\x1b[K")
            self.stream.flush()

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
        self.stream.write(f"\r\x1b[K{line}" if self.stream.isatty() else f"{line}\n")
        self.stream.flush()


def terminal_progress(*, quiet: bool) -> AbstractContextManager[Progress | None]:
    """Give what is told lines where stderr is a terminal; else, and where `quiet`, None: nothing need be counted."""
    return nullcontext() if quiet or sys.stderr is None or not sys.stderr.isatty() else Progress()
