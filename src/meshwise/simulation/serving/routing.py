"""Which replica a request goes to: each in turn, the least loaded, or the one that has its prefix in the cache.

Not here: replicas that come and go (`fleet`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from meshwise.jobs.traffic import Demand
from meshwise.simulation.serving.replica import Replica

#: Requests that a replica may have more than the least loaded one, and still get those whose prefix it has.
AFFINITY_SLACK = 16


class Router(Protocol):
    """Chooses a replica."""

    def choose(self, replicas: Sequence[Replica], time: float, demand: Demand | None) -> Replica:
        """Choose for a request that arrives at `time`; None: its prefix does not matter."""


class RoundRobin:
    """Each replica in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, replicas: Sequence[Replica], time: float, demand: Demand | None) -> Replica:  # noqa: ARG002
        """Choose the next one."""
        self._next = (self._next + 1) % len(replicas)
        return replicas[self._next]


class LeastLoaded:
    """The replica with the fewest requests that are not done."""

    def choose(self, replicas: Sequence[Replica], time: float, demand: Demand | None) -> Replica:  # noqa: ARG002
        """Choose it; of several the first."""
        best = replicas[0]
        for replica in replicas:
            if replica.clock <= time:
                replica.run_until(time)
            if replica.outstanding < best.outstanding:
                best = replica
        return best


class Affinity:
    """The replica that has most of a prompt's prefix in its cache, or was last sent one like it.

    Unless it has many more requests than the least loaded one, which is then chosen.
    """

    def __init__(self) -> None:
        self._least = LeastLoaded()
        self._sent: dict[str, Replica] = {}

    def choose(self, replicas: Sequence[Replica], time: float, demand: Demand | None) -> Replica:
        """Choose by prefix, then by load."""
        best = self._least.choose(replicas, time, demand)
        if demand is None or not demand.prefix:
            return best
        most, load = 0, best.outstanding + AFFINITY_SLACK
        beginning = demand.prefix[0][0]
        known = self._sent.get(beginning)
        if known is not None and known.outstanding <= load and known in replicas:
            best = known
        for replica in replicas:
            found = replica.cache.match(demand.prefix)[1] if replica.cache is not None else 0
            if found > most and replica.outstanding <= load:
                best, most = replica, found
        self._sent[beginning] = best
        return best


#: Name -> how to choose.
ROUTERS: dict[str, type[RoundRobin | LeastLoaded | Affinity]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "affinity": Affinity,
}
