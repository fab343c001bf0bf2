"""The score of a file of measured serving: every row predicted, refused or set aside, each with its reason.

Rows are priced again under constants fitted without them. Not here: words (`report.score_serving`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from meshwise.costs.calibration import Calibration, default_calibration
from meshwise.scoring.fitting import Constant, RepricedRow
from meshwise.scoring.leaving_out import LeavingOutRows, row_weights
from meshwise.scoring.outcomes import Refusal
from meshwise.scoring.rows import UnreadRow
from meshwise.scoring.score import Scored, predict_all
from meshwise.scoring.serving.constants import engine_of, serving_constants, start_values
from meshwise.scoring.serving.prediction import ServedPrediction, expected_under, predict_served
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


#: Rows of one model on one chip under one engine that count as so many independent ones at most.
_ROWS_OF_A_GROUP = 20


@dataclass(frozen=True)
class RepricedServed(RepricedRow):
    """A measured time of serving.

    Args:
        prediction: with its layouts and batches.
    """

    prediction: ServedPrediction

    @property
    def base(self) -> Calibration:
        """As in `RepricedRow`."""
        return self.prediction.setup.problem.calibration

    @property
    def own_family(self) -> str:
        """As in `RepricedRow`."""
        return default_calibration(self.prediction.setup.problem.cluster.chip).name

    def seconds(self, calibration: Calibration) -> float:
        """Expected seconds of what was measured."""
        setup = self.prediction.setup
        other = replace(setup, problem=replace(setup.problem, calibration=calibration))
        return expected_under(other, self.prediction.estimate, self.prediction.compared)

    def depends_on(self, constant: Constant) -> bool:
        """Whether the constant is one of its calibration's, and its model and layout have what it is of."""
        problem, name = self.prediction.setup.problem, constant.name
        weights = problem.load.formats.weights.value
        if name.startswith(("startup", "links")) and self.prediction.estimate.setup.decode.engine_chips == 1:
            return False
        if name == "experts" and not problem.model.mixtures:
            return False
        if name in ("weights.int8", "weights.int4", "weights.fp4") and name != f"weights.{weights}":
            return False
        return super().depends_on(constant)


class ServedLeavingOut(LeavingOutRows[ServedPrediction]):
    """Rows of serving, fitted to many choices of them.

    Args:
        rows: predictions of times under "fitted".
        progress: told a line now and then.
    """

    def __init__(self, rows: Sequence[ServedPrediction], progress: Callable[[str], None] = lambda _: None) -> None:
        groups = [f"{engine_of(p.setup.problem.calibration)} {p.run.chip} {p.run.model}" for p in rows]
        weights = row_weights(groups, _ROWS_OF_A_GROUP)
        priced = [RepricedServed(p) for p in rows]
        super().__init__(rows, priced, serving_constants(), weights, start_values(), progress)
