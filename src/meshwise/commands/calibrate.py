"""`calibrate`: a chip's calibration refined by measured steps. Not here: fitting (`scoring`), flags, words."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from meshwise.commands.requests import validated
from meshwise.core.errors import MeshwiseError
from meshwise.costs.fitted import calibration_text, find_calibration, is_file_name
from meshwise.costs.machine import check_new, write_new
from meshwise.hardware import load_chip
from meshwise.scoring import read_runs
from meshwise.scoring.calibrating import Refined, mean_error, refine


class CalibrateRequest(BaseModel):
    """What `meshwise calibrate` is asked."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str = Field(
        description="Measured training steps of one chip, as CSV (docs/measurements.md); one row is enough.",
        json_schema_extra={"metavar": "FILE"},
    )
    calibration: str = Field(
        default="fitted",
        description="What is refined: fitted (with the software that rows name), operations, or a family by name.",
    )
    save: Path | None = Field(
        default=None, description="Write the calibration to this new file (.json), which --calibration takes."
    )


def find_refined(request: CalibrateRequest, progress: Callable[[str], None] = lambda _: None) -> Refined:
    """Answer the request; write the file, where one is asked for.

    Raises:
        MeshwiseError: a file that cannot be read or written; rows that cannot be used together.
    """
    find_calibration(request.calibration, load_chip("h100-sxm"))  # checks the name
    if request.save is not None and not is_file_name(request.save.name):
        raise MeshwiseError(f"--save {request.save}: expected a name that ends in .json, as --calibration does")
    check_new(request.save)
    refined = refine(read_runs(Path(request.file)), request.calibration, progress)
    if request.save is not None:
        measured = {
            "rows": len(refined.rows),
            "mape_before": mean_error(refined.before),
            "mape_after": mean_error(refined.after),
            "mape_left_out": mean_error(refined.left_out) if refined.left_out else None,
        }
        write_new(request.save, calibration_text(refined.chip.name, refined.base, refined.calibration, measured))
    return refined


def calibrate(
    file: str | os.PathLike[str],
    *,
    calibration: str = "fitted",
    save: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Refined:
    """Refine a chip's calibration by measured steps: what `meshwise calibrate` answers, as values.

    Args:
        file: CSV in the format of docs/measurements.md; one row is enough.
        calibration: what is refined: "fitted", "operations", or a family by name.
        save: a new file for the result, which `calibration=` of other verbs takes.
        progress: told a line now and then.

    Returns: constants before and after, errors before, after, and with each row left out, rows refused.

    Raises:
        MeshwiseError: a file that cannot be read or written; no row that can be used; rows of several chips.
    """
    given = {"file": os.fspath(file), "calibration": calibration, "save": None if save is None else Path(save)}
    return find_refined(validated(CalibrateRequest, given), progress)
