"""The search repeated: under targets that are percentiles, and on several clusters or in several number formats.

Where targets are percentiles, closed forms propose plans, and simulated requests decide: a percentile depends on when
requests arrive, closed forms know means without queues. With a rate the answer is what serves it on the fewest chips;
without, what serves most at the highest rate that keeps the targets. A plan becomes a system that requests can
be sent to: replicas, their steps, how they schedule. Not here: one search (`planner`), the simulation
(`simulation.serving`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwise.core.errors import InfeasibleError, MeshwiseError
from meshwise.core.explanation import Answer
from meshwise.core.units import format_time
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import ServingEstimate, ServingSetup
from meshwise.costs.serving.engine import engine_costs
from meshwise.costs.serving.estimate import estimate_serving
from meshwise.jobs.traffic import Load
from meshwise.search.plan import ServingPlan
from meshwise.search.serving.constraints import ServingConstraints, in_order, ties
from meshwise.search.serving.planner import ServingPlanResult, SimulatedPlan, plan_serving
from meshwise.simulation.serving import (
    LatencyTargets,
    PrefillPool,
    Scheduling,
    ServingResult,
    ServingSystem,
    Speculation,
    find_capacity,
    simulate_serving,
)

#: Capacity over the rate that is asked for: queues need room.
_ROOM = (1.0, 1.15, 1.3, 1.5, 1.8, 2.2, 3.0)

#: Shares of the targets that closed forms are given, to propose plans with more room.
_SHARES = (1.0, 0.7, 0.45)

#: Plans that are simulated for each of these.
_EACH = 3

#: Requests that are simulated: so many times those that are there at once, within bounds.
_TIMES, _FEWEST, _MOST = 20, 3_000, 30_000


def plan_simulated(
    problem: ServingProblem,
    constraints: ServingConstraints,
    targets: LatencyTargets,
    requests: Callable[[float, int], Load],
    top: int = 5,
) -> ServingPlanResult:
    """Find the best way to serve a load under targets that are percentiles.

    Args:
        problem: model, load, cluster, calibration.
        constraints: objective, rate and the like; limits of means with the same numbers as `targets`.
        targets: of latencies, each a mean or a percentile.
        requests: gives so many requests at a rate.
        top: how many plans to give.

    Returns: the search that proposed the best plan, with the plans that keep the targets, best first.

    Raises:
        InfeasibleError: no proposed plan keeps the targets; says what came nearest.
    """
    if constraints.rate is None:
        return _most(problem, constraints, targets, requests, top)
    nearest: SimulatedPlan | None = None
    for room in _ROOM:
        more = replace(constraints, rate=constraints.rate * room)
        try:
            planning = plan_serving(problem, constraints=more, top=max(top, _EACH))
        except InfeasibleError:
            if nearest is None:
                raise
            break
        tried = [_sent(problem, e, constraints.rate, requests) for e in planning.plans]
        kept = [p for p in tried if targets.met_by(p.result)]
        if kept:
            kept.sort(key=lambda p: (p.estimate.setup.num_chips, *reversed(targets.reached(p.result))))
            return _planned(planning, constraints, kept[:top])
        nearest = min([*tried, *([nearest] if nearest else [])], key=lambda p: _excess(targets, p.result))
    assert nearest is not None
    raise InfeasibleError(_missed(targets, nearest))


def _sent(
    problem: ServingProblem, e: ServingEstimate, rate: float, requests: Callable[[float, int], Load]
) -> SimulatedPlan:
    """Send a plan requests at a rate."""
    count = int(min(max(_TIMES * rate * e.end_to_end_s, _FEWEST), _MOST))
    result = simulate_serving(simulator_setup(problem, e.setup), requests(rate, count))
    return SimulatedPlan(e, rate, result)


def _most(
    problem: ServingProblem,
    constraints: ServingConstraints,
    targets: LatencyTargets,
    requests: Callable[[float, int], Load],
    top: int,
) -> ServingPlanResult:
    """Find the most tokens a second that keep the targets; plans are those that keep shares of them as means."""
    plannings: list[ServingPlanResult] = []
    reasons: list[str] = []
    found: dict[object, SimulatedPlan] = {}
    for share in _SHARES:
        ttft, tpot = (limit and share * limit for limit in (constraints.max_ttft, constraints.max_tpot))
        tighter = replace(constraints, max_ttft=ttft, max_tpot=tpot)
        try:
            planning = plan_serving(problem, constraints=tighter, top=_EACH)
        except InfeasibleError as error:
            reasons.append(str(error))
            break
        plannings.append(planning)
        for e in planning.plans:
            if e.setup in found:
                continue
            load = requests(0.5 * e.requests_per_s, int(min(max(10 * e.requests_per_s * e.end_to_end_s, 1000), 6000)))
            try:
                capacity = find_capacity(simulator_setup(problem, e.setup), load, targets)
            except InfeasibleError as error:
                reasons.append(str(error))
                continue
            found[e.setup] = SimulatedPlan(e, capacity.rate, capacity.result)
    if not found:
        raise InfeasibleError(reasons[0])
    best = sorted(found.values(), key=lambda p: -p.tokens_per_s)[:top]
    return _planned(plannings[0], constraints, best)


def _planned(
    planning: ServingPlanResult, constraints: ServingConstraints, kept: Sequence[SimulatedPlan]
) -> ServingPlanResult:
    """The search that proposed plans, with those that were kept in their order.

    Why others lose is left out: it is told by means, which were not what decided.
    """
    plans = tuple(p.estimate for p in kept)
    return replace(planning, constraints=constraints, plans=plans, neighbours=(), simulated=tuple(kept))


def _excess(targets: LatencyTargets, result: ServingResult) -> float:
    """By which factor the worse of both targets is missed."""
    pairs = zip(targets.reached(result), (targets.ttft, targets.tpot), strict=True)
    return max((reached / target.seconds for reached, target in pairs if target is not None), default=0.0)


def _missed(targets: LatencyTargets, nearest: SimulatedPlan) -> str:
    """What came nearest."""
    latencies = zip(("TTFT", "TPOT"), (targets.ttft, targets.tpot), targets.reached(nearest.result), strict=True)
    said = [
        f"{name} {target} {format_time(value)} (wanted {format_time(target.seconds)})"
        for name, target, value in latencies
        if target is not None
    ]
    return (
        f"no plan keeps the targets at {nearest.rate:g} requests/s when its traffic is simulated; the nearest, on "
        f"{nearest.estimate.setup.num_chips} chips, has {' and '.join(said)}: loosen a target, lower --rate, or give "
        "more chips"
    )


def simulator_setup(problem: ServingProblem, setup: ServingSetup) -> ServingSystem:
    """The engines of a plan, scheduled as the plan assumes.

    Prompts are taken in whole, as many tokens at once as the plan prefills together; with chunks every step decodes
    and takes a chunk along. Beginnings of prompts that are cached already are found in the replicas' caches.

    Args:
        problem: model, load, cluster, calibration.
        setup: layouts and batches.
    """
    load = problem.load
    speculation = Speculation(min(load.acceptance, 1 - 1e-9), load.draft_tokens) if load.draft_tokens else None
    reuse, together = bool(load.cached_prefix), max(round(setup.prefill_batch * load.computed), 1)
    whole = Scheduling("prefill-first", setup.batch, together, prefix_cache=reuse, speculation=speculation)
    pool, costs = None, engine_costs(problem, setup, "decode")
    if setup.mode == "disaggregated":
        first = replace(whole, max_batch=max(setup.prefill_batch, 1), speculation=None)
        pool = PrefillPool(engine_costs(problem, setup, "prefill"), setup.prefill.replicas, first)
        whole = replace(whole, prefix_cache=False)
    elif setup.chunk is not None:
        most = setup.chunk + setup.batch * whole.tokens_each
        whole = replace(whole, policy="chunked", max_step_tokens=most)
    return ServingSystem(costs, setup.decode.replicas, whole, "least-loaded", pool)


@dataclass(frozen=True, slots=True)
class Alternative:
    """Where a load may be served, and in which formats.

    Args:
        cluster: as the user named it.
        precision: as the user wrote it.
    """

    cluster: str
    precision: str

    def __str__(self) -> str:
        return f"{self.cluster}, {self.precision}"


@dataclass(frozen=True, repr=False)
class ServingAlternatives(Answer):
    """What was found for each of them.

    Args:
        found: the plans of each, or why there is none.
        ranked: the best plans of all, best first.
        by: what they are ranked by, in words.
        formats: where there are several: the best plan's layouts and batch in each of them, on its cluster; None where
            the chip cannot multiply it.
    """

    found: Mapping[Alternative, ServingPlanResult | str]
    ranked: tuple[tuple[Alternative, ServingPlan], ...]
    by: str
    formats: Mapping[str, ServingEstimate | None]


def plan_alternatives(
    problems: Mapping[Alternative, ServingProblem], search: Callable[[ServingProblem], ServingPlanResult], top: int
) -> ServingAlternatives:
    """Plan each of them, and rank what was found.

    Ranked are dollars for output tokens where all have a price, else output tokens per second and chip; with another
    objective, or a rate, what these ask for.

    Args:
        problems: what to plan.
        search: finds plans of one of them.
        top: how many plans to give.

    Raises:
        InfeasibleError: none of them has a plan; says why for each.
    """
    found: dict[Alternative, ServingPlanResult | str] = {}
    for which, problem in problems.items():
        try:
            found[which] = search(problem)
        except MeshwiseError as error:
            found[which] = str(error)
    planned = {which: p for which, p in found.items() if isinstance(p, ServingPlanResult)}
    if not planned:
        raise InfeasibleError("\n".join(f"{which}: {reason}" for which, reason in found.items()))
    every = [
        (which, e, sent)
        for which, p in planned.items()
        for e, sent in zip(p.plans, p.simulated or [None] * len(p.plans), strict=True)
    ]
    constraints = next(iter(planned.values())).constraints
    by, score = _score(constraints, priced=all(e.usd_per_s is not None for _, e, _ in every))
    simulated = any(sent for *_, sent in every)  # these keep their targets as nearly as they can
    order = in_order(every, lambda one: score(*one[1:]), (0.0, 0.0) if simulated else ties(constraints)[:2])
    first = order[0][0], planned[order[0][0]].plans[0]  # the simplest there, which is first in its own ranking
    others = ((which, e) for which, e, _ in order if e is not first[1])
    ranked = tuple((which, ServingPlan(planned[which].problem, e)) for which, e in (first, *others))
    return ServingAlternatives(found, ranked[:top], by, _formats(problems, *ranked[0]))


#: What a plan is ranked by, from its estimate and, where it was sent requests, from what became of them.
_Score = Callable[[ServingEstimate, SimulatedPlan | None], tuple[float, ...]]


def _score(constraints: ServingConstraints, *, priced: bool) -> tuple[str, _Score]:
    """What plans are ranked by, in words and as numbers of which the least are best."""
    if constraints.rate is not None:
        if priced:
            return "dollars a second for all chips", lambda e, _: (e.usd_per_s or 0.0, e.tpot.expected)
        return "chips", lambda e, _: (e.setup.num_chips, e.tpot.expected)
    if constraints.objective == "tpot":
        return "time per output token", lambda e, _: (e.tpot.expected, e.ttft.expected)
    if constraints.objective == "ttft":
        return "time to the first token", lambda e, _: (e.ttft.expected, -e.throughput_per_chip)
    if priced:
        by = "dollars for output tokens"
        return by, lambda e, sent: ((sent or e).usd_per_million_output_tokens or 0.0, e.end_to_end_s)
    by = "output tokens per second and chip"
    return by, lambda e, sent: (-(sent.tokens_per_chip if sent else e.throughput_per_chip), e.end_to_end_s)


def _formats(
    problems: Mapping[Alternative, ServingProblem], best: Alternative, plan: ServingPlan
) -> dict[str, ServingEstimate | None]:
    """The best plan's layouts and batch in every precision that its cluster was asked for."""
    same = {which.precision: p for which, p in problems.items() if which.cluster == best.cluster}
    found: dict[str, ServingEstimate | None] = {}
    for precision, problem in same.items() if len(same) > 1 else ():
        try:
            found[precision] = estimate_serving(problem, plan.setup)
        except MeshwiseError:
            found[precision] = None
    return found
