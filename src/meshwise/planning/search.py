"""The exact search for the best training layouts.

Branch and bound over one evaluator. First every mesh, cut of the batch, remat policy and ZeRO stage is priced with
wires that no placement can beat, which bounds it from below, and what does not fit is dropped. Then, best bound
first, the real placements are priced, until no bound is left that could still enter the answer. Not here: the space
itself (`space`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.costs.estimate import model_flops
from meshwise.costs.evaluate import (
    Costs,
    LocalBlock,
    Structure,
    TrainingProblem,
    evaluate,
    evaluate_compute,
    place_structure,
)
from meshwise.costs.network import Fabric
from meshwise.planning.front import Found, Front
from meshwise.planning.rows import Rows, candidate_rows
from meshwise.planning.space import IdealWires, Limits, WireTable, meshes, placements, undominated
from meshwise.sharding.layout import MESH_AXES, Layout
from meshwise.sharding.place import Transfer
from meshwise.sharding.remat import REMAT_POLICIES

__all__ = ["OBJECTIVES", "Found", "SearchResult", "SearchSpace", "search"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Objective -> what is minimised, from seconds per token and chips used.
OBJECTIVES: dict[str, Callable[[Any, Any], Any]] = {
    "time": lambda seconds_per_token, chips: seconds_per_token + 0.0 * chips,
    "cost": lambda seconds_per_token, chips: seconds_per_token * chips,
}

#: Layouts of one kind differ only in how replicas are split between data and fsdp, in remat and microbatches: the
#: ranking shows the best of each kind, because a list of near copies says nothing.
_KIND = [MESH_AXES.index(a) for a in ("tensor", "context", "stage")]

#: Rows priced in full before anything is cut.
_FIRST = 512

#: Rows evaluated at a time: arrays stay in the cache.
_CHUNK = 8192


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What is searched.

    Args:
        remats: remat policies.
        zeros: ZeRO stages of the data axis. Stage 0 holds most, but its AllReduce hides behind the backward pass as a
            whole, where stage 1 has to hide the gathering of new weights behind the forward pass.
        sequence_parallel: whether the residual stream is split over the tensor axis between matmuls; never worse, so
            on.
        micro_batch, num_microbatches: what the user fixed, or None.
        memory_share: share of a chip's HBM that a layout may fill (infinite: whatever it needs).
        limits: of the meshes.
    """

    limits: Limits
    remats: tuple[str, ...] = tuple(REMAT_POLICIES)
    zeros: tuple[int, ...] = (0, 1, 2)
    sequence_parallel: bool = True
    micro_batch: int | None = None
    num_microbatches: int | None = None
    memory_share: float = 1.0


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found.

    Args:
        best: best layout of each of the best kinds (tensor, context and stage sizes on so many chips), best first.
        front: layouts on the first network that no other undercuts in both time per token and memory, fastest first;
            none slower than FRONT_SPAN times the fastest.
        strategies: layouts examined: their arithmetic evaluated, which rules most of them out, or priced in full.
        priced: layouts priced in full, in time and memory.
        covered: complete layouts of the rows that were laid out on the network, counting placements that another beats.
        infeasible: layouts that did not fit in memory.
        least_memory: smallest memory of any layout, bytes; what would be needed when nothing fits.
        cpu_s: CPU seconds spent.
    """

    best: tuple[Found, ...]
    front: tuple[Found, ...]
    strategies: int
    priced: int
    covered: int
    infeasible: int
    least_memory: float
    cpu_s: float


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
    state = _State(problem, space, objective, top)
    ideal = _ideal_chip_seconds_per_token(problem)
    for fabric in fabrics:
        chips = math.prod(fabric.sizes)
        if not state.best and math.isfinite(state.least_memory):
            break  # what does not fit on all chips does not fit on some of them: each would hold more
        if state.score(ideal / chips, chips) < state.cut:
            state.front_on = state.front_on or fabric
            progress(f"searching {chips:,} chips: {state.strategies:,} layouts so far")
            _search_fabric(state, fabric)
    return state.result(time.process_time() - started)


def _ideal_chip_seconds_per_token(problem: TrainingProblem) -> float:
    """Chip-seconds of one token if every chip only multiplied matrices, at its achieved rate."""
    length = int(problem.job.seq_len)
    full = problem.job.tuning.full
    flops = problem.model.train_flops_per_token(length) if full else model_flops(problem, length) / length
    formats, chip = problem.job.formats, problem.cluster.chip
    peak = max(chip.peak(formats.compute), chip.peak(formats.other_compute))
    return flops / (peak * problem.calibration.matmul_efficiency)


class _State:
    """What is known so far: the best of each kind, the front, counts."""

    def __init__(self, problem: TrainingProblem, space: SearchSpace, objective: str, top: int) -> None:
        self.problem = problem
        self.space = space
        self.score = OBJECTIVES[objective]
        self.top = top
        self.structures = [Structure(z, space.sequence_parallel, r) for r in space.remats for z in space.zeros]
        self.groups = _wire_groups(problem, self.structures)
        self.best: dict[tuple[int, ...], Found] = {}
        self.cut = math.inf
        self.front = Front()
        self.front_on: Fabric | None = None
        self.strategies = self.priced = self.covered = self.infeasible = 0
        self.least_memory = math.inf

    def incumbent(self) -> float:
        """Score that a layout must not exceed to enter the ranking."""
        return self.cut

    def may_matter(self, fabric: Fabric, seconds_per_token: Array) -> NDArray[np.bool_]:
        """Which lower bounds still allow a place in the ranking, or on the front."""
        matters = self.score(seconds_per_token, float(math.prod(fabric.sizes))) <= self.cut
        if fabric is self.front_on:
            matters |= seconds_per_token <= self.front.reach
        return np.asarray(matters)

    def enter(self, key: tuple[int, ...], found: Found) -> None:
        """Put a layout in the ranking, as the best of its kind."""
        self.best[key] = found
        if len(self.best) >= self.top:
            self.cut = sorted(f.score for f in self.best.values())[self.top - 1]
            self.best = {k: f for k, f in self.best.items() if f.score <= self.cut}

    def result(self, cpu_s: float) -> SearchResult:
        ranked = sorted(self.best.values(), key=_rank)[: self.top]
        return SearchResult(
            tuple(ranked),
            self.front.members(),
            self.strategies,
            self.priced,
            self.covered,
            self.infeasible,
            self.least_memory,
            cpu_s,
        )


def _rank(found: Found) -> tuple[Any, ...]:
    """Order by score; ties go to less memory, then to fewer kinds of parallelism."""
    return (found.score, found.memory_bytes, len(found.layout.used_axes), str(found.layout))


def _wire_groups(problem: TrainingProblem, structures: Iterable[Structure]) -> tuple[tuple[str, ...], ...]:
    """Every group of mesh axes that some collective of some structure runs over."""
    groups = set()
    for structure in structures:
        for placed in place_structure(problem, structure):
            for item in (*placed.forward, *placed.backward, *placed.step):
                if isinstance(item, Transfer):
                    groups.add(tuple(sorted(item.collective.mesh_axes)))
    return tuple(sorted(groups))


def _search_fabric(state: _State, fabric: Fabric) -> None:
    """Search one network, with bounds that cost more as they cut less.

    Bounds by compute alone order the rows; a first few are priced in full, which gives a cut. What the cut leaves is
    bounded with wires that no placement beats, and priced best bound first until no bound is left below the cut.
    """
    table = meshes(math.prod(fabric.sizes), state.space.limits)
    space = state.space
    parts, local = candidate_rows(
        state.problem,
        state.structures,
        table,
        micro_batch=space.micro_batch,
        num_microbatches=space.num_microbatches,
    )
    if not any(map(len, parts)):
        return
    ideal = IdealWires(fabric, {a: table[:, k].astype(float) for k, a in enumerate(MESH_AXES)})
    expand = _Expansion(state, fabric, local)
    state.strategies += sum(map(len, parts))
    for part, structure, own in zip(parts, state.structures, local, strict=True):
        part.bound = _compute_bound(state, structure, part, own)
    few, others = _promising(parts)
    first = _bounded(state, ideal, few, local)
    first = first.take(np.argsort(first.bound, kind="stable"))
    expand(first.take(slice(0, _FIRST)))
    left = [part.take(np.flatnonzero(state.may_matter(fabric, part.bound))) for part in others]
    rows = Rows.joined([first.take(slice(_FIRST, None)), _bounded(state, ideal, left, local)])
    rows = rows.take(np.argsort(rows.bound, kind="stable"))
    scores = state.score(rows.bound, float(math.prod(fabric.sizes)))
    begin, size = 0, _FIRST
    while begin < len(rows) and scores[begin] < state.incumbent():
        end = min(begin + size, len(rows))
        expand(rows.take(slice(begin, end)))
        begin, size = end, min(size * 2, 4 * _CHUNK)
    if fabric is state.front_on:
        _search_front(state, rows.take(slice(begin, len(rows))), expand)


def _compute_bound(state: _State, structure: Structure, rows: Rows, local: tuple[LocalBlock, ...]) -> Array:
    """Seconds per token of a row's own arithmetic, pipeline bubble included, were the network infinitely fast."""
    if not len(rows):
        return rows.bound
    own = tuple(block.take(rows.local) for block in local)
    candidates = rows.candidates()
    seconds = evaluate_compute(state.problem, structure, candidates, own)
    return np.asarray(seconds / (candidates.sequences * state.problem.job.seq_len))


