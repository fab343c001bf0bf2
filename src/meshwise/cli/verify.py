"""`meshwise verify`: a plan's step compiled for its target, predicted beside compiled."""

from __future__ import annotations

from typing import Any

import click

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options
from meshwise.cli.progress import Progress
from meshwise.commands.estimate_train import EstimateTrainRequest, find_estimate
from meshwise.commands.export import read_plan
from meshwise.commands.train import TRAIN_FLAGS
from meshwise.commands.verify import verify_plan
from meshwise.core.errors import InfeasibleError
from meshwise.report.verify import verification_report
from meshwise.search import Plan


@click.command()
@request_options(
    EstimateTrainRequest, arguments=("model",), flags={**TRAIN_FLAGS, "model": "PLAN|MODEL"}, optional=True
)
@click.option(
    "--reduced/--full",
    default=False,
    help="Compile two smaller models, from which the whole follows, or all layers (which is what happens otherwise).",
)
@output_options
def verify(request: EstimateTrainRequest | None, model: str, reduced: bool, output: Output) -> None:
    """Compile a step for its target, and compare with the plan.

    The real compiler, XLA: memory, every collective and every matmul, predicted beside compiled. Of a saved plan (what
    --save wrote, and no option that states a job), or of a model, a job and a layout as 'estimate train' takes them. No
    accelerator is needed; the compilers are extras: pip install 'meshwise[tpu]' or 'meshwise[cuda]'. The exit code is 3
    when the program does not fit in memory.

    \b
      meshwise verify plan.json
      meshwise verify llama-3-8b --on v5p:2x2x2 --batch-tokens 64Ki --seq-len 4096 \\
        --layout fsdp=4,tensor=2,remat=full
    """  # noqa: D301  (click's mark for lines that stay as they are)
    with Progress() as progress:
        plan, inputs = (read_plan(model), {"plan": model}) if request is None else _estimated(request, progress)
        found = verify_plan(plan, reduced=reduced, progress=progress)
    output.show(verification_report(found, str(plan.layout), {**inputs, "reduced": reduced}))
    if not found.fits:
        raise click.exceptions.Exit(InfeasibleError.exit_code)


def _estimated(request: EstimateTrainRequest, progress: Progress) -> tuple[Plan, dict[str, Any]]:
    """Find the plan of a layout; what it was asked, for JSON."""
    problem = request.problem()
    planning = find_estimate(request, problem, progress=progress)
    return planning.plans[0], {**request.echo_training(problem), "layout": request.layout}
