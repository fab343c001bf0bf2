"""The search repeated: with one thing 10 % less, or on more and more chips with the batch held fixed.

Not here: the search (`planner`), or words (`report`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from meshwise.core.errors import InfeasibleError, MeshwiseError
from meshwise.core.explanation import Answer
from meshwise.core.units import format_bytes
from meshwise.costs.fabric import Fabric
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import Cluster, Torus
from meshwise.jobs import TrainingJob
from meshwise.search.asked import SearchResult
from meshwise.search.constraints import Constraints
from meshwise.search.plan import Plan
from meshwise.search.planner import PlanResult, asked_spaces, nothing_in_time, plan_training
from meshwise.search.search import search
from meshwise.search.space import whole_parts_of

#: Strong scaling ends where more chips give less than this share of the speed that they could add.
WORTHWHILE = 0.5

#: Share by which each thing is less.
CHANGE = 0.1

#: Sequences stay a multiple of this, so that their positions can be split.
_POSITIONS = 128


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What happens when one thing is less.

    Args:
        name: what is less.
        change: by which share, negative.
        best: the best plan then, None where there is none.
        slowdown: its expected seconds per token over those before; infinite where there is none.
        kept_slowdown: that of the plan as it was; None where it cannot be (the batch is another), or does not fit.
        same_plan: whether the best plan has the layout as it was.
        reason: why there is no plan, "" where there is.
    """

    name: str
    change: float
    best: Plan | None
    slowdown: float
    kept_slowdown: float | None
    same_plan: bool
    reason: str = ""


def sensitivity(
    planning: PlanResult,
    *,
    objective: str = "time",
    progress: Callable[[str], None] = lambda _: None,
    time_limit: float | None = None,
) -> tuple[Sensitivity, ...]:
    """Search again for each thing that is 10 % less.

    Args:
        planning: what was found; its constraints hold, but for limits of days and dollars.
        objective: of the search; "chips" is taken as "time", on the chips of the best plan.
        progress: told a line now and then.
        time_limit: seconds after which searching ends: what was not searched to its end says so as its reason. None for
            as long as it takes.
    """
    until = math.inf if time_limit is None else time.monotonic() + time_limit
    winner = planning.plans[0]
    most = winner.estimate.num_chips if objective == "chips" else planning.constraints.max_chips
    objective = "time" if objective == "chips" else objective
    constraints = replace(planning.constraints, deadline_days=None, budget_usd=None, front=False, max_chips=most)
    if constraints.max_memory is None:
        constraints = replace(constraints, max_memory=planning.memory_share)
    found = []
    for name, change, problem in _changed(winner.problem):
        progress(f"searching again with {-change:.0%} less {name}")
        left = None if time_limit is None else max(0.0, until - time.monotonic())
        best, reason = None, "not searched to its end"
        try:
            again = plan_training(problem, objective=objective, top=1, constraints=constraints, time_limit=left)
            best = again.plans[0] if again.search.complete else None
        except MeshwiseError as error:
            reason = str(error)
        if best is None:
            found.append(Sensitivity(name, change, None, float("inf"), None, False, reason))
            continue
        same = (str(best.layout), best.fabric.sizes) == (str(winner.layout), winner.fabric.sizes)
        kept = _kept(winner, problem)
        slowdown = _ratio(kept, winner) if kept is not None and kept.estimate.fits else None
        found.append(Sensitivity(name, change, best, _ratio(best, winner), slowdown, same))
    return tuple(found)


def _ratio(plan: Plan, winner: Plan) -> float:
    ours, theirs = (p.estimate.step_time.expected / p.estimate.tokens for p in (winner, plan))
    return theirs / ours


def _kept(winner: Plan, problem: TrainingProblem) -> Plan | None:
    """The same layout on the changed problem, None where the job is another."""
    if problem.job != winner.problem.job:
        return None
    whole = problem.network
    if len(whole.dimensions) != len(winner.fabric.dimensions):
        return None
    dims = tuple(
        replace(d, bandwidth_one_way=n.bandwidth_one_way)
        for d, n in zip(winner.fabric.dimensions, whole.dimensions, strict=True)
    )
    return Plan.of(problem, winner.layout, replace(winner.fabric, dimensions=dims))


