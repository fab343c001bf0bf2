"""When requests arrive: evenly, at random, in clumps, or in bursts with pauses.

Times come in blocks of an array, so that a million requests need no memory. Not here: how long they are (`lengths`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwise.core.errors import MeshwiseError
from meshwise.core.units import parse_count, parse_duration

#: Requests that are drawn at once.
BLOCK = 4096

_EXAMPLES = "poisson, constant, gamma:2.5 (standard deviation over mean of the gaps) or on-off:10s/50s"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A process of arrivals at a mean rate.

    Args:
        rate: requests per second, over a long time.
        variation: standard deviation over mean of the gaps between arrivals: 0 is evenly, 1 is Poisson, more comes in
            clumps. Gaps follow a gamma distribution.
        on_s, off_s: seconds in which requests arrive, and in which none do, in turns; without pauses `off_s` is 0.
    """

    rate: float
    variation: float = 1.0
    on_s: float = 1.0
    off_s: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 0 < self.rate < float("inf"):
            raise MeshwiseError(f"rate: expected more than 0 requests per second, found {self.rate!r}")

    def times(self, random: np.random.Generator, count: int) -> Iterator[np.ndarray[Any, Any]]:
        """Give the times of `count` arrivals in order, seconds, block by block."""
        rate = self.rate * (self.on_s + self.off_s) / self.on_s
        last = 0.0
        for start in range(0, count, BLOCK):
            busy = last + np.cumsum(self._gaps(random, min(BLOCK, count - start))) / rate
            last = float(busy[-1])
            yield busy + np.floor(busy / self.on_s) * self.off_s if self.off_s else busy

    def _gaps(self, random: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
        """Gaps of mean 1."""
        if self.variation == 0:
            return np.ones(count)
        if self.variation == 1:
            return random.exponential(size=count)
        return random.gamma(self.variation**-2, self.variation**2, size=count)

    def at_rate(self, rate: float) -> Arrivals:
        """Give the same process at another mean rate; the same draws, closer together or further apart."""
        return replace(self, rate=rate)

    def __str__(self) -> str:
        if self.off_s:
            return f"on-off:{self.on_s:g}s/{self.off_s:g}s"
        return {0.0: "constant", 1.0: "poisson"}.get(self.variation, f"gamma:{self.variation:g}")


def parse_arrivals(text: str, rate: float, what: str = "arrivals") -> Arrivals:
    """Read a process of arrivals.

    >>> parse_arrivals("gamma:2", 5.0)
    Arrivals(rate=5.0, variation=2.0, on_s=1.0, off_s=0.0)
    >>> str(parse_arrivals("on-off:10s/50s", 5.0))
    'on-off:10s/50s'

    Args:
        text: `poisson`, `constant`, `gamma:VARIATION` or `on-off:ON/OFF`.
        rate: requests per second.
        what: names it in errors.

    Raises:
        MeshwiseError: none of these.
    """
    kind, colon, rest = text.strip().partition(":")
    if not colon and kind in ("poisson", "constant"):
        return Arrivals(rate, variation=1.0 if kind == "poisson" else 0.0)
    if kind == "gamma" and rest:
        variation = parse_count(rest, what)
        if variation > 20:
            raise MeshwiseError(f"{what}: expected gamma: with a variation of at most 20, found {text!r}")
        return Arrivals(rate, variation=variation)
    on, slash, off = rest.partition("/")
    if kind == "on-off" and slash:
        return Arrivals(rate, on_s=parse_duration(on, what), off_s=parse_duration(off, what))
    raise MeshwiseError(f"{what}: expected {_EXAMPLES}, found {text!r}")
