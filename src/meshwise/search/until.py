"""Until when a search may go on, and what says that its time is up.

Not here: what a search gives then (`search`, `serving`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass


class OutOfTime(KeyboardInterrupt):
    """The time of a search is up: an interruption that nobody had to type."""


@dataclass(frozen=True, slots=True)
class Until:
    """When a search ends.

    Args:
        at: on `time.monotonic`'s clock; infinite for never.
        spare: whether there is another plan to give, so that the user's interruption need not wait for one.
    """

    at: float = math.inf
    spare: bool = False

    @classmethod
    def after(cls, time_limit: float | None, *, spare: bool = False) -> Until:
        """So many seconds from now; None for never."""
        return cls(math.inf if time_limit is None else time.monotonic() + time_limit, spare)

    @property
    def left(self) -> float | None:
        """Seconds until then, at least 0; None for any."""
        return None if math.isinf(self.at) else max(0.0, self.at - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether it is past."""
        return time.monotonic() > self.at

    @property
    def interruption(self) -> KeyboardInterrupt:
        """What ended a search that was ended early: the time, or the user."""
        return OutOfTime() if self.over else KeyboardInterrupt()

    def tick(self) -> None:
        """Stop where the time is up.

        Raises:
            OutOfTime: it is.
        """
        if self.over:
            raise OutOfTime


def even_shares(time_limit: float | None, number: int) -> Iterator[float | None]:
    """Seconds for each of a number of searches, asked for when it begins: an even share of those that are left."""
    until = Until.after(time_limit)
    for left in range(number, 0, -1):
        yield None if until.left is None else until.left / left
