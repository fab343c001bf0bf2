"""`meshwise run`: a training plan executed on the devices that are there."""

from __future__ import annotations

from typing import Any

import click

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options, say, stdout_for_the_answer
from meshwise.cli.progress import Progress
from meshwise.commands.estimate_train import EstimateTrainRequest, find_estimate
from meshwise.commands.export import read_plan
from meshwise.commands.generate import GenerateRequest, execute_generation
from meshwise.commands.run import execute
from meshwise.commands.run_request import RunRequest
from meshwise.commands.train import TRAIN_FLAGS
from meshwise.report.generate import generate_report
from meshwise.report.report import Report
from meshwise.report.run import run_report
from meshwise.search import Plan


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
    """Train, or generate, as a plan says on the devices that are there.

    Of a saved plan (what --save wrote, and no option that states a job), or of a model, a job and a layout as
    'estimate train' takes them. Prints time, tokens/s, MFU and memory beside the prediction. A step of --checkpoint is
    reported as saved when it is safely on disk; the same command goes on from the last one. Exit code 3 when memory
    does not suffice, or when the loss is no number. With --generate it generates with the plan's layout instead, and
    prints tokens/s and the time to the first token.

    \b
      meshwise run plan.json --steps 100 --checkpoint steps --every 10
      meshwise run plan.json --cpu-devices 8 --profile profile
      meshwise run plan.json --text book.txt --tokenizer tokenizer.json
      meshwise run plan.json --coordinator host0:1234 --num-processes 2 --process-id 0
      meshwise run plan.json --weights model.safetensors --prompt "Once upon" --generate 50
    """  # noqa: D301  (click's mark for lines that stay as they are)
    with Progress() as progress:
        plan, inputs = (read_plan(model), {"plan": model}) if job is None else _estimated(job, progress)
        if request.generate is not None:
            output.show(_generated(plan, request, inputs, progress))
            return
        with stdout_for_the_answer(noisy=request.processes is not None):  # gloo tells whom it is connected to
            result = execute(plan, request, progress=progress, saved=_say_saved, told=say)
    if result.is_first_process:
        output.show(run_report(result, {**inputs, **request.model_dump()}))


def _generated(plan: Plan, request: RunRequest, inputs: dict[str, Any], progress: Progress) -> Report:
    """Generate, and say how fast."""
    request.check()
    asked = {name: getattr(request, name) for name in GenerateRequest.model_fields}
    result = execute_generation(plan, GenerateRequest.model_validate(asked), progress=progress, told=say)
    return generate_report(result, {**inputs, **asked})


def _say_saved(step: int) -> None:
    say(f"saved step {step}")


def _estimated(request: EstimateTrainRequest, progress: Progress) -> tuple[Plan, dict[str, Any]]:
    """Find the plan of a layout; what it was asked, for JSON."""
    problem = request.problem()
    planning = find_estimate(request, problem, progress=progress)
    return planning.plans[0], {**request.echo_training(problem), "layout": request.layout}
