"""`score`: predictions against measurements. Not here: predicting rows (`scoring`), flags (`cli`), words (`report`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from meshwise.commands.requests import validated
from meshwise.costs.engines import ENGINES
from meshwise.costs.fitted import find_calibration
from meshwise.hardware import load_chip
from meshwise.scoring import Score, runs_of, score_runs, shipped_runs
from meshwise.scoring.rows import read_text
from meshwise.scoring.serving import ServedScore, is_serving, score_served, served_runs_of, shipped_served_runs

#: The word for the rows that come with the package, in place of a file.
SHIPPED = "shipped"
#: The same of serving.
SHIPPED_SERVING = "shipped-serving"


class ScoreRequest(BaseModel):
    """What `meshwise score` is asked."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str = Field(
        description="Measured training runs or serving, as CSV (docs/measurements.md), or 'shipped', "
        "'shipped-serving': those of the package.",
        json_schema_extra={"metavar": "FILE"},
    )
    calibration: str | None = Field(
        default=None,
        description="Achieved rates: fitted (unless given; with the software or the engine that a row names), "
        "operations (each chip's family), none, or a family by name.",
    )
    worst: int = Field(default=5, ge=0, le=1000, description="How many of the worst rows to show.")


def find_score(request: ScoreRequest, progress: Callable[[str], None] = lambda _: None) -> Score | ServedScore:
    """Answer the request: of training runs, or of serving, as the file's columns say.

    Raises:
        MeshwiseError: a file that cannot be read; a calibration that does not exist.
    """
    if request.calibration is not None:
        _check_name(request.calibration)
    training = serving = request.calibration or "fitted"
    if request.file == SHIPPED:
        return score_runs(shipped_runs(), training, progress)
    if request.file == SHIPPED_SERVING:
        return score_served(shipped_served_runs(), serving, progress)
    text = read_text(Path(request.file))
    if is_serving(text):
        return score_served(served_runs_of(text, request.file), serving, progress)
    return score_runs(runs_of(text, request.file), training, progress)


def _check_name(calibration: str) -> None:
    """Refuse a name that neither training nor serving has."""
    word, _, engine = calibration.partition("+")
    if word != "fitted" or engine not in ENGINES:
        find_calibration(calibration, load_chip("h100-sxm"))


def score(
    file: str | os.PathLike[str],
    *,
    calibration: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Score | ServedScore:
    """Predict measured training runs or serving, and compare: what `meshwise score` answers, as values.

    Args:
        file: CSV in a format of docs/measurements.md, "shipped" for the training runs that come with the package, or
            "shipped-serving" for its measurements of serving.
        calibration: achieved rates: "fitted" (unless given), "operations", "none", or a family by name.
        progress: told a line now and then.

    Returns: predictions and refusals with their reasons; `overall.mape` and the errors of groups sum them up.

    Raises:
        MeshwiseError: a file that cannot be read, or whose columns are not those of a format.
    """
    given = {"file": os.fspath(file), "calibration": calibration}
    return find_score(validated(ScoreRequest, given), progress)
