"""`plan train`: the best plans for a job on one cluster, on several, or on more and more chips.

Not here: words and pictures (`report`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from meshwise.commands.command import Screen, Tell, command, patience, silent, verb
from meshwise.commands.estimate_train import TrainRequest
from meshwise.commands.plan_files import check_save, save_plan, write_file
from meshwise.commands.requests import Flag, Request, TimeLimit, attributes, listed, refuse, validated
from meshwise.core.errors import InfeasibleError, LayoutError, MeshwiseError
from meshwise.core.explanation import Answer
from meshwise.core.units import (
    Quantity,
    format_duration,
    format_money,
    format_percent,
    parse_duration,
    parse_fraction,
    parse_money,
)
from meshwise.costs.problem import TrainingProblem
from meshwise.exports import asked_tools
from meshwise.report.plan import plan_report, plan_svg
from meshwise.report.several_plans import comparison_report, comparison_svg, scaling_report, scaling_svg
from meshwise.search import (
    MAX_MEMORY,
    NOT_SEARCHED,
    Constraints,
    PlanResult,
    Scaling,
    most_seconds_per_token,
    parse_fixed,
    parse_forbidden,
    plan_training,
    scale_training,
    sensitivity,
)
from meshwise.search.until import Until, even_shares
from meshwise.sharding.layout import MESH_AXES

if TYPE_CHECKING:
    from meshwise.report.verify import VerifiedPlan

_Time = Annotated[float, Quantity("time", parse_duration, format_duration, "30d")]
_Dollars = Annotated[float, Quantity("dollars", parse_money, format_money, "5M$")]
_Share = Annotated[float, Quantity("share", parse_fraction, format_percent, "80%")]
_BY_DEFAULT = f"by default {MAX_MEMORY:.0%}, or all of it if no plan fits in that."
_SUCH_AS = "tensor=8,stage=16,schedule=1f1b,remat=full."
_READ_FIXED = BeforeValidator(parse_fixed, json_schema_input_type=str | Mapping[str, Any])
_Fixed = Annotated[dict[str, Any], Flag("NAME=VALUE"), _READ_FIXED]
_READ_FORBIDDEN = BeforeValidator(parse_forbidden, json_schema_input_type=str | Sequence[str])
_Forbidden = Annotated[tuple[str, ...], Flag("WORDS"), _READ_FORBIDDEN]


class PlanTrainRequest(TrainRequest):
    """What `meshwise plan train` is asked."""

    sections: ClassVar = {
        **TrainRequest.sections,
        "Search": ("objective", "deadline", "budget", "max_chips", "max_memory", "fix", "forbid", "within", "top"),
    }

    objective: Literal["time", "cost", "chips"] = "time"
    """Minimize time, cost, or the chips that meet the deadline."""
    deadline: _Time | None = Field(default=None, gt=0, serialization_alias="deadline_s")
    """Longest time for the whole run (--tokens); slower plans are dropped."""
    budget: _Dollars | None = Field(default=None, gt=0, serialization_alias="budget_usd")
    """Most dollars for the whole run (--tokens); dearer plans are dropped."""
    max_chips: int | None = Field(default=None, ge=1)
    """Most chips of the cluster to use."""
    fix: _Fixed = Field(
        default={}, description=f"Fix mesh axes ({', '.join(MESH_AXES)}) and choices, and search the others: {_SUCH_AS}"
    )
    forbid: _Forbidden = ()
    """Exclude from all plans: mesh axes (pipeline, expert, ...), offload, ring, schedules (dualpipe, interleaved,
    zero-bubble, ...), partial-remat, or values of choices (zero=2, remat=full)."""
    max_memory: _Share | None = Field(
        default=None, gt=0, le=1, description=f"Most of a chip's HBM that a plan may fill; {_BY_DEFAULT}"
    )
    within: Annotated[float, Quantity("share", parse_fraction, format_percent, "2%")] = Field(
        default=0.02, ge=0, le=0.5
    )
    """Share of the best time (or cost) within which plans are not told apart: the simplest of them is first (0 for the
    best alone)."""
    top: int = Field(default=5, ge=1, le=100)
    """How many plans to show."""
    front: bool = False
    """Also find the Pareto front of time and memory; the search takes several times as long."""
    offload: bool = False
    """Let plans with offload to the host's memory compete; by default, only if nothing fits without."""
    sensitivity: bool = False
    """Search again with 10 % less of each resource (bandwidths, FLOP/s, HBM, batch, length): what does the plan depend
    on?"""

    @property
    def clusters(self) -> tuple[str, ...]:
        """Clusters to compare; one name if there is no comparison."""
        return listed(self.on, "--on")

    def constraints(self, problem: TrainingProblem) -> Constraints:
        """What is fixed, forbidden and limited; refused, before anything is searched, where it cannot be.

        Raises:
            LayoutError: fixed axes that exceed the chips; contradictory or incomplete constraints.
        """
        try:
            constraints = Constraints(
                fixed=self.fix,
                forbidden=self.forbid,
                deadline_days=None if self.deadline is None else self.deadline / 86400,
                budget_usd=self.budget,
                tools=asked_tools(problem, self.tool),
                tools_optional=not self.tool,
                **attributes(self, "max_chips", "max_memory", "front", "offload", "within"),
            )
        except LayoutError as error:
            raise LayoutError(f"--fix and --forbid: {error}") from None
        needed = math.prod(n for a, n in self.fix.items() if a in MESH_AXES)
        there, where = problem.cluster.num_chips, f"{problem.cluster.name} has"
        if self.max_chips is not None and self.max_chips < there:
            there, where = self.max_chips, "--max-chips allows"
        if needed > there:
            raise LayoutError(f"--fix: these axes need {needed:,} chips, {where} {there:,}")
        most_seconds_per_token(constraints, problem.job.tokens, problem.cluster.price_per_chip_hour)
        return constraints


