"""Plans whose prompts are prefilled in chunks, beside what is generated: tried on the best plans that prefill whole.

Not here: plans that prefill whole (`planner`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from meshwise.costs.fabric import Fabric
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import ServingEstimate, ServingSetup
from meshwise.costs.serving.estimate import estimate_serving
from meshwise.search.serving.constraints import ServingConstraints
from meshwise.search.serving.ranking import in_order, ties


def with_chunks(
    problem: ServingProblem,
    fabric: Fabric,
    constraints: ServingConstraints,
    plans: Iterable[ServingEstimate],
    score: Callable[[ServingEstimate], tuple[float, ...]],
) -> Sequence[ServingEstimate]:
    """Add plans in chunks of those whose engines do both in one layout; give all, best first.

    Args:
        problem, fabric: as in `estimate_serving`.
        constraints: targets, and the chunks to try.
        plans: that prefill whole prompts.
        score: what is minimised.
    """
    found = {e.setup: e for e in plans}
    for e in tuple(found.values()):
        setup = e.setup
        if setup.mode == "disaggregated" or not setup.one_layout:
            continue
        for chunk in constraints.chunks:
            if chunk >= problem.load.computed:
                continue
            layout = setup.decode
            other = estimate_serving(
                problem, ServingSetup("aggregated", layout, layout, setup.batch, 1, chunk), fabric, count=False
            )
            if other.fits and keeps_targets(other, constraints):
                found[other.setup] = other
    return in_order(found.values(), score, ties(constraints))


def keeps_targets(e: ServingEstimate, constraints: ServingConstraints) -> bool:
    """Whether a plan keeps all targets."""
    return (
        (constraints.max_ttft is None or e.ttft.expected <= constraints.max_ttft)
        and (constraints.max_tpot is None or e.tpot.expected <= constraints.max_tpot)
        and (constraints.rate is None or e.requests_per_s >= constraints.rate)
    )
