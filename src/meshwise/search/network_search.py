"""The exact search of one network: branch and bound over one evaluator.

First every mesh and cut of the batch is bounded from below by its passes alone,
as if weights and gradients moved in no time; then, under all layout choices, with these. Best bound first, what does
not fit is dropped, and real placements of the others are priced, until no bound is left that could still enter the
answer. Not here: what candidates cost (`pricing`), the space (`space`), or which networks are searched (`search`).
"""

from __future__ import annotations

import math
from functools import reduce

import numpy as np

from meshwise.costs.schedules import find_schedule
from meshwise.search.bounds import CHUNK, Groups
from meshwise.search.candidates import Array, CandidateBatch, Index, Mask
from meshwise.search.pricing import Priced, Pricing
from meshwise.search.ranking import SearchState, best_of_kinds, of_first

#: For a first look, so many keys of each kind of layout are bounded, those that compute least, and of these groups so
#: many are gone through; later rounds are larger.
_OF_KIND, _GROUPS = 16, 1024
_POOL = 2048  # candidates that wait with a bound until the best of them are priced

#: Candidates that are priced in the first go, so that the cut falls before the next, which are so many times as large:
#: a go takes time for each of the layout choices that its candidates have, however few. What is left joins a go that is
#: at least such a share of it.
_GO, _GROWTH, _SHARE = 64, 8, 0.25

#: Candidates whose memory is asked for in the first go, of so many layout choices: what that takes hardly depends on
#: how many they are, but each of the choices takes time.
_FIT, _WAYS = 512, 4

#: Candidates that are so many after the first go have bounds of placements before their memory is asked for.
_MANY = 1024

#: Layout choices that are so few are priced without bounds of placements.
_FEW_WAYS = 2

#: Plans that repeat nothing may give a good cut if they take no longer than so many times what is computed at least.
_NEAR = 1.2

#: Times as long as its leader that what is priced of a kind for a first look may take.
_NEARLY = 1.015

#: So few layouts are all priced: their bounds would take longer.
_FEW = 64

#: Shares of a network's search that are behind with its tables, the first look, bounds, and the ranking where a front
#: follows; of the ranking when all groups are gone through.
_TABLES, _LOOK, _BOUNDED, _RANKED, _GONE_THROUGH = 0.1, 0.2, 0.3, 0.5, 0.9


