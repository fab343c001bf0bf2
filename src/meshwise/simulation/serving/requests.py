"""A request that is simulated: what its scheduler sees, and what only the load knows. Not here: decisions."""

from __future__ import annotations

from meshwise.scheduling import Path
from meshwise.scheduling import Request as ScheduledRequest


class Request(ScheduledRequest):
    """A request of a load.

    Args:
        index: its number in the load.
        arrival: seconds.
        prompt, output: tokens.
        prefix, keep_as: as in `Demand`.

    Attributes:
        started: when a step first worked on it; before, below 0.
        first: when its first token came.
        last: of the replica's decode steps, that after which it is done.
    """

    __slots__ = ("arrival", "first", "keep_as", "last", "output", "started")

    def __init__(  # noqa: PLR0917 -- as a demand has them
        self, index: int, arrival: float, prompt: int, output: int, prefix: Path = (), keep_as: str | None = None
    ) -> None:
        ScheduledRequest.__init__(self, index, prompt, prefix)
        self.arrival, self.output, self.keep_as = arrival, output, keep_as
        self.started = self.first = -1.0
        self.last = 0

    def kept(self) -> Path:
        """The prompt and its output, where a later prompt may go on from them."""
        if self.keep_as is None:
            return ()
        own = self.prompt + self.output - 1 - sum(size for _, size in self.prefix)
        return (*self.prefix, (self.keep_as, own))
