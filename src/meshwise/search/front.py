"""The front of time against memory: the layouts that nothing undercuts in both.

Not here: which layouts are looked at (`search`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwise.costs.fabric import Fabric
from meshwise.sharding.layout import Layout

Array = NDArray[np.float64]

#: How much slower than the best plan the front of time against memory reaches.
FRONT_SPAN = 1.5


@dataclass(frozen=True, slots=True)
class Found:
    """One layout that was priced."""

    layout: Layout
    fabric: Fabric
    score: float
    seconds_per_token: float
    memory_bytes: float


class Front:
    """Layouts that nothing undercuts in both time per token and memory."""

    def __init__(self) -> None:
        self.found: list[Found] = []

    def dominated(self, seconds: Array, memory: Array) -> NDArray[np.bool_]:
        """Which (time, memory) pairs some member undercuts or equals."""
        if not self.found:
            return np.zeros(len(seconds), bool)
        times = np.array([f.seconds_per_token for f in self.found])  # ascending, memory descending
        sizes = np.array([f.memory_bytes for f in self.found])
        at = np.searchsorted(times, seconds, side="right") - 1
        return (at >= 0) & (sizes[np.maximum(at, 0)] <= memory)

    def add(self, candidates: Iterable[Found]) -> None:
        """Let candidates in, and what they undercut out."""
        kept: list[Found] = []
        for f in sorted([*self.found, *candidates], key=lambda f: (f.seconds_per_token, f.memory_bytes, str(f.layout))):
            if not kept or f.memory_bytes < kept[-1].memory_bytes:
                kept.append(f)
        self.found = kept

    @property
    def reach(self) -> float:
        """Seconds per token that no member exceeds; infinite while there is none."""
        return FRONT_SPAN * min((f.seconds_per_token for f in self.found), default=np.inf)

    def members(self) -> tuple[Found, ...]:
        """Fastest first."""
        return tuple(f for f in self.found if f.seconds_per_token <= self.reach)
