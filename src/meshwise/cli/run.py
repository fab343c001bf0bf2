"""`meshwise run`: a training plan executed on the devices that are there."""

from __future__ import annotations

from typing import Any

import click

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options
from meshwise.cli.progress import Progress
from meshwise.planning import Plan
from meshwise.report.run import run_report
from meshwise.verbs.estimate_train import EstimateTrainRequest, find_estimate
from meshwise.verbs.export import read_plan
from meshwise.verbs.run import RunRequest, execute
from meshwise.verbs.train import TRAIN_FLAGS

__all__ = ["run"]


@click.command()
@request_options(
    EstimateTrainRequest,
    arguments=("model",),
    flags={**TRAIN_FLAGS, "model": "PLAN|MODEL"},
    optional=True,
    passed_as="job",
)
@request_options(RunRequest)
@output_options
def run(job: EstimateTrainRequest | None, model: str, request: RunRequest, output: Output) -> None:
    """Train as a plan says on the devices that are there.

    Of a saved plan (what --save wrote, and no option that states a job), or of a model, a job and a layout as
    'estimate train' takes them. Prints time, tokens/s, MFU and memory beside the prediction. A step of --checkpoint is
    reported as saved when it is safely on disk; the same command goes on from the last one. Exit code 3 when memory
    does not suffice, or when the loss is no number.

    \b
      meshwise run plan.json --steps 100 --checkpoint steps --every 10
      meshwise run plan.json --cpu-devices 8 --profile profile
      meshwise run plan.json --text book.txt --tokenizer tokenizer.json
    """  # noqa: D301  (click's mark for lines that stay as they are)
    with Progress() as progress:
        plan, inputs = (read_plan(model), {"plan": model}) if job is None else _estimated(job, progress)
        result = execute(plan, request, progress=progress, saved=_say_saved)
    output.show(run_report(result, {**inputs, **request.model_dump()}))


def _say_saved(step: int) -> None:
    click.echo(f"saved step {step}", err=True)


def _estimated(request: EstimateTrainRequest, progress: Progress) -> tuple[Plan, dict[str, Any]]:
    """Find the plan of a layout; what it was asked, for JSON."""
    problem = request.problem()
    planning = find_estimate(request, problem, progress=progress)
    return planning.plans[0], {**request.echo_training(problem), "layout": request.layout}
