"""`meshwise plan serve`: the best ways to serve a load."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options, write_picture
from meshwise.commands.estimate_serve import write_engines
from meshwise.commands.plan_file import check_save
from meshwise.commands.plan_serve import PlanServeRequest, find_serving_plans
from meshwise.commands.plan_serve_many import find_alternatives
from meshwise.commands.serve import SERVE_FLAGS
from meshwise.commands.serving_plan import save_serving_plan
from meshwise.report.plan_serve import plan_serve_report, plan_serve_svg
from meshwise.report.serve_alternatives import alternatives_report, alternatives_svg
from meshwise.search.serving import ServingPlan

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@request_options(PlanServeRequest, arguments=("model",), flags=SERVE_FLAGS)
@click.option("--engine", type=_FILE, help="Write what a step of the best plan's engine takes, for 'simulate serve'.")
@click.option("--prefill-engine", type=_FILE, help="And of its engines that only prefill.")
@click.option("--save", type=_FILE, help="Write the best plan to this file, as JSON.")
@click.option("--svg", type=_FILE, help="Write the front of latency and throughput to this file.")
@output_options
def serve(
    *,
    request: PlanServeRequest,
    engine: Path | None,
    prefill_engine: Path | None,
    save: Path | None,
    svg: Path | None,
    output: Output,
) -> None:
    """Find the best layouts for a serving load, and why the others lose.

    Searches engines of every size, layouts of prefill and of generation, together or apart, and batches. Several
    clusters (--on h100:8,h200:8) or precisions (--precision bf16,fp8) are compared. When nothing fits or keeps the
    targets, the exit code is 3.

    \b
      meshwise plan serve llama-3-70b --on h100:64 --prompt 1024 \\
        --output 256 --precision fp8 --max-ttft 500ms --max-tpot 30ms
      meshwise plan serve llama-3-8b --on h100:8,v5e:4x4 --precision bf16,int8 \\
        --prompt uniform:512-2048 --output 256 --svg front.svg
    """  # noqa: D301  (click's mark for lines that stay as they are)
    if save is not None:
        check_save(save)
    if request.several:
        found = find_alternatives(request)
        best = found.ranked[0][1]
        inputs = {**request.echo_load(best.problem.load), **request.echo_search()}
        report, picture = alternatives_report(found, inputs), partial(alternatives_svg, found)
    else:
        problem = request.problem()
        planning = find_serving_plans(request, problem)
        best = ServingPlan(problem, planning.plans[0])
        inputs = {**request.echo_serving(problem), **request.echo_search()}
        report, picture = plan_serve_report(planning, inputs), partial(plan_serve_svg, planning)
    write_engines(best.problem, best.estimate, {"decode": engine, "prefill": prefill_engine})
    if svg is not None:
        write_picture(svg, picture())
    output.show(report)
    if save is not None:  # last: an answer that cannot be saved is shown all the same
        save_serving_plan(best, save)
