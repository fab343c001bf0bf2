"""Constants fitted to measured times, in logarithms and with priors from elsewhere; errors of rows left out of a fit.

A row is priced again in milliseconds when only constants change: its model, layout and axis mapping stay. Not here:
which constants are fitted (`constants`), or what rows mean (`training`, `serving_scenario`).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np

from meshwise.core.errors import MeshwiseError
from meshwise.core.explanation import Answer
from meshwise.costs.calibration import Calibration
from meshwise.costs.machine import MeasuredOperation
from meshwise.costs.spread import Likely
from meshwise.hardware import Chip
from meshwise.scoring.constants import Constant, all_constants
from meshwise.scoring.operations import predict_operations
from meshwise.scoring.prediction import WRONG, Prediction, Refusal
from meshwise.scoring.rows import Row, ServingRun, TrainingRun, UnreadRow
from meshwise.scoring.score import predict_all
from meshwise.scoring.serving import predict_serving
from meshwise.scoring.serving_constants import serving_constants
from meshwise.scoring.training import predict_training


class Measured(Protocol):
    """A measured time that can be priced under other constants."""

    @property
    def run(self) -> Row | MeasuredOperation:
        """The row."""
        ...

    @property
    def hardware(self) -> Chip:
        """Its chip, and `chip` the name of that."""
        ...

    @property
    def chip(self) -> str:
        """See `hardware`."""
        ...

    @property
    def calibration(self) -> Calibration:
        """Of the prediction."""
        ...

    @property
    def measured(self) -> float:
        """Seconds; `expected` likewise."""
        ...

    @property
    def expected(self) -> float:
        """See `measured`."""
        ...

    @property
    def error(self) -> float:
        """Signed: 0.1 where 10 % too much is predicted."""
        ...

    @property
    def assumed(self) -> tuple[str, ...]:
        """What the row does not say."""
        ...

    def seconds_under(self, calibration: Calibration) -> float:
        """Expected seconds under another calibration."""
        ...

    def depends_on(self, constant: Constant) -> bool:
        """Whether the prediction is made with the constant."""
        ...


P = TypeVar("P", bound=Measured)
Q = TypeVar("Q", bound=Prediction)

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
    rows: Sequence[Measured],
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


def with_constants(p: Measured, constants: Sequence[Constant], values: Mapping[str, float]) -> Calibration:
    """A row's calibration with other values of the constants that apply to it."""
    found = p.calibration
    for c in constants:
        if c.name in values and p.depends_on(c):
            found = c.put(found, c.clipped(values[c.name]))
    return found


def _seconds(p: Measured, constants: Sequence[Constant], values: Mapping[str, float]) -> float:
    return p.seconds_under(with_constants(p, constants, values))


def fit(
    constants: Sequence[Constant], points: Sensitivities, measured: np.ndarray, weights: np.ndarray | float = 1.0
) -> Fit:
    """Find the constants that are most likely by rows and priors, rows far off counting less (Huber).

    Args:
        constants: as `points` has them.
        points: of the rows that are fitted, [rows, constants].
        measured: [rows] seconds.
        weights: [rows] how many independent measurements a row is worth; 0 leaves it out.
    """
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

    def fitted_to(self, chosen: np.ndarray | bool = True) -> Fit:
        """The constants that some rows make most likely; `chosen` is [rows] true or false."""
        return fit(self.constants, self.points, np.array([p.measured for p in self.rows]), self.weights * chosen)

    def leave_out(self: FittedRows[Q], key: Callable[[Q], str]) -> tuple[Q, ...]:
        """Predict each row from the rows of other keys alone; intervals keep their relative widths."""
        expected = self.expected_without(key)
        return tuple(_moved(p, float(e)) for p, e in zip(self.rows, expected, strict=True))

    def expected_without(self, key: Callable[[P], str]) -> np.ndarray:
        """[rows] seconds of each row, predicted from the rows of other keys alone."""
        keys = np.array([key(p) for p in self.rows])
        expected = np.zeros(len(keys))
        for own in dict.fromkeys(keys.tolist()):
            out = keys == own
            values = self.fitted_to(~out).values
            expected[out] = [_seconds(self.rows[i], self.constants, values) for i in np.flatnonzero(out)]
        return expected


