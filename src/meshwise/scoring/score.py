"""The score of a file of measurements: every row predicted, refused or set aside, and what all say together.

Not here: predicting a row (`training`, `serving`); words and pictures (`report`).
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import ClassVar, Generic, TypeVar

from meshwise.core.explanation import Answer
from meshwise.scoring.prediction import Prediction, Refusal
from meshwise.scoring.rows import Row, ServingRun, TrainingRun, UnreadRow
from meshwise.scoring.serving import ServingPrediction, predict_serving
from meshwise.scoring.training import TrainingPrediction, predict_training

#: Layouts whose measured times differ by less are not ranked: runs of one layout do so, too.
SAME = 0.02

P = TypeVar("P", bound=Prediction)
R = TypeVar("R", bound=Row)


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of some predictions.

    Args:
        rows: how many.
        mape: mean absolute; median: median absolute.
        bias: mean signed: above 0 where too much is predicted.
        within_10, within_20: share of rows with an error of at most so many per cent.
        coverage_80: share of measurements inside their 80 % interval; None where predictions have none.
        bound_mape, bound_bias: the same of the uncalibrated bound.
    """

    rows: int
    mape: float
    median: float
    bias: float
    within_10: float
    within_20: float
    coverage_80: float | None
    bound_mape: float
    bound_bias: float


@dataclass(frozen=True, slots=True)
class Ranking:
    """How often the faster of two layouts was predicted to be.

    Args:
        pairs: of layouts of one model on one machine, by one source with one software, that differ by 2 % or more.
        pairwise: share that is ranked right; None without pairs.
        groups: within which pairs were formed.
    """

    pairs: int
    pairwise: float | None
    groups: int


@dataclass(frozen=True, repr=False)
class Score(Answer, Generic[P]):
    """Predictions beside measurements.

    Args:
        predictions, refusals: of the rows that count, in their order.
        set_aside: rows that repeat another row in other units or are no independent number, with the reason.
        calibration: as asked.
    """

    #: Properties of predictions by which times are grouped.
    KEYS: ClassVar[tuple[str, ...]] = ("source", "chip", "family", "kind")

    predictions: tuple[P, ...]
    refusals: tuple[Refusal, ...]
    set_aside: tuple[Refusal, ...]
    calibration: str

    @property
    def rows(self) -> int:
        """Rows that count."""
        return len(self.predictions) + len(self.refusals)

    @cached_property
    def times(self) -> tuple[P, ...]:
        """Predictions of times."""
        return tuple(p for p in self.predictions if not p.run.is_memory)

    @cached_property
    def overall(self) -> Errors | None:
        """Errors of all times; None without any."""
        return errors_of(self.times)

    @cached_property
    def groups(self) -> dict[str, dict[str, Errors]]:
        """Errors of times, by each of `KEYS`."""
        return {name: by(self.times, attrgetter(name)) for name in self.KEYS}

    @property
    def macro_mape(self) -> float | None:
        """Mean over sources of their mean absolute errors."""
        return macro(self.groups["source"])

    @property
    def false_oom(self) -> tuple[P, ...]:
        """Rows that ran and are said not to fit."""
        return tuple(p for p in self.predictions if p.false_oom)

    @property
    def memory_metrics(self) -> dict[str, tuple[P, ...]]:
        """Predictions of memory by metric, in the order of the metrics."""
        found = [p for p in self.predictions if p.run.is_memory]
        names = found[0].run.MEMORY if found else ()
        metrics = {name: tuple(p for p in found if p.run.measured_metric == name) for name in names}
        return {name: rows for name, rows in metrics.items() if rows}

    @property
    def memory_mape(self) -> float | None:
        """Mean absolute error of needed memory; what tools show as reserved is left out."""
        needed = [abs(p.error) for m, rows in self.memory_metrics.items() if m != "gpu_memory" for p in rows]
        return statistics.fmean(needed) if needed else None

    def worst(self, number: int) -> tuple[P, ...]:
        """Times with the largest errors, worst first."""
        return tuple(sorted(self.times, key=lambda p: -abs(p.error))[:number])


class TrainingScore(Score[TrainingPrediction]):
    """Predictions beside measurements of training."""

    @cached_property
    def ranking(self) -> Ranking:
        """Pairs of layouts."""
        return ranking_of(self.times)


class ServingScore(Score[ServingPrediction]):
    """Predictions beside measurements of serving."""

    KEYS = (*Score.KEYS, "phase", "engine")


def score_training(
    runs: Sequence[TrainingRun | UnreadRow],
    calibration: str = "fitted",
    progress: Callable[[str], None] = lambda _: None,
) -> TrainingScore:
    """Predict every training run that counts, and say of every other why it does not."""
    found = predict_all(runs, partial(predict_training, calibration=calibration), progress)
    return TrainingScore(*found, calibration)


