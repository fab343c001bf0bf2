"""`meshwise plan train`: the best layouts for a training job, and why the others lose."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options, write_picture
from meshwise.cli.progress import Progress
from meshwise.commands.plan_file import check_save
from meshwise.commands.plan_many import check_asked, compare_clusters, find_scaling
from meshwise.commands.plan_train import PlanTrainRequest, find_plans
from meshwise.commands.train import TRAIN_FLAGS, save_plan
from meshwise.core.errors import InfeasibleError, MeshwiseError
from meshwise.report.plan import plan_report
from meshwise.report.several_plans import comparison_report, comparison_svg, scaling_report, scaling_svg

if TYPE_CHECKING:
    from meshwise.commands.verify_best import Verified


@click.command()
@request_options(PlanTrainRequest, arguments=("model",), flags=TRAIN_FLAGS)
@click.option(
    "--save", type=click.Path(dir_okay=False, path_type=Path), help="Write the best plan to this file, as JSON."
)
@click.option(
    "--scaling", is_flag=True, help="Plan on powers of two of the chips: MFU against chips, and where scaling ends."
)
@click.option(
    "--svg",
    type=click.Path(dir_okay=False, path_type=Path),
    help="With several clusters (--on a,b,c) or --scaling: write the picture to this file.",
)
@click.option(
    "--verify",
    type=click.IntRange(min=1),
    metavar="N",
    help="Compile the best N plans for their target; those that do not fit go to the end ('meshwise verify').",
)
@output_options
def train(
    *,
    request: PlanTrainRequest,
    save: Path | None,
    scaling: bool,
    svg: Path | None,
    verify: int | None,
    output: Output,
) -> None:
    """Find the best layouts for a training job, and why the others lose.

    \b
      meshwise plan train llama-3-70b --on v5p:16x20x28 \\
        --batch-tokens 4Mi --seq-len 4096 --tokens 15T
      meshwise plan train gemma-3-27b --on v6e:16x16 \\
        --batch-tokens 2Mi --seq-len 8192

    Several clusters (--on h100:512,b200:256) are compared. Ctrl-C during a search shows the best plan so far, with exit
    code 0; 130 when there is none yet.
    """  # noqa: D301  (click's mark for lines that stay as they are)
    several, pictured = len(request.clusters) > 1, svg is not None
    if save is not None:
        check_save(save)
    check_asked(several=several, scaling=scaling, pictured=pictured, saved=save is not None)
    if verify is not None and (several or scaling):
        raise MeshwiseError(
            "--verify: expected one cluster and no --scaling; verify a plan of one with 'meshwise verify'"
        )
    picture: Callable[[], str] = str
    with Progress() as progress:
        if several:
            compared = compare_clusters(request, progress=progress)
            report = comparison_report(compared, request.echo_many())
            picture = functools.partial(comparison_svg, compared)
        elif scaling:
            scaled = find_scaling(request, progress=progress)
            report = scaling_report(scaled, request.echo_many())
            picture = functools.partial(scaling_svg, scaled)
        else:
            problem = request.problem()
            planning = find_plans(request, problem, progress=progress)
            inputs = {**request.echo_training(problem), **request.echo_search(planning.memory_share)}
            verified: tuple[Verified, ...] = ()
            if verify is not None:  # what reads compiled programs is loaded where it is asked for
                from meshwise.commands.verify_best import verify_best  # noqa: PLC0415

                planning, verified = verify_best(planning, verify, progress=progress)
            report = plan_report(planning, {**inputs, "verify": verify})
            if verified:
                from meshwise.report.verify import VerifiedRow, with_verified  # noqa: PLC0415

                report = with_verified(
                    report, [VerifiedRow(v.rank, str(v.plan.layout), v.found, v.refused) for v in verified]
                )
    if svg is not None:
        write_picture(svg, picture())
    output.show(report)
    if not (several or scaling) and verify is not None and all(v.fails for v in verified):
        raise click.exceptions.Exit(InfeasibleError.exit_code)
    if save is not None:  # last: an answer that cannot be saved is shown all the same
        save_plan(planning.plans[0], save)
