"""`score`: predictions against measurements. Not here: predicting rows (`scoring`), flags (`cli`), words (`report`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from meshwise.costs.fitted import find_calibration
from meshwise.hardware import load_chip
from meshwise.scoring import Score, read_runs, score_runs, shipped_runs
from meshwise.verbs.requests import validated

__all__ = ["SHIPPED", "ScoreRequest", "find_score", "score"]

#: The word for the rows that come with the package, in place of a file.
SHIPPED = "shipped"


class ScoreRequest(BaseModel):
    """What `meshwise score` is asked."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str = Field(
        description="Measured training runs, as CSV (docs/measurements.md), or 'shipped': those of the package.",
        json_schema_extra={"metavar": "FILE"},
    )
    calibration: str = Field(
        default="fitted",
        description="Achieved rates: fitted (with the software that a row names), default (each chip's family), none, "
        "or a family by name.",
    )
    worst: int = Field(default=5, ge=0, le=1000, description="How many of the worst rows to show.")


def find_score(request: ScoreRequest, progress: Callable[[str], None] = lambda _: None) -> Score:
    """Answer the request.

    Raises:
        MeshwiseError: a file that cannot be read; a calibration that does not exist.
    """
    find_calibration(request.calibration, load_chip("h100-sxm"))  # checks the name
    runs = shipped_runs() if request.file == SHIPPED else read_runs(Path(request.file))
    return score_runs(runs, request.calibration, progress)


def score(
    file: str | os.PathLike[str],
    *,
    calibration: str = "fitted",
    progress: Callable[[str], None] = lambda _: None,
) -> Score:
    """Predict measured training runs, and compare: what `meshwise score` answers, as values.

    Args:
        file: CSV in the format of docs/measurements.md, or "shipped" for the runs that come with the package.
        calibration: achieved rates: "fitted", "default", "none", or a family by name.
        progress: told a line now and then.

    Returns: predictions and refusals with their reasons; `overall.mape`, `by_source`, `ranking` sum them up.

    Raises:
        MeshwiseError: a file that cannot be read, with the line and the column.
    """
    given = {"file": os.fspath(file), "calibration": calibration}
    return find_score(validated(ScoreRequest, given), progress)