def _moved(p: Q, expected: float) -> Q:
    assert p.likely is not None
    width = p.likely.high / p.expected
    return replace(p, expected=expected, likely=Likely(max(expected / width, min(p.bound, expected)), expected * width))


#: Points at which slopes are taken: at the priors, then where these lead.
_POINTS = 2


def training_fit(rows: Sequence[P], progress: Callable[[str], None] = lambda _: None) -> FittedRows[P]:
    """Prepare measured training steps for fits; rows of one source share their errors, and count as 12 at most."""
    weights = row_weights([p.run.source for p in rows], 12)
    constants = all_constants()
    at = {c.name: c.prior for c in constants}
    for _ in range(_POINTS):  # slopes hold near where they were taken
        found = FittedRows(tuple(rows), constants, sensitivities(rows, constants, at, progress), weights)
        at = dict(found.fitted_to().values)
    return found


def row_weights(groups: Sequence[str], most: int) -> np.ndarray:
    """What each row counts in a fit: the rows of one group count as `most` at most.

    >>> row_weights(["a", *["b"] * 24], 12)[:2].tolist()
    [1.0, 0.5]
    """
    numbers = Counter(groups)
    return np.array([min(1.0, most / numbers[g]) for g in groups])


#: A constant that moves no step by this share when it doubles is left alone.
_IDLE = 0.005

#: Rows from which each is left out in turn.
_LEAVE_OUT_FROM = 3
#: Times its prediction that a step may take: what is further is a wrong unit, batch or number of chips.
_FURTHEST = 10


@dataclass(frozen=True, repr=False)
class Refined(Answer):
    """A calibration that was refined.

    Args:
        chip: whose it is.
        base, calibration: before and after.
        rows: the measured times that were used, as predicted before.
        refusals: rows that could not be, each with its reason.
        constants: those that steps depend on, with the values before as priors.
        fit: their values, and how sure they are.
        after: signed errors of the rows under the new values.
        left_out: the same where each row is predicted from the others alone; empty with fewer than three.
    """

    chip: Chip
    base: Calibration
    calibration: Calibration
    rows: tuple[Measured, ...]
    refusals: tuple[Refusal, ...]
    constants: tuple[Constant, ...]
    fit: Fit
    after: tuple[float, ...]
    left_out: tuple[float, ...]

    @property
    def before(self) -> tuple[float, ...]:
        """Signed errors of the rows under the calibration that there was."""
        return tuple(p.error for p in self.rows)


def mean_error(errors: Sequence[float]) -> float:
    """Mean absolute error.

    >>> mean_error([0.1, -0.3])
    0.2
    """
    return statistics.fmean(map(abs, errors))


def refine(
    runs: Sequence[TrainingRun | UnreadRow],
    calibration: str = "fitted",
    progress: Callable[[str], None] = lambda _: None,
) -> Refined:
    """Refine a calibration by measured steps.

    Args:
        runs: as `meshwise score` takes them; rows of memory are left out.
        calibration: that is refined; "fitted" takes the software that rows name.
        progress: told a line now and then.

    Raises:
        MeshwiseError: no row can be used; rows are of several chips or of several generations of software.
    """
    timed = [run for run in runs if isinstance(run, UnreadRow) or not run.is_memory]
    found, refusals, _ = predict_all(timed, partial(predict_training, calibration=calibration), lambda _: None)
    return _refined(found, refusals, all_constants(), progress)


