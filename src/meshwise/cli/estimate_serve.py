"""`meshwise estimate serve`: what one serving layout would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options
from meshwise.commands.estimate_serve import EstimateServeRequest, answer_plan, find_serving_estimate, write_engines
from meshwise.commands.plan_file import check_save
from meshwise.commands.serve import SERVE_FLAGS
from meshwise.commands.serving_plan import read_serving_plan, save_serving_plan
from meshwise.core.errors import InfeasibleError
from meshwise.costs.serving.answer import ServingAnswer
from meshwise.report.serve import estimate_serve_report
from meshwise.search.serving import ServingPlan

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@request_options(
    EstimateServeRequest, arguments=("model",), flags={**SERVE_FLAGS, "model": "PLAN|MODEL"}, optional=True
)
@click.option("--engine", type=_FILE, help="Write what a step of the engine takes, for 'simulate serve'.")
@click.option("--prefill-engine", type=_FILE, help="And of engines that only prefill.")
@click.option("--save", type=_FILE, help="Write the plan to this file, as JSON.")
@output_options
def serve(
    request: EstimateServeRequest | None,
    model: str,
    *,
    engine: Path | None,
    prefill_engine: Path | None,
    save: Path | None,
    output: Output,
) -> None:
    """Estimate what one layout would do for a serving load.

    Of a saved plan (what 'plan serve --save' wrote, and no option that states a load), or of a model, a load and a
    layout. Where the mesh lies on the network is chosen best unless the layout says it. When it does not fit in memory,
    the exit code is 3.

    \b
      meshwise estimate serve llama-3-70b --on h100:8 --prompt 1024 \\
        --output 256 --batch 64 --layout tensor=8 --precision fp8
      meshwise estimate serve llama-3-70b --on h100:8 --prompt 1024 \\
        --output 256 --batch 64 --layout tensor=8 --engine engine.json
      meshwise estimate serve llama-3-70b --on h100:8 --prompt 1024 \\
        --output 256 --batch 64 --layout tensor=8 --save plan.json
      meshwise estimate serve plan.json
    """  # noqa: D301  (click's mark for lines that stay as they are)
    if save is not None:
        check_save(save)
    if request is None:
        answer, inputs = answer_plan(read_serving_plan(model)), {"plan": model}
    else:
        answer, inputs = _estimated(request)
    output.show(estimate_serve_report(answer, inputs))
    write_engines(answer.problem, answer.estimate, {"decode": engine, "prefill": prefill_engine})
    if save is not None:
        save_serving_plan(ServingPlan(answer.problem, answer.estimate), save)
    if not answer.estimate.fits:
        raise click.exceptions.Exit(InfeasibleError.exit_code)


def _estimated(request: EstimateServeRequest) -> tuple[ServingAnswer, dict[str, Any]]:
    """Find the answer for a layout; what it was asked, for JSON."""
    problem = request.problem()
    asked = {
        name: getattr(request, name) for name in ("layout", "prefill_layout", "mode", "batch", "prefill_batch", "chunk")
    }
    return find_serving_estimate(request, problem), {**request.echo_serving(problem), **asked}
