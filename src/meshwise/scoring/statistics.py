"""What predictions and measurements say together: errors, coverage, ranking. Not here: predicting."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from meshwise.scoring.outcomes import Predicted, SetUp
from meshwise.scoring.prediction import Prediction

#: Layouts whose measured times differ by less are not ranked: runs of one layout do so, too.
SAME = 0.02


#: A prediction of training, or of serving.
AnyPredicted = Predicted[SetUp]

P = TypeVar("P", bound=AnyPredicted)


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


def errors_of(predictions: Iterable[AnyPredicted]) -> Errors | None:
    """Sum up times; None where there are none."""
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
        within_10=_share(e <= 0.1 for e in absolute),
        within_20=_share(e <= 0.2 for e in absolute),
        coverage_80=_share(known) if known else None,
        bound_mape=statistics.fmean(abs(p.bound_error) for p in rows),
        bound_bias=statistics.fmean(p.bound_error for p in rows),
    )


def _share(true: Iterable[bool]) -> float:
    values = list(true)
    return sum(values) / len(values)


def by(predictions: Iterable[P], key: Callable[[P], str]) -> dict[str, Errors]:
    """Sum up times by a key, in order of it."""
    groups: defaultdict[str, list[P]] = defaultdict(list)
    for p in predictions:
        groups[key(p)].append(p)
    found = ((name, errors_of(group)) for name, group in sorted(groups.items()))
    return {name: errors for name, errors in found if errors is not None}


def macro(groups: Mapping[str, Errors]) -> float | None:
    """Mean of the groups' mean absolute errors, each group alike."""
    return statistics.fmean(e.mape for e in groups.values()) if groups else None


def ranking_of(predictions: Sequence[Prediction]) -> Ranking:
    """Compare layouts pairwise within what one source measured of one model on one machine."""
    groups: defaultdict[tuple[object, ...], list[Prediction]] = defaultdict(list)
    for p in predictions:
        if not p.run.is_memory:
            groups[_machine(p)].append(p)
    several = [group for group in groups.values() if len({_laid_out(p) for p in group}) > 1]
    pairs = right = 0.0
    for group in several:
        for a, b in itertools.combinations(group, 2):
            x, y = _per_token(a, a.measured), _per_token(b, b.measured)
            if _laid_out(a) == _laid_out(b) or abs(x / y - 1) < SAME:
                continue
            pairs += 1
            said = _per_token(a, a.expected) - _per_token(b, b.expected)
            right += 0.5 if said == 0 else float((said > 0) == (x > y))
    return Ranking(int(pairs), right / pairs if pairs else None, len(several))


def _machine(p: Prediction) -> tuple[object, ...]:
    r = p.run
    what = (r.model, r.layers, r.d_model, r.n_heads, r.seq_len, r.dtype)
    return (r.source, r.chip, r.hardware, r.n_chips, r.software, *what)


def _laid_out(p: Prediction) -> tuple[object, ...]:
    r = p.run
    shares = (r.fsdp_or_zero_stage, r.recompute, r.micro_batch)
    return (r.tp, r.sp, r.pp, r.vpp, r.cp, r.ep, r.dp, *shares)


def _per_token(p: Prediction, seconds: float) -> float:
    return seconds / p.run.tokens
