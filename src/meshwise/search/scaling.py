"""Strong scaling: the best plan on more and more chips with the batch held fixed, and where more chips stop to help.

Not here: the search (`search`), or words (`report`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from meshwise.core.errors import InfeasibleError
from meshwise.core.units import format_bytes
from meshwise.costs.fabric import Fabric
from meshwise.costs.problem import TrainingProblem
from meshwise.search.constraints import Constraints
from meshwise.search.parts import whole_parts_of
from meshwise.search.plan import Plan
from meshwise.search.planner import wished_spaces
from meshwise.search.search import SearchResult, search

#: Strong scaling ends where more chips give less than this share of the speed that they could add.
WORTHWHILE = 0.5


@dataclass(frozen=True, slots=True)
class Point:
    """The best plan on so many chips; None with a reason where there is none."""

    num_chips: int
    plan: Plan | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Scaling:
    """What was found.

    Args:
        points: fewest chips first.
        end: chips after which more of them give less than WORTHWHILE of what they could; None if that never happens.
        why: the term that grows there, or what else stands in the way; "" without an end.
        complete: whether all were looked at; false after Ctrl-C.
    """

    points: tuple[Point, ...]
    end: int | None
    why: str
    complete: bool = True


def scale_training(
    problem: TrainingProblem,
    *,
    constraints: Constraints | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Scaling:
    """Find the fastest plan on powers of two of the chips, up to all of them, for one and the same batch.

    Interrupted after a plan was found, it gives those so far.

    Raises:
        InfeasibleError: no number of chips has a plan.
    """
    constraints = constraints or Constraints()
    whole = Fabric.of(problem.cluster, flat_rings=problem.calibration.flat_rings)
    total = min(problem.cluster.num_chips, constraints.max_chips or problem.cluster.num_chips)
    points: list[Point] = []
    complete = True
    try:
        for chips in sorted({*(2**k for k in range(total.bit_length()) if 2**k <= total), total}):
            progress(f"searching {chips:,} of {total:,} chips")
            boxes = whole_parts_of(whole, chips)
            if boxes:
                points.append(_point(problem, constraints, boxes, chips))
    except KeyboardInterrupt:
        if not any(p.plan for p in points):
            raise
        complete = False
    if not any(p.plan for p in points):
        raise InfeasibleError(f"no part of {problem.cluster.name} has a plan: {points[-1].reason}")
    return Scaling(tuple(points), *_end(points), complete)


def _point(problem: TrainingProblem, constraints: Constraints, boxes: list[Fabric], chips: int) -> Point:
    for space in wished_spaces(problem, constraints):
        result = search(problem, boxes, space, top=1)
        if not result.complete:
            raise KeyboardInterrupt
        if result.best:
            best = result.best[0]
            return Point(chips, Plan.of(problem, best.layout, best.fabric))
    return Point(chips, None, _reason(problem, result, space.memory_share))


def _reason(problem: TrainingProblem, result: SearchResult, share: float) -> str:
    if math.isfinite(result.least_memory):
        has = format_bytes(problem.cluster.chip.hbm_usable * share)
        return f"the leanest layout needs {format_bytes(result.least_memory)} per chip of {has}"
    return f"no layout can cut the batch of {problem.job.sequences:,.0f} sequences"


def _end(points: list[Point]) -> tuple[int | None, str]:
    """Chips after which more are not worth while, and why."""
    feasible = [p.plan for p in points if p.plan is not None]
    for fewer, more in pairwise(feasible):
        could = more.estimate.num_chips / fewer.estimate.num_chips - 1
        if more.estimate.tokens_per_s / fewer.estimate.tokens_per_s - 1 < WORTHWHILE * could:
            return fewer.estimate.num_chips, _grown(fewer, more)
    last = feasible[-1].estimate.num_chips
    beyond = next((p for p in points if p.num_chips > last), None)
    return (last, beyond.reason) if beyond else (None, "")


def _grown(fewer: Plan, more: Plan) -> str:
    """The term of the expected time whose chip-seconds per token grow most."""
    ours, theirs = (
        {n: s * p.estimate.num_chips / p.estimate.tokens for n, s in p.estimate.terms.items()} for p in (fewer, more)
    )
    return max(theirs, key=lambda name: theirs[name] - ours.get(name, 0.0))