class NetworkSearch:
    """The search of one network.

    Args:
        state: filled.
        pricing: of the network; of a large one, of a block of the meshes.
        last: whether it is the last block.
    """

    def __init__(self, state: SearchState, pricing: Pricing, *, last: bool = True) -> None:
        self.state, self.network, self.pricing = state, pricing.network, pricing
        self.last, self.all_priced = last, False
        self.chips = float(math.prod(self.network.fabric.sizes))
        self.most_seconds = state.seconds_on(self.chips)
        self.for_front = self.network.fabric is state.front_on
        self.waiting = CandidateBatch.none()
        self.rest = 0.0  # no bound is below it of what is neither priced nor waits
        self.looked_at = np.zeros(0, int)  # numbers of candidates that the first look has priced
        self.splits_backward = np.array([find_schedule(s.schedule).splits_backward for s in self.network.schedules])
        self.kinds, self.kind_of = pricing.kinds  # and which of them each of the bounds' keys is of

    def run(self) -> None:
        """Search: a first look at the plainest schedule gives a cut, which rules most other schedules out."""
        bounds, every = self.pricing.bounds, range(len(self.network.schedules))
        self.state.strategies += (number := bounds.examined(every))
        if number <= _FEW:
            self.price_all()
            self.all_priced = True
            return
        if math.isinf(self.state.ranking.cut):
            self._tell(_TABLES)
            keep_all = sum(v.own.remat == "none" and not v.needs_stages for v in self.network.variants)
            if keep_all == 1:  # it is lowered in any case; mixtures have several
                self.look(bounds.groups(every[:1], self.matters, self._first_of_kinds, "none"), self._near())
            for chosen in (self._first_of_kinds, None):
                if math.isinf(self.state.ranking.cut) and not self.kinds.keys() <= self.state.ranking.best.keys():
                    self.look(bounds.groups(every[:1], self.matters, chosen))
        self._tell(_LOOK)
        groups = bounds.groups(every, self.matters)
        with self.state.behind.part(_BOUNDED, _RANKED if self.for_front else 1.0):
            left = self.rank(groups)
        self.state.here = math.inf  # the front is not what is ranked
        if self.for_front:
            with self.state.behind.part(_RANKED, 1.0):
                self.find_front(left)

    def find_leanest(self, *, exact: bool) -> None:
        """Find the least memory of all layouts where nothing fits; not `exact`, that there are any.

        Candidates whose activations alone do not fit were not looked at. Under limits, memory is not what lacks.
        """
        if not (self.state.ranking.best or self.all_priced) and math.isinf(self.most_seconds):
            self.state.least_memory = self.pricing.least_memory(self.state.least_memory, exact=exact)

    def price_all(self) -> None:
        """Price every layout that may matter: so few take no longer than their bounds."""
        bounds = self.pricing.bounds
        fitting = self._fitting(self.pricing.taken(bounds.members_of(bounds.all_groups(self.matters))))
        self.state.priced += len(fitting)
        self.expand(fitting)
        self.state.here = math.inf

    def below_cut(self, seconds_per_token: Array, cut: Array | None = None) -> Mask:
        """Which bounds still allow a place in the ranking (a tie may win it by its memory)."""
        self.state.tick()
        scores = self.state.score(seconds_per_token, self.chips)
        below = scores <= (self.state.ranking.cut if cut is None else cut)
        return np.asarray(below & (seconds_per_token <= self.most_seconds))

    def cuts(self, key: Index) -> Array:
        """Scores above which nothing of some keys enters the ranking: of a kind that is there, that of its best."""
        found = np.full(len(self.kinds), self.state.ranking.cut)
        for kind, best in self.state.ranking.best.items():
            if kind in self.kinds:
                found[self.kinds[kind]] = best.score
        return found[self.kind_of[key]]

    def matters(self, seconds_per_token: Array, key: Index) -> Mask:
        """Which bounds, of the bounds' keys, still allow a place in the ranking, or on the front."""
        below = self.below_cut(seconds_per_token, self.cuts(key))
        return below | (seconds_per_token <= self.state.front.reach) if self.for_front else below

    def _key(self, batch: CandidateBatch) -> Index:
        return self.pricing.bounds.key_of[batch.at]

    def _mattering(self, batch: CandidateBatch) -> CandidateBatch:
        return batch.where(self.matters(batch.bound, self._key(batch)))

    def expand(self, batch: CandidateBatch) -> None:
        """Price every worthy placement of some candidates, and remember the best."""
        state = self.state
        for priced in self.pricing.placed(batch):
            state.covered += priced.covered
            state.priced += len(priced.seconds)
            plain = priced.batch.saving == 0  # no other saving of a candidate is faster
            self.pricing.least.append((self.pricing.numbers(priced.batch)[plain], priced.seconds[plain]))
            scores = np.asarray(state.score(priced.seconds, self.chips))
            kinds = self.pricing.kinds_at(priced.batch.at)
            within = np.where(priced.seconds <= self.most_seconds, scores, math.nan)  # what is over is below no cut
            for i in best_of_kinds(priced.batch, kinds, within, state.ranking.cut):
                kind = (int(self.chips), *(int(n) for n in kinds[i]))
                state.ranking.enter(kind, self.pricing.found(priced, i, float(scores[i])))
            if self.for_front:
                self._enter_front(priced, scores)

    def _enter_front(self, priced: Priced, scores: Array) -> None:
        front, seconds, memory = self.state.front, priced.seconds, priced.batch.memory
        new = np.flatnonzero(~front.dominated(seconds, memory))
        if len(new):
            order = new[np.lexsort((memory[new], seconds[new]))]
            lowest = np.minimum.accumulate(memory[order])
            chosen = order[np.r_[True, lowest[1:] < lowest[:-1]]]
            front.add(self.pricing.found(priced, int(i), float(scores[i])) for i in chosen)

    def expand_waiting(self, most: int) -> None:
        """Expand those that wait, best bound first, at least `most` of them while they may enter the ranking."""
        batch = self.waiting.by_bound()
        leaders = self._leaders(batch)
        batch = self._expand_of(batch, leaders[self.below_cut(batch.bound[leaders])])
        size, ways, alike = min(_GO, most), 1, 1  # of the layout choices, for each takes time of its own
        while most > 0 and len(worthy := np.flatnonzero(self.below_cut(batch.bound, self.cuts(self._key(batch))))):
            # The others wait on: they may be on the front.
            if math.isfinite(self.state.ranking.cut) and self._has_many_ways(batch, worthy):
                batch = self._bounded_when_placed(batch, worthy[~batch.placed[worthy]])
                worthy = np.flatnonzero(self.below_cut(batch.bound, self.cuts(self._key(batch))))
            if self._are_tight(batch, worthy):  # of each kind the first
                first = worthy[_of_each(self.kind_of[self._key(batch.take(worthy))], alike)]
                chosen, alike = first[: alike * self.state.ranking.top], _GROWTH * alike
            else:
                chosen = worthy[: _go_of(size, len(worthy))]
                chosen = chosen[of_first(batch.choices[chosen], ways)]
                size, ways = min(_GROWTH * size, CHUNK), 2 * ways
            batch = self._expand_of(batch, chosen)
            most -= len(chosen)
            self._raise_floor(batch.bound)
        self.waiting = batch

    def _are_tight(self, batch: CandidateBatch, which: Index) -> bool:
        """Whether prices of some are nearly their bounds: those of placements, but for backward passes in two parts."""
        tight = batch.placed[which] & ~self.splits_backward[batch.schedule[which]]
        return len(which) > 0 and bool(tight.all())

    def _has_many_ways(self, batch: CandidateBatch, which: Index) -> bool:
        """Whether bounds of placements take less time than what they rule out: of some that have none yet."""
        new = which[~batch.placed[which]]
        return len(new) > 0 and len(np.unique(batch.choices[new])) > _FEW_WAYS

    def _bounded_when_placed(self, batch: CandidateBatch, which: Index) -> CandidateBatch:
        """The batch, best bound first, some of it with bounds of placements."""
        if not len(which):
            return batch
        placed = self.pricing.raised(batch.take(which), self.matters, placed=True)
        others = batch.take(np.delete(np.arange(len(batch)), which))
        return CandidateBatch.joined([placed, others]).by_bound()

    def _leaders(self, batch: CandidateBatch) -> Index:
        """Of a batch sorted by its bounds the first of each of the first kinds that are not in the ranking yet.

        None where the ranking is full: what is worth a price then is known by its bound.
        """
        if math.isfinite(self.state.ranking.cut):
            return np.zeros(0, int)
        ranked = [number for kind, number in self.kinds.items() if kind in self.state.ranking.best]
        kinds, first = np.unique(self.kind_of[self._key(batch)], return_index=True)
        return np.sort(first[~np.isin(kinds, ranked)])[: 2 * self.state.ranking.top]

    def _expand_of(self, batch: CandidateBatch, chosen: Index) -> CandidateBatch:
        """Expand some of a batch; the others."""
        self.expand(batch.take(chosen))
        return batch.take(np.delete(np.arange(len(batch)), chosen))

    def _raise_floor(self, waiting: Array) -> None:
        """Know that no layout of this network undercuts what waits, and what is not looked at."""
        least = min(self.rest, float(waiting.min(initial=math.inf)))
        self.state.here = max(self.state.here, float(self.state.score(least, self.chips)))

    def _first_of_kinds(self, least: Array, key: Index) -> Mask:
        """Of each kind the few keys of least seconds."""
        kind = self.kind_of[key]
        order = np.lexsort((least, kind))
        begins = np.searchsorted(kind[order], kind[order])
        return np.asarray(np.isin(np.arange(len(key)), order[np.arange(len(key)) - begins < _OF_KIND]))

    def _near(self) -> float:
        """Seconds per token that the worst plan of a ranking hardly takes, if some of the plans repeat nothing."""
        least, bounds = np.full(len(self.kinds), math.inf), self.pricing.bounds
        np.minimum.at(least, self.kind_of, reduce(np.minimum, bounds.busy.values())[bounds.size] * bounds.per_token)
        return _NEAR * float(np.sort(least)[: self.state.ranking.top][-1])

    def look(self, groups: Groups, near: float = math.inf) -> None:
        """Price some of the best of `groups`, sorted by their bound: a cut, before all are gone through.

        Nothing is priced if the bounds of what fits of them are not `near` enough for a good one.
        """
        known, begin, number = self.state.infeasible, 0, _FIT
        enough = min(self.state.ranking.top, len(self.kinds)) if math.isfinite(near) else 0
        if len(np.unique(self.kind_of[groups.key[groups.bound <= near]])) < enough:
            return
        every = self._possible(groups.take(slice(_GROUPS))).by_bound()
        self.state.infeasible = known  # they come again
        while begin < len(every) and math.isinf(self.state.ranking.cut):
            batch, size = self.pricing.taken(every.take(slice(begin, begin + number))), _GO
            begin, number = begin + number, _GROWTH * number
            while len(batch := batch.where(np.isinf(self.cuts(self._key(batch))))):  # of kinds that may fill it
                # Others of the leaders' kinds wait for a cut.
                go = (
                    self._under_one_choice(batch, self._leaders(batch))
                    if size == _GO
                    else np.arange(min(size, len(batch)))
                )
                batch = self._look_at(batch, go)
                if size == _GO and (lacking := len(go) - len(self.waiting)) > 0:
                    batch = self._look_at(batch, self._leaders_that_fit(batch, lacking))
                if size == _GO and (self.waiting.bound <= near).sum() < enough:
                    self.waiting, self.looked_at = CandidateBatch.none(), np.zeros(0, int)
                    return
                self.expand_waiting(_GO)
                size = _GROWTH * size
        self._tell()

    def _under_one_choice(self, batch: CandidateBatch, leaders: Index) -> Index:
        """Leaders of kinds, or what hardly takes longer under the choices that most of them have."""
        if len(leaders) < 2:
            return leaders
        numbers, counts = np.unique(batch.choices[leaders], return_counts=True)
        own = np.flatnonzero(batch.choices == numbers[counts.argmax()])
        kinds = self.kind_of[self._key(batch)]
        found, first = np.unique(kinds[own], return_index=True)
        nearest = dict(zip(found.tolist(), own[first].tolist(), strict=True))
        each = zip(kinds[leaders].tolist(), leaders.tolist(), strict=True)
        of = np.array([nearest.get(kind, at) for kind, at in each])
        return np.where(batch.bound[of] <= _NEARLY * batch.bound[leaders], of, leaders)

    def _look_at(self, batch: CandidateBatch, go: Index) -> CandidateBatch:
        """Let some of a batch wait, as far as they fit, and come no more; the others."""
        self._price(chosen := batch.take(go))
        self.looked_at = np.concatenate([self.looked_at, self.pricing.numbers(chosen)])
        return batch.take(np.delete(np.arange(len(batch)), go))

    def _leaders_that_fit(self, batch: CandidateBatch, most: int) -> Index:
        """Of a batch the first that fits of each of the first kinds of which none waits."""
        waits = np.unique(self.kind_of[self._key(self.waiting)])
        rest = np.flatnonzero(~np.isin(self.kind_of[self._key(batch)], waits))
        fits = self.pricing.numbers(self.fitting(batch.take(rest))[0])
        rest = rest[np.isin(self.pricing.numbers(batch.take(rest)), fits)]
        first = np.unique(self.kind_of[self._key(batch.take(rest))], return_index=True)[1]
        return rest[np.sort(first)[:most]]

    def _possible(self, groups: Groups) -> CandidateBatch:
        """Candidates of groups that may fit, with their bounds; without those that the first look has priced."""
        batch = self.members_of(groups)
        if len(self.looked_at):
            batch = batch.where(~np.isin(self.pricing.numbers(batch), self.looked_at))
        possible = self.pricing.possible(batch)
        self.state.infeasible += len(batch) - len(possible)
        return self.pricing.raised(possible, self.matters)

    def _bounded(self, groups: Groups) -> CandidateBatch:
        """Those of them that some tool takes, which is asked of few where the cut is known."""
        return self.pricing.taken(self._possible(groups))

    def members_of(self, groups: Groups) -> CandidateBatch:
        """The candidates of groups."""
        return self.pricing.bounds.members_of(groups)

    def rank(self, groups: Groups) -> Groups:
        """Go through `groups`, sorted by their bound, until none can enter the ranking.

        Returns: those that were not looked at.
        """
        begin, size = 0, _GROUPS
        pool = CandidateBatch.none()
        beyond = np.append(groups.bound, math.inf)
        while begin < len(groups) and self.below_cut(groups.bound[begin : begin + 1])[0]:
            # Those over the cut wait on: they may be on the front.
            end = begin + int(self.below_cut(groups.bound[begin : begin + size]).sum())
            some = groups.take(slice(begin, end))
            some = some.take(np.flatnonzero(self.matters(some.bound, some.key)))
            pool = self._mattering(CandidateBatch.joined([pool, self._bounded(some)])).by_bound()
            # A lower cut spares the bounds of others: of many groups the best are priced at once, else when many wait.
            now = len(pool) if len(pool) > _POOL else _FIT if end < len(groups) else 0
            pool, best = pool.take(slice(now, None)), pool.take(slice(now))
            self._price(best, min(float(beyond[end]), float(pool.bound.min(initial=math.inf))))
            if end < len(groups):  # else the pool is priced first
                self.expand_waiting(_GO)
            self.rest = min(float(beyond[end]), float(pool.bound.min(initial=math.inf)))
            self._raise_floor(self.waiting.bound)
            begin, size = end, min(_GROWTH * size, CHUNK)
            self._tell(_GONE_THROUGH * begin / max(int(self.below_cut(groups.bound).sum()), begin))
        self._price(pool, math.inf)
        self.rest = math.inf
        self.expand_waiting(len(self.waiting))
        return groups.take(slice(begin, None))

    def _tell(self, share: float = 0.0) -> None:
        """Say how far the search is, and that this share of what it is at is behind."""
        self.state.behind.at(share)
        self.state.tell(self.chips)

    def _price(self, batch: CandidateBatch, beyond: float = 0.0) -> None:
        """Let those that fit wait with their bounds, and expand some: best first, until none matters.

        Nothing but these and those that wait is bounded below `beyond`.
        """
        batch, size, ways = self._mattering(batch.by_bound()), _FIT, _WAYS
        go = self._leaders(batch)
        while len(batch := self._mattering(batch)):
            if not len(go):
                if len(batch) <= _MANY and math.isfinite(self.state.ranking.cut):
                    every = np.arange(len(batch))
                    if self._has_many_ways(batch, every):
                        batch = self._bounded_when_placed(batch, every[~batch.placed])
                        continue
                go = np.arange(_go_of(size, len(batch)))
                if not batch.placed[go].all():
                    go, ways = go[of_first(batch.choices[go], ways)], 4 * ways
            self.state.priced += len(fitting := self._fitting(batch.take(go)))
            self.waiting = CandidateBatch.joined([self.waiting, self._mattering(fitting)])
            batch = batch.take(np.delete(np.arange(len(batch)), go))
            self.rest = min(beyond, float(batch.bound.min(initial=math.inf)))
            self._raise_floor(self.waiting.bound)
            if len(batch):
                self.expand_waiting(len(go))
                self._tell()
                batch = self._mattering(batch)
                if len(batch) > _MANY and not batch.placed.all():
                    batch = self._bounded_when_placed(batch, np.flatnonzero(~batch.placed))
            go, size = go[:0], min(_GROWTH * size, CHUNK)

    def fitting(self, batch: CandidateBatch) -> tuple[CandidateBatch, float]:
        """The candidates that fit, and the least memory of any."""
        return self.pricing.fitting(batch)

    def _fitting(self, batch: CandidateBatch) -> CandidateBatch:
        fitting, least = self.fitting(batch)
        self.state.infeasible += len(batch) - int((~self.network.offloads[fitting.saving]).sum())
        self.state.least_memory = min(self.state.least_memory, least)
        return fitting

    def find_front(self, groups: Groups) -> None:
        """Price what could still enter the front: `groups` were not looked at, candidates wait with bounds.

        The front ends at FRONT_SPAN times the best time: nobody trades more than that for memory.
        """
        front, pricing = self.state.front, self.pricing
        left, self.waiting = self._undominated(self.waiting), CandidateBatch.none()
        begin, size, rounds = 0, CHUNK // 8, 0
        while True:
            each = 1 / (rounds + 1 + math.log2(1 + len(groups) / size))  # of the rounds, as far as they are known
            self._expand_front(left, rounds * each, each)
            groups = groups.take(slice(begin, int(np.searchsorted(groups.bound, front.reach))))
            groups = groups.take(np.flatnonzero(~front.dominated(groups.bound, groups.memory)))
            if not len(groups):
                break
            # Memory needs no wires: what it rules out need not be bounded.
            members = pricing.taken(pricing.bounds.members_of(groups.take(slice(0, size))))
            possible = self._undominated(self._fitting(members))
            self.state.priced += len(possible)
            left = self._undominated(pricing.bounded(possible))
            begin, size, rounds = size, 2 * size, rounds + 1

    def _expand_front(self, left: CandidateBatch, behind: float, share: float) -> None:
        """Price the placements of candidates that may enter the front, in rounds, until none is left."""
        left, number = left.by_bound(), len(left)
        while len(left):
            # Those that no other bounds in both time and memory, and some more.
            chosen = np.zeros(len(left), bool)
            while chosen.sum() < _GO // 2 and not chosen.all():
                rest = np.flatnonzero(~chosen)
                lowest = np.minimum.accumulate(left.memory[rest])
                chosen[rest[np.r_[True, lowest[1:] < lowest[:-1]]]] = True
            self.expand(left.take(np.flatnonzero(chosen)))
            left = self._undominated(left.take(np.flatnonzero(~chosen)))
            self._tell(behind + share * (1 - len(left) / number))

    def _undominated(self, batch: CandidateBatch) -> CandidateBatch:
        front = self.state.front
        return batch.where((batch.bound < front.reach) & ~front.dominated(batch.bound, batch.memory))


def _of_each(kinds: Index, number: int) -> Mask:
    """Which are among the first so many of their kind."""
    order = np.argsort(kinds, kind="stable")
    nth = np.arange(len(order)) - np.searchsorted(kinds[order], kinds[order])
    found = np.zeros(len(order), bool)
    found[order] = nth < number
    return found


def _go_of(size: int, left: int) -> int:
    """Candidates of a go of `size`, of those that are left: all where another would be left few."""
    return left if size >= _SHARE * left else size
