"""The score of a file of measured serving: every row predicted, refused or set aside, each with its reason.

Not here: words (`report.score_serving`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwise.scoring.serving.prediction import ServedPrediction, ServedRefusal, predict_served
from meshwise.scoring.serving.reading import ServedRun
from meshwise.scoring.statistics import Errors, by, errors_of, macro

__all__ = ["ServedScore", "score_served"]


@dataclass(frozen=True)
class ServedScore:
    """Predictions beside measurements.

    Args:
        predictions, refusals: of the rows that count, in their order.
        set_aside: rows that repeat another row in other units or are no independent number, with the reason.
        calibration: as asked.
    """

    predictions: tuple[ServedPrediction, ...]
    refusals: tuple[ServedRefusal, ...]
    set_aside: tuple[ServedRefusal, ...]
    calibration: str

    @property
    def rows(self) -> int:
        """Rows that count."""
        return len(self.predictions) + len(self.refusals)

    @cached_property
    def times(self) -> tuple[ServedPrediction, ...]:
        """Predictions of times."""
        return tuple(p for p in self.predictions if not p.run.is_memory)

    @cached_property
    def overall(self) -> Errors | None:
        """Errors of all times; None where there are none."""
        return errors_of(self.times)

    @cached_property
    def groups(self) -> dict[str, dict[str, Errors]]:
        """Errors of times by source, chip, family of models, kind, phase and engine."""
        return {
            "source": by(self.times, lambda p: p.run.source or "not named"),
            "chip": by(self.times, lambda p: p.setup.problem.cluster.chip.name),
            "family": by(self.times, lambda p: p.family),
            "kind": by(self.times, lambda p: "mixtures" if p.setup.model.mixtures else "dense"),
            "phase": by(self.times, lambda p: p.run.steps),
            "engine": by(self.times, lambda p: p.run.engine.split()[0] if p.run.engine else "not named"),
        }

    @property
    def macro_mape(self) -> float | None:
        """Mean over sources of their mean absolute errors."""
        return macro(self.groups["source"])

    @property
    def memory(self) -> tuple[ServedPrediction, ...]:
        """Predictions of memory."""
        return tuple(p for p in self.predictions if p.run.is_memory)

    @property
    def memory_mape(self) -> float | None:
        """Mean absolute error of memory."""
        return statistics.fmean(abs(p.error) for p in self.memory) if self.memory else None

    @property
    def false_oom(self) -> tuple[ServedPrediction, ...]:
        """Runs that ran and are said not to fit."""
        return tuple(p for p in self.predictions if p.false_oom)

    def worst(self, number: int) -> tuple[ServedPrediction, ...]:
        """Times with the largest errors, worst first."""
        return tuple(sorted(self.times, key=lambda p: -abs(p.error))[:number])


def score_served(
    runs: Sequence[ServedRun], calibration: str = "default", progress: Callable[[str], None] = lambda _: None
) -> ServedScore:
    """Predict every row that counts, and say of every other why it does not."""
    counted = [run for run in runs if run.counts]
    found: list[ServedPrediction | ServedRefusal] = []
    for number, run in enumerate(counted, 1):
        progress(f"{number:,} of {len(counted):,} rows")
        found.append(predict_served(run, calibration))
    return ServedScore(
        tuple(f for f in found if isinstance(f, ServedPrediction)),
        tuple(f for f in found if isinstance(f, ServedRefusal)),
        tuple(ServedRefusal(run, _why_aside(run)) for run in runs if not run.counts),
        calibration,
    )


def _why_aside(run: ServedRun) -> str:
    if "queue" in run.phase:
        return "primary is no: a time that includes queueing, of a run whose other row counts"
    return f"primary is no: {run.measured_metric} of a run whose other row counts"
