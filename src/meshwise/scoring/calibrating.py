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
from meshwise.costs.calibration import Calibration
from meshwise.hardware import Chip
from meshwise.scoring.constants import Constant, all_constants
from meshwise.scoring.fitting import Fit, FittedRows, Sensitivities, sensitivities, with_constants
from meshwise.scoring.prediction import Prediction, Refusal
from meshwise.scoring.rows import TrainingRun, UnreadRow
from meshwise.scoring.score import predict_all
from meshwise.scoring.training import TrainingPrediction, predict_training

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
    rows: tuple[TrainingPrediction, ...]
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
    rows, refusals = predict_all(timed, partial(predict_training, calibration=calibration), lambda _: None)
    _check(rows, refusals)
    base = rows[0].calibration
    constants = tuple(
        replace(c, prior=max(c.clipped(c.read(base)), 1e-9))
        for c in all_constants()
        if rows[0].depends_on(c) and c.read(base) > 0
    )
    points = sensitivities(rows, constants, {c.name: c.prior for c in constants}, progress)
    used = [j for j in range(len(constants)) if np.max(np.abs(points.slopes[:, j])) > _IDLE]
    constants = tuple(constants[j] for j in used)
    points = Sensitivities(points.at, points.seconds, points.slopes[:, used])
    fitted = FittedRows(rows, constants, points, np.ones(len(rows)))
    best = fitted.fitted_to()
    new = with_constants(rows[0], constants, best.values)
    return Refined(
        chip=rows[0].scenario.problem.cluster.chip,
        base=base,
        calibration=new,
        rows=rows,
        refusals=refusals,
        constants=constants,
        fit=best,
        after=tuple(row.seconds_under(new) / row.measured - 1 for row in rows),
        left_out=tuple(p.error for p in fitted.leave_out(_id)) if len(rows) >= _LEAVE_OUT_FROM else (),
    )


def _id(p: Prediction) -> str:
    return p.run.id


def _check(rows: Sequence[TrainingPrediction], refusals: Sequence[Refusal]) -> None:
    if not rows:
        reasons = "; ".join(f"{r.run.id}: {r.reason}" for r in refusals[:3])
        raise MeshwiseError(f"no row can be used to calibrate: {reasons or 'no row is of a time'}")
    for what, names in (
        ("chips", {p.chip for p in rows}),
        ("generations of software", {p.calibration.name for p in rows}),
    ):
        if len(names) > 1:
            raise MeshwiseError(f"rows are of several {what}: {', '.join(sorted(names))}; use a file for each")