def _changed(problem: TrainingProblem) -> Iterator[tuple[str, float, TrainingProblem]]:
    """Name, change and problem of each thing that is less."""
    cluster, job = problem.cluster, problem.job
    for name, other in _clusters(cluster):
        yield name, -CHANGE, replace(problem, cluster=other)
    sequences = max(1, round(job.sequences * (1 - CHANGE)))
    if sequences < job.sequences:
        yield "batch", sequences / job.sequences - 1, replace(problem, job=job.with_sequences(sequences))
    length = round(job.seq_len * (1 - CHANGE) / _POSITIONS) * _POSITIONS
    if 0 < length < job.seq_len:
        shorter = TrainingJob(**{**job.model_dump(), "seq_len": float(length)})
        yield "sequence length", length / job.seq_len - 1, replace(problem, job=shorter)


def _clusters(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """The cluster with each rate and size of its network and chip 10 % lower."""
    less, net = 1 - CHANGE, cluster.network
    if isinstance(net, Torus):
        if cluster.chips_per_slice > 1:
            slower = replace(net, link_bandwidth_one_way=net.link_bandwidth_one_way * less)
            yield "link bandwidth", cluster.replace(network=slower)
    else:
        # Levels of one bandwidth are one switch to a collective: they change together.
        for bandwidth in dict.fromkeys(v.bandwidth_per_chip_one_way for v in net.levels if v.degree > 1):
            names = [v.name for v in net.levels if v.bandwidth_per_chip_one_way == bandwidth]
            levels = tuple(
                replace(v, bandwidth_per_chip_one_way=bandwidth * less) if v.name in names else v for v in net.levels
            )
            yield f"{'+'.join(names)} bandwidth", cluster.replace(network=replace(net, levels=levels))
    if cluster.num_slices > 1 and cluster.dcn_bandwidth_per_chip_one_way:
        slower_dcn = cluster.dcn_bandwidth_per_chip_one_way * less
        yield "DCN bandwidth", cluster.replace(dcn_bandwidth_per_chip_one_way=slower_dcn)
    chip = cluster.chip
    slower_chip = chip.replace(flops_per_s={dtype: rate * less for dtype, rate in chip.flops_per_s.items()})
    yield "FLOP/s", cluster.replace(chip=slower_chip)
    yield "HBM bandwidth", cluster.replace(chip=chip.replace(hbm_bandwidth=chip.hbm_bandwidth * less))
    reported = None if chip.hbm_reported is None else chip.hbm_reported * less
    smaller = chip.replace(hbm_capacity=chip.hbm_capacity * less, hbm_reported=reported)
    yield "HBM capacity", cluster.replace(chip=smaller)


@dataclass(frozen=True, slots=True)
class Point:
    """The best plan on so many chips; None with a reason where there is none."""

    num_chips: int
    plan: Plan | None
    reason: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Scaling(Answer):
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
    time_limit: float | None = None,
) -> Scaling:
    """Find the fastest plan on powers of two of the chips, up to all of them, for one and the same batch.

    Interrupted, or after the seconds of `time_limit`, it gives the plans so far, of numbers whose search ended.

    Raises:
        InfeasibleError: no number of chips has a plan, or none was found in time.
    """
    until = math.inf if time_limit is None else time.monotonic() + time_limit
    constraints = constraints or Constraints()
    whole = problem.network
    total = min(problem.cluster.num_chips, constraints.max_chips or problem.cluster.num_chips)
    points: list[Point] = []
    complete = True
    try:
        for chips in sorted({*(2**k for k in range(total.bit_length()) if 2**k <= total), total}):
            progress(f"searching {chips:,} of {total:,} chips")
            boxes = whole_parts_of(whole, chips)
            if boxes:
                points.append(_point(problem, constraints, boxes, chips, until))
    except KeyboardInterrupt:
        if not any(p.plan for p in points):
            if time.monotonic() > until:
                raise nothing_in_time(problem, time_limit) from None
            raise
        complete = False
    if not any(p.plan for p in points):
        raise InfeasibleError(f"no part of {problem.cluster.name} has a plan: {points[-1].reason}")
    return Scaling(tuple(points), *_end(points), complete)


def _point(problem: TrainingProblem, constraints: Constraints, boxes: list[Fabric], chips: int, until: float) -> Point:
    for space in asked_spaces(problem, constraints):
        result = search(problem, boxes, space, top=1, until=until)
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
