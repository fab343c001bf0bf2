"""What latencies are to be, each as a mean or as a quantile of its own. Not here: one share for both (`results`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwise.core.errors import MeshwiseError
from meshwise.simulation.serving.results import ServingResult


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
class Aims:
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

    def reached(self, result: ServingResult) -> tuple[float, float]:
        """What the requests have of each, or their second half where that is more: a queue that grows is seen there."""
        both = ((self.ttft or LatencyTarget(1.0), result.ttft_s), (self.tpot or LatencyTarget(1.0), result.tpot_s))
        ttft, tpot = (max(aim.of(values), aim.of(values[len(values) // 2 :])) for aim, values in both)
        return ttft, tpot

    def too_tight(self, alone: ServingResult) -> str:
        """Say what would have to be asked for, where requests that come one by one miss them."""
        ttft, tpot = self.reached(alone)
        refused = f"; {alone.refused} requests do not fit in the cache at all" if alone.refused else ""
        return (
            f"the targets are missed at any rate: of requests that come one by one TTFT is {ttft:.3g} s "
            f"({self.ttft or 'mean'}) and TPOT {tpot:.3g} s ({self.tpot or 'mean'}); allow more than that{refused}"
        )
