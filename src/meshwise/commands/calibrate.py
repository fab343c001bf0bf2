"""`calibrate`: a chip's calibration refined by measured steps. Not here: fitting (`scoring`)."""

from __future__ import annotations

from pathlib import Path

from meshwise.commands.command import Screen, Tell, command, silent, verb
from meshwise.commands.requests import File, Request
from meshwise.core.errors import MeshwiseError
from meshwise.core.explanation import Answer
from meshwise.costs.calibration_files import calibration_text, is_file_name
from meshwise.costs.fitted import find_calibration
from meshwise.costs.machine import check_new, write_new
from meshwise.hardware import load_chip
from meshwise.report.calibrate import calibrate_report
from meshwise.scoring import TrainingRun, read_rows, read_text
from meshwise.scoring.fitting import Refined, mean_error, refine


class CalibrateRequest(Request):
    """What `meshwise calibrate` is asked."""

    positional = ("file",)

    file: File
    """Measured training steps of one chip, as CSV (docs/measurements.md); one row is enough."""
    calibration: str = "fitted"
    """Calibration to refine: fitted (with the rows' software), operations, or a family by name."""
    save: Path | None = None
    """Write the calibration to this new file (.json), which --calibration takes."""


@command(CalibrateRequest)
def calibrate(request: CalibrateRequest, *, progress: Tell = silent) -> Refined:
    """Refine a chip's calibration by measured steps: what `meshwise calibrate` answers, as values.

    Args:
        progress: told a line now and then.

    Returns: constants before and after, errors before, after, and with each row left out, rows refused.

    Raises:
        MeshwiseError: a file that cannot be read or written; no row that can be used; rows of several chips.
    """
    find_calibration(request.calibration, load_chip("h100-sxm"))  # checks the name
    if request.save is not None and not is_file_name(request.save.name):
        raise MeshwiseError(f"--save {request.save}: expected a name that ends in .json, as --calibration does")
    check_new(request.save)
    runs = read_rows(read_text(Path(request.file)), request.file, TrainingRun)
    refined = refine(runs, request.calibration, progress)
    if request.save is not None:
        measured = {
            "rows": len(refined.rows),
            "mape_before": mean_error(refined.before),
            "mape_after": mean_error(refined.after),
            "mape_left_out": mean_error(refined.left_out) if refined.left_out else None,
        }
        write_new(request.save, calibration_text(refined.chip.name, refined.base, refined.calibration, measured))
    return refined


Answer.reports[Refined] = lambda refined: calibrate_report(refined, {})


@verb(CalibrateRequest)
def show_calibration(screen: Screen, request: CalibrateRequest) -> None:
    """Refine a chip's calibration by your own measured steps.

    FILE has one measurement a row, in the columns of docs/measurements.md. Constants move as far as the rows
    support it, within what is known of the chip. Rows that are faster than physically possible, or take
    ten times what is predicted, are refused.

    \b
      meshwise calibrate runs.csv --save ours.json
      meshwise plan train llama-3-70b --on h100:64 --batch-tokens 1Mi --calibration ours.json
    """  # noqa: D301  (click's mark for lines that stay as they are)
    screen.show(calibrate_report(calibrate.answer(request, progress=screen.progress), request.echo()))
