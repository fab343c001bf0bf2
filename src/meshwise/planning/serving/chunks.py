"""Plans whose prompts are prefilled in chunks, beside what is generated: tried on the best plans that prefill whole.

Not here: plans that prefill whole (`planner`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from meshwise.costs.fabric import Fabric
from meshwise.costs.serving.answer import ServingEstimate, ServingSetup
from meshwise.costs.serving.estimate import estimate_serving
from meshwise.costs.serving.problem import ServingProblem
from meshwise.planning.serving.ranking import in_order, ties
from meshwise.planning.serving.wishes import ServingWishes


def with_chunks(
    problem: ServingProblem,
    fabric: Fabric,
    wishes: ServingWishes,
    plans: Iterable[ServingEstimate],
    score: Callable[[ServingEstimate], tuple[float, ...]],
) -> Sequence[ServingEstimate]:
    """Add plans in chunks of those whose engines do both in one layout; give all, best first.

    Args:
        problem, fabric: as in `estimate_serving`.
        wishes: targets, and the chunks to try.
        plans: that prefill whole prompts.
        score: what is minimised.
    """
    found = {e.setup: e for e in plans}
    for e in tuple(found.values()):
        setup = e.setup
        if setup.mode == "disaggregated" or not setup.one_layout:
            continue
        for chunk in wishes.chunks:
            if chunk >= problem.load.computed:
                continue
            layout = setup.generate
            other = estimate_serving(
                problem, ServingSetup("aggregated", layout, layout, setup.batch, 1, chunk), fabric, count=False
            )
            if other.fits and keeps_targets(other, wishes):
                found[other.setup] = other
    return in_order(found.values(), score, ties(wishes))


def keeps_targets(e: ServingEstimate, wishes: ServingWishes) -> bool:
    """Whether a plan keeps all targets."""
    return (
        (wishes.max_ttft is None or e.ttft.expected <= wishes.max_ttft)
        and (wishes.max_tpot is None or e.tpot.expected <= wishes.max_tpot)
        and (wishes.rate is None or e.requests_per_s >= wishes.rate)
    )
