"""`plan serve` on several clusters or in several precisions. Not here: one of each (`plan_serve`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshwise.commands.plan_serve import PlanServeRequest, find_serving_plans
from meshwise.commands.requests import PARAMETERS, validated
from meshwise.core.errors import MeshwiseError
from meshwise.search.serving.alternatives import Alternative, ServingAlternatives, plan_alternatives


def find_alternatives(request: PlanServeRequest) -> ServingAlternatives:
    """Plan on each of the clusters that `--on a,b` names, in each of the precisions that `--precision a,b` names.

    Raises:
        MeshwiseError: a cluster that cannot be found; one, or a precision, given twice.
        InfeasibleError: none of them has a plan.
    """
    for flag, names in (("--on", request.clusters), ("--precision", request.precisions)):
        if twice := [name for name in names if names.count(name) > 1]:
            raise MeshwiseError(f"{flag}: {twice[0]} is named twice; leave one out")
    clusters: tuple[str | None, ...] = request.clusters or (None,)
    problems = {
        Alternative(name or str(request.cluster_file), precision): request.model_copy(
            update={"cluster": name, "precision": precision}
        ).problem()
        for name in clusters
        for precision in request.precisions
    }
    return plan_alternatives(problems, lambda problem: find_serving_plans(request, problem), request.top)


def compare_serve(
    model: str, *, on: Iterable[str], precisions: Iterable[str] = ("bf16",), **options: Any
) -> ServingAlternatives:
    """Compare clusters and precisions for a serving load.

    >>> import meshwise
    >>> found = meshwise.compare_serve(
    ...     "llama-3-8b", on=["h100:1", "h200:1"], precisions=["bf16", "fp8"], prompt=1024, output=256, max_batch=8
    ... )
    >>> len(found.found), found.ranked[0][0].precision
    (4, 'fp8')

    Args:
        model: as `plan_serve` takes it.
        on: the clusters, by name.
        precisions: as `plan_serve` takes one.
        options: those of `plan_serve`, by the same names.

    Raises:
        MeshwiseError: as `plan_serve`; InfeasibleError where nothing has a plan.
    """
    given = {"model": model, "cluster": ",".join(on), "precision": ";".join(precisions), **options}
    return find_alternatives(validated(PlanServeRequest, given, PARAMETERS))
