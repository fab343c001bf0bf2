"""`score`: predictions against measurements. Not here: predicting rows (`scoring`), words (`report`)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pydantic import Field

from meshwise.commands.command import Screen, Tell, command, silent, verb
from meshwise.commands.plan_files import write_file
from meshwise.commands.requests import File, Request
from meshwise.core.explanation import Answer
from meshwise.costs.calibration_files import is_file_name, read_calibration_file
from meshwise.costs.engines import ENGINES
from meshwise.costs.fitted import find_calibration
from meshwise.hardware import load_chip
from meshwise.report.score import score_report, scored_svg, served_report
from meshwise.scoring import (
    ServingRun,
    ServingScore,
    TrainingRun,
    TrainingScore,
    is_serving,
    read_rows,
    read_text,
    score_serving,
    score_training,
    shipped_rows,
)

#: The word for the rows that come with the package, in place of a file.
SHIPPED = "shipped"
#: The same of serving.
SHIPPED_SERVING = "shipped-serving"


class ScoreRequest(Request):
    """What `meshwise score` is asked."""

    positional = ("file",)

    file: File
    """Measured training runs or serving, as CSV (docs/measurements.md), or 'shipped', 'shipped-serving': the package's
    own."""
    calibration: str | None = None
    """Achieved rates: fitted (the default, with the row's software or engine), operations (each chip's family), none,
    or a family by name."""


@command(ScoreRequest)
def score(request: ScoreRequest, *, progress: Tell = silent) -> TrainingScore | ServingScore:
    """Predict measured training runs or serving, and compare: what `meshwise score` answers, as values.

    Args:
        progress: told a line now and then.

    Returns: predictions and refusals with their reasons; `overall.mape` and the errors of groups sum them up.

    Raises:
        MeshwiseError: a file that cannot be read, or whose columns are not those of a format.
    """
    calibration = request.calibration or "fitted"
    word, _, engine = calibration.partition("+")
    if is_file_name(calibration):
        read_calibration_file(Path(calibration))  # refuses what is none; of which rows it is, these say
    elif word != "fitted" or engine not in ENGINES:  # refuses a name that neither training nor serving has
        find_calibration(calibration, load_chip("h100-sxm"))
    if request.file == SHIPPED:
        return score_training(shipped_rows(TrainingRun), calibration, progress)
    if request.file == SHIPPED_SERVING:
        return score_serving(shipped_rows(ServingRun), calibration, progress)
    text = read_text(Path(request.file))
    if is_serving(text):
        return score_serving(read_rows(text, request.file, ServingRun), calibration, progress)
    return score_training(read_rows(text, request.file, TrainingRun), calibration, progress)


class _Shown(Request):
    worst: int = Field(default=5, ge=0, le=1000)
    """How many of the worst rows to show."""
    svg: Path | None = None
    """Write predicted against measured to this file."""


Answer.reports[TrainingScore] = lambda score: score_report(score, {})
Answer.reports[ServingScore] = lambda score: served_report(score, {})


@verb(ScoreRequest, _Shown)
def show_score(screen: Screen, request: ScoreRequest, shown: _Shown) -> None:
    """Compare predictions with measured training runs, or with measured serving.

    FILE has one measurement a row, in the columns of docs/measurements.md; 'shipped' stands for the published training
    runs that come with the package, 'shipped-serving' for its measurements of serving. Every row is predicted, or
    refused with its reason. Errors are predicted / measured - 1.

    \b
      meshwise score runs.csv
      meshwise score shipped --worst 20 --svg accuracy.svg
      meshwise score shipped-serving
    """  # noqa: D301  (click's mark for lines that stay as they are)
    found = score.answer(request, progress=screen.progress)
    inputs = request.echo() | shown.echo() | {"calibration": found.calibration}
    if isinstance(found, TrainingScore):
        write_file("--svg", shown.svg, partial(scored_svg, found, "step"))
        screen.show(score_report(found, inputs, worst=shown.worst))
    else:
        write_file("--svg", shown.svg, partial(scored_svg, found, "time"))
        screen.show(served_report(found, inputs, worst=shown.worst))
