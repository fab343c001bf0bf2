"""Rows of serving priced again under other constants, and their errors under constants fitted without them.

Not here: which constants there are (`constants`), or the fit (`scoring.fitting`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshwise.costs.calibration import Calibration, default_calibration
from meshwise.scoring.fitting import Constant, RepricedRow
from meshwise.scoring.leaving_out import LeavingOutRows, row_weights
from meshwise.scoring.serving.constants import engine_of, serving_constants, start_values
from meshwise.scoring.serving.prediction import ServedPrediction, expected_under

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
