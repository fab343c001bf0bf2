"""`meshwise plan serve`: the best ways to serve a load."""

from __future__ import annotations

import click

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options
from meshwise.report.plan_serve import plan_serve_report
from meshwise.verbs.plan_serve import PlanServeRequest, find_serving_plans
from meshwise.verbs.serve import SERVE_FLAGS

__all__ = ["serve"]


@click.command()
@request_options(PlanServeRequest, arguments=("model",), flags=SERVE_FLAGS)
@output_options
def serve(request: PlanServeRequest, output: Output) -> None:
    """Find the best layouts for a serving load, and why the others lose.

    Searches engines of every size, layouts of prefill and of generation, together or apart, and batches. When nothing
    fits or keeps the targets, the exit code is 3.

    \b
      meshwise plan serve llama-3-70b --on h100:64 --prompt 1024 \\
        --output 256 --precision fp8 --max-ttft 500ms --max-tpot 30ms
    """  # noqa: D301  (click's mark for lines that stay as they are)
    problem = request.problem()
    planning = find_serving_plans(request, problem)
    output.show(plan_serve_report(planning, {**request.echo_serving(problem), **request.echo_search()}))