def _promising(parts: list[Rows]) -> tuple[list[Rows], list[Rows]]:
    """The rows of least bound, several times as many as are expanded first because some do not fit; and the others."""
    bounds = np.concatenate([part.bound for part in parts])
    count = min(len(bounds), 8 * _FIRST)
    limit = np.partition(bounds, count - 1)[count - 1]
    few = [part.bound <= limit for part in parts]
    chosen = [part.take(np.flatnonzero(mask)) for part, mask in zip(parts, few, strict=True)]
    return chosen, [part.take(np.flatnonzero(~mask)) for part, mask in zip(parts, few, strict=True)]


def _search_front(state: _State, rows: Rows, expand: _Expansion) -> None:
    """Price what could still enter the front: each round the rows that no other row bounds in both time and memory.

    `rows` are sorted by their bound. The front ends at FRONT_SPAN times the best time: nobody trades more than that
    for memory.
    """
    rows = rows.take(slice(0, int(np.searchsorted(rows.bound, state.front.reach))))
    while len(rows):
        chosen = np.zeros(len(rows), bool)
        while chosen.sum() < 256 and not chosen.all():
            left = np.flatnonzero(~chosen)
            lowest = np.minimum.accumulate(rows.memory[left])
            chosen[left[np.r_[True, lowest[1:] < lowest[:-1]]]] = True
        expand(rows.take(np.flatnonzero(chosen)))
        rows = rows.take(np.flatnonzero(~chosen))
        rows = rows.take(np.flatnonzero(~state.front.dominated(rows.bound, rows.memory)))


