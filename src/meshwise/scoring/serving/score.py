"""The score of a file of measured serving: every row predicted, refused or set aside, each with its reason.

Not here: words (`report.score_serving`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from meshwise.scoring.outcomes import Refusal
from meshwise.scoring.rows import UnreadRow
from meshwise.scoring.scored import Scored, predict_all
from meshwise.scoring.serving.prediction import ServedPrediction, predict_served
from meshwise.scoring.serving.reading import ServedRun


@dataclass(frozen=True)
class ServedScore(Scored[ServedPrediction]):
    """Predictions beside measurements of serving.

    Args:
        set_aside: rows that repeat another row in other units or are no independent number, with the reason.
        calibration: as asked.
    """

    set_aside: tuple[Refusal[ServedRun], ...]
    calibration: str

    @property
    def keys(self) -> dict[str, Callable[[ServedPrediction], str]]:
        """As of training, and phase and engine."""
        return {
            **super().keys,
            "phase": lambda p: p.run.steps,
            "engine": lambda p: p.run.engine.split()[0] if p.run.engine else "not named",
        }


def score_served(
    runs: Sequence[ServedRun | UnreadRow],
    calibration: str = "fitted",
    progress: Callable[[str], None] = lambda _: None,
) -> ServedScore:
    """Predict every row that counts, and say of every other why it does not."""
    predictions, refusals = predict_all(runs, partial(predict_served, calibration=calibration), progress)
    aside = tuple(Refusal(run, _why_aside(run)) for run in runs if isinstance(run, ServedRun) and not run.counts)
    return ServedScore(predictions, refusals, aside, calibration)


def _why_aside(run: ServedRun) -> str:
    if "queue" in run.phase:
        return "primary is no: a time that includes queueing, of a run whose other row counts"
    return f"primary is no: {run.measured_metric} of a run whose other row counts"
