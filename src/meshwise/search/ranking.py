"""What a search keeps of what it priced: the best of each kind, the front of time against memory, and counts.

Not here: which layouts are looked at (`search`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from meshwise.core.units import format_percent
from meshwise.costs.arithmetic import Num
from meshwise.costs.fabric import Fabric
from meshwise.search.behind import Behind
from meshwise.search.candidates import Array, CandidateBatch, Index, Mask
from meshwise.search.until import Until
from meshwise.sharding.layout import MESH_AXES, Layout

#: Layouts of one kind differ only in how replicas are split between data and fsdp, in remat and microbatches: the
#: ranking shows the best of each kind, because a list of near copies says nothing.
_KIND = [MESH_AXES.index(a) for a in ("tensor", "ulysses", "context", "expert", "stage")]

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


Rank = tuple[float, float, int, str]


def rank(found: Found) -> Rank:
    """Order by score; ties go to less memory, then to fewer kinds of parallelism."""
    return (found.score, found.memory_bytes, len(found.layout.used_axes), str(found.layout))


class Ranking:
    """The best layout of each of the best kinds.

    Args:
        top: how many kinds.
    """

    def __init__(self, top: int) -> None:
        self.top = top
        self.best: dict[tuple[int, ...], Found] = {}
        self.cut = math.inf  # score above which nothing enters

    def enter(self, kind: tuple[int, ...], found: Found) -> None:
        """Put a layout in the ranking, if it is the best of its kind."""
        if kind in self.best and not rank(found) < rank(self.best[kind]):
            return
        self.best[kind] = found
        if len(self.best) >= self.top:
            self.cut = sorted(f.score for f in self.best.values())[self.top - 1]
            self.best = {k: f for k, f in self.best.items() if f.score <= self.cut}

    def members(self) -> tuple[Found, ...]:
        """Best first."""
        return tuple(sorted(self.best.values(), key=rank)[: self.top])

    def words(self) -> str:
        """The mesh of the best layout so far, "" without one."""
        if not self.best:
            return ""
        layout = self.members()[0].layout
        return f", best {','.join(f'{a}={layout.sizes[a]}' for a in layout.used_axes) or 'data=1'}"


def kinds_of(meshes: Array) -> Array:
    """[candidates, axes]: the sizes that tell kinds of layouts apart, from those of all axes."""
    return meshes[:, _KIND]


def best_of_kinds(batch: CandidateBatch, kinds: Array, scores: Array, cut: float) -> list[int]:
    """The candidates that may enter the ranking: of each kind the one of least score, then of least memory."""
    promising = np.flatnonzero(scores <= cut)
    if not len(promising):
        return []
    of = kinds[promising]
    order = np.lexsort((batch.memory[promising], scores[promising], *of.T))
    changes = (of[order][1:] != of[order][:-1]).any(axis=1)
    # Equal scores and memory are told apart by words: keep all that tie with the first of their kind.
    first = np.maximum.accumulate(np.where(np.r_[True, changes], np.arange(len(order)), 0))
    mine = promising[order]
    ties = (scores[mine] == scores[mine[first]]) & (batch.memory[mine] == batch.memory[mine[first]])
    return [int(i) for i in mine[ties]]


def of_first(values: Index, number: int) -> Mask:
    """Which values are among the first so many that differ."""
    first = np.sort(np.unique(values, return_index=True)[1])[:number]
    return np.isin(values, values[first])


class Front:
    """Layouts that nothing undercuts in both time per token and memory."""

    def __init__(self) -> None:
        self.found: list[Found] = []

    def dominated(self, seconds: Array, memory: Array) -> Mask:
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


class SearchState:
    """What is known so far, on all networks: the best of each kind, the front, counts.

    Args:
        objective: "time" or "cost".
        top: how many kinds to rank.
        seconds_on: chips -> seconds per token that a plan may take.
        progress: told a line now and then.
        until: when the search ends, on `time.monotonic`'s clock.
    """

    def __init__(
        self,
        objective: str,
        top: int,
        seconds_on: Callable[[float], float],
        progress: Callable[[str], None],
        until: float = math.inf,
    ) -> None:
        self.by_cost, self.seconds_on, self.progress, self.until = objective == "cost", seconds_on, progress, until
        self.ranking, self.front = Ranking(top), Front()
        self.front_on: Fabric | None = None
        self.behind = Behind()
        self.strategies = self.priced = self.covered = self.infeasible = 0
        self.least_memory = math.inf
        # Scores that no layout undercuts: on the networks to come, and on this one.
        self.elsewhere = self.here = math.inf

    def tell(self, chips: float) -> None:
        """Say how far the search is, on a network of so many chips."""
        gap = self.gap
        known = f"best possible within {format_percent(gap)}, still proving; " if gap < 1 else ""
        looked = f"{self.behind.words()}; {self.strategies:,} layouts" if self.strategies else self.behind.words()
        self.progress(f"searching {chips:,.0f} chips: {known}{looked}{self.ranking.words()}")

    def tick(self) -> None:
        """Stop where the time is up.

        Raises:
            OutOfTime: it is.
        """
        Until(self.until).tick()

    @property
    def gap(self) -> float:
        """Share by which the best may still be from the optimum; 1 without one."""
        best = min((f.score for f in self.ranking.best.values()), default=math.inf)
        lower = min(self.here, self.elsewhere)
        return max(0.0, 1 - lower / best) if lower < best else 0.0

    def score(self, seconds_per_token: Num, chips: float) -> Num:
        """What is minimised."""
        return seconds_per_token * (chips if self.by_cost else 1)
