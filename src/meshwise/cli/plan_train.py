"""`meshwise plan train`: the best layouts for a training job, and why the others lose."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import click
from pydantic import BeforeValidator, Field

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options
from meshwise.cli.pairs import parse_sizes
from meshwise.cli.progress import Progress
from meshwise.cli.train import TRAIN_FLAGS, TrainRequest, save_plan
from meshwise.errors import LayoutError, UnknownNameError
from meshwise.planning import MAX_MEMORY, plan_training
from meshwise.report.plan import plan_report
from meshwise.sharding.layout import MESH_AXES
from meshwise.units import Quantity, format_duration, format_percent, parse_duration, parse_fraction

__all__ = ["PlanTrainRequest", "train"]


def _mesh_axes(value: Any) -> Any:
    """Read sizes of mesh axes, and only of those."""
    sizes = parse_sizes(value)
    for name in sizes:
        if name not in MESH_AXES:
            raise UnknownNameError("mesh axis", name, MESH_AXES)
    return sizes


class PlanTrainRequest(TrainRequest):
    """What `meshwise plan train` is asked."""

    objective: Literal["time", "cost", "chips"] = Field(
        default="time", description="Least time, least cost, or fewest chips for the deadline."
    )
    deadline: Annotated[float | None, Quantity("time", parse_duration, format_duration, "30d")] = Field(
        default=None, gt=0, description="For --objective chips: how long the whole run may take."
    )
    fix: Annotated[dict[str, int], BeforeValidator(_mesh_axes)] = Field(
        default={},
        description=f"Fix mesh axes ({', '.join(MESH_AXES)}): tensor=8,stage=16; the others are searched.",
        json_schema_extra={"metavar": "AXIS=SIZE"},
    )
    max_memory: Annotated[float, Quantity("share", parse_fraction, format_percent, "90%")] = Field(
        default=MAX_MEMORY, gt=0, description="Share of a chip's HBM that plans may fill; all of it where nothing fits."
    )
    top: int = Field(default=5, ge=1, le=100, description="How many plans to show.")


@click.command()
@request_options(PlanTrainRequest, arguments=("model",), flags=TRAIN_FLAGS)
@click.option(
    "--save", type=click.Path(dir_okay=False, path_type=Path), help="Write the best plan to this file, as JSON."
)
@output_options
def train(request: PlanTrainRequest, save: Path | None, output: Output) -> None:
    r"""Find the best layouts for a training job, and why the others lose.

    \b
      meshwise plan train llama-3-70b --on v5p:16x20x28 --batch-tokens 4Mi --seq-len 4096 --tokens 15T
      meshwise plan train gemma-3-27b --on v6e:16x16 --batch-tokens 2Mi --seq-len 8192
    """
    problem = request.problem()
    needed, there = math.prod(request.fix.values()), problem.cluster.num_chips
    if needed > there:
        raise LayoutError(f"--fix: these axes need {needed:,} chips, {problem.cluster.name} has {there:,}")
    with Progress() as progress:
        planning = plan_training(
            problem,
            objective=request.objective,
            top=request.top,
            deadline_days=None if request.deadline is None else request.deadline / 86400,
            fixed=request.fix,
            max_memory=request.max_memory,
            progress=progress,
        )
    if save is not None:
        save_plan(planning.plans[0], save)
    inputs = {
        **request.echo_training(problem),
        "objective": request.objective,
        "deadline_s": request.deadline,
        "fix": dict(request.fix),
        "max_memory": request.max_memory,
        "top": request.top,
    }
    output.show(plan_report(planning, inputs))
