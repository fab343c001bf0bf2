"""Forecasts of training rows as a stranger would measure them: a source without all that it alone supports.

A source's rows are read as though its software, where only they know it, were not known; constants are fitted to the
other sources, around what single operations say. How far constants follow rows, and how wide intervals are, is chosen
among these others in the same way: each of them left out in turn. So nothing is chosen on what is scored. Beside it
stands the best model of one constant: one MFU for everything, of the other sources. Not here: fits (`fitting`), pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwise.costs.spread import Likely
from meshwise.scoring.constants import Constant
from meshwise.scoring.fitting import Fit, FittedRows, Sensitivities, sensitivities, training_fit
from meshwise.scoring.training import TrainingPrediction, build_scenario, predict_training

#: How far constants may follow rows: times the spreads of their priors. 0 keeps them where single operations put them.
FREEDOMS = (0.0, 0.5, 1.0, 2.0)

#: Share of measurements that an interval should hold.
_SHARE = 0.80

#: Spread of a constant that is kept at its prior.
_KEPT = 1e-4


@dataclass(frozen=True)
class Forecasts:
    """What is forecast of rows whose source was left out.

    Args:
        rows: with the expected time and the interval of a forecast.
        one_mfu: the same rows by the best constant MFU of the other sources, without intervals.
        freedoms: source -> what was chosen for it among the others.
        widths: source -> times the spread of an interval, likewise.
    """

    rows: tuple[TrainingPrediction, ...]
    one_mfu: tuple[TrainingPrediction, ...]
    freedoms: dict[str, float]
    widths: dict[str, float]


class HeldOut:
    """Rows whose sources are left out, one after the other.

    Args:
        rows: predicted times, as the shipped calibration has them.
        progress: told a line now and then.
    """

    def __init__(self, rows: Sequence[TrainingPrediction], progress: Callable[[str], None] = lambda _: None) -> None:
        self.fitted = training_fit(rows, progress)
        self.blind = tuple(_blind(p) for p in rows)
        self.sources = np.array([p.run.source for p in rows])
        self.names = tuple(dict.fromkeys(self.sources.tolist()))
        self.measured = np.array([p.measured for p in rows])
        self.points = _points(self.fitted, self.blind, progress)
        self._known: dict[tuple[float, frozenset[str]], Fit] = {}

    def fit(self, left_out: Iterable[str], freedom: float, kept: str = "") -> Fit:
        """Constants fitted without some sources; the one called `kept` stays at its prior."""
        out = frozenset(left_out)
        key = (freedom, out)
        if not kept and key in self._known:
            return self._known[key]
        constants = tuple(_freed(c, 0.0 if c.name == kept else freedom) for c in self.fitted.constants)
        chosen = ~np.isin(self.sources, list(out))
        found = replace(self.fitted, constants=constants).fitted_to(chosen)
        if not kept:
            self._known[key] = found
        return found

    def expected(self, source: str, fit: Fit) -> np.ndarray:
        """[rows of the source] seconds under constants, read as though the source had not been seen."""
        own = self.sources == source
        change = [np.log(fit.values[c.name] / self.points.at[c.name]) for c in self.fitted.constants]
        return np.asarray(self.points.seconds[own] * np.exp(self.points.slopes[own] @ change))

    def errors(self, source: str, fit: Fit) -> np.ndarray:
        """[rows of the source] logarithms of forecast over measured."""
        return np.asarray(np.log(self.expected(source, fit) / self.measured[self.sources == source]))

    def freedom(self, source: str) -> float:
        """How far constants should follow rows, by the other sources alone: what errs least, averaged over sources."""
        others = [s for s in self.names if s != source]
        wrong = {f: math.fsum(mean_of(self.errors(s, self.fit((source, s), f))) for s in others) for f in FREEDOMS}
        return min(FREEDOMS, key=wrong.__getitem__)

    def width(self, source: str, freedom: float) -> float:
        """Times the stated spread that holds four of five forecasts of the other sources; at least once.

        A source counts by the root of its rows.
        """
        ratios, weights = [], []
        for other in (s for s in self.names if s != source):
            errors = np.abs(self.errors(other, self.fit((source, other), freedom)))
            stated = [_half_width(p) for p, s in zip(self.blind, self.sources, strict=True) if s == other]
            ratios += list(errors / np.array(stated))
            weights += [1 / math.sqrt(len(errors))] * len(errors)
        return max(1.0, weighted_quantile(np.array(ratios), np.array(weights), _SHARE))

    def forecasts(self) -> Forecasts:
        """Forecast every source's rows."""
        rows: list[TrainingPrediction | None] = [None] * len(self.blind)
        plain = list(rows)
        freedoms, widths = {}, {}
        mfu = np.array([p.estimate.mfu * p.expected / p.measured for p in self.blind])
        for source in self.names:
            freedoms[source] = freedom = self.freedom(source)
            widths[source] = width = self.width(source, freedom)
            times = self.expected(source, self.fit((source,), freedom))
            one = self._one_mfu(source, mfu)
            for i, seconds in zip(np.flatnonzero(self.sources == source), times, strict=True):
                rows[i] = _forecast(self.blind[i], float(seconds), width)
                plain[i] = replace(self.blind[i], expected=self.measured[i] * mfu[i] / one, likely=None)
        done = tuple(p for p in rows if p is not None)
        return Forecasts(done, tuple(p for p in plain if p is not None), freedoms, widths)

    def _one_mfu(self, source: str, mfu: np.ndarray) -> float:
        """The MFU that errs least for the other sources, each alike: mean of predicted over measured, less one."""
        others = [mfu[self.sources == s] for s in self.names if s != source]
        return float(
            min(np.unique(np.round(mfu, 3)), key=lambda m: sum(np.mean(np.abs(own / m - 1)) for own in others))
        )

    def worth(self, freedom: float = 1.0) -> dict[str, float]:
        """Constant -> points by which the mean error of sources grows where it stays at its prior."""
        whole = self._macro(freedom, "")
        return {c.name: self._macro(freedom, c.name) - whole for c in self.fitted.constants}

    def _macro(self, freedom: float, kept: str) -> float:
        return float(np.mean([mean_of(self.errors(s, self.fit((s,), freedom, kept))) for s in self.names]))


