"""A chip's calibration refined by a user's own measurements: a regularised fit around the one there is.

Not here: the fit itself (`fitting`), files (`costs.calibration_file`), or words (`report.calibrate`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from meshwise.core.errors import MeshwiseError
from meshwise.costs.calibration import Calibration, default_calibration
from meshwise.hardware import Chip
from meshwise.scoring.fitting import Constant, Fit, Repriced, Sensitivities, all_constants, fit, sensitivities
from meshwise.scoring.outcomes import Refusal
from meshwise.scoring.prediction import Prediction, predict
from meshwise.scoring.rows import MeasuredRun, UnreadRow
from meshwise.scoring.score import predict_all

#: A constant that moves no step by this share when it doubles is left alone.
_IDLE = 0.005

#: Rows from which each is left out in turn.
_LEAVE_OUT_FROM = 3


@dataclass(frozen=True)
class Refined:
    """A calibration that was refined.

    Args:
        chip: whose it is.
        base, calibration: before and after.
        rows: the measured steps that were used, as predicted before.
        refusals: rows that could not be, each with its reason.
        constants: those that steps depend on, with the values before as priors.
        fit: their values, and how sure they are.
        after: signed errors of the rows under the new values.
        left_out: the same where each row is predicted from the others alone; empty with fewer than three.
    """

    chip: Chip
    base: Calibration
    calibration: Calibration
    rows: tuple[Prediction, ...]
    refusals: tuple[Refusal[MeasuredRun | UnreadRow], ...]
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
    runs: Sequence[MeasuredRun | UnreadRow],
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
    rows, refusals = predict_all(timed, partial(predict, calibration=calibration), lambda _: None)
    _check(rows, refusals)
    problem = rows[0].setup.problem
    chip, base = problem.cluster.chip, problem.calibration
    priced = [Repriced(p, default_calibration(chip).name) for p in rows]
    constants = tuple(
        replace(c, prior=max(c.clipped(c.read(base)), 1e-9))
        for c in all_constants()
        if priced[0].depends_on(c) and c.read(base) > 0
    )
    points = sensitivities(priced, constants, {c.name: c.prior for c in constants}, progress)
    used = [j for j in range(len(constants)) if np.max(np.abs(points.slopes[:, j])) > _IDLE]
    constants = tuple(constants[j] for j in used)
    points = Sensitivities(points.at, points.seconds, points.slopes[:, used])
    measured = np.array([p.measured for p in rows])
    best = fit(constants, points, measured)
    new = priced[0].calibration(constants, best.values)
    after = tuple(row.seconds(new) / m - 1 for row, m in zip(priced, measured, strict=True))
    return Refined(chip, base, new, rows, refusals, constants, best, after, _left_out(constants, points, measured))


def _check(rows: Sequence[Prediction], refusals: Sequence[Refusal[MeasuredRun | UnreadRow]]) -> None:
    if not rows:
        reasons = "; ".join(f"{r.run.id}: {r.reason}" for r in refusals[:3])
        raise MeshwiseError(f"no row can be used to calibrate: {reasons or 'no row is of a time'}")
    for what, names in (
        ("chips", {p.setup.problem.cluster.chip.name for p in rows}),
        ("generations of software", {p.setup.problem.calibration.name for p in rows}),
    ):
        if len(names) > 1:
            raise MeshwiseError(f"rows are of several {what}: {', '.join(sorted(names))}; use a file for each")


def _left_out(constants: Sequence[Constant], points: Sensitivities, measured: np.ndarray) -> tuple[float, ...]:
    """Error of each row under constants fitted to the others; steps change with them as their slopes say."""
    if len(measured) < _LEAVE_OUT_FROM:
        return ()
    errors = []
    for i in range(len(measured)):
        others = np.arange(len(measured)) != i
        rest = Sensitivities(points.at, points.seconds[others], points.slopes[others])
        values = fit(constants, rest, measured[others]).values
        change = [np.log(values[c.name] / points.at[c.name]) for c in constants]
        errors.append(float(points.seconds[i] * np.exp(points.slopes[i] @ change) / measured[i] - 1))
    return tuple(errors)
