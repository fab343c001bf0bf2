"""`estimate train`, and what every command of training shares: the job as a request, and the plan that it is about.

Not here: searching (`plan_train`) and what the answer looks like (`report.plan`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from meshwise.commands.command import Screen, Tell, command, silent, verb
from meshwise.commands.plan_files import read_plan, save_plan, write_file
from meshwise.commands.requests import File, Flag, Request, attributes, validated
from meshwise.commands.where import ModelOnCluster
from meshwise.core.errors import InfeasibleError, LayoutError, MeshwiseError
from meshwise.core.explanation import Answer
from meshwise.core.units import Quantity, format_time, parse_duration
from meshwise.costs.estimate import estimate_training
from meshwise.costs.problem import TrainingProblem
from meshwise.exports import TOOLS, USUAL, asked_tools, calibration_for, check_written, parse_tools
from meshwise.hardware import Cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.models.model import check_length
from meshwise.report.plan import estimate_report, plan_report, plan_svg
from meshwise.search import Plan, PlanResult, estimate_layout
from meshwise.search.diagnosis import explain_measured, single_changes
from meshwise.search.planner import plan_alone
from meshwise.sharding.layout import LayoutRequest, parse_layout


def at_anchor(problem: TrainingProblem, path: str) -> TrainingProblem:
    """The problem with its calibration anchored at the measured steps of a file."""
    from meshwise.scoring.anchoring import anchor_file  # noqa: PLC0415 -- only those who have measured need it

    return replace(problem, calibration=anchor_file(problem, path).calibration)


#: What `run` and `verify` choose themselves is chosen so that they can.
OWN_RUNTIME = ("meshwise",)


class TrainRequest(ModelOnCluster, TrainingJob):
    """A model, a training job and a cluster."""

    sections: ClassVar = {
        "Job": ("on", "batch_tokens", "seq_len", "tokens", "precision", "optimizer", "fine_tune", "tool")
    }

    tool: Annotated[
        tuple[str, ...], Flag("TOOLS"), BeforeValidator(parse_tools, json_schema_input_type=str | Sequence[str])
    ] = Field(
        default=(),
        description=f"Tools of which at least one has to run the plan: {', '.join(TOOLS)}, or none for any plan; "
        "by default, those for the chip that have trainers of their own.",
    )
    calibration: str = "fitted"
    """Achieved rates: fitted (to whole steps; with one --tool, of that tool), fitted+SOFTWARE, operations (single ones
    alone), none, a family by name, or a file of meshwise calibrate."""
    anchor: File | None = None
    """Measured steps of this model on these chips, in any layout (CSV, docs/measurements.md): what they are off by
    corrects all that is predicted."""

    def job(self) -> TrainingJob:
        """The training job alone."""
        return TrainingJob(**attributes(self, *TrainingJob.model_fields))

    def problem(self, usual: tuple[str, ...] = ()) -> TrainingProblem:
        """Resolve the names.

        Args:
            usual: tools whose software it is priced as, unless others are named.

        Raises:
            MeshwiseError: a model, cluster or calibration that cannot be found; sequences that the model cannot read.
        """
        cluster = self.must_find()
        model = load_model(self.model)
        check_length(model, self.seq_len)
        calibration = calibration_for(self.tool or usual, self.calibration, cluster.chip)
        problem = TrainingProblem(model, self.job(), cluster, calibration, in_step=(self.tool or usual) == OWN_RUNTIME)
        return problem if self.anchor is None else at_anchor(problem, self.anchor)


class EstimateTrainRequest(TrainRequest):
    """What `meshwise estimate train` is asked."""

    sections: ClassVar = {"Job": ("on", "layout", *TrainRequest.sections["Job"][1:])}

    layout: Annotated[str, Flag("LAYOUT")]
    """The layout: fsdp=512,tensor=4 (dp fsdp tp cp ulysses ep pp; -1 for the rest; dp fills what is left), and remat=,
    zero=, schedule=, offload=, micro_batch=, num_microbatches=, ... to fix what is otherwise chosen."""


@command(EstimateTrainRequest)
def estimate_train(request: EstimateTrainRequest, *, progress: Tell = silent) -> PlanResult:
    """Estimate what one layout would do: what `meshwise estimate train` answers, as values.

    >>> import meshwise
    >>> planning = meshwise.estimate_train(
    ...     "llama-3-8b", on="v5p:4x4x4", batch_tokens="1Mi", seq_len=4096, layout="fsdp=16,tensor=4,remat=full"
    ... )
    >>> plan = planning.plans[0]
    >>> plan.layout.sizes["tensor"]
    4

    Its step as a timeline, and the plan as a file for another tool:

    >>> timeline = meshwise.simulate_step(plan)
    >>> abs(timeline.total / plan.estimate.step_time.expected - 1) < 1e-9
    True
    >>> handed = meshwise.export(plan, to="jax")
    >>> handed.file_name, "P('fsdp', 'tensor'" in handed.text
    ('planned.py', True)

    Args:
        progress: told a line now and then.

    Returns: one plan; `plans[0].estimate.fits` says whether it fits in memory.

    Raises:
        MeshwiseError: an argument that cannot be understood, or a layout that cannot be placed.
    """
    return _estimated(request, progress)


def _estimated(request: EstimateTrainRequest, progress: Tell, usual: tuple[str, ...] = USUAL) -> PlanResult:
    """Answer the request; `usual`: tools that what is left open is chosen for, unless others are named."""
    problem = request.problem()
    layout = _whole(parse_layout(request.layout, num_chips=problem.cluster.num_chips), problem.cluster, request.layout)
    tools = asked_tools(problem, request.tool, usual)
    planning = estimate_layout(problem, layout, tools=tools, progress=progress)
    if usual == OWN_RUNTIME and not request.tool:  # chosen as plans usually are, priced as the program runs
        own, (plan,) = request.problem(usual), planning.plans
        priced = replace(plan, problem=own, estimate=estimate_training(own, plan.fabric, plan.layout))
        planning = replace(planning, plans=(priced,))
    if request.anchor is not None:
        planning = _as_measured(planning, request.anchor)
    if request.tool:
        check_written(planning.plans[0], layout, tools)
    return planning


def _as_measured(planning: PlanResult, path: str) -> PlanResult:
    """The plan takes what it took where its layout is one of the measured ones."""
    from meshwise.scoring.anchoring import as_measured  # noqa: PLC0415 -- only those who have measured need it

    (plan,) = planning.plans
    own = as_measured(plan.problem, plan.problem.job.batch_tokens, plan.estimate.step_time.expected, path)
    if own is plan.problem:
        return planning
    return replace(
        planning, plans=(replace(plan, problem=own, estimate=estimate_training(own, plan.fabric, plan.layout)),)
    )


def _whole(layout: LayoutRequest, cluster: Cluster, text: str) -> LayoutRequest:
    """The layout on all chips: replicas (`data`) fill what it leaves, unless it says how many there are.

    Raises:
        LayoutError: it leaves chips that replicas cannot fill, or that it does not let them fill.
    """
    used, chips = layout.num_chips, cluster.num_chips
    if used == chips:
        return layout
    if "data" in layout.written or chips % used:
        fill = (
            "leave data out, or write data=-1, to fill them" if chips % used == 0 else f"{used:,} does not divide them"
        )
        raise LayoutError(
            f"layout {text!r} uses {used:,} of the {chips:,} chips of {cluster.name}: {fill}; or give a cluster of "
            f"{used:,} chips"
        )
    return replace(layout, sizes={**layout.sizes, "data": chips // used}, written=(*layout.written, "data"))


Answer.reports[Plan] = lambda plan: estimate_report(plan_alone(plan), {})
Answer.reports[PlanResult] = lambda planning: (plan_report if planning.rejected else estimate_report)(planning, {})


class _Files(Request):
    sections: ClassVar = {"Diagnosis": ("measured", "changes"), "Output": ("save", "svg")}

    measured: Annotated[float, Quantity("time", parse_duration, format_time, "12.3s")] | None = Field(
        default=None, gt=0, serialization_alias="measured_s"
    )
    """Your own time of a step: where the difference from the expected one can and cannot come from."""
    changes: bool = True
    """Try single changes of the layout, which takes about a second: which gain most, or with which it fits."""
    save: Path | None = None
    """Write the plan to this file as JSON."""
    svg: Path | None = None
    """Write a picture to this file: time of a step, memory of a chip, the mesh on the network."""


@verb(EstimateTrainRequest, _Files)
def show_estimate(screen: Screen, request: EstimateTrainRequest, files: _Files) -> int | None:
    """Estimate what one layout would do for a training job.

    What the layout leaves open (remat, microbatches, the mapping to the network) is chosen for the least time. If
    nothing fits in memory, the leanest choice is shown, and the exit code is 3.

    \b
      meshwise estimate train llama-3-70b --on v5p:16x20x28 \\
        --batch-tokens 4Mi --seq-len 4096 --layout fsdp=-1,tensor=4
    """  # noqa: D301  (click's mark for lines that stay as they are)
    planning = estimate_train.answer(request, progress=screen.progress)
    (plan,) = planning.plans
    save_plan(plan, files.save)
    write_file("--svg", files.svg, lambda: plan_svg(plan))
    measured = None if files.measured is None else explain_measured(plan, files.measured)
    screen.progress("trying single changes")
    changes = single_changes(plan, asked_tools(plan.problem, request.tool)) if files.changes else ()
    screen.show(estimate_report(planning, request.echo_resolved(plan.problem), changes, measured))
    return None if plan.estimate.fits else InfeasibleError.exit_code


def plan_asked(
    asked: EstimateTrainRequest | str, screen: Screen, usual: tuple[str, ...] = USUAL
) -> tuple[Plan, dict[str, Any]]:
    """The plan that a verb is about: of a job and a layout, or saved in a file. And the inputs for JSON."""
    if isinstance(asked, str):
        return read_plan(asked, Plan), {"plan": asked}
    (plan,) = _estimated(asked, screen.progress, usual).plans
    return plan, asked.echo_resolved(plan.problem)


def plan_given(
    plan: Plan | PlanResult | str | os.PathLike[str], job: Mapping[str, Any], usual: tuple[str, ...] = USUAL
) -> Plan:
    """The plan that a Python function is about: itself, its file, or that of a model with a job.

    Args:
        plan: a plan, or the file that one was saved in; of what a search found, the first; with `job`, a model.
        job: the keywords of `estimate_train`.
        usual: tools that what is left open is chosen for, unless others are named.

    Raises:
        MeshwiseError: a file that holds no plan; a plan and a job; an argument that cannot be understood.
    """
    plan = plan.plans[0] if isinstance(plan, PlanResult) else plan
    if not isinstance(plan, Plan | str | os.PathLike):
        raise MeshwiseError(f"plan: expected a plan or the file of one, found {plan!r}")
    if not isinstance(plan, Plan):
        if not job:
            return read_plan(plan, Plan)
        return _estimated(validated(EstimateTrainRequest, {"model": str(plan), **job}), lambda _: None, usual).plans[0]
    if job:
        raise MeshwiseError(f"plan: a plan has its job in it, found {', '.join(sorted(job))} besides; leave them out")
    return plan
