"""`meshwise calibrate`: a chip's calibration refined by measured steps."""

from __future__ import annotations

import click

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options
from meshwise.cli.progress import Progress
from meshwise.commands.calibrate import CalibrateRequest, find_refined
from meshwise.report.calibrate import calibrate_report


@click.command()
@request_options(CalibrateRequest, arguments=("file",))
@output_options
def calibrate(request: CalibrateRequest, output: Output) -> None:
    """Refine a chip's calibration by your own measured steps.

    FILE has one measurement a row, in the columns of docs/measurements.md. Constants move as far as rows speak for it,
    and no further than what is known of the chip allows. Rows that are faster than physics are refused.

    \b
      meshwise calibrate runs.csv --save ours.json
      meshwise plan train llama-3-70b --on h100:64 --batch-tokens 1Mi --calibration ours.json
    """  # noqa: D301  (click's mark for lines that stay as they are)
    with Progress() as progress:
        refined = find_refined(request, progress)
    inputs = request.model_dump() | {"save": None if request.save is None else str(request.save)}
    output.show(calibrate_report(refined, inputs))
