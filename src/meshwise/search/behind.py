"""How much of a search is behind, of all its parts, and how long the rest may take. Not here: who is told."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from meshwise.core.units import format_time


class Behind:
    """The share of a search that is behind. It never falls, and jumps where a part proves needless.

    Args:
        doing: what is being done, for those who are told; it may be changed.

    >>> behind = Behind()
    >>> with behind.part(0, 0.4):
    ...     behind.at(0.5)
    >>> behind.share
    0.4
    """

    def __init__(self, doing: str = "") -> None:
        self.doing, self.began, self.share = doing, time.monotonic(), 0.0
        self._begin, self._size = 0.0, 1.0

    @contextmanager
    def part(self, begin: float, end: float) -> Iterator[None]:
        """A part of what is being done, from one share of it to another."""
        outer = self._begin, self._size
        self._begin, self._size = self._begin + begin * self._size, (end - begin) * self._size
        self.at(0)
        try:
            yield
            self.at(1)
        finally:
            self._begin, self._size = outer

    def at(self, share: float) -> None:
        """Of what is being done this share is behind."""
        self.share = max(self.share, self._begin + share * self._size)

    def words(self) -> str:
        """The share, and how long the rest takes if it takes as long as what is behind."""
        seconds = time.monotonic() - self.began
        left = f", about {format_time(seconds / self.share - seconds)} left" if 0 < self.share < 1 else ""
        return f"{math.floor(100 * self.share)}% done{left}"
