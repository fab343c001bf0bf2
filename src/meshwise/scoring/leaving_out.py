"""Errors of rows under constants that were fitted without them: a source, a chip or a model left out at a time.

Priors are of single operations and say nothing of the rows. Not here: the fit (`fitting`), or tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np

from meshwise.costs.calibration import default_calibration
from meshwise.costs.spread import Likely
from meshwise.scoring.fitting import (
    Constant,
    Fit,
    Repriced,
    RepricedRow,
    Sensitivities,
    all_constants,
    fit,
    sensitivities,
)
from meshwise.scoring.prediction import Prediction
from meshwise.scoring.statistics import AnyPredicted

#: Points at which slopes are taken: at the priors, then where these lead.
_ROUNDS = 2

#: Rows of one group that count as so many independent ones at most: they share what they are off by.
_ROWS_OF_A_GROUP = 12

P = TypeVar("P", bound=AnyPredicted)


def row_weights(groups: Sequence[str], most: int = _ROWS_OF_A_GROUP) -> np.ndarray:
    """What each row counts in a fit: a group with many rows counts as a dozen, or `most`.

    >>> row_weights(["a", *["b"] * 24])[:2].tolist()
    [1.0, 0.5]
    """
    numbers = Counter(groups)
    return np.array([min(1.0, most / numbers[g]) for g in groups])


class LeavingOutRows(Generic[P]):
    """Rows, and how each one's time depends on every constant: worked out once, fitted to many choices of rows.

    Args:
        rows: predictions of times.
        priced: the same as rows that can be priced again.
        constants: that are fitted.
        weights: [rows] what each one counts.
        start: values near which slopes are taken first; the priors where there are none.
        progress: told a line now and then.
    """

    def __init__(  # noqa: PLR0917 -- rows, then what is fitted to them
        self,
        rows: Sequence[P],
        priced: Sequence[RepricedRow],
        constants: Sequence[Constant],
        weights: np.ndarray,
        start: Mapping[str, float] | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.rows = tuple(rows)
        self.constants = tuple(constants)
        self.measured = np.array([p.measured for p in self.rows])
        self.weights = weights
        at: dict[str, float] = {c.name: c.prior for c in self.constants} | dict(start or {})
        for _ in range(1 if start else _ROUNDS):  # slopes hold near where they were taken
            self.points = sensitivities(priced, self.constants, at, progress)
            at = dict(self.fitted_to(np.ones(len(self.rows), dtype=bool)).values)

    def fitted_to(self, chosen: np.ndarray) -> Fit:
        """The constants that some rows make most likely; `chosen` is [rows] true or false."""
        points = Sensitivities(self.points.at, self.points.seconds[chosen], self.points.slopes[chosen])
        return fit(self.constants, points, self.measured[chosen], self.weights[chosen])

    def expected(self, values: Fit) -> np.ndarray:
        """[rows] seconds under fitted constants, by the rows' slopes."""
        change = [np.log(values.values[c.name] / self.points.at[c.name]) for c in self.constants]
        return np.asarray(self.points.seconds * np.exp(self.points.slopes @ change))

    def leave_out(self, key: Callable[[P], str]) -> tuple[P, ...]:
        """Predict each row from the rows of other keys alone; intervals keep their relative widths."""
        keys = np.array([key(p) for p in self.rows])
        expected = np.zeros(len(keys))
        for own in dict.fromkeys(keys.tolist()):
            out = keys == own
            expected[out] = self.expected(self.fitted_to(~out))[out]
        return tuple(_moved(p, float(e)) for p, e in zip(self.rows, expected, strict=True))


class LeavingOut(LeavingOutRows[Prediction]):
    """Training runs, fitted to many choices of them.

    Args:
        rows: predictions of steps.
        progress: told a line now and then.
    """

    def __init__(self, rows: Sequence[Prediction], progress: Callable[[str], None] = lambda _: None) -> None:
        priced = [Repriced(p, default_calibration(p.setup.problem.cluster.chip).name) for p in rows]
        weights = row_weights([p.run.source for p in rows])
        super().__init__(rows, priced, all_constants(), weights, progress=progress)


def _moved(p: P, expected: float) -> P:
    assert p.likely is not None
    width = p.likely.high / p.expected
    return replace(p, expected=expected, likely=Likely(max(expected / width, min(p.bound, expected)), expected * width))
