"""`plan train` for several clusters, or for more and more chips of one. Not here: one cluster (`plan_train`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from meshwise.commands.plan_train import PlanTrainRequest, find_plans
from meshwise.commands.requests import PARAMETERS, validated
from meshwise.core.errors import InfeasibleError, LayoutError, MeshwiseError
from meshwise.search import PlanResult, Scaling, scale_training


def compare_clusters(
    request: PlanTrainRequest, *, progress: Callable[[str], None] = lambda _: None
) -> dict[str, PlanResult | str]:
    """Plan on each of the clusters that `--on a,b,c` names; where there is no plan, its reason.

    Raises:
        MeshwiseError: a cluster that cannot be found, or given twice.
        InfeasibleError: no cluster has a plan.
    """
    one_each = {name: request.model_copy(update={"cluster": name}) for name in request.clusters}
    if len(one_each) < len(request.clusters):
        raise MeshwiseError(f"--on {request.cluster}: a cluster is named twice")
    problems = {name: one.problem() for name, one in one_each.items()}
    found: dict[str, PlanResult | str] = {}
    for name, problem in problems.items():
        try:
            found[name] = find_plans(
                one_each[name],
                problem,
                progress=lambda line, name=name: progress(f"{name}: {line}"),  # type: ignore[misc]
            )
        except (InfeasibleError, LayoutError) as error:
            found[name] = str(error)
    if all(isinstance(p, str) for p in found.values()):
        raise InfeasibleError("\n".join(f"{name}: {reason}" for name, reason in found.items()))
    return found


def find_scaling(request: PlanTrainRequest, *, progress: Callable[[str], None] = lambda _: None) -> Scaling:
    """Plan on powers of two of the chips.

    Raises:
        MeshwiseError: several clusters, or limits that have no meaning here.
    """
    given = [flag for flag, value in (("--deadline", request.deadline), ("--budget", request.budget)) if value]
    if given or request.objective != "time":
        raise MeshwiseError(f"--scaling asks for the least time; leave out {' and '.join(given) or '--objective'}")
    problem = request.problem()
    return scale_training(problem, constraints=request.check(problem), progress=progress)


def compare_train(model: str, *, on: Iterable[str], **options: Any) -> dict[str, PlanResult | str]:
    """Compare clusters: cluster -> its plans, or why there is none.

    Args:
        model: as `plan_train` takes it.
        on: the clusters, by name.
        options: those of `plan_train`, by the same names, and `progress`.

    Raises:
        MeshwiseError: as `plan_train`; InfeasibleError where no cluster has a plan.
    """
    progress = options.pop("progress", lambda _: None)
    request = validated(PlanTrainRequest, {"model": model, "cluster": ",".join(on), **options}, PARAMETERS)
    return compare_clusters(request, progress=progress)


def scale_train(model: str, *, on: str, **options: Any) -> Scaling:
    """Find the best plan on powers of two of a cluster's chips, for one batch, and where strong scaling ends.

    Args:
        model: as `plan_train` takes it.
        on: the cluster by name.
        options: those of `plan_train`, by the same names, and `progress`.

    Raises:
        MeshwiseError: as `plan_train`; InfeasibleError where no number of chips has a plan.
    """
    progress = options.pop("progress", lambda _: None)
    request = validated(PlanTrainRequest, {"model": model, "cluster": on, **options}, PARAMETERS)
    return find_scaling(request, progress=progress)


def check_asked(*, several: bool, scaling: bool, pictured: bool, saved: bool) -> None:
    """Refuse flags that have no meaning together.

    Raises:
        MeshwiseError: naming them.
    """
    if several and scaling:
        raise MeshwiseError("--scaling is of one cluster, found several in --on; leave one of them out")
    if saved and (several or scaling):
        raise MeshwiseError("--save writes one plan: leave it out with several clusters or --scaling")
    if pictured and not (several or scaling):
        raise MeshwiseError("--svg is the picture of several clusters (--on a,b,c) or of --scaling: give one of them")
