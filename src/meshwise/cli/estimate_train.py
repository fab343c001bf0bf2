"""`meshwise estimate train`: what one layout would do."""

from __future__ import annotations

from pathlib import Path

import click
from pydantic import Field

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options
from meshwise.cli.progress import Progress
from meshwise.cli.train import TRAIN_FLAGS, TrainRequest, save_plan
from meshwise.errors import InfeasibleError
from meshwise.planning import estimate_layout
from meshwise.report.plan import estimate_report
from meshwise.sharding.layout import parse_layout

__all__ = ["EstimateTrainRequest", "train"]


class EstimateTrainRequest(TrainRequest):
    """What `meshwise estimate train` is asked."""

    layout: str = Field(
        description="The layout: fsdp=512,tensor=4 (dp fsdp tp cp pp; -1 for the rest), and remat=, zero=, "
        "micro_batch=, num_microbatches= where they are not to be chosen.",
        json_schema_extra={"metavar": "LAYOUT"},
    )


@click.command()
@request_options(EstimateTrainRequest, arguments=("model",), flags=TRAIN_FLAGS)
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan to this file as JSON.")
@output_options
def train(request: EstimateTrainRequest, save: Path | None, output: Output) -> None:
    r"""Estimate what one layout would do for a training job.

    What the layout leaves open (remat, microbatches, where the mesh lies) is chosen best. The exit code is 3 when the
    layout does not fit in memory.

    \b
      meshwise estimate train llama-3-70b --on v5p:16x20x28 --batch-tokens 4Mi --seq-len 4096 --layout fsdp=-1,tensor=4
    """
    problem = request.problem()
    layout = parse_layout(request.layout, num_chips=problem.cluster.num_chips)
    with Progress() as progress:
        planning = estimate_layout(problem, layout, progress=progress)
    if save is not None:
        save_plan(planning.plans[0], save)
    output.show(estimate_report(planning, {**request.echo_training(problem), "layout": request.layout}))
    if not planning.plans[0].estimate.fits:
        raise click.exceptions.Exit(InfeasibleError.exit_code)
