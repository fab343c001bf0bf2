"""The score of a file of measured training runs. Not here: words and pictures (`report.score`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.resources import files

from meshwise.scoring.prediction import Prediction, predict
from meshwise.scoring.reading import MeasuredRun, runs_of
from meshwise.scoring.rows import UnreadRow, all_read
from meshwise.scoring.scored import Scored, predict_all
from meshwise.scoring.statistics import Ranking, ranking_of


@dataclass(frozen=True)
class Score(Scored[Prediction]):
    """Predictions beside measurements of training.

    Args:
        not_counted: rows that repeat a number of another row in other units.
        calibration: as asked.
    """

    not_counted: int
    calibration: str

    @cached_property
    def ranking(self) -> Ranking:
        """Pairs of layouts."""
        return ranking_of(self.times)


def score_runs(
    runs: Sequence[MeasuredRun | UnreadRow],
    calibration: str = "fitted",
    progress: Callable[[str], None] = lambda _: None,
) -> Score:
    """Predict every row that counts."""
    predictions, refusals = predict_all(runs, partial(predict, calibration=calibration), progress)
    return Score(predictions, refusals, len(runs) - len(predictions) - len(refusals), calibration)


def shipped_runs() -> tuple[MeasuredRun, ...]:
    """Published training runs that come with the package, each with its source."""
    text = (files("meshwise.scoring") / "data" / "training.csv").read_text(encoding="utf-8")
    return all_read(runs_of(text, "training.csv"))
