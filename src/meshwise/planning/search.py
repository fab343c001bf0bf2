"""The exact search for the best training layouts.

Branch and bound over one evaluator. First every mesh, cut of the batch, remat policy and ZeRO stage is priced with wires that
no placement can beat, which bounds it from below, and what does not fit is dropped. Then, best bound first, the real
placements are priced, until no bound is left that could still enter the answer. Not here: the space itself (`space`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.costs.evaluate import Candidates, Costs, Structure, TrainingProblem, evaluate, place_structure
from meshwise.costs.network import Fabric
from meshwise.planning.space import IdealWires, Limits, WireTable, meshes, placements, undominated
from meshwise.sharding.layout import MESH_AXES, Layout
from meshwise.sharding.place import Transfer
from meshwise.sharding.remat import REMAT_POLICIES

__all__ = ["OBJECTIVES", "Found", "SearchResult", "SearchSpace", "search"]

Array = NDArray[np.float64]
Rows = NDArray[np.int64]

#: Objective -> what is minimised, from seconds per token and chips used.
OBJECTIVES: dict[str, Callable[[Any, Any], Any]] = {
    "time": lambda seconds_per_token, chips: seconds_per_token + 0.0 * chips,
    "cost": lambda seconds_per_token, chips: seconds_per_token * chips,
}

#: Rows evaluated at a time: arrays stay in the cache.
_CHUNK = 8192


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What is searched.

    Args:
        remats: remat policies.
        zeros: ZeRO stages of the data axis.
        limits: of the meshes.
    """

    limits: Limits
    remats: tuple[str, ...] = tuple(REMAT_POLICIES)
    zeros: tuple[int, ...] = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Found:
    """One layout that was priced."""

    layout: Layout
    fabric: Fabric
    score: float
    seconds_per_token: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found.

    Args:
        best: best layout of each of the best meshes, best first.
        front: layouts that no other undercuts in both time per token and memory, fastest first.
        strategies: layouts evaluated (time and memory).
        covered: layouts in the space, counting those ruled out by a bound.
        infeasible: layouts that did not fit in memory.
        least_memory: smallest memory of any layout, bytes; what would be needed when nothing fits.
        cpu_s: CPU seconds spent.
    """

    best: tuple[Found, ...]
    front: tuple[Found, ...]
    strategies: int
    covered: int
    infeasible: int
    least_memory: float
    cpu_s: float


@dataclass(slots=True)
class _Rows:
    """Candidates before wires: parallel columns."""

    mesh: Array  # [rows, axes]
    micro_batch: Array
    num_microbatches: Array
    structure: Rows  # index into the structures
    bound: Array = field(default_factory=lambda: np.zeros(0))
    memory: Array = field(default_factory=lambda: np.zeros(0))

    def take(self, index: Any) -> _Rows:
        return _Rows(*(getattr(self, n)[index] for n in ("mesh", "micro_batch", "num_microbatches", "structure")),
                     *(getattr(self, n)[index] if len(getattr(self, n)) else getattr(self, n) for n in ("bound", "memory")))  # fmt: skip

    def candidates(self, index: Any = slice(None)) -> Candidates:
        columns = {a: self.mesh[index, i] for i, a in enumerate(MESH_AXES)}
        return Candidates(**columns, micro_batch=self.micro_batch[index], num_microbatches=self.num_microbatches[index])


def search(
    problem: TrainingProblem,
    fabrics: Sequence[Fabric],
    space: SearchSpace,
    *,
    objective: str = "time",
    top: int = 10,
    progress: Callable[[str], None] = lambda _: None,
) -> SearchResult:
    """Find the best layouts on any of `fabrics`.

    Args:
        problem: model, job, cluster, calibration.
        fabrics: networks to use whole: the cluster's, then smaller parts of it.
        space: what may vary.
        objective: a key of OBJECTIVES.
        top: how many meshes to rank.
        progress: told a line now and then.
    """
    started = time.process_time()
    state = _State(problem, space, objective, top)
    for fabric in fabrics:
        progress(f"searching {math.prod(fabric.sizes):,} chips: {state.strategies:,} layouts so far")
        _search_fabric(state, fabric)
    return state.result(time.process_time() - started)


class _State:
    """What is known so far: the best of each mesh, the front, counts."""

    def __init__(self, problem: TrainingProblem, space: SearchSpace, objective: str, top: int) -> None:
        self.problem = problem
        self.space = space
        self.score = OBJECTIVES[objective]
        self.top = top
        self.structures = [Structure(z, True, r) for r in space.remats for z in space.zeros]
        self.groups = _wire_groups(problem, self.structures)
        self.best: dict[tuple[int, ...], Found] = {}
        self.front = _Front()
        self.strategies = self.covered = self.infeasible = 0
        self.least_memory = math.inf

    def incumbent(self) -> float:
        """Score that a layout must beat to enter the ranking."""
        if len(self.best) < self.top:
            return math.inf
        return sorted(f.score for f in self.best.values())[self.top - 1]

    def result(self, cpu_s: float) -> SearchResult:
        ranked = sorted(self.best.values(), key=_rank)[: self.top]
        return SearchResult(
            tuple(ranked), self.front.members(), self.strategies, self.covered, self.infeasible, self.least_memory, cpu_s
        )


def _rank(found: Found) -> tuple[Any, ...]:
    """Order by score; ties go to less memory, then to fewer kinds of parallelism."""
    return (found.score, found.memory_bytes, len(found.layout.used_axes), str(found.layout))


class _Front:
    """Layouts that nothing undercuts in both time per token and memory."""

    def __init__(self) -> None:
        self.found: list[Found] = []

    def dominated(self, seconds: Array, memory: Array) -> NDArray[np.bool_]:
        """Which (time, memory) pairs some member undercuts or equals."""
        if not self.found:
            return np.zeros(len(seconds), bool)
        times = np.array([f.seconds_per_token for f in self.found])  # ascending, memory descending
        sizes = np.array([f.memory_bytes for f in self.found])
        at = np.searchsorted(times, seconds, side="right") - 1
        return (at >= 0) & (sizes[np.maximum(at, 0)] <= memory)

    def add(self, candidates: Iterable[Found]) -> None:
        kept: list[Found] = []
        for f in sorted([*self.found, *candidates], key=lambda f: (f.seconds_per_token, f.memory_bytes, str(f.layout))):
            if not kept or f.memory_bytes < kept[-1].memory_bytes:
                kept.append(f)
        self.found = kept

    def members(self) -> tuple[Found, ...]:
        return tuple(self.found)


def _wire_groups(problem: TrainingProblem, structures: Iterable[Structure]) -> tuple[tuple[str, ...], ...]:
    """Every group of mesh axes that some collective of some structure runs over."""
    groups = set()
    for structure in structures:
        for placed in place_structure(problem.model, structure):
            for item in (*placed.forward, *placed.backward, *placed.step):
                if isinstance(item, Transfer):
                    groups.add(tuple(sorted(item.collective.mesh_axes)))
    return tuple(sorted(groups))


def _search_fabric(state: _State, fabric: Fabric) -> None:
    """Search one network: bound everything, then expand what could still matter, best bound first."""
    rows = _bounded_rows(state, fabric)
    if not len(rows.bound):
        return
    order = np.argsort(rows.bound, kind="stable")
    rows = rows.take(order)
    chips = float(math.prod(fabric.sizes))
    scores = state.score(rows.bound, chips)
    begin, size = 0, 256
    while begin < len(scores):
        end = min(begin + size, len(scores))
        if scores[begin] >= state.incumbent():
            # Nothing left can enter the ranking; what could still enter the front goes on.
            rest = np.flatnonzero(~state.front.dominated(rows.bound[begin:], rows.memory[begin:])) + begin
            for i in range(0, len(rest), 2048):
                batch = rest[i : i + 2048]
                batch = batch[~state.front.dominated(rows.bound[batch], rows.memory[batch])]
                _expand(state, fabric, rows.take(batch))
            return
        useful = np.arange(begin, end)
        useful = useful[
            (scores[useful] < state.incumbent()) | ~state.front.dominated(rows.bound[useful], rows.memory[useful])
        ]
        _expand(state, fabric, rows.take(useful))
        begin, size = end, min(size * 2, 4096)


def _bounded_rows(state: _State, fabric: Fabric) -> _Rows:
    """All candidates on `fabric` that fit, with a lower bound of their seconds per token."""
    rows = _all_rows(state, fabric)
    parts = []
    for s, structure in enumerate(state.structures):
        mine = rows.take(np.flatnonzero(rows.structure == s))
        for i in range(0, len(mine.structure), _CHUNK):
            chunk = mine.take(slice(i, i + _CHUNK))
            wires = IdealWires(fabric, {a: chunk.mesh[:, k] for k, a in enumerate(MESH_AXES)})
            costs = evaluate(state.problem, structure, chunk.candidates(), wires)
            fits = _account(state, fabric, chunk, costs)
            chunk.bound, chunk.memory = _seconds_per_token(state, chunk, costs), costs.memory["total"]
            parts.append(chunk.take(fits))
    if not parts:
        return _Rows(np.zeros((0, len(MESH_AXES))), np.zeros(0), np.zeros(0), np.zeros(0, int))
    joined = {n: np.concatenate([getattr(p, n) for p in parts]) for n in _Rows.__dataclass_fields__}
    return _Rows(**joined)


def _account(state: _State, fabric: Fabric, rows: _Rows, costs: Costs) -> Rows:
    """Count a chunk; return the indices of rows that fit."""
    memory = np.broadcast_to(costs.memory["total"], rows.micro_batch.shape)
    fits = memory <= state.problem.cluster.chip.hbm_capacity
    state.strategies += len(fits)
    state.infeasible += int((~fits).sum())
    state.least_memory = min(state.least_memory, float(memory.min()))
    del fabric
    return np.flatnonzero(fits)


def _seconds_per_token(state: _State, rows: _Rows, costs: Costs) -> Array:
    c = rows.candidates()
    return np.asarray(costs.step.expected / (c.sequences * state.problem.job.seq_len))


def _all_rows(state: _State, fabric: Fabric) -> _Rows:
    """Every mesh, cut of the batch and structure on `fabric`."""
    table = meshes(math.prod(fabric.sizes), state.space.limits)
    fsdp, data = (table[:, MESH_AXES.index(a)] for a in ("fsdp", "data"))
    cuts = {int(r): batch_cuts(state.problem.job.sequences, state.problem.job.batch_slack, int(r)) for r in set(fsdp * data)}
    index, micro, number = [], [], []
    for m, replicas in enumerate(fsdp * data):
        for b, n in cuts[int(replicas)]:
            index.append(m)
            micro.append(b)
            number.append(n)
    mesh = table[np.array(index, int)].astype(float)
    base = _Rows(mesh, np.array(micro, float), np.array(number, float), np.zeros(len(index), int))
    parts = []
    for s, structure in enumerate(state.structures):
        meaningful = (mesh[:, MESH_AXES.index("data")] > 1) | (structure.zero == min(state.space.zeros))
        part = base.take(np.flatnonzero(meaningful))
        part.structure = np.full(len(part.structure), s)
        parts.append(part)
    joined = {n: np.concatenate([getattr(p, n) for p in parts]) for n in _Rows.__dataclass_fields__}
    return _Rows(**joined)


def batch_cuts(sequences: float, slack: float, replicas: int) -> list[tuple[int, int]]:
    """Ways to cut a batch over `replicas`: (sequences per microbatch, microbatches).

    The batch may be rounded within `slack`. For each power of two, the nearest batch whose share per replica it divides is
    tried, so that shares without divisors do not rule out accumulation or pipelines.
    """
    low, high = sequences * (1 - slack) / replicas, sequences * (1 + slack) / replicas
    shares = set()
    for unit in (1, 2, 4, 8, 16, 32, 64):
        nearest = max(1, round(sequences / replicas / unit)) * unit
        if low - 1e-9 <= nearest <= high + 1e-9:
            shares.add(nearest)
    return sorted({(b, share // b) for share in shares for b in range(1, share + 1) if share % b == 0})


def _expand(state: _State, fabric: Fabric, rows: _Rows) -> None:
    """Price the real placements of `rows`."""
    if not len(rows.micro_batch):
        return
    unique, inverse = np.unique(rows.mesh, axis=0, return_inverse=True)
    options = [placements(fabric.sizes, tuple(int(v) for v in mesh)) for mesh in unique]
    counts = np.array([len(o) for o in options])
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    factors = np.concatenate(options)
    kept = undominated(fabric, factors, starts, state.groups)
    owner = np.repeat(np.arange(len(unique)), counts)[kept]
    first = np.searchsorted(owner, np.arange(len(unique)))
    number = np.bincount(owner, minlength=len(unique))
    state.covered += int(counts[inverse].sum())
    for s, structure in enumerate(state.structures):
        mine = np.flatnonzero(rows.structure == s)
        repeats = number[inverse[mine]]
        row = np.repeat(mine, repeats)
        offset = np.arange(len(row)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        placement = kept[first[inverse[row]] + offset]
        for i in range(0, len(row), _CHUNK):
            part = slice(i, i + _CHUNK)
            _price(state, fabric, structure, rows.take(row[part]), factors[placement[part]])


def _price(state: _State, fabric: Fabric, structure: Structure, rows: _Rows, factors: Array) -> None:
    """Evaluate one chunk of complete layouts and remember the best."""
    costs = evaluate(state.problem, structure, rows.candidates(), WireTable(fabric, factors))
    seconds = _seconds_per_token(state, rows, costs)
    state.strategies += len(seconds)
    scores = state.score(seconds, float(math.prod(fabric.sizes)))

    def found(i: int) -> Found:
        layout = _layout(rows, i, structure, factors[i])
        return Found(layout, fabric, float(scores[i]), float(seconds[i]), float(rows.memory[i]))

    order = np.argsort(scores, kind="stable")
    _, first = np.unique(rows.mesh[order], axis=0, return_index=True)
    cut = state.incumbent()
    for i in order[np.sort(first)]:
        if scores[i] > cut:
            break
        # Several rows of one mesh may tie: the ranking prefers less memory.
        ties = np.flatnonzero((scores == scores[i]) & (rows.mesh == rows.mesh[i]).all(axis=1))
        candidate = min((found(int(j)) for j in ties[:8]), key=_rank)
        key = (*(int(v) for v in rows.mesh[i]), math.prod(fabric.sizes))
        if key not in state.best or _rank(candidate) < _rank(state.best[key]):
            state.best[key] = candidate
    new = np.flatnonzero(~state.front.dominated(seconds, rows.memory))
    order = new[np.lexsort((rows.memory[new], seconds[new]))]
    lowest = np.minimum.accumulate(rows.memory[order])
    steps = order[np.r_[True, lowest[1:] < lowest[:-1]]] if len(order) else order
    state.front.add(found(int(i)) for i in steps)


def _layout(rows: _Rows, i: int, structure: Structure, factors: Array) -> Layout:
    sizes = {a: int(rows.mesh[i, k]) for k, a in enumerate(MESH_AXES)}
    wires = tuple((a, tuple(int(e) for e in factors[k])) for k, a in enumerate(MESH_AXES))
    return Layout(
        **sizes,
        zero=structure.zero,
        sequence_parallel=structure.sequence_parallel,
        remat=structure.remat,
        micro_batch=int(rows.micro_batch[i]),
        num_microbatches=int(rows.num_microbatches[i]),
        wires=wires,
    )
