"""The planner: the best training plans for a problem, and what was considered on the way.

Turns model and job into a search space, searches, estimates the winners again with their terms kept. Not here: the
search itself (`search`), or words (`report`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from meshwise.core.errors import InfeasibleError, LayoutError, UnknownNameError
from meshwise.core.explanation import Answer
from meshwise.core.units import format_time
from meshwise.costs.makespans import PipelineShape
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.schedules import find_schedule
from meshwise.search.asked import OBJECTIVES, SearchResult, SearchSpace
from meshwise.search.baselines import Baseline, baselines, variations
from meshwise.search.completed import MAX_MEMORY, check_sizes, completed, is_usual, training_limits
from meshwise.search.constraints import Constraints, most_seconds_per_token
from meshwise.search.ideal import ideal_chip_seconds_per_token
from meshwise.search.limits import Wanted, find_best, find_fewest, nothing_found, over_limit, too_much
from meshwise.search.network import LocalTables
from meshwise.search.plan import Plan
from meshwise.search.ranking import Found
from meshwise.search.reasons import winner_reasons
from meshwise.search.simplest import find_simplest
from meshwise.search.tools import Tool
from meshwise.search.until import OutOfTime
from meshwise.sharding.layout import MESH_AXES, LayoutRequest, layout_words


@dataclass(frozen=True, repr=False)
class PlanResult(Answer):
    """What the planner found.

    Args:
        plans: the best, best first, one per kind (sizes of all axes but data and fsdp).
        reasons: why the best is best, in the book's terms.
        rejected: well-known alternatives and why they lose.
        search: counts, and the front of time against memory.
        memory_share: share of HBM that plans were allowed to fill.
        memory_asked: whether the user set that share; else it is MAX_MEMORY, or 1 where that found nothing.
        constraints: what was fixed, forbidden and limited.
        most_speedup: how many times as fast as the best plan one could be whose chips, all of them, only computed
            that plans may use: what an interrupted search can have missed at most.
        sensitivity: what 10 % less of each thing does, where that was asked for.
    """

    plans: tuple[Plan, ...]
    reasons: tuple[str, ...]
    rejected: tuple[Baseline, ...]
    search: SearchResult
    memory_share: float = 1.0
    memory_asked: bool = False
    constraints: Constraints = field(default_factory=Constraints)
    most_speedup: float = math.inf
    sensitivity: tuple[Any, ...] = ()


def plan_training(
    problem: TrainingProblem,
    *,
    objective: str = "time",
    top: int = 5,
    constraints: Constraints | None = None,
    progress: Callable[[str], None] = lambda _: None,
    time_limit: float | None = None,
    **asked: Any,
) -> PlanResult:
    """Find the best training plans.

    Interrupted (KeyboardInterrupt), or out of time, after something was found, it gives the best so far.

    Args:
        problem: model, job, cluster, calibration.
        objective: "time" (per token), "cost" (chip-seconds per token) or "chips" (fewest for the deadline).
        top: how many plans to return.
        constraints: what is fixed, forbidden and limited; or its fields as arguments, `fixed={"tensor": 8}`.
        progress: told a line now and then.
        time_limit: seconds after which searching ends; None for as long as it takes.

    Raises:
        InfeasibleError: nothing can be placed, nothing fits, no part of the cluster keeps the limits, or nothing was
            found in time.
        LayoutError: constraints that contradict each other, or lack what they need.
        MeshwiseError: a share that is none.
        UnknownNameError: an objective, an axis or a choice that does not exist.
    """
    constraints = constraints or Constraints(**asked)
    if objective not in (*OBJECTIVES, "chips"):
        raise UnknownNameError("objective", objective, (*OBJECTIVES, "chips"))
    _check_constraints(problem, constraints)
    whole = problem.network
    until = math.inf if time_limit is None else time.monotonic() + time_limit
    local = LocalTables(problem)
    for space in asked_spaces(problem, constraints):
        wanted = Wanted(problem, constraints, objective, top, space, progress, until, local)
        try:
            outcome = find_fewest(wanted) if objective == "chips" else find_best(wanted)
        except OutOfTime:
            raise nothing_in_time(problem, time_limit) from None
        if outcome.result.best:
            break
    result, share = outcome.result, space.memory_share
    if not result.best and result.interrupted_on:
        if time.monotonic() > until:
            raise nothing_in_time(problem, time_limit)
        raise KeyboardInterrupt
    if not result.best:
        raise too_much(wanted, outcome) if outcome.over else nothing_found(problem, result, constraints, share)
    simple, result = _simplest_in_time(wanted, result)
    ranked = [*([simple] if simple else []), *(f for f in result.best if simple is None or f.layout != simple.layout)]
    plans = tuple(Plan.of(problem, f.layout, f.fabric) for f in ranked[:top])
    others = baselines(plans[0], plans, whole, memory_share=share)
    changed = variations(plans[0], memory_share=share, forbidden=constraints.forbidden)
    return PlanResult(
        plans,
        (*(_why_simplest(wanted, simple, result.best[0]) if simple else ()), *winner_reasons(plans[0], whole)),
        (*(over_limit(wanted, f, plans[0]) for f in outcome.over[:1]), *others, *changed),
        result,
        memory_share=share,
        memory_asked=constraints.max_memory is not None,
        constraints=constraints,
        most_speedup=result.best[0].seconds_per_token
        * min(problem.cluster.num_chips, constraints.max_chips or math.inf)
        / ideal_chip_seconds_per_token(local, space.choices, space.tools),
    )


def nothing_in_time(problem: TrainingProblem, time_limit: float | None) -> InfeasibleError:
    """What to say where the time was up before a plan was found."""
    return InfeasibleError(
        f"no plan of {problem.model.name} on {problem.cluster.name} was found in {format_time(time_limit or 0.0)}; "
        "nothing is proved, there may be one: raise --time-limit, or fix a part of the layout (--fix)"
    )


def _simplest_in_time(wanted: Wanted, result: SearchResult) -> tuple[Found | None, SearchResult]:
    """The simplest plan that is as good as the best, if one is asked for; the result says whether time was left."""
    if not (wanted.constraints.within and wanted.objective in OBJECTIVES and result.complete):
        return None, result
    try:
        return find_simplest(wanted, result.best), result
    except KeyboardInterrupt:  # the fastest is known, whether a simpler one is as good is not
        return None, replace(result, complete=False, interrupted_on=result.best[0].layout.num_chips)


def _why_simplest(wanted: Wanted, simple: Found, best: Found) -> Iterator[str]:
    """Why the simplest of plans is first."""
    gain = simple.score / best.score - 1
    how = "cheaper" if wanted.objective == "cost" else "faster"
    yield (
        f"{layout_words(best.layout)} is {100 * gain:.2g} % {how}; within {wanted.constraints.within:.0%} predictions "
        f"cannot tell plans apart, and the simplest is first (--within 0: the {how[:-1]}st)"
    )


def _offloading(problem: TrainingProblem, constraints: Constraints) -> tuple[bool, ...]:
    """Whether plans may offload: at once where that is asked for, else where nothing fits without, if it can help."""
    if constraints.offload or "offload" in constraints.fixed:
        return (True,)
    may = constraints.choices.offload != ((),) and problem.cluster.chip.host_memory is not None
    return (False, True) if may else (False,)


def asked_spaces(problem: TrainingProblem, constraints: Constraints) -> Iterator[SearchSpace]:
    """Spaces to search, in this order until something is found."""
    shares = (MAX_MEMORY, 1.0) if constraints.max_memory is None else (constraints.max_memory,)
    tools = (True, False) if constraints.tools_optional else (True,)
    seconds, chip_seconds = most_seconds_per_token(constraints, problem.job.tokens, problem.cluster.price_per_chip_hour)
    each = list(itertools.product(tools, _offloading(problem, constraints), shares))
    for i, (with_tools, offload, share) in enumerate(each, 1):
        asked = constraints if with_tools else replace(constraints, tools=())
        yield SearchSpace(
            training_limits(problem, asked.sizes),
            choices=asked.choices if offload else replace(asked.choices, offload=((),)),
            micro_batch=asked.fixed.get("micro_batch"),
            num_microbatches=asked.fixed.get("num_microbatches"),
            memory_share=share,
            front=asked.front,
            tools=asked.tools,
            most_seconds=seconds,
            most_chip_seconds=chip_seconds,
            leanest=i == len(each),
        )


def estimate_layout(
    problem: TrainingProblem,
    request: LayoutRequest,
    *,
    tools: tuple[Tool, ...] = (),
    memory_share: float = MAX_MEMORY,
    progress: Callable[[str], None] = lambda _: None,
) -> PlanResult:
    """Estimate the layout that a user wrote; what was not written (remat, microbatches, wires...) is chosen best.

    It is chosen so that one of `tools` runs the plan, where one can.
    It fills no more than `memory_share` of the HBM, where that can be, else no more than all.
    Nothing is offloaded unless the layout says so. The batch is rounded only where the layout does not divide it, or
    does not fit with it. A layout that does not fit in memory in any way is estimated in its
    leanest one, and `Estimate.fits` says so.

    Raises:
        LayoutError: the layout cannot be placed on this model, job and cluster; says which constraint and the nearest
            that can.
    """
    plan, result, share = completed(problem, request, tools, memory_share, progress)
    return replace(plan_alone(plan), search=result, memory_share=share)


def plan_alone(plan: Plan) -> PlanResult:
    """A plan as the result of a search that looked at nothing else."""
    looked = SearchResult((), (), 1, 1, 1, 0, plan.estimate.memory["total"], 0.0)
    return PlanResult((plan,), (*_why_fuller(plan), *winner_reasons(plan, plan.problem.network)), (), looked)


def _why_fuller(plan: Plan) -> Iterator[str]:
    """That an estimate fits, but not in what plans fill."""
    if plan.estimate.fits and not is_usual(plan):
        share = plan.estimate.memory["total"] / plan.estimate.hbm_capacity
        yield (
            f"fills {share:.1%} of the HBM, where `plan` keeps to {MAX_MEMORY:.0%} unless --max-memory says otherwise: "
            "activations are known to about 15 %"
        )


def _check_constraints(problem: TrainingProblem, constraints: Constraints) -> None:
    """Refuse what is fixed where the model or the schedule rules it out, whatever the batch.

    Raises:
        LayoutError: with the constraint.
    """
    where = "what is fixed"
    sizes = dict.fromkeys(MESH_AXES, 1) | constraints.sizes
    check_sizes(problem, sizes, where)
    name, stages = constraints.fixed.get("schedule"), sizes["stage"]
    if name is None or stages == 1:
        return
    pieces = constraints.fixed.get("virtual_stages", 2 if name == "interleaved" else 1)
    enough = PipelineShape(stages, 4 * stages, pieces)  # microbatches for any schedule: what it lacks is not these
    reason = find_schedule(name).why_not(enough)
    if reason is not None:
        raise LayoutError(f"{where}: schedule={reason}")
