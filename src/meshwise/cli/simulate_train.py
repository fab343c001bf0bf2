"""`meshwise simulate train`: one training step in time, of a saved plan or of a layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options
from meshwise.cli.progress import Progress
from meshwise.commands.estimate_train import EstimateTrainRequest, find_estimate
from meshwise.commands.export import read_plan
from meshwise.commands.simulate import simulate_step
from meshwise.commands.train import TRAIN_FLAGS
from meshwise.core.errors import InfeasibleError, MeshwiseError
from meshwise.report.timeline import timeline_report, timeline_svg, timeline_trace
from meshwise.search import Plan

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@request_options(
    EstimateTrainRequest, arguments=("model",), flags={**TRAIN_FLAGS, "model": "PLAN|MODEL"}, optional=True
)
@click.option("--svg", type=_FILE, help="Write the picture to this file as SVG.")
@click.option("--trace", type=_FILE, help="Write a trace to this file that opens in Perfetto or chrome://tracing.")
@output_options
def train(
    request: EstimateTrainRequest | None, model: str, svg: Path | None, trace: Path | None, output: Output
) -> None:
    """Show one training step as a timeline.

    Of a saved plan (what --save wrote, and no option that states a job), or of a model, a job and a layout as
    'estimate train' takes them. For every pipeline stage: compute, each stream of communication, and when it waits.
    The end is the estimate's expected step time. Of a layout that does not fit in memory the exit code is 3.

    \b
      meshwise simulate train plan.json --trace step.json
      meshwise simulate train llama-3-70b --on h100:512 --batch-tokens 4Mi --seq-len 4096 \\
        --layout stage=8,tensor=8,fsdp=8 --svg step.svg
    """  # noqa: D301  (click's mark for lines that stay as they are)
    plan, inputs = (read_plan(model), {"plan": model}) if request is None else _estimated(request)
    timeline = simulate_step(plan)
    for flag, file, picture in (("--svg", svg, timeline_svg), ("--trace", trace, timeline_trace)):
        if file is not None:
            text = picture(timeline)
            try:
                file.write_text(text, encoding="utf-8")
            except OSError as error:
                raise MeshwiseError(f"{flag} {file}: {error.strerror}") from None
    files = {"svg": None if svg is None else str(svg), "trace": None if trace is None else str(trace)}
    fits = plan.estimate.fits
    output.show(timeline_report(timeline, str(plan.layout), {**inputs, **files}, fits=fits))
    if not fits:
        raise click.exceptions.Exit(InfeasibleError.exit_code)


def _estimated(request: EstimateTrainRequest) -> tuple[Plan, dict[str, Any]]:
    """Find the plan of a layout; what it was asked, for JSON."""
    problem = request.problem()
    with Progress() as progress:
        planning = find_estimate(request, problem, progress=progress)
    return planning.plans[0], {**request.echo_training(problem), "layout": request.layout}
