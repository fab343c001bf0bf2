"""Predictions that start from measured steps of the same model on the same chips: errors that all layouts share cancel.

What was measured over what is predicted of it is one factor on all that is expected. It follows the measurement as far
as its error is likely to be shared: what one layout is off by for reasons of its own is no other's. One factor ranks
other layouts as no factor does. The layout that was measured takes what was measured. Not here: constants that many
rows of a machine decide (`fitting`).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshwise.core.errors import MeshwiseError
from meshwise.costs.calibration import Calibration, anchored
from meshwise.costs.fitted import find_calibration
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.spread import EIGHTY_PERCENT, OWN_SPREAD, shared_spread
from meshwise.scoring.prediction import Refusal
from meshwise.scoring.reading import read_rows, read_text
from meshwise.scoring.rows import TrainingRun, UnreadRow
from meshwise.scoring.score import Ranking, machine_of, ranking_of
from meshwise.scoring.training import TrainingPrediction, build_scenario, predict_training

#: Prices of a row until its own prediction is the factor's.
_ROUNDS = 3


@dataclass(frozen=True)
class Anchor:
    """What measured steps say of a machine.

    Args:
        calibration: with the factor; plans keep it by its name. With "fitted" its software is that of the rows.
        factor: on all that was expected before.
        rows: that were used, as predicted before.
    """

    calibration: Calibration
    factor: float
    rows: tuple[TrainingPrediction, ...]


def shared_factor(rows: Sequence[TrainingPrediction]) -> float:
    """What measured over predicted says of layouts that were not measured: the likeliest of what they share.

    Before anything is measured, the layouts of a machine are off together by as much as their intervals say (a normal
    distribution, `shared_spread`: wider where the chip, the format or the software is new). Each alone is off by a
    Laplace distribution, as few are far off and these by much: its scale is `OWN_SPREAD`, or what layouts share if that
    is less. So one row is followed whole up to a limit and no further, and n rows that agree up to n times as far.

    Args:
        rows: measured, of one machine and model.
    """
    ratios = [math.log(p.measured / p.expected) for p in rows]
    shared = math.hypot(*(shared_spread(p.estimate.terms, p.scenario.causes) for p in rows)) / math.sqrt(len(rows))
    limit = shared**2 / min(shared, OWN_SPREAD)
    # Where x^2 / (2 limit) + sum |x - ratio| is least.
    return math.exp(statistics.median([*ratios, *(limit * k for k in range(-len(rows), len(rows) + 1, 2))]))


def anchor(problem: TrainingProblem, runs: Sequence[TrainingRun | UnreadRow], where: str) -> Anchor:
    """Anchor a problem's calibration at measured steps of its model on its chips.

    Args:
        problem: what is asked; its calibration is anchored.
        runs: measured, as `meshwise score` takes them; the number of chips, the batch and the layout may be others.
        where: what errors call them.

    Raises:
        MeshwiseError: no row can be used, with the reasons.
    """
    used, reasons = [], []
    for run in runs:
        found = Refusal(run, run.reason) if isinstance(run, UnreadRow) else _predicted(problem, run)
        if isinstance(found, Refusal):
            reasons.append(f"{run.id}: {found.reason}")
        else:
            used.append(found)
    if not used:
        raise MeshwiseError(f"--anchor {where}: no row is a measured step of this model on these chips: {reasons[0]}")
    if len({p.calibration.name for p in used}) > 1:
        names = ", ".join(sorted({p.calibration.name for p in used}))
        raise MeshwiseError(f"--anchor {where}: rows are of several generations of software ({names}); use one")
    # With "fitted", of the software that the rows name; what else they say of traffic is theirs.
    base = find_calibration(used[0].calibration.name, problem.cluster.chip)
    return _slowed(base, used, shared_factor(used))


def as_measured(problem: TrainingProblem, tokens: float, expected: float, path: str) -> TrainingProblem:
    """An anchored problem where its own layout is among the rows of the file: the step takes what it took.

    Args:
        problem: anchored.
        tokens: of its step.
        expected: seconds of its step; a row of the same size that is expected to take as long is of the same run.
        path: of the rows.
    """
    own = []
    for run in _read(path):
        if isinstance(run, TrainingRun) and (run.tokens, run.n_chips) == (tokens, problem.cluster.num_chips):
            found = _predicted(problem, run)
            if isinstance(found, TrainingPrediction) and math.isclose(found.expected, expected, rel_tol=1e-6):
                own.append(found)
    if not own:
        return problem
    base = find_calibration(problem.calibration.name.partition("*")[0], problem.cluster.chip)
    target = statistics.geometric_mean(p.measured / p.expected for p in own)
    return replace(problem, calibration=_slowed(base, own, target).calibration)


def _slowed(base: Calibration, rows: Sequence[TrainingPrediction], target: float) -> Anchor:
    """The calibration under which rows take `target` times as long as was expected."""
    factor = target
    for _ in range(_ROUNDS):  # what is at a limit does not follow
        now = [p.seconds_under(anchored(base, factor)) / p.expected for p in rows]
        factor *= target / statistics.geometric_mean(now)
    return Anchor(anchored(base, factor), factor, tuple(rows))


@dataclass(frozen=True)
class Anchored:
    """How far layouts are from what is predicted of them by one other layout of their machine and model.

    Args:
        groups: of at least four rows, each row in turn the anchor.
        mape: mean absolute error of the others, each group alike.
        plain: the same without an anchor.
        coverage: share of them in the 80 % interval that they have with an anchor, each group alike.
        pairwise: share of the pairs of these others that is ranked right (`score.ranking_of`); None without pairs.
    """

    groups: int
    mape: float
    plain: float
    coverage: float
    pairwise: float | None


#: Rows of one machine and model from which each is an anchor in turn.
_GROUP = 4


def anchor_each(rows: Sequence[TrainingPrediction]) -> Anchored | None:
    """Predict each row by every other row of its machine and model; None where no group is large enough."""
    groups: defaultdict[tuple[object, ...], list[TrainingPrediction]] = defaultdict(list)
    for p in rows:
        groups[machine_of(p.scenario.run)].append(p)
    large = [group for group in groups.values() if len(group) >= _GROUP]
    if not large:
        return None
    errors, held, rankings = [], [], list[Ranking]()
    for group in large:
        by_anchor = [_others(a, group) for a in group]
        others = [p for own in by_anchor for p in own]
        errors.append(statistics.fmean(abs(p.error) for p in others))
        held.append(statistics.fmean(abs(math.log1p(p.error)) <= EIGHTY_PERCENT * _left(p) for p in others))
        rankings += map(ranking_of, by_anchor)
    pairs = sum(r.pairs for r in rankings)
    right = sum(r.pairs * r.pairwise for r in rankings if r.pairwise is not None)
    return Anchored(
        groups=len(large),
        mape=statistics.fmean(errors),
        plain=statistics.fmean(statistics.fmean(abs(p.error) for p in group) for group in large),
        coverage=statistics.fmean(held),
        pairwise=right / pairs if pairs else None,
    )


def _others(measured: TrainingPrediction, group: Sequence[TrainingPrediction]) -> list[TrainingPrediction]:
    """The other rows of a group, as one that was measured has them."""
    factor = shared_factor([measured])
    return [replace(p, expected=factor * p.expected) for p in group if p is not measured]


def _left(p: TrainingPrediction) -> float:
    """The spread that is left where another layout of the machine was measured."""
    causes = {*p.scenario.open, "anchored"} | {*p.scenario.causes} & {"mixture"}
    return p.spread(causes)


def anchor_file(problem: TrainingProblem, path: str) -> Anchor:
    """The same with the rows of a file.

    Raises:
        MeshwiseError: it cannot be read, or has no such row.
    """
    return anchor(problem, _read(path), path)


def _read(path: str) -> Sequence[TrainingRun | UnreadRow]:
    return read_rows(read_text(Path(path)), path, TrainingRun)


def _predicted(problem: TrainingProblem, run: TrainingRun) -> TrainingPrediction | Refusal:
    """The row under the problem's calibration; a refusal if it is of another model or chip."""
    if run.is_memory or not run.counts:
        return Refusal(run, "no step's time, or no number of its own (primary is no)")
    name = problem.calibration.name
    try:
        own = build_scenario(run, name).problem
    except MeshwiseError as error:
        return Refusal(run, str(error))
    for what, found, asked in (
        ("chip", own.cluster.chip.name, problem.cluster.chip.name),
        ("model", own.model.sizes, problem.model.sizes),
        ("format", own.job.formats.compute, problem.job.formats.compute),
    ):
        if found != asked:
            return Refusal(run, f"another {what}: {_short(found)}, asked is {_short(asked)}")
    return predict_training(run, name)


def _short(value: object) -> str:
    return getattr(value, "value", None) or str(value)[:80]