def score_serving(
    runs: Sequence[ServingRun | UnreadRow],
    calibration: str = "fitted",
    progress: Callable[[str], None] = lambda _: None,
) -> ServingScore:
    """Predict every measurement of serving that counts, and say of every other why it does not."""
    found = predict_all(runs, partial(predict_serving, calibration=calibration), progress)
    return ServingScore(*found, calibration)


def predict_all(
    runs: Sequence[R | UnreadRow], predict: Callable[[R], P | Refusal], progress: Callable[[str], None]
) -> tuple[tuple[P, ...], tuple[Refusal, ...], tuple[Refusal, ...]]:
    """Predict every row that counts.

    Args:
        runs: rows, of which some may not count, and some could not be read.
        predict: one row.
        progress: told a line for each.

    Returns: predictions, refusals, and the rows that do not count.
    """
    counted = [run for run in runs if run.counts]
    predictions: list[P] = []
    refusals: list[Refusal] = []
    for number, run in enumerate(counted, 1):
        progress(f"scoring: {number:,} of {len(counted):,} rows")
        found = Refusal(run, run.reason) if isinstance(run, UnreadRow) else predict(run)
        if isinstance(found, Refusal):
            refusals.append(found)
        else:
            predictions.append(found)
    aside = (Refusal(run, _why_aside(run)) for run in runs if not run.counts)
    return tuple(predictions), tuple(refusals), tuple(aside)


def _why_aside(run: Row | UnreadRow) -> str:
    if isinstance(run, UnreadRow):
        return f"primary is no, and it cannot be read: {run.reason}"
    if isinstance(run, ServingRun) and "queue" in run.phase:
        return "primary is no: a time that includes queueing, of a run whose other row counts"
    return f"primary is no: {run.measured_metric} of a run whose other row counts"


def errors_of(predictions: Iterable[Prediction]) -> Errors | None:
    """Sum up times; None without any."""
    rows = [p for p in predictions if not p.run.is_memory]
    if not rows:
        return None
    errors = [p.error for p in rows]
    absolute = [abs(e) for e in errors]
    known = [p.covered for p in rows if p.covered is not None]
    return Errors(
        rows=len(rows),
        mape=statistics.fmean(absolute),
        median=statistics.median(absolute),
        bias=statistics.fmean(errors),
        within_10=statistics.fmean(e <= 0.1 for e in absolute),
        within_20=statistics.fmean(e <= 0.2 for e in absolute),
        coverage_80=statistics.fmean(known) if known else None,
        bound_mape=statistics.fmean(abs(p.bound_error) for p in rows),
        bound_bias=statistics.fmean(p.bound_error for p in rows),
    )


def by(predictions: Iterable[P], key: Callable[[P], str]) -> dict[str, Errors]:
    """Sum up times by a key, in order of it."""
    grouped = itertools.groupby(sorted(predictions, key=key), key)
    found = ((name, errors_of(group)) for name, group in grouped)
    return {name: errors for name, errors in found if errors is not None}


def macro(groups: Mapping[str, Errors]) -> float | None:
    """Mean of the groups' mean absolute errors, each group alike."""
    return statistics.fmean(e.mape for e in groups.values()) if groups else None


def ranking_of(predictions: Sequence[TrainingPrediction]) -> Ranking:
    """Compare layouts pairwise within what one source measured of one model on one machine."""
    groups: defaultdict[tuple[object, ...], list[tuple[tuple[object, ...], float, float]]] = defaultdict(list)
    for p in predictions:
        if not p.run.is_memory:
            run = p.scenario.run
            groups[machine_of(run)].append((_laid_out(run), p.measured / run.tokens, p.expected / run.tokens))
    several = [group for group in groups.values() if len({layout for layout, *_ in group}) > 1]
    pairs = right = 0.0
    for group in several:
        for (a, took_a, said_a), (b, took_b, said_b) in itertools.combinations(group, 2):
            if a != b and abs(took_a / took_b - 1) >= SAME:
                pairs += 1
                right += 0.5 if said_a == said_b else float((said_a > said_b) == (took_a > took_b))
    return Ranking(int(pairs), right / pairs if pairs else None, len(several))


def machine_of(r: TrainingRun) -> tuple[object, ...]:
    """What runs share that differ in their layouts alone: source, machine, software, model."""
    what = (r.model, r.layers, r.d_model, r.n_heads, r.seq_len, r.dtype)
    return (r.source, r.chip, r.hardware, r.n_chips, r.software, *what)


def _laid_out(r: TrainingRun) -> tuple[object, ...]:
    return (r.tp, r.sp, r.pp, r.vpp, r.cp, r.ep, r.dp, r.fsdp_or_zero_stage, r.recompute, r.micro_batch)