def _bounded(state: _State, ideal: IdealWires, parts: list[Rows], local: list[tuple[LocalBlock, ...]]) -> Rows:
    """Those of the rows that fit in memory, with a lower bound of their time."""
    capacity = state.problem.cluster.chip.hbm_usable * state.space.memory_share
    kept = [parts[0].take(slice(0, 0))]
    for s, (structure, mine) in enumerate(zip(state.structures, parts, strict=True)):
        for i in range(0, len(mine), _CHUNK):
            chunk = mine.take(slice(i, i + _CHUNK))
            costs = _evaluate(state, structure, chunk, ideal.at(chunk.mesh_id), local[s])
            chunk.bound = _seconds_per_token(state, chunk, costs)
            chunk.memory = np.broadcast_to(costs.memory["total"], len(chunk))
            fits = chunk.memory <= capacity
            state.priced += len(chunk)
            state.infeasible += int((~fits).sum())
            state.least_memory = min(state.least_memory, float(chunk.memory.min()))
            kept.append(chunk if fits.all() else chunk.take(np.flatnonzero(fits)))
    return Rows.joined(kept)


def _evaluate(state: _State, structure: Structure, rows: Rows, wires: Any, local: tuple[LocalBlock, ...]) -> Costs:
    own = tuple(block.take(rows.local) for block in local)
    return evaluate(state.problem, structure, rows.candidates(), wires, own)


def _seconds_per_token(state: _State, rows: Rows, costs: Costs) -> Array:
    return np.asarray(costs.step.expected / (rows.candidates().sequences * state.problem.job.seq_len))


