"""One load on several clusters, or in several number formats: the best plans of all, and what formats buy.

Not here: one cluster and one precision (`planner`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwise.core.errors import InfeasibleError, MeshwiseError
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import ServingEstimate
from meshwise.costs.serving.estimate import estimate_serving
from meshwise.search.serving.constraints import ServingConstraints
from meshwise.search.serving.plan import ServingPlan
from meshwise.search.serving.planner import ServingPlanResult, SimulatedPlan
from meshwise.search.serving.ranking import in_order, ties


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


@dataclass(frozen=True)
class ServingAlternatives:
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
    every = [(which, ServingPlan(p.problem, e)) for which, p in planned.items() for e in p.plans]
    sent = {id(p.estimate): p for planning in planned.values() for p in planning.simulated}
    constraints = next(iter(planned.values())).constraints
    by, score = _score(constraints, [plan.estimate for _, plan in every], sent)
    within = (0.0, 0.0) if sent else ties(constraints)[:2]  # simulated plans keep their targets as nearly as they can
    ranked = in_order(every, lambda x: score(x[1].estimate), within)
    return ServingAlternatives(found, ranked[:top], by, _formats(problems, *ranked[0]))


def _score(
    constraints: ServingConstraints, estimates: Sequence[ServingEstimate], sent: Mapping[int, SimulatedPlan]
) -> tuple[str, Callable[[ServingEstimate], tuple[float, ...]]]:
    """What plans are ranked by, in words and as numbers of which the least are best; `sent` by the id of estimates."""

    def tokens(e: ServingEstimate) -> float:
        return sent[id(e)].tokens_per_chip if id(e) in sent else e.throughput_per_chip

    def dollars(e: ServingEstimate) -> float:
        cost = sent[id(e)].usd_per_million_output_tokens if id(e) in sent else e.usd_per_million_output_tokens
        return cost or 0.0

    priced = all(e.usd_per_s is not None for e in estimates)
    if constraints.rate is not None:
        if priced:
            return "dollars a second for all chips", lambda e: (e.usd_per_s or 0.0, e.tpot.expected)
        return "chips", lambda e: (e.setup.num_chips, e.tpot.expected)
    if constraints.objective == "tpot":
        return "time per output token", lambda e: (e.tpot.expected, e.ttft.expected)
    if constraints.objective == "ttft":
        return "time to the first token", lambda e: (e.ttft.expected, -e.throughput_per_chip)
    if priced:
        return "dollars for output tokens", lambda e: (dollars(e), e.end_to_end_s)
    return "output tokens per second and chip", lambda e: (-tokens(e), e.end_to_end_s)


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
