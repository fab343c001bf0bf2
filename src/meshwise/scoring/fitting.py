"""Constants fitted to measured steps: a regularised fit in logarithms, each constant with a prior from elsewhere.

A row is priced again in milliseconds when only constants change: its model, layout and wires stay. Not here: which
constants there are (`constants`), or what rows mean (`setup`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwise.costs.calibration import Calibration
from meshwise.costs.estimate import evaluate_layout
from meshwise.costs.fabric import Fabric
from meshwise.scoring.prediction import Prediction

#: Errors of the logarithm beyond which a row pulls no harder: rows are off for reasons of their own.
_HUBER = 0.10

#: What a row is off by even under the right constants (`spread.SPREADS`, software).
_NOISE = 0.09

#: Step of a constant's logarithm by which sensitivities are taken.
_STEP = 0.05

_ROUNDS = 30

#: Precision that keeps a constant where it is.
_FIXED = 1e8


@dataclass(frozen=True)
class Constant:
    """One number that many rows share.

    Args:
        name: what it is called in tables and files.
        unit: in words.
        prior: its value by what is known without whole steps, and `spread` the standard deviation of its logarithm.
        source: of the prior.
        applies: whether a calibration, of a family, depends on it.
        read: its value in a calibration.
        put: gives a calibration with another value of it.
        least, most: no value is smaller, or larger.
    """

    name: str
    unit: str
    prior: float
    spread: float
    source: str
    applies: Callable[[Calibration, str], bool]
    read: Callable[[Calibration], float]
    put: Callable[[Calibration, float], Calibration]
    most: float = float("inf")
    least: float = 0.0

    def clipped(self, value: float) -> float:
        """The value, or the nearest that can be."""
        return min(max(value, self.least), self.most)


class RepricedRow(ABC):
    """A measured time whose model, layout and wires stay while constants change."""

    @property
    @abstractmethod
    def base(self) -> Calibration:
        """The calibration that it was predicted with."""

    @property
    @abstractmethod
    def own_family(self) -> str:
        """Family of its chip."""

    @abstractmethod
    def seconds(self, calibration: Calibration) -> float:
        """Expected seconds of what was measured."""

    def calibration(self, constants: Sequence[Constant], values: Mapping[str, float]) -> Calibration:
        """The row's calibration with other constants, of those that apply to it."""
        found = self.base
        for c in constants:
            if c.name in values and self.depends_on(c):
                found = c.put(found, c.clipped(values[c.name]))
        return found

    def depends_on(self, constant: Constant) -> bool:
        """Whether the constant is one of its calibration's."""
        return constant.applies(self.base, self.own_family)


@dataclass(frozen=True)
class Repriced(RepricedRow):
    """A measured training step.

    Args:
        prediction: with its layout.
        family: of its chip.
    """

    prediction: Prediction
    family: str

    @property
    def base(self) -> Calibration:
        """As in `RepricedRow`."""
        return self.prediction.setup.problem.calibration

    @property
    def own_family(self) -> str:
        """As in `RepricedRow`."""
        return self.family

    def seconds(self, calibration: Calibration) -> float:
        """Expected seconds of the step."""
        problem = replace(self.prediction.setup.problem, calibration=calibration)
        fabric = Fabric.of(problem.cluster, flat_rings=calibration.flat_rings)
        return float(evaluate_layout(problem, fabric, self.prediction.layout).step.expected)


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
    rows: Sequence[RepricedRow],
    constants: Sequence[Constant],
    at: Mapping[str, float],
    progress: Callable[[str], None] = lambda _: None,
) -> Sensitivities:
    """Price all rows at a point, and beside it along each constant that they depend on."""
    seconds = np.array([row.seconds(row.calibration(constants, at)) for row in rows])
    slopes = np.zeros((len(rows), len(constants)))
    for j, c in enumerate(constants):
        progress(f"constant {j + 1} of {len(constants)}: {c.name}")
        up = {**at, c.name: at[c.name] * float(np.exp(_STEP))}
        down = {**at, c.name: at[c.name] * float(np.exp(-_STEP))}
        for i, row in enumerate(rows):
            if row.depends_on(c):
                high, low = (row.seconds(row.calibration(constants, v)) for v in (up, down))
                slopes[i, j] = np.log(high / low) / (2 * _STEP)
    return Sensitivities(dict(at), seconds, slopes)


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
