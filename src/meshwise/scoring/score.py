"""The score of a file of measurements: each row predicted or refused, and what all say together.

Not here: words and pictures (`report.score`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.resources import files
from typing import Any, Generic, TypeVar

from meshwise.scoring.outcomes import Refusal
from meshwise.scoring.prediction import Prediction, predict
from meshwise.scoring.rows import MeasuredRun, Row, UnreadRow, all_read, runs_of
from meshwise.scoring.statistics import AnyPredicted, Errors, Ranking, by, errors_of, macro, ranking_of

P = TypeVar("P", bound=AnyPredicted)
R = TypeVar("R", bound=Row)


@dataclass(frozen=True)
class Scored(Generic[P]):
    """Predictions beside measurements.

    Args:
        predictions, refusals: of the rows that count, in their order.
    """

    predictions: tuple[P, ...]
    refusals: tuple[Refusal[Any], ...]

    @property
    def rows(self) -> int:
        """Rows that count."""
        return len(self.predictions) + len(self.refusals)

    @cached_property
    def times(self) -> tuple[P, ...]:
        """Predictions of times."""
        return tuple(p for p in self.predictions if not p.run.is_memory)

    @cached_property
    def overall(self) -> Errors | None:
        """Errors of all times; None where there are none."""
        return errors_of(self.times)

    @property
    def keys(self) -> dict[str, Callable[[P], str]]:
        """What times are grouped by."""
        return {"source": source_of, "chip": lambda p: p.chip, "family": lambda p: p.family, "kind": lambda p: p.kind}

    @cached_property
    def groups(self) -> dict[str, dict[str, Errors]]:
        """Errors of times, by each of `keys`."""
        return {name: by(self.times, key) for name, key in self.keys.items()}

    @property
    def by_source(self) -> dict[str, Errors]:
        """Errors of times, by source."""
        return self.groups["source"]

    @property
    def macro_mape(self) -> float | None:
        """Mean over sources of their mean absolute errors."""
        return macro(self.by_source)

    @property
    def false_oom(self) -> tuple[P, ...]:
        """Rows that ran and are said not to fit."""
        return tuple(p for p in self.predictions if p.false_oom)

    @property
    def memory_metrics(self) -> dict[str, tuple[P, ...]]:
        """Predictions of memory by metric, in the order of the metrics."""
        found = [p for p in self.predictions if p.run.is_memory]
        names = list(found[0].run.METRICS) if found else []
        metrics = {name: tuple(p for p in found if p.run.measured_metric == name) for name in names}
        return {name: rows for name, rows in metrics.items() if rows}

    @property
    def memory_mape(self) -> float | None:
        """Mean absolute error of memory that was needed; what tools show as reserved is left out."""
        needed = [abs(p.error) for m, rows in self.memory_metrics.items() if m != "gpu_memory" for p in rows]
        return statistics.fmean(needed) if needed else None

    def worst(self, number: int) -> tuple[P, ...]:
        """Times with the largest errors, worst first."""
        return tuple(sorted(self.times, key=lambda p: -abs(p.error))[:number])


def source_of(p: AnyPredicted) -> str:
    """Name who measured."""
    return p.run.source or "not named"


def predict_all(
    runs: Sequence[R | UnreadRow], predict: Callable[[R], P | Refusal[R]], progress: Callable[[str], None]
) -> tuple[tuple[P, ...], tuple[Refusal[R | UnreadRow], ...]]:
    """Predict every row that counts.

    Args:
        runs: rows, of which some may not count, and some could not be read.
        predict: one row.
        progress: told a line for each.

    Returns: predictions and refusals.
    """
    counted = [run for run in runs if isinstance(run, UnreadRow) or run.counts]
    predictions: list[P] = []
    refusals: list[Refusal[R | UnreadRow]] = []
    for number, run in enumerate(counted, 1):
        progress(f"scoring: {number:,} of {len(counted):,} rows")
        found = Refusal(run, run.reason) if isinstance(run, UnreadRow) else predict(run)
        if isinstance(found, Refusal):
            refusals.append(found)
        else:
            predictions.append(found)
    return tuple(predictions), tuple(refusals)


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