def refine_serving(
    runs: Sequence[ServingRun | UnreadRow],
    calibration: str = "fitted",
    progress: Callable[[str], None] = lambda _: None,
) -> Refined:
    """Refine a calibration by measured serving; arguments as of `refine`, "fitted" takes the engine that rows name.

    Raises:
        MeshwiseError: no row can be used; rows are of several chips or engines.
    """
    timed = [run for run in runs if isinstance(run, UnreadRow) or not run.is_memory]
    found, refusals, _ = predict_all(timed, partial(predict_serving, calibration=calibration), lambda _: None)
    # What the host and the start of a sum add is the engine's own number: no factor on what engines share.
    constants = tuple(c for c in serving_constants() if not c.unit.startswith(("times host.", "times startup")))
    return _refined(found, refusals, constants, progress)


def refine_operations(
    rows: Sequence[MeasuredOperation | UnreadRow],
    calibration: str = "fitted",
    on: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Refined:
    """Refine a calibration's rates by single operations; `on` as of `predict_operations`, the rest as of `refine`.

    Raises:
        MeshwiseError: no row can be used; rows are of several chips.
    """
    found, refusals = predict_operations(rows, calibration, on)
    return _refined(found, refusals, all_constants(), progress)


def _refined(
    found: Sequence[P],
    refusals: tuple[Refusal, ...],
    constants: Sequence[Constant],
    progress: Callable[[str], None],
) -> Refined:
    """Move the constants that rows depend on."""
    rows = tuple(row for row in found if row.measured <= _FURTHEST * row.expected)
    refusals = (*refusals, *(_too_slow(row) for row in found if row.measured > _FURTHEST * row.expected))
    _check(rows, refusals)
    base = rows[0].calibration
    constants = tuple(
        replace(c, prior=max(c.clipped(c.read(base)), 1e-9))
        for c in constants
        if rows[0].depends_on(c) and c.read(base) > 0
    )
    if not constants:
        raise MeshwiseError(f"{rows[0].chip} under {base.name}: none of its constants can be refined by such rows")
    points = sensitivities(rows, constants, {c.name: c.prior for c in constants}, progress)
    used = [j for j in range(len(constants)) if np.max(np.abs(points.slopes[:, j])) > _IDLE]
    constants = tuple(constants[j] for j in used)
    points = Sensitivities(points.at, points.seconds, points.slopes[:, used])
    fitted = FittedRows(rows, constants, points, np.ones(len(rows)))
    best = fitted.fitted_to()
    new = with_constants(rows[0], constants, best.values)
    left_out = list[float]()
    if len(rows) >= _LEAVE_OUT_FROM:
        seconds = fitted.expected_without(lambda p: p.run.id)
        left_out = [float(s) / row.measured - 1 for s, row in zip(seconds, rows, strict=True)]
    return Refined(
        chip=rows[0].hardware,
        base=base,
        calibration=new,
        rows=rows,
        refusals=refusals,
        constants=constants,
        fit=best,
        after=tuple(row.seconds_under(new) / row.measured - 1 for row in rows),
        left_out=tuple(left_out),
    )


def _too_slow(row: Measured) -> Refusal:
    """Why a row says nothing of its chip; one that is too fast was refused before."""
    return Refusal(
        row.run,
        f"{row.measured:.4g} s is {row.measured / row.expected:,.0f} times the {row.expected:.4g} s predicted; "
        f"expected at most {_FURTHEST} times, as no chip's constants explain more; {WRONG}",
    )


def _check(rows: Sequence[Measured], refusals: Sequence[Refusal]) -> None:
    if not rows:
        reasons = "; ".join(f"{r.run.id}: {r.reason}" for r in refusals[:3])
        raise MeshwiseError(f"no row can be used to calibrate: {reasons or 'no row is of a time'}")
    for what, names in (
        ("chips", {p.chip for p in rows}),
        ("generations of software or engines", {p.calibration.name for p in rows}),
    ):
        if len(names) > 1:
            raise MeshwiseError(f"rows are of several {what}: {', '.join(sorted(names))}; use a file for each")
