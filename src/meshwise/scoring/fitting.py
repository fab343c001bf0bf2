"""Constants fitted to measured times, in logarithms and with priors from elsewhere; errors of rows left out of a fit.

A row is priced again in milliseconds when only constants change: its model, layout and axis mapping stay. Not here:
which constants are fitted (`constants`), or what rows mean (`training_scenario`, `serving_scenario`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from meshwise.costs.calibration import Calibration
from meshwise.costs.spread import Likely
from meshwise.scoring.constants import Constant, all_constants, engine_of, serving_constants, start_values
from meshwise.scoring.prediction import Prediction

P = TypeVar("P", bound=Prediction)

#: Errors of the logarithm beyond which a row pulls no harder: rows are off for reasons of their own.
_HUBER = 0.10

#: What a row is off by even under the right constants (`spread.SPREADS`, software).
_NOISE = 0.09

#: Step of a constant's logarithm by which sensitivities are taken.
_STEP = 0.05

_ROUNDS = 30

#: Points at which slopes are taken: at the priors, then where these lead.
_POINTS = 2

#: Precision that keeps a constant where it is.
_FIXED = 1e8


@dataclass(frozen=True)
class Sensitivities:
    """Logarithms of seconds at one point, and what they change by with the logarithm of each constant.

    Args:
        at: values of the constants there.
        seconds: [rows] expected.
        slopes: [rows, constants].
    """

    at: Mapping[str, float]
    seconds: np.ndarray
    slopes: np.ndarray


@dataclass(frozen=True)
class Fit:
    """Fitted constants.

    Args:
        values: by name; a constant that no row depends on keeps its prior.
        spreads: standard deviation of each one's logarithm that rows and prior leave.
    """

    values: Mapping[str, float]
    spreads: Mapping[str, float]


def sensitivities(
    rows: Sequence[Prediction],
    constants: Sequence[Constant],
    at: Mapping[str, float],
    progress: Callable[[str], None] = lambda _: None,
) -> Sensitivities:
    """Price all rows at a point, and beside it along each constant that they depend on."""
    seconds = np.array([_seconds(row, constants, at) for row in rows])
    slopes = np.zeros((len(rows), len(constants)))
    for j, c in enumerate(constants):
        progress(f"constant {j + 1} of {len(constants)}: {c.name}")
        up = {**at, c.name: at[c.name] * float(np.exp(_STEP))}
        down = {**at, c.name: at[c.name] * float(np.exp(-_STEP))}
        for i, row in enumerate(rows):
            if row.depends_on(c):
                high, low = (_seconds(row, constants, values) for values in (up, down))
                slopes[i, j] = np.log(high / low) / (2 * _STEP)
    return Sensitivities(dict(at), seconds, slopes)


def with_constants(p: Prediction, constants: Sequence[Constant], values: Mapping[str, float]) -> Calibration:
    """A row's calibration with other values of the constants that apply to it."""
    found = p.calibration
    for c in constants:
        if c.name in values and p.depends_on(c):
            found = c.put(found, c.clipped(values[c.name]))
    return found


def _seconds(p: Prediction, constants: Sequence[Constant], values: Mapping[str, float]) -> float:
    return p.seconds_under(with_constants(p, constants, values))


def fit(
    constants: Sequence[Constant], points: Sensitivities, measured: np.ndarray, weights: np.ndarray | None = None
) -> Fit:
    """Find the constants that are most likely by rows and priors, rows far off counting less (Huber).

    Args:
        constants: as `points` has them.
        points: of the rows that are fitted, [rows, constants].
        measured: [rows] seconds.
        weights: [rows] how many independent measurements a row is worth; 1 by default.
    """
    weights = np.ones(len(measured)) if weights is None else weights
    start = np.log([points.at[c.name] for c in constants])
    prior, precision = np.log([c.prior for c in constants]), 1 / np.array([c.spread for c in constants]) ** 2
    residual = np.log(points.seconds) - np.log(measured)
    shift = np.zeros(len(constants))
    information = np.diag(precision)
    for _ in range(_ROUNDS):
        off = np.abs(residual + points.slopes @ shift)
        pull = weights * np.minimum(1.0, _HUBER / np.maximum(off, 1e-12)) / _NOISE**2
        information = points.slopes.T @ (pull[:, None] * points.slopes) + np.diag(precision)
        wanted = -points.slopes.T @ (pull * residual) + precision * (prior - start)
        shift = np.linalg.solve(information, wanted)
        for j, c in enumerate(constants):  # what cannot be stays at its limit, and the others make up for it
            value = float(np.exp(start[j] + shift[j]))
            if value != c.clipped(value) and precision[j] < _FIXED:
                prior[j], precision[j] = np.log(c.clipped(value)), _FIXED
    left = np.sqrt(np.diag(np.linalg.inv(information)))
    values = {c.name: c.clipped(float(np.exp(v))) for c, v in zip(constants, start + shift, strict=True)}
    return Fit(values, {c.name: float(s) for c, s in zip(constants, left, strict=True)})


@dataclass(frozen=True)
class FittedRows(Generic[P]):
    """Rows, and how each one's time depends on every constant: worked out once, fitted to many choices of rows.

    Args:
        rows: predictions of times.
        constants: that are fitted.
        points: of the rows and constants.
        weights: [rows] what each one counts.
    """

    rows: tuple[P, ...]
    constants: tuple[Constant, ...]
    points: Sensitivities
    weights: np.ndarray

    def fitted_to(self, chosen: np.ndarray | None = None) -> Fit:
        """The constants that some rows make most likely; `chosen` is [rows] true or false, None for all."""
        chosen = np.ones(len(self.rows), dtype=bool) if chosen is None else chosen
        points = Sensitivities(self.points.at, self.points.seconds[chosen], self.points.slopes[chosen])
        measured = np.array([p.measured for p in self.rows])
        return fit(self.constants, points, measured[chosen], self.weights[chosen])

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


def training_fit(rows: Sequence[P], progress: Callable[[str], None] = lambda _: None) -> FittedRows[P]:
    """Prepare measured training steps for fits; rows of one source share their errors, and count as 12 at most."""
    weights = _row_weights([p.run.source for p in rows], 12)
    constants = all_constants()
    at = {c.name: c.prior for c in constants}
    for _ in range(_POINTS):  # slopes hold near where they were taken
        found = FittedRows(tuple(rows), constants, sensitivities(rows, constants, at, progress), weights)
        at = dict(found.fitted_to().values)
    return found


def serving_fit(rows: Sequence[P], progress: Callable[[str], None] = lambda _: None) -> FittedRows[P]:
    """Prepare measured times of serving for fits; rows of one model, chip and engine count as 20 at most."""
    weights = _row_weights([f"{engine_of(p.calibration)} {p.run.chip} {p.run.model}" for p in rows], 20)
    constants = serving_constants()
    return FittedRows(tuple(rows), constants, sensitivities(rows, constants, start_values(), progress), weights)


def _row_weights(groups: Sequence[str], most: int) -> np.ndarray:
    """What each row counts in a fit: the rows of one group count as `most` at most.

    >>> _row_weights(["a", *["b"] * 24], 12)[:2].tolist()
    [1.0, 0.5]
    """
    numbers = Counter(groups)
    return np.array([min(1.0, most / numbers[g]) for g in groups])


def _moved(p: P, expected: float) -> P:
    assert p.likely is not None
    width = p.likely.high / p.expected
    return replace(p, expected=expected, likely=Likely(max(expected / width, min(p.bound, expected)), expected * width))
