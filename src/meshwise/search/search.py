"""The exact search for the best training layouts.

Branch and bound over one evaluator. First every mesh and cut of the batch is bounded from below by its passes alone,
as if weights and gradients moved in no time; then all structures by what moving them adds. Best bound first, they are
priced with wires that no placement can beat; what does not fit is dropped; then real placements are priced, until no
bound is left that could still enter the answer. Not here: the space itself (`space`, `structures`), or one network's
pricing (`pricing`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.costs.fabric import Fabric
from meshwise.costs.problem import TrainingProblem
from meshwise.search.allocator import keep_freed_memory
from meshwise.search.bounds import CHUNK, Groups, ideal_chip_seconds_per_token
from meshwise.search.front import Found, Front
from meshwise.search.pricing import Priced, Pricing
from meshwise.search.rows import Rows, candidate_table
from meshwise.search.space import Limits, meshes
from meshwise.search.structures import Choices, works
from meshwise.sharding.layout import MESH_AXES

Array = NDArray[np.float64]

#: Objective -> what is minimised, from seconds per token and chips used.
OBJECTIVES: dict[str, Callable[[Any, Any], Any]] = {
    "time": lambda seconds_per_token, chips: seconds_per_token + 0.0 * chips,
    "cost": lambda seconds_per_token, chips: seconds_per_token * chips,
}

#: Layouts of one kind differ only in how replicas are split between data and fsdp, in remat and microbatches: the
#: ranking shows the best of each kind, because a list of near copies says nothing.
_KIND = [MESH_AXES.index(a) for a in ("tensor", "ulysses", "context", "expert", "stage")]

#: For a first look, the best of each kind of work by a cheap bound are bounded, about so many, and of these groups so
#: many are gone through; later rounds are larger. The placements of about so many candidates are priced.
_LOOKED_AT, _GROUPS, _LEADERS = 4096, 1024, 32

#: Rows for each structure that are priced in the first go, so that the cut falls before the next, which are so many
#: times as large: a go takes time for each structure that its rows have, however few.
_GO, _GROWTH = 64, 8


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What is searched.

    Args:
        limits: of the meshes.
        choices: what is tried besides sizes.
        micro_batch, num_microbatches: what the user fixed, or None.
        memory_share: share of a chip's HBM that a layout may fill (infinite: whatever it needs).
        front: whether to find the front of time against memory, too, which takes several times as long.
        most_seconds, most_chip_seconds: per token, of what may enter the ranking; infinite for any.
    """

    limits: Limits
    choices: Choices = field(default_factory=Choices)
    micro_batch: int | None = None
    num_microbatches: int | None = None
    memory_share: float = 1.0
    front: bool = False
    most_seconds: float = math.inf
    most_chip_seconds: float = math.inf

    def seconds_on(self, chips: float) -> float:
        """Seconds per token that a plan on so many chips may take."""
        return min(self.most_seconds, self.most_chip_seconds / chips)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found.

    Args:
        best: best layout of each of the best kinds (sizes of all axes but data and fsdp on so many chips), best first.
        front: layouts on the first network that no other undercuts in both time per token and memory, fastest first;
            none slower than FRONT_SPAN times the fastest. Empty unless asked for.
        strategies: layouts examined, wires aside: ruled out by a bound that holds for them (what activations alone take
            in memory or in time), or priced.
        priced: layouts priced in full, in time and memory.
        covered: complete layouts of the rows that were laid out on the network, counting placements that another beats.
        infeasible: layouts that did not fit in memory.
        least_memory: smallest memory of any layout that was looked at, bytes; of any there is where nothing fits.
        cpu_s: CPU seconds spent.
        complete: whether nothing was left out because the user interrupted the search.
        interrupted_on: chips of the network that was being searched then, 0 for none.
    """

    best: tuple[Found, ...]
    front: tuple[Found, ...]
    strategies: int
    priced: int
    covered: int
    infeasible: int
    least_memory: float
    cpu_s: float
    complete: bool = True
    interrupted_on: int = 0


def search(
    problem: TrainingProblem,
    fabrics: Iterable[Fabric],
    space: SearchSpace,
    *,
    objective: str = "time",
    top: int = 10,
    progress: Callable[[str], None] = lambda _: None,
) -> SearchResult:
    """Find the best layouts on any of `fabrics`.

    Interrupted (KeyboardInterrupt) after something was found, it gives the best so far.

    Args:
        problem: model, job, cluster, calibration.
        fabrics: networks to use whole: the cluster's, then smaller parts of it, which are skipped when even perfect
            use of their chips could not enter the ranking.
        space: what may vary.
        objective: a key of OBJECTIVES.
        top: how many kinds of layout to rank.
        progress: told a line now and then.
    """
    started = time.process_time()
    keep_freed_memory()
    state = _State(problem, space, objective, top, progress)
    ideal = ideal_chip_seconds_per_token(problem, space.choices)
    interrupted_on = 0
    limited = math.isfinite(space.seconds_on(1.0))
    try:
        for fabric in fabrics:
            chips = math.prod(fabric.sizes)
            if not state.best and math.isfinite(state.least_memory) and not limited:
                break  # what does not fit on all chips does not fit on some of them: each would hold more
            if state.score(ideal / chips, chips) < state.cut and ideal / chips <= space.seconds_on(chips):
                if space.front:
                    state.front_on = state.front_on or fabric
                _search_fabric(state, fabric)
    except KeyboardInterrupt:
        if not state.best:
            raise
        interrupted_on = chips
    return state.result(time.process_time() - started, interrupted_on)


class _State:
    """What is known so far: the best of each kind, the front, counts."""

    def __init__(
        self,
        problem: TrainingProblem,
        space: SearchSpace,
        objective: str,
        top: int,
        progress: Callable[[str], None],
    ) -> None:
        self.problem = problem
        self.space = space
        self.score = OBJECTIVES[objective]
        self.top = top
        self.progress = progress
        self.works = works(problem.model, space.choices)
        self.capacity = problem.cluster.chip.hbm_usable * space.memory_share
        self.best: dict[tuple[int, ...], Found] = {}
        self.cut = math.inf
        self.front = Front()
        self.front_on: Fabric | None = None
        self.strategies = self.priced = self.covered = self.infeasible = 0
        self.least_memory = math.inf

    def enter(self, key: tuple[int, ...], found: Found) -> None:
        """Put a layout in the ranking, if it is the best of its kind."""
        if key in self.best and not _rank(found) < _rank(self.best[key]):
            return
        self.best[key] = found
        if len(self.best) >= self.top:
            self.cut = sorted(f.score for f in self.best.values())[self.top - 1]
            self.best = {k: f for k, f in self.best.items() if f.score <= self.cut}

    def result(self, cpu_s: float, interrupted_on: int) -> SearchResult:
        ranked = sorted(self.best.values(), key=_rank)[: self.top]
        return SearchResult(
            best=tuple(ranked),
            front=self.front.members(),
            strategies=self.strategies,
            priced=self.priced,
            covered=self.covered,
            infeasible=self.infeasible,
            least_memory=self.least_memory,
            cpu_s=cpu_s,
            complete=not interrupted_on,
            interrupted_on=interrupted_on,
        )


def _rank(found: Found) -> tuple[Any, ...]:
    """Order by score; ties go to less memory, then to fewer kinds of parallelism."""
    return (found.score, found.memory_bytes, len(found.layout.used_axes), str(found.layout))


def _best_words(state: _State) -> str:
    """Name the mesh of the best layout so far, if there is one."""
    if not state.best:
        return ""
    layout = min(state.best.values(), key=_rank).layout
    return f", best {','.join(f'{a}={layout.sizes[a]}' for a in layout.used_axes) or 'data=1'}"


class _OnFabric:
    """The search of one network."""

    def __init__(self, state: _State, fabric: Fabric, pricing: Pricing) -> None:
        self.state = state
        self.fabric = fabric
        self.pricing = pricing
        self.chips = float(math.prod(fabric.sizes))
        self.most_seconds = state.space.seconds_on(self.chips)
        self.waiting = Rows.none()
        self.go = _GO

    @property
    def for_front(self) -> bool:
        """Whether the front is that of this network."""
        return self.fabric is self.state.front_on

    def below_cut(self, seconds_per_token: Array) -> NDArray[np.bool_]:
        """Which bounds still allow a place in the ranking (a tie may win it by its memory)."""
        within = seconds_per_token <= self.most_seconds
        return np.asarray((self.state.score(seconds_per_token, self.chips) <= self.state.cut) & within)

    def matters(self, seconds_per_token: Array) -> NDArray[np.bool_]:
        """Which bounds still allow a place in the ranking, or on the front."""
        below = self.below_cut(seconds_per_token)
        return below | (seconds_per_token <= self.state.front.reach) if self.for_front else below

    def expand(self, rows: Rows) -> None:
        """Price every worthy placement of `rows`, and remember the best."""
        state = self.state
        for priced in self.pricing.placed(rows):
            state.covered += priced.covered
            state.priced += len(priced.seconds)
            scores = np.asarray(state.score(priced.seconds, self.chips))
            kinds = self._kinds(priced.rows)
            within = np.where(priced.seconds <= self.most_seconds, scores, math.nan)  # what is over is below no cut
            for i in _best_of_kinds(priced.rows, kinds, within, state.cut):
                kind = (int(self.chips), *(int(n) for n in kinds[i]))
                state.enter(kind, self.pricing.found(priced, i, float(scores[i])))
            if self.for_front:
                self._enter_front(priced, scores)

    def _enter_front(self, priced: Priced, scores: Array) -> None:
        front, seconds, memory = self.state.front, priced.seconds, priced.rows.memory
        new = np.flatnonzero(~front.dominated(seconds, memory))
        if len(new):
            order = new[np.lexsort((memory[new], seconds[new]))]
            lowest = np.minimum.accumulate(memory[order])
            chosen = order[np.r_[True, lowest[1:] < lowest[:-1]]]
            front.add(self.pricing.found(priced, int(i), float(scores[i])) for i in chosen)

    def expand_waiting(self, most: int) -> None:
        """Expand those that wait, best bound first, at least `most` of them while they may enter the ranking."""
        rows = self.waiting.take(np.argsort(self.waiting.bound, kind="stable"))
        if math.isinf(self.state.cut):  # the ranking is not full: begin with the best of each kind, which fill it
            kinds = self._kinds(rows)
            _, leaders = np.unique(kinds, axis=0, return_index=True)
            chosen = np.sort(leaders)[: 2 * self.state.top]
            chosen = chosen[self.below_cut(rows.bound[chosen])]
            self.expand(rows.take(chosen))
            rows = rows.take(np.delete(np.arange(len(rows)), chosen))
        begin, size = 0, min(self.go, most)
        while begin < min(len(rows), most) and self.below_cut(rows.bound[begin : begin + 1])[0]:
            # The others of the next rows wait on: they may be on the front.
            end = begin + int(self.below_cut(rows.bound[begin : begin + size]).sum())
            self.expand(rows.take(slice(begin, end)))
            begin, size = end, min(_GROWTH * size, CHUNK)
        self.waiting = rows.take(slice(begin, None))

    def _kinds(self, rows: Rows) -> Array:
        """[rows, axes]: the sizes that tell kinds of layouts apart."""
        table = self.pricing.table
        return table.meshes[table.mesh_id[rows.at]][:, _KIND]

    def look(self, groups: Groups) -> None:
        """Price some of the best of `groups`, sorted by their bound: a cut, before all are gone through."""
        rows = self._bounded(groups.take(slice(0, _GROUPS)))
        self._price(rows.take(np.argsort(rows.bound, kind="stable")[: self.go]))
        self.expand_waiting(_LEADERS)
        self.waiting = Rows.none()  # they come again
        self._tell()

    def _bounded(self, groups: Groups) -> Rows:
        """Candidates of groups that may fit, with their bounds."""
        rows = self.pricing.rows(groups)
        possible = self.pricing.possible(rows)
        self.state.infeasible += len(rows) - len(possible)
        return self.pricing.raised(possible, self.matters)

    def rank(self, groups: Groups) -> Groups:
        """Go through `groups`, sorted by their bound, until none can enter the ranking.

        Returns: those that were not looked at.
        """
        begin, size = 0, _GROUPS
        pool = Rows.none()
        while begin < len(groups) and self.below_cut(groups.bound[begin : begin + 1])[0]:
            # Those over the cut wait on: they may be on the front.
            end = begin + int(self.below_cut(groups.bound[begin : begin + size]).sum())
            rows = self._bounded(groups.take(slice(begin, end)))
            pool = Rows.joined([pool, rows])
            if len(pool) > CHUNK:
                self._price(pool)
                self.expand_waiting(self.go)
                pool = Rows.none()
            begin, size = end, min(_GROWTH * size, CHUNK)
        self._price(pool)
        self.expand_waiting(len(self.waiting))
        self._tell()
        return groups.take(slice(begin, None))

    def _tell(self) -> None:
        """Say how far the search is."""
        state = self.state
        state.progress(f"searching {self.chips:,.0f} chips: {state.strategies:,} layouts{_best_words(state)}")

    def _price(self, rows: Rows) -> None:
        """Let those of `rows` that fit wait with their bounds, and expand some: best first, until none matters."""
        state = self.state
        rows = rows.take(np.argsort(rows.bound, kind="stable"))
        size = self.go
        while len(rows := rows.take(np.flatnonzero(self.matters(rows.bound)))):
            fitting = self._fitting(rows.take(slice(0, size)))
            state.priced += len(fitting)
            bounded = self.pricing.bounded(fitting)
            self.waiting = Rows.joined([self.waiting, bounded.take(np.flatnonzero(self.matters(bounded.bound)))])
            rows = rows.take(slice(size, None))
            if len(rows):
                self.expand_waiting(size)
                self._tell()
            size = min(_GROWTH * size, CHUNK)

    def _fitting(self, rows: Rows) -> Rows:
        fitting, least = self.pricing.fitting(rows)
        self.state.infeasible += len(rows) - int((fitting.offload == 0).sum())
        self.state.least_memory = min(self.state.least_memory, least)
        return fitting

    def find_front(self, groups: Groups) -> None:
        """Price what could still enter the front: `groups` were not looked at, rows wait with their bounds.

        The front ends at FRONT_SPAN times the best time: nobody trades more than that for memory.
        """
        front, pricing = self.state.front, self.pricing
        left, self.waiting = self._undominated(self.waiting), Rows.none()
        begin, size = 0, CHUNK // 8
        while True:
            self._expand_front(left)
            groups = groups.take(slice(begin, int(np.searchsorted(groups.bound, front.reach))))
            groups = groups.take(np.flatnonzero(~front.dominated(groups.bound, groups.memory)))
            if not len(groups):
                break
            # Memory needs no wires: what it rules out need not be bounded.
            possible = self._undominated(self._fitting(pricing.rows(groups.take(slice(0, size)))))
            self.state.priced += len(possible)
            left = self._undominated(pricing.bounded(possible))
            begin, size = size, 2 * size

    def _expand_front(self, left: Rows) -> None:
        """Price the placements of rows that may enter the front, in rounds, until none is left."""
        left = left.take(np.argsort(left.bound, kind="stable"))
        while len(left):
            # Those that no other row bounds in both time and memory, and some more.
            chosen = np.zeros(len(left), bool)
            while chosen.sum() < self.go // 2 and not chosen.all():
                rest = np.flatnonzero(~chosen)
                lowest = np.minimum.accumulate(left.memory[rest])
                chosen[rest[np.r_[True, lowest[1:] < lowest[:-1]]]] = True
            self.expand(left.take(np.flatnonzero(chosen)))
            left = self._undominated(left.take(np.flatnonzero(~chosen)))

    def _undominated(self, rows: Rows) -> Rows:
        front = self.state.front
        return rows.take(np.flatnonzero((rows.bound < front.reach) & ~front.dominated(rows.bound, rows.memory)))


def _best_of_kinds(rows: Rows, kinds: Array, scores: Array, cut: float) -> list[int]:
    """The rows that may enter the ranking: of each kind the one of least score, then of least memory."""
    promising = np.flatnonzero(scores <= cut)
    if not len(promising):
        return []
    of = kinds[promising]
    order = np.lexsort((rows.memory[promising], scores[promising], *of.T))
    changes = (of[order][1:] != of[order][:-1]).any(axis=1)
    # Equal scores and memory are told apart by words: keep all that tie with the first of their kind.
    first = np.maximum.accumulate(np.where(np.r_[True, changes], np.arange(len(order)), 0))
    mine = promising[order]
    ties = (scores[mine] == scores[mine[first]]) & (rows.memory[mine] == rows.memory[mine[first]])
    return [int(i) for i in mine[ties]]


def _search_fabric(state: _State, fabric: Fabric) -> None:
    """Search one network: a first look at the plainest schedule gives a cut, which rules most other schedules out."""
    space = state.space
    table = candidate_table(
        state.problem.job,
        meshes(math.prod(fabric.sizes), space.limits),
        micro_batch=space.micro_batch,
        num_microbatches=space.num_microbatches,
    )
    if not len(table):
        return
    pricing = Pricing(state.problem, fabric, state.works, space.choices, table, state.capacity)
    on_fabric = _OnFabric(state, fabric, pricing)
    every = range(len(pricing.variants))
    state.strategies += pricing.bounds.examined(every)
    # A first look at the plainest schedule gives a cut, which rules most of the others out.
    on_fabric.look(pricing.groups(every[:1], on_fabric.matters, most=_LOOKED_AT))
    left = on_fabric.rank(pricing.groups(every, on_fabric.matters))
    if not state.best:  # candidates whose activations alone do not fit were not looked at
        state.least_memory = min(state.least_memory, pricing.least_memory())
    if on_fabric.for_front:
        on_fabric.find_front(left)
