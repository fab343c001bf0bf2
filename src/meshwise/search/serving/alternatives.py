"""One load on several clusters, or in several number formats: the best plans of all, and what formats buy.

Not here: one cluster and one precision (`planner`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwise.core.errors import InfeasibleError, MeshwiseError
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import ServingEstimate
from meshwise.costs.serving.estimate import estimate_serving
from meshwise.search.plan import ServingPlan
from meshwise.search.serving.constraints import ServingConstraints, in_order, ties
from meshwise.search.serving.planner import ServingPlanResult, SimulatedPlan


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
    every = [
        (which, e, sent)
        for which, p in planned.items()
        for e, sent in zip(p.plans, p.simulated or [None] * len(p.plans), strict=True)
    ]
    constraints = next(iter(planned.values())).constraints
    by, score = _score(constraints, priced=all(e.usd_per_s is not None for _, e, _ in every))
    simulated = any(sent for *_, sent in every)  # these keep their targets as nearly as they can
    order = in_order(every, lambda one: score(*one[1:]), (0.0, 0.0) if simulated else ties(constraints)[:2])
    ranked = tuple((which, ServingPlan(planned[which].problem, e)) for which, e, _ in order)
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
        return "dollars for output tokens", lambda e, sent: (
            (sent or e).usd_per_million_output_tokens or 0.0,
            e.end_to_end_s,
        )
    return "output tokens per second and chip", lambda e, sent: (
        -(sent.tokens_per_chip if sent else e.throughput_per_chip),
        e.end_to_end_s,
    )


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