@command(PlanTrainRequest)
def plan_train(request: PlanTrainRequest, *, progress: Tell = silent, time_limit: float | None = None) -> PlanResult:
    """Find the best layouts for a training job: what `meshwise plan train` answers, as values.

    >>> import meshwise
    >>> planning = meshwise.plan_train("llama-3-8b", on="v5p:4x4x4", batch_tokens="1Mi", seq_len=4096)
    >>> best = planning.plans[0]
    >>> best.estimate.fits, best.layout.num_chips, best.estimate.step_time.expected > best.estimate.step_time.lower
    (True, 64, True)

    Args:
        progress: told a line now and then.
        time_limit: seconds after which searching ends with the best so far; `search.gap` says how good that is. None
            for as long as it takes.

    Raises:
        MeshwiseError: an argument that cannot be understood; InfeasibleError when nothing fits.
    """
    until, problem = Until.after(time_limit), request.problem()
    constraints = request.constraints(problem)
    goal = request.objective
    planning = plan_training(
        problem,
        objective=goal,
        top=request.top,
        constraints=constraints,
        progress=progress,
        time_limit=time_limit,
    )
    if not request.sensitivity or not planning.search.complete:
        return planning
    left = until.left
    found = sensitivity(planning, objective=goal, progress=progress, time_limit=left)
    return replace(planning, sensitivity=found)


def compare_clusters(
    request: PlanTrainRequest, *, progress: Tell = silent, time_limit: float | None = None
) -> dict[str, PlanResult | str]:
    """Plan on each of the clusters that `--on a,b,c` names; where there is no plan, its reason.

    Interrupted (KeyboardInterrupt) after something was found, it gives that; other clusters are NOT_SEARCHED.
    Each gets an even share of the seconds of `time_limit` that are left.

    Raises:
        MeshwiseError: a cluster that cannot be found, or given twice.
        InfeasibleError: no cluster has a plan.
    """
    one_each = {name: request.model_copy(update={"on": name}) for name in request.clusters}
    if len(one_each) < len(request.clusters):
        raise MeshwiseError(f"--on {request.on}: a cluster is named twice")
    for one in one_each.values():  # refused before anything is searched
        one.problem()
    found: dict[str, PlanResult | str] = {}
    for (name, one), share in zip(one_each.items(), even_shares(time_limit, len(one_each)), strict=True):
        until = Until.after(share)
        try:
            found[name] = planned = plan_train.answer(
                one, progress=lambda line, name=name: progress(f"{name}: {line}"), time_limit=share
            )
        except (InfeasibleError, LayoutError) as error:
            found[name] = str(error)
        except KeyboardInterrupt:
            if all(isinstance(p, str) for p in found.values()):
                raise
            break
        else:
            if planned.search.interrupted_on and not until.over:  # by Ctrl-C
                break
    found |= {name: NOT_SEARCHED for name in one_each if name not in found}
    if all(isinstance(p, str) for p in found.values()):
        raise InfeasibleError("\n".join(f"{name}: {reason}" for name, reason in found.items()))
    return found


def compare_train(
    model: str, *, on: Iterable[str], progress: Tell = silent, **options: Any
) -> dict[str, PlanResult | str]:
    """Compare clusters: cluster -> its plans, or why there is none.

    Args:
        model: as `plan_train` takes it.
        on: the clusters, by name.
        progress: told a line now and then.
        options: those of `plan_train`, by the same names.

    Raises:
        MeshwiseError: as `plan_train`; InfeasibleError where no cluster has a plan.
    """
    request = validated(PlanTrainRequest, {"model": model, "on": ",".join(on), **options})
    return compare_clusters(request, progress=progress)


