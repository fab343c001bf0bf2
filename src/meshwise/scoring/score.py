"""The score of a file of measurements: every row predicted or refused, and what the predictions are worth.

Not here: words and pictures (`report.score`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files

from meshwise.scoring.prediction import Prediction, Refusal, predict
from meshwise.scoring.reading import MeasuredRun, runs_of
from meshwise.scoring.statistics import Errors, Ranking, by, errors_of, macro, ranking_of

__all__ = ["Score", "score_runs", "shipped_runs"]


@dataclass(frozen=True)
class Score:
    """Predictions beside measurements.

    Args:
        predictions, refusals: of the rows that count, in their order.
        not_counted: rows that repeat a number of another row in other units.
        calibration: as asked.
    """

    predictions: tuple[Prediction, ...]
    refusals: tuple[Refusal, ...]
    not_counted: int
    calibration: str

    @property
    def rows(self) -> int:
        """Rows that count."""
        return len(self.predictions) + len(self.refusals)

    @cached_property
    def times(self) -> tuple[Prediction, ...]:
        """Predictions of a step's time."""
        return tuple(p for p in self.predictions if not p.run.is_memory)

    @cached_property
    def overall(self) -> Errors | None:
        """Errors of all times; None where there are none."""
        return errors_of(self.times)

    @cached_property
    def by_source(self) -> dict[str, Errors]:
        """Errors of times, by source."""
        return by(self.times, lambda p: p.run.source or "not named")

    @cached_property
    def by_chip(self) -> dict[str, Errors]:
        """Errors of times, by chip."""
        return by(self.times, lambda p: p.setup.problem.cluster.chip.name)

    @cached_property
    def by_family(self) -> dict[str, Errors]:
        """Errors of times, by family of models."""
        return by(self.times, lambda p: p.family)

    @cached_property
    def by_kind(self) -> dict[str, Errors]:
        """Errors of times of dense models and of mixtures."""
        return by(self.times, lambda p: "mixtures" if p.setup.model.mixtures else "dense")

    @property
    def macro_mape(self) -> float | None:
        """Mean over sources of their mean absolute errors."""
        return macro(self.by_source)

    @cached_property
    def ranking(self) -> Ranking:
        """Pairs of layouts."""
        return ranking_of(self.times)

    @property
    def false_oom(self) -> tuple[Prediction, ...]:
        """Runs that ran and are said not to fit."""
        return tuple(p for p in self.predictions if p.false_oom)

    def memory(self, metric: str) -> tuple[Prediction, ...]:
        """Predictions of one kind of memory."""
        return tuple(p for p in self.predictions if p.run.measured_metric == metric)

    @property
    def memory_mape(self) -> float | None:
        """Mean absolute error of memory that was needed; what tools show as reserved is left out."""
        needed = [abs(p.error) for p in self.predictions if p.run.is_memory and p.run.measured_metric != "gpu_memory"]
        return statistics.fmean(needed) if needed else None

    def worst(self, number: int) -> tuple[Prediction, ...]:
        """Times with the largest errors, worst first."""
        return tuple(sorted(self.times, key=lambda p: -abs(p.error))[:number])


def score_runs(
    runs: Sequence[MeasuredRun], calibration: str = "fitted", progress: Callable[[str], None] = lambda _: None
) -> Score:
    """Predict every row that counts."""
    counted = [run for run in runs if run.counts]
    found: list[Prediction | Refusal] = []
    for number, run in enumerate(counted, 1):
        progress(f"{number:,} of {len(counted):,} rows")
        found.append(predict(run, calibration))
    return Score(
        tuple(f for f in found if isinstance(f, Prediction)),
        tuple(f for f in found if isinstance(f, Refusal)),
        len(runs) - len(counted),
        calibration,
    )


def shipped_runs() -> tuple[MeasuredRun, ...]:
    """Published training runs that come with the package, each with its source."""
    text = (files("meshwise.scoring") / "data" / "training.csv").read_text(encoding="utf-8")
    return runs_of(text, "training.csv")
