"""Errors of rows under constants that were fitted without them: a source, or a chip, left out at a time.

Priors are of single operations and say nothing of the rows. Not here: the fit (`fitting`), or tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from meshwise.costs.calibration import default_calibration
from meshwise.costs.spread import Likely
from meshwise.scoring.constants import all_constants
from meshwise.scoring.fitting import Fit, Repriced, Sensitivities, fit, sensitivities
from meshwise.scoring.prediction import Prediction

__all__ = ["LeavingOut", "row_weights"]

#: Points at which slopes are taken: at the priors, then where these lead.
_ROUNDS = 2

#: Rows of one source that count as so many independent ones at most: they share what they are off by.
_ROWS_OF_A_SOURCE = 12


def row_weights(sources: Sequence[str]) -> np.ndarray:
    """What each row counts in a fit: a source with many rows counts as a dozen.

    >>> row_weights(["a", *["b"] * 24])[:2].tolist()
    [1.0, 0.5]
    """
    numbers = Counter(sources)
    return np.array([min(1.0, _ROWS_OF_A_SOURCE / numbers[s]) for s in sources])


class LeavingOut:
    """Rows, and how each one's step depends on every constant: worked out once, fitted to many choices of rows.

    Args:
        rows: predictions of times.
        progress: told a line now and then.
    """

    def __init__(self, rows: Sequence[Prediction], progress: Callable[[str], None] = lambda _: None) -> None:
        self.rows = tuple(rows)
        self.constants = all_constants()
        priced = [Repriced(p, default_calibration(p.setup.problem.cluster.chip).name) for p in self.rows]
        self.measured = np.array([p.measured for p in self.rows])
        self.weights = row_weights([p.run.source for p in self.rows])
        at: dict[str, float] = {c.name: c.prior for c in self.constants}
        for _ in range(_ROUNDS):  # slopes hold near where they were taken
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

    def leave_out(self, key: Callable[[Prediction], str]) -> tuple[Prediction, ...]:
        """Predict each row from the rows of other keys alone; intervals keep their relative widths."""
        keys = np.array([key(p) for p in self.rows])
        expected = np.zeros(len(keys))
        for own in dict.fromkeys(keys.tolist()):
            out = keys == own
            expected[out] = self.expected(self.fitted_to(~out))[out]
        return tuple(_moved(p, float(e)) for p, e in zip(self.rows, expected, strict=True))


def _moved(p: Prediction, expected: float) -> Prediction:
    assert p.likely is not None
    width = p.likely.high / p.expected
    return replace(p, expected=expected, likely=Likely(max(expected / width, min(p.bound, expected)), expected * width))