@command(PlanTrainRequest)
def scale_train(request: PlanTrainRequest, *, progress: Tell = silent, time_limit: float | None = None) -> Scaling:
    """Find the best plan on powers of two of a cluster's chips, for one batch, and where strong scaling ends.

    Args:
        progress: told a line now and then.
        time_limit: seconds after which searching ends with the numbers of chips so far; None for as long as it takes.

    Raises:
        MeshwiseError: as `plan_train`, and for limits that have no meaning here; InfeasibleError where no number of
            chips has a plan.
    """
    given = [flag for flag, value in (("--deadline", request.deadline), ("--budget", request.budget)) if value]
    if given or request.objective != "time":
        raise MeshwiseError(f"--scaling asks for the least time; leave out {' and '.join(given) or '--objective'}")
    problem = request.problem()
    limits = request.constraints(problem)
    return scale_training(problem, constraints=limits, progress=progress, time_limit=time_limit)


class _Further(Request):
    """What the command line adds."""

    sections: ClassVar = {"Search": ("time_limit", "scaling", "verify"), "Output": ("save", "svg")}

    time_limit: TimeLimit = Field(default=None, gt=0)
    """End the search of a plan after this time with the best so far, and say how far it may be from the best possible;
    on a terminal by default after a minute. Several clusters share it, and so do --scaling and --sensitivity."""
    scaling: Annotated[bool, Flag(name="--scaling")] = False
    """Plan for 1, 2, 4, ... chips: MFU against chips, and where strong scaling ends."""
    verify: int | None = Field(default=None, ge=1)
    """Compile the best N plans for their target; plans that do not fit go to the end ('meshwise verify')."""
    save: Path | None = None
    """Write the best plan to this file, as JSON."""
    svg: Path | None = None
    """Write a picture to this file: the best plan's time, memory and mesh; of several clusters their costs and times;
    with --scaling MFU against chips."""

    def check(self, *, several: bool) -> None:
        """Refuse flags that have no meaning together.

        Raises:
            MeshwiseError: naming them.
        """
        check_save(self.save)
        one = not (several or self.scaling)
        refuse(
            (several and self.scaling, "--scaling is of one cluster, found several in --on; leave one of them out"),
            (self.save and not one, "--save writes one plan: leave it out with several clusters or --scaling"),
            (
                self.verify and not one,
                "--verify: expected one cluster and no --scaling; verify a plan of one with 'meshwise verify'",
            ),
        )


Answer.reports[Scaling] = lambda scaling: scaling_report(scaling, {})


@verb(PlanTrainRequest, _Further)
def show_plans(screen: Screen, request: PlanTrainRequest, further: _Further) -> int | None:
    """Find the best layouts for a training job, and why the others lose.

    \b
      meshwise plan train llama-3-70b --on v5p:16x20x28 \\
        --batch-tokens 4Mi --seq-len 4096 --tokens 15T
      meshwise plan train gemma-3-27b --on v6e:16x16 \\
        --batch-tokens 2Mi --seq-len 8192

    Several clusters (--on h100:512,b200:256) are compared. Ctrl-C during a search, or the end of its time
    (--time-limit), shows the best so far, with exit code 0, and what was not searched. Without a plan: 130, or 3.
    """  # noqa: D301  (click's mark for lines that stay as they are)
    further = further.model_copy(update={"time_limit": patience(screen, further.time_limit)})
    several = len(request.clusters) > 1
    further.check(several=several)
    if not several and not further.scaling:
        return _show_plans_of_one(screen, request, further)
    if several:
        compared = compare_clusters(request, progress=screen.progress, time_limit=further.time_limit)
        write_file("--svg", further.svg, lambda: comparison_svg(compared))
        screen.show(comparison_report(compared, request.echo()))
    else:
        scaled = scale_train.answer(request, progress=screen.progress, time_limit=further.time_limit)
        write_file("--svg", further.svg, lambda: scaling_svg(scaled))
        screen.show(scaling_report(scaled, request.echo()))
    return None


def _show_plans_of_one(screen: Screen, request: PlanTrainRequest, further: _Further) -> int | None:
    """Search one cluster; compile the best plans, if that is asked for."""
    planning = plan_train.answer(request, progress=screen.progress, time_limit=further.time_limit)
    inputs = request.echo_resolved(planning.plans[0].problem)
    inputs |= {"max_memory": planning.memory_share, "verify": further.verify}
    verified: tuple[VerifiedPlan, ...] = ()
    if further.verify is not None:  # what reads compiled programs is loaded where it is asked for
        from meshwise.commands.verify import verify_best  # noqa: PLC0415

        planning, verified = verify_best(planning, further.verify, progress=screen.progress)
    report = plan_report(planning, inputs)
    if verified:
        from meshwise.report.verify import with_verified  # noqa: PLC0415

        report = with_verified(report, verified)
    screen.show(report)
    if further.verify is not None and all(v.fails for v in verified):
        return InfeasibleError.exit_code
    write_file("--svg", further.svg, lambda: plan_svg(planning.plans[0]))
    save_plan(planning.plans[0], further.save)  # last: an answer that cannot be saved is shown all the same
    return None