def mean_of(errors: np.ndarray) -> float:
    """Mean absolute error of logarithms of ratios, as relative errors.

    >>> round(mean_of(np.log([1.1, 0.9])), 6)
    0.1
    """
    return float(np.mean(np.abs(np.expm1(errors))))


def weighted_quantile(values: np.ndarray, weights: np.ndarray, share: float) -> float:
    """The value below which a share of the weights lies.

    >>> weighted_quantile(np.array([3.0, 1.0, 2.0]), np.array([1.0, 2.0, 1.0]), 0.5)
    1.0
    """
    order = np.argsort(values)
    below = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(below, share - 1e-12)])


def _blind(p: TrainingPrediction) -> TrainingPrediction:
    """The row as though its source had not been seen; itself where that changes nothing."""
    if build_scenario(p.scenario.run, unseen=p.run.source).problem.calibration == p.calibration:
        return p
    found = predict_training(p.scenario.run, unseen=p.run.source)
    return found if isinstance(found, TrainingPrediction) else p


def _points(
    fitted: FittedRows[TrainingPrediction], blind: Sequence[TrainingPrediction], progress: Callable[[str], None]
) -> Sensitivities:
    """Slopes of the rows as they are read blind: those at hand where they are read the same."""
    at, seconds, slopes = fitted.points.at, fitted.points.seconds.copy(), fitted.points.slopes.copy()
    changed = [i for i, (a, b) in enumerate(zip(fitted.rows, blind, strict=True)) if a is not b]
    if changed:
        own = sensitivities([blind[i] for i in changed], fitted.constants, at, progress)
        seconds[changed], slopes[changed] = own.seconds, own.slopes
    return Sensitivities(at, seconds, slopes)


def rests_on(fitted: FittedRows[TrainingPrediction], least: float = 0.005) -> dict[str, tuple[str, ...]]:
    """Constant -> the sources with a row whose logarithm moves by `least` of the constant's."""
    found: dict[str, tuple[str, ...]] = {}
    for j, c in enumerate(fitted.constants):
        moved = (
            p.run.source for p, slope in zip(fitted.rows, fitted.points.slopes[:, j], strict=True) if abs(slope) > least
        )
        found[c.name] = tuple(dict.fromkeys(moved))
    return found


def _freed(c: Constant, freedom: float) -> Constant:
    return replace(c, spread=max(c.spread * freedom, _KEPT))


def _half_width(p: TrainingPrediction) -> float:
    """Logarithm of the upper end of an interval over what is expected."""
    assert p.likely is not None
    return math.log(p.likely.high / p.expected)


def _forecast(p: TrainingPrediction, seconds: float, width: float) -> TrainingPrediction:
    factor = math.exp(_half_width(p) * width)
    return replace(p, expected=seconds, likely=Likely(max(seconds / factor, min(p.bound, seconds)), seconds * factor))
