"""`meshwise score`: predictions against measurements."""

from __future__ import annotations

from pathlib import Path

import click

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options
from meshwise.cli.progress import Progress
from meshwise.commands.score import ScoreRequest, find_score
from meshwise.core.errors import MeshwiseError
from meshwise.report.score import score_report
from meshwise.report.score_serving import served_report
from meshwise.report.scored import scored_svg
from meshwise.scoring import Score


@click.command()
@request_options(ScoreRequest, arguments=("file",))
@click.option(
    "--svg", type=click.Path(dir_okay=False, path_type=Path), help="Write predicted against measured to this file."
)
@output_options
def score(request: ScoreRequest, svg: Path | None, output: Output) -> None:
    """Compare predictions with measured training runs, or with measured serving.

    FILE has one measurement a row, in the columns of docs/measurements.md; 'shipped' stands for the published training
    runs that come with the package, 'shipped-serving' for its measurements of serving. Every row is predicted, or
    refused with its reason. Errors are predicted / measured - 1.

    \b
      meshwise score runs.csv
      meshwise score shipped --worst 20 --svg accuracy.svg
      meshwise score shipped-serving
    """  # noqa: D301  (click's mark for lines that stay as they are)
    with Progress() as progress:
        found = find_score(request, progress)
    if svg is not None:
        drawing = scored_svg(found, "step") if isinstance(found, Score) else scored_svg(found, "time")
        try:
            svg.write_text(drawing, encoding="utf-8")
        except OSError as error:
            raise MeshwiseError(f"--svg {svg}: {error.strerror}") from None
    inputs = {**request.model_dump(), "calibration": found.calibration, "svg": None if svg is None else str(svg)}
    if isinstance(found, Score):
        output.show(score_report(found, inputs, worst=request.worst))
    else:
        output.show(served_report(found, inputs, worst=request.worst))
