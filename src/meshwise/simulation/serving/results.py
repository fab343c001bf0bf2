"""What users noticed, how busy the replicas were, and the latencies that were asked for (SLOs).

Not here: words and pictures (`report`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwise.core.errors import MeshwiseError
from meshwise.costs.engine import EngineCosts
from meshwise.simulation.serving.fleet import Fleet
from meshwise.simulation.serving.recording import Activity, Span
from meshwise.simulation.serving.requests import Request
from meshwise.simulation.serving.system import ServingSystem

Values = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of many values; a quantile is the smallest value that so many are not above."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Values) -> Quantiles | None:
        """Sum values up; None where there are none."""
        if not len(values):
            return None
        p50, p90, p99 = np.quantile(values, (0.5, 0.9, 0.99), method="inverted_cdf").tolist()
        return cls(float(values.mean()), p50, p90, p99, float(values.max()))


class TooManyMissed(Exception):  # noqa: N818 -- no error: the outcome is known
    """So many requests missed a target that those to come cannot make it good."""


@dataclass(slots=True)
class Misses:
    """Counts requests that miss a target while they are simulated.

    Args:
        ttft_s, tpot_s: what they are to keep.
        since: number of the first request that counts.
        allowed: how many may miss it.
    """

    ttft_s: float
    tpot_s: float
    since: int
    allowed: float

    def __call__(self, request: Request, time: float) -> None:
        """Count a request that is done.

        Raises:
            TooManyMissed: with it there are too many.
        """
        r = request
        if r.index < self.since or (
            r.first - r.arrival <= self.ttft_s and (r.output == 1 or (time - r.first) / (r.output - 1) <= self.tpot_s)
        ):
            return
        self.allowed -= 1
        if self.allowed < 0:
            raise TooManyMissed


@dataclass(frozen=True, slots=True)
class Targets:
    """What a user is to notice at most; None: whatever it is.

    Args:
        ttft_s: seconds to the first token.
        tpot_s: seconds for each token after the first.
        share: of the requests that are to keep both.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    share: float = 0.99

    def __post_init__(self) -> None:
        """Check the numbers."""
        if any(t is not None and t <= 0 for t in (self.ttft_s, self.tpot_s)):
            raise MeshwiseError(f"targets: expected more than 0 seconds, found {self.ttft_s!r} and {self.tpot_s!r}")
        if not 0 < self.share <= 1:
            raise MeshwiseError(
                f"targets: expected a share of requests of more than 0 and at most 1, found {self.share!r}"
            )

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return self.ttft_s is not None or self.tpot_s is not None

    def met_by(self, result: ServingResult) -> bool:
        """Whether enough of the second half of the requests kept them, and none was refused."""
        kept = result.kept(self)
        return not result.refused and float(kept[len(kept) // 2 :].mean()) >= self.share

    def misses(self, requests: int) -> Iterator[Misses]:
        """Counters that end a simulation of so many requests early."""
        half = requests // 2
        ttft, tpot = (math.inf if t is None else t for t in (self.ttft_s, self.tpot_s))
        yield Misses(ttft, tpot, half, (1 - self.share) * (requests - half) + 1e-6)

    def too_tight(self, alone: ServingResult) -> str:
        """What would have to be asked for, where requests that come one by one miss them."""
        ttft, tpot = (float(np.quantile(v, self.share)) if len(v) else 0.0 for v in (alone.ttft_s, alone.tpot_s))
        reached = f"{self.share:.0%} have their first token within {ttft:.3g} s and a token every {tpot:.3g} s"
        return _too_tight(reached, alone)


def _too_tight(reached: str, alone: ServingResult) -> str:
    refused = f"; {alone.refused} requests do not fit in the cache at all" if alone.refused else ""
    return (
        f"the targets are missed at any rate: of requests that come one by one {reached}; allow more than that{refused}"
    )


@dataclass(frozen=True)
class ServingResult:
    """What became of a load.

    Args:
        system: what served.
        columns: name of `COLUMNS` -> a value for each request that is done, in order of arrival.
        refused: requests that do not fit in a replica's cache.
        end: when the last one was done, seconds.
        replicas: how busy each was.
        sizes: times, and how many replicas were to be there from then on.
        transferred_tokens: whose cache was sent from replicas that prefill.
        spans: the first steps, as many as were asked for.
        cpu_s: seconds that the simulation took.
    """

    system: ServingSystem
    columns: dict[str, Values]
    refused: int
    end: float
    replicas: tuple[Activity, ...]
    sizes: tuple[tuple[float, int], ...]
    transferred_tokens: int
    spans: tuple[Span, ...]
    cpu_s: float

    @classmethod
    def of(cls, fleet: Fleet, cpu_s: float) -> ServingResult:
        """Collect what a fleet did."""
        replicas = [*fleet.replicas, *fleet.prefill]
        for replica in replicas:
            replica.activity.seconds = replica.lifetime(fleet.end)
        return cls(
            system=fleet.system,
            columns=fleet.recorder.columns(),
            refused=fleet.refused,
            end=fleet.end,
            replicas=tuple(replica.activity for replica in replicas),
            sizes=tuple(fleet.sizes),
            transferred_tokens=fleet.transferred,
            spans=tuple(fleet.recorder.spans),
            cpu_s=cpu_s,
        )

    @property
    def requests(self) -> int:
        """Requests that are done."""
        return len(self.columns["index"])

    @property
    def ttft_s(self) -> Values:
        """Seconds from arrival to the first token."""
        return self.columns["first"] - self.columns["arrival"]

    @property
    def tpot_s(self) -> Values:
        """Seconds for each token after the first; of requests that have one token only, none."""
        several = self.columns["output"] > 1
        seconds = self.columns["finished"][several] - self.columns["first"][several]
        return np.asarray(seconds / (self.columns["output"][several] - 1))

    @property
    def end_to_end_s(self) -> Values:
        """Seconds from arrival to the last token."""
        return self.columns["finished"] - self.columns["arrival"]

    @property
    def queueing_s(self) -> Values:
        """Seconds from arrival to the first step that worked on it."""
        return self.columns["started"] - self.columns["arrival"]

    @property
    def output_tokens(self) -> int:
        """Tokens that were generated for requests that are done."""
        return int(self.columns["output"].sum())

    @property
    def requests_per_s(self) -> float:
        """Requests done, a second, from the first arrival to the end."""
        return self.requests / (self.end - float(self.columns["arrival"][0]))

    @property
    def utilisation(self) -> float:
        """Share of the replicas' time in which they worked."""
        return sum(r.busy_s for r in self.replicas) / sum(r.seconds for r in self.replicas)

    @property
    def chip_seconds(self) -> float:
        """Of all replicas, from when they were asked for."""
        return sum(r.seconds * self._costs(r).num_chips for r in self.replicas)

    @property
    def usd(self) -> float | None:
        """What the replicas cost meanwhile; None if a price is unknown."""
        own = [(r.seconds, self._costs(r)) for r in self.replicas]
        if any(costs.usd_per_chip_hour is None for _, costs in own):
            return None
        return sum(seconds / 3600 * costs.num_chips * (costs.usd_per_chip_hour or 0) for seconds, costs in own)

    def _costs(self, replica: Activity) -> EngineCosts:
        """Step costs of the engine that a replica is one of."""
        pool = self.system.prefill
        return self.system.costs if pool is None or replica.number >= 0 else pool.costs

    def kept(self, targets: Targets) -> Values:
        """1 for each request, in order of arrival, that kept the targets, else 0."""
        kept = np.ones(self.requests)
        if targets.ttft_s is not None:
            kept *= self.ttft_s <= targets.ttft_s
        if targets.tpot_s is not None:
            kept[self.columns["output"] > 1] *= self.tpot_s <= targets.tpot_s
        return kept

    def goodput(self, targets: Targets) -> float:
        """Requests a second that are done and kept the targets."""
        return float(self.kept(targets).mean()) * self.requests_per_s


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """What one latency is to be at most.

    Args:
        seconds: the limit.
        share: of the requests that are to keep it, 0.99 for p99; None: the mean is to keep it.
    """

    seconds: float
    share: float | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.seconds <= 0:
            raise MeshwiseError(f"target: expected more than 0 seconds, found {self.seconds!r}")
        if self.share is not None and not 0 < self.share < 1:
            raise MeshwiseError(f"target: expected a percentile between 0 and 100, found {100 * self.share:g}")

    def of(self, values: np.ndarray[Any, Any]) -> float:
        """What is compared with the limit: the mean or the quantile of latencies; 0 of none."""
        if not len(values):
            return 0.0
        return float(values.mean() if self.share is None else np.quantile(values, self.share, method="inverted_cdf"))

    def __str__(self) -> str:
        return "mean" if self.share is None else f"p{100 * self.share:g}"


#: Share of a load's time that its last quarter may wait before the queue counts as one that grows.
_GROWS = 0.02


def _steady(result: ServingResult) -> bool:
    """Whether the last quarter of the requests waits little, measured by the time in which all arrive."""
    arrivals, waits = result.columns["arrival"], result.queueing_s
    last = waits[3 * len(waits) // 4 :]
    return float(last.mean()) <= _GROWS * float(arrivals[-1] - arrivals[0])


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """What latencies of a load are to be; None: whatever they are.

    Args:
        ttft, tpot: time to the first token, and per token after it.
    """

    ttft: LatencyTarget | None = None
    tpot: LatencyTarget | None = None

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return self.ttft is not None or self.tpot is not None

    def met_by(self, result: ServingResult) -> bool:
        """Whether the requests keep them, their second half too, and none was refused.

        Where the first token may take any time, a queue must not grow all the same.
        """
        ttft, tpot = self.reached(result)
        return (
            not result.refused
            and (self.ttft is not None or _steady(result))
            and (self.ttft is None or ttft <= self.ttft.seconds)
            and (self.tpot is None or tpot <= self.tpot.seconds)
        )

    def misses(self, requests: int) -> Iterator[Misses]:
        """Counters that end a simulation of so many requests early; means end none.

        Halves of requests with several tokens begin elsewhere than halves of all: of these all are counted.
        """
        half = requests // 2
        if self.ttft is not None and self.ttft.share is not None:
            yield Misses(self.ttft.seconds, math.inf, half, (1 - self.ttft.share) * (requests - half) + 1)
        if self.tpot is not None and self.tpot.share is not None:
            yield Misses(math.inf, self.tpot.seconds, 0, (1 - self.tpot.share) * requests + 1)

    def share_kept(self, result: ServingResult) -> float:
        """Share of the requests that kept both limits."""
        ttft, tpot = (None if t is None else t.seconds for t in (self.ttft, self.tpot))
        return float(result.kept(Targets(ttft, tpot)).mean())

    def reached(self, result: ServingResult) -> tuple[float, float]:
        """What the requests have of each, or their second half where that is more: a queue that grows is seen there."""
        both = ((self.ttft or LatencyTarget(1.0), result.ttft_s), (self.tpot or LatencyTarget(1.0), result.tpot_s))
        ttft, tpot = (max(target.of(values), target.of(values[len(values) // 2 :])) for target, values in both)
        return ttft, tpot

    def too_tight(self, alone: ServingResult) -> str:
        """What would have to be asked for, where requests that come one by one miss them."""
        ttft, tpot = self.reached(alone)
        reached = f"TTFT is {ttft:.3g} s ({self.ttft or 'mean'}) and TPOT {tpot:.3g} s ({self.tpot or 'mean'})"
        return _too_tight(reached, alone)
