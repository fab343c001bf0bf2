"""The pairs that an answer may tell of: a search meets millions, and holds these.

They are the best plans, the front of throughput against time per output token, and the best of each kind of plan that
the best one may be compared with. Not here: pairs (`pairs`), what an answer tells of them (`planner`, `neighbours`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshwise.search.candidates import Array, Index, Mask, distinct
from meshwise.search.serving.constraints import ServingConstraints, as_good, pair_scores
from meshwise.search.serving.pairs import Pairs
from meshwise.search.serving.tables import Tables

#: Pairs that are held until those that are not needed are left out.
_WAITING = 1 << 18

#: Of the best pairs so many are asked first for the best kinds.
_FEW = 4096

#: One of so many plans is asked first which others it beats.
_SAMPLED = 256

#: Axes of decoding engines by which plans are compared.
_COMPARED = ("tensor", "cache", "width", "expert", "stage")


@dataclass
class Kept:
    """Pairs that fit in memory, without those that no answer needs; of equal ones the first are needed.

    Args:
        tables, constraints: what is searched for.
        top: how many plans are wanted.
    """

    tables: Tables
    constraints: ServingConstraints
    top: int
    _new: list[Pairs] = field(default_factory=list)
    _old: list[Pairs] = field(default_factory=list)
    _waiting: int = 0  # pairs that are new
    _enough: int = 0
    _last: list[float] = field(default_factory=lambda: [math.inf, math.inf])  # the first score of the last of the best

    def __post_init__(self) -> None:
        decode = self.tables.decode
        self._mesh, self._batches = np.zeros(len(decode.layouts), int), np.unique(decode.batch)
        for axis in _COMPARED:
            self._mesh = distinct([self._mesh, decode.sizes[axis]])[1]

    def add(self, pairs: Pairs) -> None:
        """Take those of some more that fit in memory."""
        fits = pairs.memory <= self.tables.usable
        self._new.append(fitting := pairs if fits.all() else pairs.take(np.flatnonzero(fits)))
        self._waiting += len(fitting)
        if self._waiting >= _WAITING:
            self._old, self._new, self._waiting = [*self._old, self._needed(self._new)], [], 0
            if _number(self._old) >= self._enough:
                self._enough = 2 * len(self.pairs())

    def __len__(self) -> int:
        return _number(self._old) + self._waiting

    def pairs(self) -> Pairs:
        """Those that are needed, in the order in which they came; where they are few, all of them."""
        parts = [*self._old, *self._new]
        self._old = [self._needed(parts) if len(self) > _WAITING else Pairs.joined(parts)]
        self._new, self._waiting = [], 0
        return self._old[0]

    def _needed(self, parts: Sequence[Pairs]) -> Pairs:
        pairs = Pairs.joined(parts)
        needed = np.zeros(len(pairs), bool)
        for rows in (self._best(pairs), front(self.constraints, pairs), *self._compared(pairs)):
            needed[rows] = True
        return pairs.take(np.flatnonzero(needed))

    def _best(self, pairs: Pairs) -> Index:
        """Those that may be as good as the last of the best; of those with one layout, too, where prompts are cut."""
        asked, first = self.constraints, pair_scores(self.constraints, pairs, self.tables)[0]
        kept, found = asked.keeping(pairs), [np.zeros(0, int)]
        for i, some in enumerate((kept, kept & one_layout(self.tables, pairs)) if asked.chunks else (kept,)):
            rows = np.flatnonzero(some & as_good(asked, first, self._last[i]))
            self._last[i] = min(self._last[i], self._last_of_best(pairs, first, rows))
            found.append(rows[as_good(asked, first[rows], self._last[i])])
        return np.concatenate(found)

    def _last_of_best(self, pairs: Pairs, first: Array, rows: Index) -> float:
        """The first score of the last of the best kinds among some rows; infinite where there are fewer kinds."""
        some, number = rows[:0], _FEW
        while len(some) < len(rows):
            some = rows if number >= len(rows) else rows[np.argpartition(first[rows], number)[:number]]
            order = some[np.argsort(first[some], kind="stable")]
            begins = np.sort(np.unique(kinds_of(self.tables, pairs, order), return_index=True)[1])
            if len(begins) >= self.top:
                return float(first[order[begins[self.top - 1]]])
            number *= 16
        return math.inf

    def _compared(self, pairs: Pairs) -> Iterator[Index]:
        """The best of each kind in what is asked for: of those that keep the targets, and in each target of all."""
        asked, decode = self.constraints, self.tables.decode
        gathers = (self.tables.prefill.sizes["fsdp"] > 1)[self.tables.prefill.kind[pairs.prefill]]
        batch = np.searchsorted(self._batches, decode.batch[pairs.decode])
        code = self._mesh[decode.kind[pairs.decode]] * len(self._batches) + batch
        code = 4 * code + 2 * pairs.apart + gathers
        goal = {"throughput": -pairs.tokens, "tpot": pairs.tpot, "ttft": pairs.ttft}[asked.objective]
        yield _least(code, np.where(asked.keeping(pairs), pairs.chips if asked.rate is not None else goal, math.inf))
        for limit, column in ((asked.max_ttft, pairs.ttft), (asked.max_tpot, pairs.tpot), (asked.rate, -pairs.rate)):
            if limit is not None:
                yield _least(code, column)


def _number(parts: Sequence[Pairs]) -> int:
    return sum(map(len, parts))


def kinds_of(tables: Tables, pairs: Pairs, rows: Index | slice = slice(None)) -> Index:
    """One number for each pair of layouts and mode, wherever they lie: of some rows."""
    into = tables.prefill.kind[pairs.prefill[rows]].astype(int)
    out = tables.decode.kind[pairs.decode[rows]].astype(int)
    return np.asarray(2 * (into * len(tables.decode.layouts) + out) + pairs.apart[rows])


def one_layout(tables: Tables, pairs: Pairs) -> Mask:
    """Which are engines of one layout that does both."""
    return np.asarray(~pairs.apart & (tables.prefill.mesh[pairs.prefill] == tables.decode.mesh[pairs.decode]))


def front(constraints: ServingConstraints, pairs: Pairs) -> Index:
    """Those that none beats in throughput and time per output token, within the first's target; least time first."""
    within = np.flatnonzero(pairs.ttft <= (math.inf if constraints.max_ttft is None else constraints.max_ttft))
    return within[_pareto(pairs.tpot[within], pairs.tokens[within])] if len(within) else within


def _least(code: Index, column: Array) -> Index:
    """The first row with the least, of the rows of each code; none where that is infinite."""
    least = np.full(int(code.max(initial=0)) + 1, math.inf)
    np.minimum.at(least, code, column)
    rows = np.flatnonzero((column == least[code]) & (column < math.inf))
    first: Index = rows[np.unique(code[rows], return_index=True)[1]]
    return first


def _sorted_by(small: Array, large: Array) -> Index:
    return np.lexsort((-large, small))


def _pareto(small: Array, large: Array) -> Index:
    """Rows with the least `small` for so much `large`."""
    some = _sorted_by(small[::_SAMPLED], large[::_SAMPLED])  # none of what these beat can be one of them
    steps, most = small[::_SAMPLED][some], np.maximum.accumulate(large[::_SAMPLED][some])
    below = np.searchsorted(steps, small, side="right")
    asked = np.flatnonzero(large >= np.concatenate([[-math.inf], most])[below])
    order = asked[_sorted_by(small[asked], large[asked])]
    best = np.maximum.accumulate(large[order])
    first = np.concatenate([[True], best[1:] > best[:-1]])
    chosen: Index = order[first]
    return chosen
