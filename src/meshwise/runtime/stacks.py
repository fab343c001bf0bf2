"""The order of a model's layers as few loops: runs of equal layers, and periods of runs that repeat.

The weights of a run are stacked, so that a loop over them is compiled once. Not here: weights (`params`), executing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Run:
    """Equal layers one after another.

    Args:
        block: whose operations they run.
        count: of layers.
        key: under which their weights are held.
        remat: whether they follow the layout's remat policy, else they keep everything.
    """

    block: str
    count: int
    key: str = ""
    remat: bool = True


@dataclass(frozen=True, slots=True)
class Segment:
    """Runs that are repeated `times` in this order."""

    runs: tuple[Run, ...]
    times: int = 1

    def stack(self, run: Run) -> tuple[int, ...]:
        """Give the sizes of the dimensions in which weights of a run are stacked: over times, and within a run."""
        return tuple(n for n in (self.times, run.count) if n > 1)


def plan_segments(order: Sequence[str], remat_layers: int | None = None) -> tuple[Segment, ...]:
    """Write the order of layers as segments.

    >>> for s in plan_segments(["local", "local", "global"] * 3 + ["local"]):
    ...     print(s.times, [(r.block, r.count, r.key) for r in s.runs])
    3 [('local', 2, 'local.0'), ('global', 1, 'global')]
    1 [('local', 1, 'local.1')]

    Args:
        order: block of each layer.
        remat_layers: how many layers, from the first, follow the remat policy; None for all.
    """
    at = len(order) if remat_layers is None else remat_layers
    parts = [(list(order[:at]), True), (list(order[at:]), False)]
    found = [segment for part, remat in parts for segment in _segments(part, remat)]
    return _with_keys(found)


def _segments(order: list[str], remat: bool) -> list[Segment]:
    """Find the period that leaves the fewest runs to write out."""
    if not order:
        return []
    best = [Segment(_runs(order, remat))]
    for period in range(2, len(order) // 2 + 1):
        times = next((n for n in range(len(order) // period, 1, -1) if order[: n * period] == order[:period] * n), 1)
        if times == 1:
            continue
        rest = order[times * period :]
        found = [Segment(_runs(order[:period], remat), times), *([Segment(_runs(rest, remat))] if rest else [])]
        if sum(len(s.runs) for s in found) < sum(len(s.runs) for s in best):
            best = found
    return best


def _runs(order: list[str], remat: bool) -> tuple[Run, ...]:
    return tuple(Run(block, len(list(same)), remat=remat) for block, same in groupby(order))


def _with_keys(segments: list[Segment]) -> tuple[Segment, ...]:
    """Name each run by its block, numbered where a block has several."""
    blocks = [run.block for s in segments for run in s.runs]
    seen: dict[str, int] = {}

    def named(run: Run) -> Run:
        index = seen.setdefault(run.block, 0)
        seen[run.block] += 1
        return replace(run, key=run.block if blocks.count(run.block) == 1 else f"{run.block}.{index}")

    return tuple(replace(s, runs=tuple(named(r) for r in s.runs)) for s in segments)
