"""Forecasts of training rows as a stranger would measure them: a source without all that it alone supports.

A source's rows are read as though its software, where only they know it, were not known; constants are fitted to the
other sources, around what single operations say. How far constants follow rows, and how wide intervals are, is chosen
among these others in the same way: each of them left out in turn. So nothing is chosen on what is scored. A chip, a
family or a format that only the source has measured counts as not measured in its intervals. Beside it stands the best
model of one constant: one MFU for everything, of the other sources. Not here: fits (`fitting`), pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwise.core.dtypes import DType
from meshwise.costs.calibration import default_calibration
from meshwise.costs.spread import EIGHTY_PERCENT, WIDTH, interval_of
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
        withheld: sources of what is known of software that no row is forecast by, beside its own.
    """

    def __init__(
        self,
        rows: Sequence[TrainingPrediction],
        progress: Callable[[str], None] = lambda _: None,
        withheld: Collection[str] = (),
    ) -> None:
        self.fitted = training_fit(rows, progress)
        self.blind = tuple(_blind(p, (p.run.source, *withheld)) for p in rows)
        self.sources = np.array([p.run.source for p in rows])
        self.names = tuple(dict.fromkeys(self.sources.tolist()))
        self.measured = np.array([p.measured for p in rows])
        self.points = _points(self.fitted, self.blind, progress)
        self.stated = np.array([_stated(p, self.blind) for p in self.blind])
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
        """Times the stated spread that intervals have: what holds four of five forecasts of a source like others."""
        ratios = []
        for other in (s for s in self.names if s != source):
            errors = np.abs(self.errors(other, self.fit((source, other), freedom)))
            ratios.append(errors / (EIGHTY_PERCENT * self.stated[self.sources == other]))
        return held_by_next(ratios)

    @property
    def shipped_width(self) -> float:
        """What all sources together say of `spread.WIDTH`."""
        return self.width("", self.freedom(""))

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
                rows[i] = _forecast(self.blind[i], float(seconds), width * float(self.stated[i]))
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


def _blind(p: TrainingPrediction, unseen: Collection[str]) -> TrainingPrediction:
    """The row as though these sources had not been seen; itself where that changes nothing."""
    if build_scenario(p.scenario.run, unseen=unseen).problem.calibration == p.calibration:
        return p
    found = predict_training(p.scenario.run, unseen=unseen)
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


def _stated(p: TrainingPrediction, rows: Sequence[TrainingPrediction]) -> float:
    """The spread that is stated of a row where only other sources have measured its chip and format."""
    others = [q for q in rows if q.run.source != p.run.source]
    return p.spread(causes_beside(p, others)) / WIDTH


def causes_beside(p: TrainingPrediction, others: Sequence[TrainingPrediction]) -> set[str]:
    """Causes of a row's uncertainty where these others were measured."""
    kin = [q for q in others if _family(q) == _family(p)]
    if not kin:
        return {*p.scenario.causes, "family"} - {"chip", "format"}
    new = {"chip": p.chip not in {q.chip for q in kin}, "format": _format(p) not in map(_format, kin)}
    return {*p.scenario.causes, *(cause for cause, holds in new.items() if holds)}


def _family(p: TrainingPrediction) -> str:
    return default_calibration(p.scenario.problem.cluster.chip).name


def _format(p: TrainingPrediction) -> DType:
    return p.scenario.problem.job.formats.compute


def held_by_next(sources: Sequence[np.ndarray]) -> float:
    """What four of five values of a next source are below, as likely more as fewer, if it is drawn as these were.

    Each of the n sources counts alike, and a share of 4/5 + 3/(5 n) of them all is below, the estimate of a quantile
    that is as often too high as too low; of three sources and fewer all are, which promises no share.

    Source: Hyndman and Fan 1996, "Sample quantiles in statistical packages", definition 8: (n + 1/3) p + 1/3 of n.
    """
    n, weights = len(sources), np.concatenate([np.full(len(own), 1 / len(own)) for own in sources])
    return weighted_quantile(np.concatenate(sources), weights, min(((n + 1 / 3) * _SHARE + 1 / 3) / n, 1.0))


def _forecast(p: TrainingPrediction, seconds: float, spread: float) -> TrainingPrediction:
    return replace(p, expected=seconds, likely=interval_of(seconds, p.bound, spread))
