"""Which of several replicas a request goes to. Not here: what a replica does with it (`scheduler`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from meshwise.scheduling.cache import PagedCache
from meshwise.scheduling.prefixes import Path

#: Routing -> which replica a request goes to.
ROUTINGS = {
    "round-robin": "each replica in turn",
    "least-loaded": "the one with the fewest requests that are not done",
    "affinity": "the one that has most of its prefix in the cache, unless it has many more requests than others",
}

#: Requests that a replica may have more than the least loaded one, and still get those whose prefix it has.
_AFFINITY_SLACK = 16

#: Beginnings of prompts of which it is known who was sent one; the oldest are forgotten.
_MOST_KNOWN = 2**16


class Replica(Protocol):
    """What a request can be sent to."""

    @property
    def outstanding(self) -> int:
        """Requests that are not done."""
        ...

    @property
    def caches(self) -> Sequence[PagedCache]:
        """The blocks of its ranks."""
        ...


R = TypeVar("R", bound=Replica)


class Router(Generic[R]):
    """Chooses replicas for the requests of one fleet.

    Args:
        routing: a name of `ROUTINGS`.
    """

    def __init__(self, routing: str) -> None:
        self._routing = routing
        self._last = 0
        self._sent: dict[str | bytes, R] = {}  # beginning of prompts -> the replica that was last sent one

    def choose(self, replicas: Sequence[R], prefix: Path, ready: Callable[[R], None] | None = None) -> R:
        """Choose for a request.

        Args:
            replicas: at least one.
            prefix: of its prompt; empty where it does not matter.
            ready: called for each replica before it is asked how many requests it has.
        """
        if self._routing == "round-robin":
            self._last = (self._last + 1) % len(replicas)
            return replicas[self._last]
        best = replicas[0]
        for replica in replicas:
            if ready is not None:
                ready(replica)
            if replica.outstanding < best.outstanding:
                best = replica
            if not best.outstanding:  # the first without requests; the others run on when their turn comes
                break
        return best if self._routing == "least-loaded" or not prefix else self._by_prefix(replicas, best, prefix)

    def _by_prefix(self, replicas: Sequence[R], least: R, prefix: Path) -> R:
        """The replica that has most of a prompt's prefix in its cache, or was last sent one like it.

        Unless it has many more requests than the least loaded one, which is then chosen.
        """
        best, most, load = least, 0, least.outstanding + _AFFINITY_SLACK
        beginning = prefix[0][0]
        known = self._sent.pop(beginning, None)
        if known is not None and known.outstanding <= load and known in replicas:
            best = known
        for replica in replicas:
            found = max(cache.matched(prefix) for cache in replica.caches)
            if found > most and replica.outstanding <= load:
                best, most = replica, found
        self._sent[beginning] = best
        if len(self._sent) > _MOST_KNOWN:
            del self._sent[next(iter(self._sent))]
        return best
