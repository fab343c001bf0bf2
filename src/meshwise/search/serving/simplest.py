"""The simplest serving plan that cannot be told from the best: fewest axes, then the most usual choices, then the best.

As in training, it is found by pairing again, of rows with few axes alone, so that a plan is not missed because a less
simple one beats it in everything. Not here: the best plan (`planner`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from meshwise.costs.serving.answer import ServingSetup
from meshwise.search.candidates import Mask
from meshwise.search.serving.constraints import ServingConstraints, best_of, pair_scores, ties
from meshwise.search.serving.neighbours import Neighbour
from meshwise.search.serving.pairs import Pairs
from meshwise.search.serving.tables import Table, Tables
from meshwise.sharding.serving import SERVING_AXES, ServingLayout

#: Axes that every engine has: heads and widths, and experts.
_USUAL = ("tensor", "expert")

#: Pairs that an engine or another takes, of some rows.
PairUp = Callable[[Tables, ServingConstraints], Iterable[Pairs]]


def complexity(setup: ServingSetup) -> tuple[int, bool]:
    """Mesh axes of an engine, two kinds of engines (or layouts) counting as one more; and whether choices are unusual.

    Usual are engines of one kind with one layout, on the axes tensor and expert alone.
    """
    both = setup.prefill, setup.decode
    axes = max(sum(n > 1 for n in layout.sizes.values()) for layout in both)
    return axes + (not setup.one_layout), not (setup.one_layout and all(map(_is_usual, both)))


def _is_usual(layout: ServingLayout) -> bool:
    others = (n for axis, n in layout.sizes.items() if axis not in _USUAL)
    return not any(n > 1 for n in others) and not layout.sequence_parallel


def _usual_layouts(table: Table) -> Mask:
    """The same of all layouts of a table."""
    others = np.any([table.sizes[a] > 1 for a in SERVING_AXES if a not in _USUAL], axis=0)
    return np.asarray(~(others | np.array([layout.sequence_parallel for layout in table.layouts], bool)))


def find_simplest(
    tables: Tables, constraints: ServingConstraints, pairs: Pairs, best: int, pair_up: PairUp
) -> Pairs | None:
    """The simplest plan that cannot be told from the best, as one pair; None if that is the best itself.

    Args:
        tables, constraints: what was searched for.
        pairs: all plans; best: which of them is the best.
        pair_up: pairs rows of tables.
    """
    setup = pairs.setup(best, tables)
    most, unusual = complexity(setup)
    limits = _limits(constraints.within, [float(c[best]) for c in pair_scores(constraints, pairs, tables)])
    axes = [np.sum([t.sizes[a] > 1 for a in SERVING_AXES], axis=0)[t.kind] for t in tables.both]
    plain = [_usual_layouts(t)[t.kind] for t in tables.both]
    for number in range(most + 1):
        for usual in (True, False):
            if number == most and (usual, unusual) != (True, True):
                return None
            rows = [(a <= number) & (p | (not usual)) for a, p in zip(axes, plain, strict=True)]
            fewer = None if usual or not number else [a < number for a in axes]
            found = [
                _as_good(tables, constraints, own, limits)
                for own in _of_level(tables, constraints, pair_up, rows, fewer)
            ]
            if any(map(len, found)):
                own = Pairs.joined(found)
                return own.take(np.array([best_of(pair_scores(constraints, own, tables), ties(constraints))]))
    return None


def _as_good(tables: Tables, constraints: ServingConstraints, pairs: Pairs, limits: Sequence[float]) -> Pairs:
    """Those that fit and keep the targets, and whose first scores are within the limits."""
    kept = constraints.keeping(pairs) & (pairs.memory <= tables.usable)
    for column, limit in zip(pair_scores(constraints, pairs, tables), limits, strict=False):
        kept &= column <= limit
    return pairs.take(kept)


def _of_level(
    tables: Tables, constraints: ServingConstraints, pair_up: PairUp, rows: Sequence[Mask], fewer: Sequence[Mask] | None
) -> Iterator[Pairs]:
    """Engines of one kind with one layout of `rows`, and all pairs of rows with `fewer` axes."""
    if constraints.mode != "disaggregated":
        for pairs in _paired_rows(tables, replace(constraints, mode="aggregated"), pair_up, rows):
            yield pairs.take(tables.prefill.mesh[pairs.prefill] == tables.decode.mesh[pairs.decode])
    if fewer is not None:
        yield from _paired_rows(tables, constraints, pair_up, fewer)


def _paired_rows(
    tables: Tables, constraints: ServingConstraints, pair_up: PairUp, kept: Sequence[Mask]
) -> Iterator[Pairs]:
    """Pairs of those rows that are kept, numbered as in `tables`."""
    into, out = map(np.flatnonzero, kept)
    if len(into) and len(out):
        some = replace(tables, prefill=tables.prefill.take(into), decode=tables.decode.take(out))
        for pairs in pair_up(some, constraints):
            yield replace(pairs, prefill=into[pairs.prefill], decode=out[pairs.decode])


def _limits(within: float, best: Sequence[float]) -> list[float]:
    """Up to which a plan's first two numbers cannot be told from the best's."""
    return [value + within * abs(value) for value in best[:2]]


_Plan = TypeVar("_Plan")


def simplest_first(
    plans: Sequence[_Plan],
    scores: Callable[[_Plan], Sequence[float]],
    setup_of: Callable[[_Plan], ServingSetup],
    within: float,
) -> tuple[_Plan, ...]:
    """The plans, which are best first, with the simplest of those that cannot be told from the best before them.

    Args:
        plans: at least one.
        scores: what is minimised; the first two decide whether plans can be told apart.
        setup_of: layouts and batches of a plan.
        within: share of the best's numbers; 0 leaves the best first.
    """
    limits = _limits(within, scores(plans[0]))
    alike = [p for p in plans if all(a <= b for a, b in zip(scores(p), limits, strict=False))]
    simple = min(alike, key=lambda p: complexity(setup_of(p))) if within else plans[0]
    return (simple, *(p for p in plans if p is not simple))


#: What plans are ranked by -> the words for a gain in their first two numbers.
_GAINS = {
    "rate": ("fewer chips", "less TPOT"),
    "throughput": ("more tokens/s", "less time of a request"),
    "tpot": ("less TPOT", "less TTFT"),
    "ttft": ("less TTFT", "more tokens/s"),
}


def gain_of(
    constraints: ServingConstraints,
    best: _Plan,
    first: _Plan,
    scores: Callable[[_Plan], Sequence[float]],
    setup_of: Callable[[_Plan], ServingSetup],
) -> Neighbour | None:
    """The best plan's layouts, and what it has over the simplest, where that is first; else None.

    Args:
        constraints: what was asked.
        best, first: the plans.
        scores, setup_of: as for `simplest_first`.
    """
    if first is best:
        return None
    setup = setup_of(best)
    alike = str(setup.prefill) == str(setup.decode)
    name = f"{setup.decode}" if alike else f"prefill by {setup.prefill}, generation by {setup.decode}"
    names = _GAINS["rate" if constraints.rate is not None else constraints.objective]
    pairs = zip(names, scores(first), scores(best), strict=False)
    gains = [f"{100 * abs(1 - b / a):.2g} % {of}" for of, a, b in pairs if b < a]
    return Neighbour(
        name,
        f"{gains[0] if gains else 'as good'}; within {constraints.within:.0%} predictions cannot tell plans apart, and "
        "the simplest is first (--within 0: the best)",
    )
