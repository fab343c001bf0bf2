"""The search on several clusters, or in several number formats: each planned by itself, and ranked together.

Not here: one search (`planner`, `studies`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import merge

from meshwise.core.errors import InfeasibleError, MeshwiseError
from meshwise.core.explanation import Answer
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import ServingEstimate
from meshwise.costs.serving.estimate import estimate_serving
from meshwise.search.plan import NOT_SEARCHED, ServingPlan, SimulatedPlan
from meshwise.search.serving.constraints import ServingConstraints
from meshwise.search.serving.planner import ServingPlanResult
from meshwise.search.until import Until, even_shares


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
    problems: Mapping[Alternative, ServingProblem],
    search: Callable[[ServingProblem, float | None], ServingPlanResult],
    top: int,
    time_limit: float | None = None,
) -> ServingAlternatives:
    """Plan each of them, and rank what was found; interrupted after one has a plan, the others are NOT_SEARCHED.

    Ranked are dollars for output tokens where all have a price, else output tokens per second and chip; with another
    objective, or a rate, what these ask for; equal ones by latency, however near others are. Plans of one of them stay
    in their own order, where ties within 1 % go to what else is better, and the simplest may be first.

    Args:
        problems: what to plan.
        search: finds plans of one of them, in so many seconds.
        top: how many plans to give.
        time_limit: seconds for all of them, an even share of those left for each; None for as long as it takes.

    Raises:
        InfeasibleError: none of them has a plan; says why for each.
    """
    found: dict[Alternative, ServingPlanResult | str] = {}
    for (which, problem), share in zip(problems.items(), even_shares(time_limit, len(problems)), strict=True):
        until = Until.after(share)
        try:
            found[which] = planned_here = search(problem, share)
            if not planned_here.search.complete and not until.over:  # by Ctrl-C
                break
        except MeshwiseError as error:
            found[which] = str(error)
        except KeyboardInterrupt:
            if all(isinstance(p, str) for p in found.values()):
                raise
            break
    found |= {which: NOT_SEARCHED for which in problems if which not in found}
    planned = {which: p for which, p in found.items() if isinstance(p, ServingPlanResult)}
    if not planned:
        raise InfeasibleError("\n".join(f"{which}: {reason}" for which, reason in found.items()))
    rankings = [
        [(which, e, sent) for e, sent in zip(p.plans, p.simulated or [None] * len(p.plans), strict=True)]
        for which, p in planned.items()
    ]
    constraints = next(iter(planned.values())).constraints
    by, score = _score(constraints, priced=all(e.usd_per_s is not None for p in planned.values() for e in p.plans))
    order = merge(*rankings, key=lambda one: score(*one[1:]))
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
