"""Until when a search may go on, and what says that its time is up.

Not here: what a search gives then (`search`, `serving`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from meshwise.search.behind import Behind


class OutOfTime(KeyboardInterrupt):
    """The time of a search is up: an interruption that nobody had to type."""


@dataclass(frozen=True, slots=True)
class Until:
    """When a search ends.

    Args:
        at: on `time.monotonic`'s clock; infinite for never.
        spare: whether there is another plan to give, so that the user's interruption need not wait for one.
        told: who is told how far the search is, at each tick.
        behind: how far that is.
    """

    at: float = math.inf
    spare: bool = False
    told: Callable[[str], None] | None = None
    behind: Behind = field(default_factory=Behind, compare=False)

    @classmethod
    def after(cls, time_limit: float | None, *, spare: bool = False) -> Until:
        """So many seconds from now; None for never."""
        return cls(math.inf if time_limit is None else time.monotonic() + time_limit, spare)

    def telling(self, told: Callable[[str], None]) -> Until:
        """The same for a search that begins, and tells how far it is."""
        return replace(self, told=told, behind=Behind("searching layouts"))

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
        """Stop where the time is up; else tell how far the search is.

        Raises:
            OutOfTime: it is.
        """
        if self.over:
            raise OutOfTime
        self.tell()

    def tell(self) -> None:
        """Tell how far the search is."""
        if self.told is not None:
            self.told(f"{self.behind.doing}: {self.behind.words()}")


def even_shares(time_limit: float | None, number: int) -> Iterator[float | None]:
    """Seconds for each of a number of searches, asked for when it begins: an even share of those that are left."""
    until = Until.after(time_limit)
    for left in range(number, 0, -1):
        yield None if until.left is None else until.left / left
