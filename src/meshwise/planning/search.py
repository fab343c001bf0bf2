"""The exact search for the best training layouts.

Branch and bound over one evaluator. First every mesh, cut of the batch, remat policy and ZeRO stage is priced with
wires that no placement can beat, which bounds it from below, and what does not fit is dropped. Then, best bound
first, the real placements are priced, until no bound is left that could still enter the answer. Not here: the space
itself (`space`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.costs.evaluate import (
    Candidates,
    Costs,
    LocalBlock,
    Structure,
    TrainingProblem,
    evaluate,
    evaluate_local,
    place_structure,
)
from meshwise.costs.network import Fabric
from meshwise.jobs import TrainingJob
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

#: Layouts of one kind differ only in how replicas are split between data and fsdp, in remat and microbatches: the
#: ranking shows the best of each kind, because a list of near copies says nothing.
_KIND = [MESH_AXES.index(a) for a in ("tensor", "context", "stage")]

#: How much slower than the best plan the front of time against memory reaches.
FRONT_SPAN = 2.0

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
        best: best layout of each of the best kinds (tensor, context and stage sizes on so many chips), best first.
        front: layouts on the first network that no other undercuts in both time per token and memory, fastest first;
            none slower than FRONT_SPAN times the fastest.
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
    """Candidates before wires: parallel columns.

    Args:
        meshes: [meshes, axes] sizes; shared, not a column.
        mesh_id: number of the row's mesh.
        micro_batch, num_microbatches: how the batch is cut.
        local: index into the table of distinct (micro_batch, context, tensor).
        structure: index into the structures.
        bound: lower bound of the seconds per token.
        memory: bytes per chip.
    """

    meshes: Array
    mesh_id: Rows
    micro_batch: Array
    num_microbatches: Array
    local: Rows
    structure: Rows
    bound: Array
    memory: Array

    def __len__(self) -> int:
        return len(self.mesh_id)

    def take(self, index: Any) -> _Rows:
        return _Rows(self.meshes, *(getattr(self, f.name)[index] for f in fields(self)[1:]))

    @property
    def mesh(self) -> Array:
        """[rows, axes] sizes."""
        return self.meshes[self.mesh_id]

    def candidates(self) -> Candidates:
        columns = {a: self.meshes[:, i][self.mesh_id] for i, a in enumerate(MESH_AXES)}
        return Candidates(**columns, micro_batch=self.micro_batch, num_microbatches=self.num_microbatches)

    @classmethod
    def joined(cls, parts: Sequence[_Rows]) -> _Rows:
        columns = (np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)[1:])
        return cls(parts[0].meshes, *columns)


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
        if state.score(ideal / chips, chips) < state.cut:
            state.front_on = state.front_on or fabric
            progress(f"searching {chips:,} chips: {state.strategies:,} layouts so far")
            _search_fabric(state, fabric)
    return state.result(time.process_time() - started)


def _ideal_chip_seconds_per_token(problem: TrainingProblem) -> float:
    """Chip-seconds of one token if every chip only multiplied matrices, at its achieved rate."""
    flops = problem.model.train_flops_per_token(int(problem.job.seq_len))
    rate = problem.cluster.chip.peak(problem.job.formats.compute) * problem.calibration.matmul_efficiency
    return flops / rate


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
        self.front = _Front()
        self.front_on: Fabric | None = None
        self.strategies = self.covered = self.infeasible = 0
        self.least_memory = math.inf

    def incumbent(self) -> float:
        """Score that a layout must not exceed to enter the ranking."""
        return self.cut

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
            self.covered,
            self.infeasible,
            self.least_memory,
            cpu_s,
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
        return tuple(f for f in self.found if f.seconds_per_token <= FRONT_SPAN * self.found[0].seconds_per_token)


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
    table = meshes(math.prod(fabric.sizes), state.space.limits)
    parts, local = _all_rows(state, table)
    if not any(map(len, parts)):
        return
    ideal = IdealWires(fabric, {a: table[:, k].astype(float) for k, a in enumerate(MESH_AXES)})
    rows = _bounded(state, ideal, parts, local)
    rows = rows.take(np.argsort(rows.bound, kind="stable"))
    expand = _Expansion(state, fabric, local)
    scores = state.score(rows.bound, float(math.prod(fabric.sizes)))
    begin, size = 0, 512
    while begin < len(rows) and scores[begin] < state.incumbent():
        end = min(begin + size, len(rows))
        expand(rows.take(slice(begin, end)))
        begin, size = end, min(size * 2, 4 * _CHUNK)
    if fabric is state.front_on:
        _search_front(state, rows.take(slice(begin, len(rows))), expand)


def _search_front(state: _State, rows: _Rows, expand: _Expansion) -> None:
    """Price what could still enter the front: each round the rows that no other row bounds in both time and memory.

    `rows` are sorted by their bound. The front ends at twice the best time: nobody trades more than that for memory.
    """
    fastest = min((f.seconds_per_token for f in state.front.found), default=math.inf)
    rows = rows.take(slice(0, int(np.searchsorted(rows.bound, FRONT_SPAN * fastest))))
    while len(rows):
        chosen = np.zeros(len(rows), bool)
        while chosen.sum() < 256 and not chosen.all():
            left = np.flatnonzero(~chosen)
            lowest = np.minimum.accumulate(rows.memory[left])
            chosen[left[np.r_[True, lowest[1:] < lowest[:-1]]]] = True
        expand(rows.take(np.flatnonzero(chosen)))
        rows = rows.take(np.flatnonzero(~chosen))
        rows = rows.take(np.flatnonzero(~state.front.dominated(rows.bound, rows.memory)))


def _all_rows(state: _State, table: Rows) -> tuple[list[_Rows], list[tuple[LocalBlock, ...]]]:
    """Every cut of the batch on the meshes of `table`, and what devices do on their own; both for each structure."""
    job = state.problem.job
    replicas = table[:, MESH_AXES.index("fsdp")] * table[:, MESH_AXES.index("data")]
    distinct, which = np.unique(replicas, return_inverse=True)
    cuts = [np.array(_cuts(state.space, job, int(r)), float).reshape(-1, 2) for r in distinct]
    number = np.array([len(c) for c in cuts], int)[which] if len(table) else np.zeros(0, int)
    mesh_id = np.repeat(np.arange(len(table)), number)
    cut = np.concatenate([cuts[w] for w in which]) if len(table) else np.zeros((0, 2))
    context, tensor, data = (table[:, MESH_AXES.index(a)][mesh_id] for a in ("context", "tensor", "data"))
    # One number for each distinct combination: rows are found faster than columns are compared.
    keys = (cut[:, 0] * (context.max(initial=0) + 1) + context) * (tensor.max(initial=0) + 1) + tensor
    _, first, index = np.unique(keys, return_index=True, return_inverse=True)
    own = {"micro_batch": cut[first, 0], "context": context[first].astype(float), "tensor": tensor[first].astype(float)}
    blank = np.zeros(len(mesh_id))
    base = _Rows(table.astype(float), mesh_id, cut[:, 0], cut[:, 1], index, np.zeros(len(mesh_id), int), blank, blank)
    parts, local = [], []
    for s, structure in enumerate(state.structures):
        # Without replicas the ZeRO stage means nothing: one of them stands for all.
        part = base.take(np.flatnonzero((data > 1) | (structure.zero == min(state.space.zeros))))
        part.structure = np.full(len(part), s)
        parts.append(part)
        local.append(evaluate_local(state.problem, structure, **own) if len(part) else ())
    return parts, local


def _bounded(state: _State, ideal: IdealWires, parts: list[_Rows], local: list[tuple[LocalBlock, ...]]) -> _Rows:
    """Those of the rows that fit in memory, with a lower bound of their time."""
    capacity = state.problem.cluster.chip.hbm_usable * state.space.memory_share
    kept = []
    for s, (structure, mine) in enumerate(zip(state.structures, parts, strict=True)):
        for i in range(0, len(mine), _CHUNK):
            chunk = mine.take(slice(i, i + _CHUNK))
            costs = _evaluate(state, structure, chunk, ideal.at(chunk.mesh_id), local[s])
            chunk.bound = _seconds_per_token(state, chunk, costs)
            chunk.memory = np.broadcast_to(costs.memory["total"], len(chunk))
            fits = chunk.memory <= capacity
            state.strategies += len(chunk)
            state.infeasible += int((~fits).sum())
            state.least_memory = min(state.least_memory, float(chunk.memory.min()))
            kept.append(chunk if fits.all() else chunk.take(np.flatnonzero(fits)))
    return _Rows.joined(kept)


def _evaluate(state: _State, structure: Structure, rows: _Rows, wires: Any, local: tuple[LocalBlock, ...]) -> Costs:
    own = tuple(block.take(rows.local) for block in local)
    return evaluate(state.problem, structure, rows.candidates(), wires, own)


def _seconds_per_token(state: _State, rows: _Rows, costs: Costs) -> Array:
    return np.asarray(costs.step.expected / (rows.candidates().sequences * state.problem.job.seq_len))


def _cuts(space: SearchSpace, job: TrainingJob, replicas: int) -> list[tuple[int, int]]:
    """Cuts of the batch that agree with what the user fixed."""
    b, n = space.micro_batch, space.num_microbatches
    if b is not None and n is not None:
        within = abs(b * n * replicas - job.sequences) <= job.sequences * job.batch_slack + 1e-9
        return [(b, n)] if within else []
    unit = b or n or 1
    cuts = batch_cuts(job.sequences, job.batch_slack, replicas, unit)
    return [c for c in cuts if b in (None, c[0]) and n in (None, c[1])]


def batch_cuts(sequences: float, slack: float, replicas: int, multiple: int = 1) -> list[tuple[int, int]]:
    """Ways to cut a batch over `replicas`: (sequences per microbatch, microbatches).

    The batch may be rounded within `slack`. For each power of two, the nearest batch whose share per replica it
    divides is tried, so that shares without divisors do not rule out accumulation or pipelines; all shares are a
    multiple of `multiple`.

    >>> batch_cuts(1024, 0.1, 1120), batch_cuts(16, 0, 4), batch_cuts(1024, 0, 1120)
    ([(1, 1)], [(1, 4), (2, 2), (4, 1)], [])
    """
    low, high = sequences * (1 - slack) / replicas, sequences * (1 + slack) / replicas
    shares = set()
    for unit in (multiple * p for p in (1, 2, 4, 8, 16, 32, 64)):
        nearest = max(1, round(sequences / replicas / unit)) * unit
        if low - 1e-9 <= nearest <= high + 1e-9:
            shares.add(nearest)
    return sorted({(b, share // b) for share in shares for b in _divisors(share)})


def _divisors(number: int) -> set[int]:
    """All divisors."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return {*small, *(number // d for d in small)}


