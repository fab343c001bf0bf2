"""Replicas that share a load: requests are routed, caches are sent where others decode, replicas come and go.

Each replica runs on its own to the next time at which something from outside reaches it. Not here: what a replica does
(`replica`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection

from meshwise.core.errors import MeshwiseError
from meshwise.core.units import format_time
from meshwise.jobs.traffic import Load
from meshwise.scheduling.routing import Router
from meshwise.simulation.serving.recording import Recorder
from meshwise.simulation.serving.replica import Replica
from meshwise.simulation.serving.requests import Request
from meshwise.simulation.serving.system import PrefillPool, ServingSystem

#: Decisions of an autoscaler in one simulation: six weeks of one in ten seconds.
_MOST_DECISIONS = 360_000


class Fleet:
    """All replicas of a system.

    Args:
        system: what serves.
        recorder: is told what happens.
        seed: of what replicas draw.
        only: numbers of the replicas that serve here, of an `independent` system; None: all.

    Attributes:
        replicas: those that decode, all there ever were.
        prefill: those that only prefill.
        sizes: times, and how many replicas were to be there from then on.
        refused: requests that do not fit in a replica's cache.
        transferred: tokens whose cache was sent.
    """

    def __init__(
        self, system: ServingSystem, recorder: Recorder, seed: int = 0, only: Collection[int] | None = None
    ) -> None:
        self.system, self.recorder, self.seed, self._only = system, recorder, seed, only
        self._router: Router[Replica] = Router(system.routing)
        self._prefill_router: Router[Replica] = Router(system.routing)
        self._made = 0
        self.replicas = [self._ordered(0.0, 0.0) for _ in range(system.replicas)]
        self._active = self.replicas
        self.sizes = [(0.0, system.replicas)]
        self._due = math.inf if system.autoscaling is None else system.autoscaling.interval_s
        self.refused = self.transferred = 0
        self.end = 0.0
        self.prefill: list[Replica] = []
        self._arriving: list[tuple[float, int, Request]] = []
        if system.prefill is not None:
            self._links = [0.0] * system.prefill.replicas
            self.prefill = [self._prefiller(system.prefill, number) for number in range(system.prefill.replicas)]

    def run(self, load: Load) -> None:
        """Serve a load from the first request to the last."""
        prefill = self.prefill
        most_tokens = self._active[0].caches[0].most_tokens
        most_prompt = prefill[0].caches[0].most_tokens if prefill else most_tokens
        for index, demand in enumerate(load.requests()):
            time = demand.arrival
            if prefill:
                self._deliver(time)
            if time >= self._due:
                self._scale(time)
            if demand.prompt > most_prompt or demand.prompt + demand.output - 1 > most_tokens:
                self.refused += 1
                continue
            if prefill:
                replica = self._prefill_router.choose(prefill, demand.prefix, _up_to(time))
            else:
                replica = self._router.choose(self._active, demand.prefix, _up_to(time))
            if self._only is not None and replica.number not in self._only:
                continue
            replica.run_until(time)
            replica.enqueue(Request(index, *demand), time)
        self._deliver(math.inf)
        for replica in self.replicas:
            replica.run_until(math.inf)
        self.end = max(replica.clock for replica in (*self.replicas, *prefill))

    def _ordered(self, now: float, startup: float) -> Replica:
        """One more replica."""
        number = self._made
        self._made += 1
        costs, scheduling = self.system.costs, self.system.scheduling
        replica = Replica(number, costs, scheduling, self.recorder, seed=self.seed, begins=now + startup)
        replica.ordered = now
        return replica

    # Caches that are sent

    def _prefiller(self, pool: PrefillPool, number: int) -> Replica:
        """One replica that prefills; requests leave it over its own link, one after the other."""
        costs = pool.costs

        def send(request: Request, time: float) -> float:
            begin = max(time, self._links[number])
            self._links[number] = end = begin + costs.transfer_seconds(request.prompt)
            self.transferred += request.prompt
            heapq.heappush(self._arriving, (end, request.index, request))
            return end

        return Replica(-1 - number, costs, pool.scheduling, self.recorder, hand_over=send)

    def _deliver(self, time: float) -> None:
        """Bring what has been sent up to `time` to those that decode."""
        for replica in self.prefill:
            if replica.clock <= time:
                replica.run_until(time)
        arriving = self._arriving
        while arriving and arriving[0][0] <= time:
            when, _, request = heapq.heappop(arriving)
            self._scale(when)
            replica = self._router.choose(self._active, (), _up_to(when))
            replica.run_until(when)
            replica.enqueue(request, when)

    # Replicas that come and go

    def _scale(self, time: float) -> None:
        """Decide how many replicas there are, as often as was due before `time`."""
        rule = self.system.autoscaling
        while rule is not None and self._due <= time:
            now = self._due
            self._due += rule.interval_s
            if len(self.sizes) > _MOST_DECISIONS:
                raise MeshwiseError(
                    f"autoscaling: {_MOST_DECISIONS:,} decisions by {format_time(now)} of the load, one each "
                    f"{format_time(rule.interval_s)}; decide less often, or send fewer requests"
                )
            for replica in self.replicas:
                replica.run_until(now)
            outstanding = sum(replica.outstanding for replica in self.replicas)
            wanted = min(max(math.ceil(outstanding / rule.requests_per_replica), rule.least), rule.most)
            staying = [replica for replica in self.replicas if replica.leaving is None]
            for replica in staying[wanted:]:
                replica.leaving = now
            more = [self._ordered(now, rule.startup_s) for _ in range(wanted - len(staying))]
            self.replicas = [*self.replicas, *more]
            there = [replica for replica in self.replicas if replica.leaving is None and replica.begins <= now]
            self.sizes.append((now, wanted))
            self._active = there or self._active


def _up_to(time: float) -> Callable[[Replica], None]:
    """Let a replica run to a time, if it has not."""

    def run(replica: Replica) -> None:
        if replica.clock <= time:
            replica.run_until(time)

    return run
