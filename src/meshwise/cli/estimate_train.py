"""`meshwise estimate train`: what one layout would do."""

from __future__ import annotations

from pathlib import Path

import click

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options
from meshwise.cli.progress import Progress
from meshwise.commands.estimate_train import EstimateTrainRequest, find_estimate
from meshwise.commands.train import TRAIN_FLAGS, save_plan
from meshwise.core.errors import InfeasibleError
from meshwise.report.plan import estimate_report


@click.command()
@request_options(EstimateTrainRequest, arguments=("model",), flags=TRAIN_FLAGS)
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan to this file as JSON.")
@output_options
def train(request: EstimateTrainRequest, save: Path | None, output: Output) -> None:
    """Estimate what one layout would do for a training job.

    What the layout leaves open (remat, microbatches, where the mesh lies) is chosen best. When it does not fit in
    memory in any way, the leanest is shown, and the exit code is 3.

    \b
      meshwise estimate train llama-3-70b --on v5p:16x20x28 \\
        --batch-tokens 4Mi --seq-len 4096 --layout fsdp=-1,tensor=4
    """  # noqa: D301  (click's mark for lines that stay as they are)
    problem = request.problem()
    with Progress() as progress:
        planning = find_estimate(request, problem, progress=progress)
    if save is not None:
        save_plan(planning.plans[0], save)
    output.show(estimate_report(planning, {**request.echo_training(problem), "layout": request.layout}))
    if not planning.plans[0].estimate.fits:
        raise click.exceptions.Exit(InfeasibleError.exit_code)