class _Expansion:
    """Prices the real placements of rows on one fabric."""

    def __init__(self, state: _State, fabric: Fabric, local: list[tuple[LocalBlock, ...]]) -> None:
        self.state = state
        self.fabric = fabric
        self.local = local
        self.worthy: dict[int, Array] = {}  # mesh -> its undominated placements
        self.counts: dict[int, int] = {}

    def __call__(self, rows: _Rows) -> None:
        """Price every undominated placement of `rows`."""
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

    def _prepare(self, ids: Rows, mesh: Array) -> None:
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

    def _price(self, s: int, structure: Structure, rows: _Rows, factors: Array) -> None:
        """Evaluate one chunk of complete layouts and remember the best."""
        state = self.state
        costs = _evaluate(state, structure, rows, WireTable(self.fabric, factors), self.local[s])
        seconds = _seconds_per_token(state, rows, costs)
        scores = np.asarray(state.score(seconds, float(math.prod(self.fabric.sizes))))
        state.strategies += len(seconds)

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

    def _rank(self, rows: _Rows, scores: Array, found: Callable[[int], Found]) -> None:
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


def _span(owner: Rows, k: int) -> slice:
    """Where `k` stands in the sorted `owner`."""
    return slice(int(np.searchsorted(owner, k)), int(np.searchsorted(owner, k, side="right")))


def _layout(rows: _Rows, i: int, structure: Structure, factors: Array) -> Layout:
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