class _Expansion:
    """Prices the real placements of rows on one fabric."""

    def __init__(self, state: _State, fabric: Fabric, local: list[tuple[LocalBlock, ...]]) -> None:
        self.state = state
        self.fabric = fabric
        self.local = local
        self.worthy: dict[int, Array] = {}  # mesh -> its undominated placements
        self.counts: dict[int, int] = {}

    def __call__(self, rows: Rows) -> None:
        """Price every undominated placement of `rows`."""
        if not len(rows):
            return
        ids, inverse = np.unique(rows.mesh_id, return_inverse=True)
        self._prepare(ids, rows.meshes[ids])
        options = [self.worthy[int(i)] for i in ids]
        number = np.array([len(o) for o in options])
        begins = np.cumsum(number) - number
        factors = np.concatenate(options)
        self.state.covered += int(np.array([self.counts[int(i)] for i in ids])[inverse].sum())
        for s, structure in enumerate(self.state.structures):
            mine = np.flatnonzero(rows.structure == s)
            repeats = number[inverse[mine]]
            row = np.repeat(mine, repeats)
            offset = np.arange(len(row)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
            placement = begins[inverse[row]] + offset
            for i in range(0, len(row), _CHUNK):
                part = slice(i, i + _CHUNK)
                self._price(s, structure, rows.take(row[part]), factors[placement[part]])

    def _prepare(self, ids: Index, mesh: Array) -> None:
        """List the placements of meshes not seen before, and drop the dominated ones."""
        new = [(int(i), tuple(int(v) for v in m)) for i, m in zip(ids, mesh, strict=True) if int(i) not in self.worthy]
        if not new:
            return
        options = [placements(self.fabric.sizes, sizes) for _, sizes in new]
        counts = np.array([len(o) for o in options])
        starts = np.cumsum(counts) - counts
        factors = np.concatenate(options)
        kept = undominated(self.fabric, factors, starts, self.state.groups)
        owner = np.repeat(np.arange(len(new)), counts)[kept]
        for k, (i, _) in enumerate(new):
            self.worthy[i] = factors[kept[_span(owner, k)]]
            self.counts[i] = int(counts[k])

    def _price(self, s: int, structure: Structure, rows: Rows, factors: Array) -> None:
        """Evaluate one chunk of complete layouts and remember the best."""
        state = self.state
        costs = _evaluate(state, structure, rows, WireTable(self.fabric, factors), self.local[s])
        seconds = _seconds_per_token(state, rows, costs)
        scores = np.asarray(state.score(seconds, float(math.prod(self.fabric.sizes))))
        state.strategies += len(seconds)
        state.priced += len(seconds)

        def found(i: int) -> Found:
            layout = _layout(rows, i, structure, factors[i])
            return Found(layout, self.fabric, float(scores[i]), float(seconds[i]), float(rows.memory[i]))

        self._rank(rows, scores, found)
        if self.fabric is not state.front_on:
            return
        new = np.flatnonzero(~state.front.dominated(seconds, rows.memory))
        if len(new):
            order = new[np.lexsort((rows.memory[new], seconds[new]))]
            lowest = np.minimum.accumulate(rows.memory[order])
            state.front.add(found(int(i)) for i in order[np.r_[True, lowest[1:] < lowest[:-1]]])

    def _rank(self, rows: Rows, scores: Array, found: Callable[[int], Found]) -> None:
        """Let the best layout of each kind enter the ranking."""
        state, chips = self.state, math.prod(self.fabric.sizes)
        promising = np.flatnonzero(scores <= state.incumbent())
        kinds = rows.meshes[rows.mesh_id[promising]][:, _KIND].astype(int)
        order = np.lexsort((rows.memory[promising], scores[promising], *kinds.T))
        changes = (kinds[order][1:] != kinds[order][:-1]).any(axis=1)
        for k in order[np.r_[True, changes]] if len(order) else order:
            candidate = found(int(promising[k]))
            key = (chips, *(int(v) for v in kinds[k]))
            if key not in state.best or _rank(candidate) < _rank(state.best[key]):
                state.enter(key, candidate)


def _span(owner: Index, k: int) -> slice:
    """Where `k` stands in the sorted `owner`."""
    return slice(int(np.searchsorted(owner, k)), int(np.searchsorted(owner, k, side="right")))


def _layout(rows: Rows, i: int, structure: Structure, factors: Array) -> Layout:
    sizes = {a: int(n) for a, n in zip(MESH_AXES, rows.meshes[rows.mesh_id[i]], strict=True)}
    wires = tuple((a, tuple(int(e) for e in factors[k])) for k, a in enumerate(MESH_AXES))
    return Layout(
        **sizes,
        zero=structure.zero if sizes["data"] > 1 else 0,
        sequence_parallel=structure.sequence_parallel,
        remat=structure.remat,
        micro_batch=int(rows.micro_batch[i]),
        num_microbatches=int(rows.num_microbatches[i]),
        wires=wires,
    )
