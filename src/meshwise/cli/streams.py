"""Streams that fail: a reader that has gone, a device that is full. Not here: what is written (`output`)."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def tell(text: str, stream: TextIO | None = None) -> None:
    """Write on stderr, or a stream like it; where that cannot be (a full device, a closed pipe), nothing is told."""
    stream = stream or sys.stderr
    if stream is None:
        return
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        discard(stream)


def discard(stream: TextIO) -> None:
    """Let what a stream still has go nowhere: the interpreter flushes it once more at its end, and would fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
