"""`meshwise plan train`: the best layouts for a training job, and why the others lose."""

from __future__ import annotations

from pathlib import Path

import click

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options
from meshwise.cli.progress import Progress
from meshwise.report.plan import plan_report
from meshwise.verbs.plan_train import PlanTrainRequest, find_plans
from meshwise.verbs.train import TRAIN_FLAGS, check_save, save_plan

__all__ = ["train"]


@click.command()
@request_options(PlanTrainRequest, arguments=("model",), flags=TRAIN_FLAGS)
@click.option(
    "--save", type=click.Path(dir_okay=False, path_type=Path), help="Write the best plan to this file, as JSON."
)
@output_options
def train(request: PlanTrainRequest, save: Path | None, output: Output) -> None:
    """Find the best layouts for a training job, and why the others lose.

    \b
      meshwise plan train llama-3-70b --on v5p:16x20x28 \\
        --batch-tokens 4Mi --seq-len 4096 --tokens 15T
      meshwise plan train gemma-3-27b --on v6e:16x16 \\
        --batch-tokens 2Mi --seq-len 8192
    """  # noqa: D301  (click's mark for lines that stay as they are)
    problem = request.problem()
    if save is not None:
        check_save(save)
    with Progress() as progress:
        planning = find_plans(request, problem, progress=progress)
    inputs = {**request.echo_training(problem), **request.echo_search(planning)}
    output.show(plan_report(planning, inputs))
    if save is not None:  # last: an answer that cannot be saved is shown all the same
        save_plan(planning.plans[0], save)
