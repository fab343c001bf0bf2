"""Prices of candidates on one network: a bound of their work, a bound for any placement, and real placements.

Columns of candidates in, columns out, by the one evaluator. Not here: which of them are looked at (`search`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.costs.evaluate import LocalBlock, evaluate_memory, evaluated, offloaded
from meshwise.costs.fabric import Fabric
from meshwise.costs.layout_choices import Candidates, LayoutChoices
from meshwise.costs.pipeline import Pipeline
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.traffic import term_of
from meshwise.costs.weight_traffic import evaluate_weight_state, weight_choices
from meshwise.search.bounds import CHUNK, Bounds, Groups
from meshwise.search.front import Found
from meshwise.search.local import LocalTables
from meshwise.search.placement_bounds import IdealMapping, PlacementBounds, Placements
from meshwise.search.rows import KnownColumns, Rows, Table
from meshwise.search.space import IdealWires, WireTable, placements, undominated
from meshwise.search.structures import Choices, Variant, Work
from meshwise.sharding.layout import MESH_AXES, Layout
from meshwise.sharding.placed import Purpose, Transfer

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True)
class Priced:
    """Complete layouts that were priced in full.

    Args:
        rows: one for each.
        factors: [rows, axes, dimensions] their placements.
        seconds: per token.
        covered: complete layouts that these stand for, placements that others beat included.
    """

    rows: Rows
    factors: Array
    seconds: Array
    covered: int


class Pricing:
    """Everything that is worked out once for one network.

    Args:
        problem: model, job, cluster, calibration.
        fabric: the network.
        works: the kinds of work, with their structures.
        choices: that they were made of.
        table: meshes and cuts of the batch.
        capacity: bytes of a chip that may be filled.
    """

    def __init__(  # noqa: PLR0917 -- what pricing is made of
        self,
        problem: TrainingProblem,
        fabric: Fabric,
        works: tuple[Work, ...],
        choices: Choices,
        table: Table,
        capacity: float,
    ) -> None:
        self.problem = problem
        self.fabric = fabric
        self.works = works
        self.structures = [(work, s) for work in works for s in work.structures]
        numbered = tuple((w, s) for w, work in enumerate(works) for s in work.structures)
        self.capacity = capacity
        self.variants = choices.variants
        known = problem.cluster.chip.host_memory is not None
        self.offloads = choices.offload if known else tuple(o for o in choices.offload if not o)
        self.offload_layers = choices.offload_layers
        self.table = table
        sizes = {a: table.meshes[:, k] for k, a in enumerate(MESH_AXES)}
        self.ideal = IdealWires(fabric, sizes, problem.routing)
        self.local = LocalTables(problem, works, table.sizes)
        elsewhere = any("activations" in o for o in self.offloads)
        self.bounds = Bounds(problem, fabric, works, choices, table, self.local, capacity, offloaded=elsewhere)
        mappings: list[IdealMapping | Placements] = [IdealMapping(self.ideal)]
        if not any(d.torus for d in fabric.dimensions):
            mappings.append(Placements(fabric, table, problem.routing))
        self.placement_bounds = [PlacementBounds(problem, numbered, works, table, m, self.bounds) for m in mappings]
        self.state_of: dict[LayoutChoices, KnownColumns] = {}
        self.groups_of: dict[LayoutChoices, tuple[tuple[str, ...], ...]] = {}
        self.pairs_of: dict[LayoutChoices, tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = {}
        self.worthy: dict[tuple[Any, int], Array] = {}  # groups of axes, mesh -> its undominated placements
        self.counts: dict[int, int] = {}  # mesh -> all its placements

    def groups(
        self, variants: Sequence[int], below: Callable[[Array], NDArray[np.bool_]], most: int | None = None
    ) -> Groups:
        """All groups of some variants whose bound is `below`, smallest bound first; see `bounds`."""
        return self.bounds.groups(variants, below, most)

    def least_memory(self) -> float:
        """Least memory of any candidate, bytes, with whatever the host has room for."""
        groups, least = self.bounds.by_memory(), math.inf
        begin, size = 0, CHUNK // 32
        while begin < len(groups) and groups.memory[begin] < least:
            _, some = self.fitting(self.rows(groups.take(slice(begin, begin + size))))
            least, begin, size = min(least, some), begin + size, min(2 * size, CHUNK)
        return least

    def rows(self, groups: Groups) -> Rows:
        """All candidates of groups: every member of each in every structure that means something there."""
        found = [Rows.none()]
        begin = 0
        for w, work in enumerate(self.works):
            mine = groups.take(np.flatnonzero(groups.work == w))
            if len(mine):
                repeats = self.bounds.number[mine.key]
                group = np.repeat(np.arange(len(mine)), repeats)
                offset = np.arange(len(group)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
                at = self.bounds.members[self.bounds.begins[mine.key][group] + offset]
                for s, structure in enumerate(work.structures, begin):
                    kept = np.flatnonzero(work.differs(structure, partial(self.table.axis, at=at)))
                    own = group[kept]
                    found.append(Rows.made(at[kept], s, mine.variant[own], mine.bound[own]))
            begin += len(work.structures)
        return Rows.joined(found)

    def possible(self, rows: Rows) -> Rows:
        """The candidates whose activations and training state fit; all, where some of these may be on the host."""
        if any(self.offloads):
            return rows
        kept = [np.zeros(0, int)]
        for s in np.unique(rows.structure):
            work, own = self.structures[s][0], weight_choices(self.structures[s][1])
            if own not in self.state_of:
                self.state_of[own] = KnownColumns(partial(self._evaluate_state, own))
            mine = np.flatnonzero(rows.structure == s)
            part = rows.take(mine)
            state = self.state_of[own](self.table.mesh_id[part.at])
            kept.append(mine[self.bounds.fits(work, part, state)])
        return rows.take(np.sort(np.concatenate(kept)))

    def _evaluate_state(self, choices: LayoutChoices, meshes: Index) -> dict[str, Array]:
        return evaluate_weight_state(self.problem, choices, self.table.axes(meshes))

    def raised(self, rows: Rows, below: Callable[[Array], NDArray[np.bool_]]) -> Rows:
        """The candidates whose bounds are `below`, with bounds that count their weight traffic on the best mapping."""
        for bounds in self.placement_bounds:
            rows = bounds.raised(rows)
            rows = rows.take(np.flatnonzero(below(rows.bound)))
        return rows

    def fitting(self, rows: Rows) -> tuple[Rows, float]:
        """The rows that fit in memory, with their memory; and the least memory of any.

        Where a row does not fit, copies of it that offload something do, perhaps: but none that offloads all that
        another does which fits, for it is no faster.
        """
        found, least = [Rows.none()], math.inf
        for structure, part, inverse, local in self._chunks(rows):
            candidates = self._candidates(self.structures[structure][0], part)
            memory = evaluate_memory(self.problem, self.structures[structure][1], candidates, local).memory
            mine = rows.take(inverse[0])
            for v in np.unique(mine.variant):
                of_variant = np.flatnonzero(mine.variant == v)
                pipeline = self._pipeline(int(v), candidates)
                missing = np.ones(len(of_variant), bool)
                tried: list[tuple[frozenset[str], NDArray[np.bool_]]] = []
                for o, offload in enumerate(self.offloads):
                    sizes = np.broadcast_to(memory(pipeline, offload), len(part))[inverse[1][of_variant]]
                    least = min(least, float(sizes.min()))
                    fits = sizes <= self.capacity
                    new = fits.copy()
                    for smaller, fitted in tried:
                        if smaller <= set(offload):
                            new &= ~fitted
                    tried.append((frozenset(offload), fits))
                    kept = np.flatnonzero(new)
                    chosen = mine.take(of_variant[kept])
                    chosen.memory, chosen.offload = sizes[kept], np.full(len(kept), o)
                    found.append(chosen)
                    missing &= ~fits
                    if o == 0 and not missing.any():
                        break
        return Rows.joined(found), least

    def bounded(self, rows: Rows) -> Rows:
        """The rows, with a bound of their time that no placement beats."""
        out = rows.take(slice(None))
        out.bound = np.zeros(len(rows))
        for s, at, (index, inverse), local in self._chunks(rows):
            candidates = self._candidates(self.structures[s][0], at)
            wires = self.ideal.at(self.table.mesh_id[at])
            mine = rows.take(index)
            seconds = self._seconds(s, candidates, wires, local, mine.variant, mine.offload, inverse)
            out.bound[index] = np.maximum(mine.bound, seconds)
        return out

    def placed(self, rows: Rows) -> Iterator[Priced]:
        """Price every placement of `rows` that no other of the same mesh undercuts."""
        for s in np.unique(rows.structure):
            work, structure = self.structures[s]
            mine = rows.take(np.flatnonzero(rows.structure == s))
            ids, inverse = np.unique(self.table.mesh_id[mine.at], return_inverse=True)
            options = self._placements(structure, ids)
            number = np.array([len(o) for o in options])
            factors, begins = np.concatenate(options), np.cumsum(number) - number
            repeats = number[inverse]
            row = np.repeat(np.arange(len(mine)), repeats)
            offset = np.arange(len(row)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
            placement = begins[inverse[row]] + offset
            covered = int(np.array([self.counts[int(i)] for i in ids])[inverse].sum())
            for begin in range(0, len(row), CHUNK):
                part = slice(begin, begin + CHUNK)
                chosen, where = mine.take(row[part]), factors[placement[part]]
                wires = WireTable(self.fabric, where, self.problem.routing)
                local = self.local(structure)(self.table.local[chosen.at])
                every = np.arange(len(chosen))
                candidates = self._candidates(work, chosen.at)
                seconds = self._seconds(s, candidates, wires, local, chosen.variant, chosen.offload, every)
                yield Priced(chosen, where, seconds, covered if begin == 0 else 0)

    def found(self, priced: Priced, i: int, score: float) -> Found:
        """Spell row `i` out as a layout."""
        rows, factors = priced.rows, priced.factors[i]
        work, structure = self.structures[rows.structure[i]]
        at = rows.at[i]
        mesh = self.table.meshes[self.table.mesh_id[at]]
        sizes = {a: int(n) for a, n in zip(MESH_AXES, mesh, strict=True)}
        variant = self.variants[rows.variant[i]]
        shared = math.prod(sizes[a] for a in ("context", "ulysses", "expert")) > 1
        followers = sizes["data"] > 1 or (shared and not structure.fully_sharded)
        layout = Layout(
            **sizes,
            zero=structure.zero if followers else 0,
            fully_sharded=structure.fully_sharded,
            sequence_parallel=structure.sequence_parallel,
            expert_tensor_parallel=structure.expert_tensor_parallel or sizes["tensor"] == 1,
            context_method=structure.context_method if sizes["context"] > 1 else "gather",
            collective_matmul=structure.collective_matmul if sizes["tensor"] > 1 else "compiler",
            expert_dispatch=work.choices.expert_dispatch,
            schedule=variant.schedule,
            virtual_stages=variant.virtual_stages,
            remat=structure.remat,
            remat_layers=work.remat_layers,
            offload=self.offloads[rows.offload[i]],
            offload_layers=self.offload_layers if "activations" in self.offloads[rows.offload[i]] else None,
            micro_batch=int(self.table.micro_batch[at]),
            num_microbatches=int(self.table.num_microbatches[at]),
            wires=tuple((a, tuple(int(e) for e in factors[k])) for k, a in enumerate(MESH_AXES)),
        )
        return Found(layout, self.fabric, score, float(priced.seconds[i]), float(rows.memory[i]))

    def _seconds(  # noqa: PLR0917 -- columns that belong together
        self,
        structure: int,
        candidates: Candidates,
        wires: Any,
        local: tuple[LocalBlock, ...],
        variant: Index,
        offload: Index,
        inverse: Index,
    ) -> Array:
        """Seconds per token of rows with so many variants; `inverse` says which candidate is whose."""
        shared = evaluated(self.problem, self.structures[structure][1], candidates, wires, local, bounded=False)
        tokens = np.broadcast_to(candidates.sequences * self.problem.job.seq_len, len(candidates.micro_batch))
        out = np.zeros(len(variant))
        with np.errstate(all="ignore"):  # where a schedule cannot run, its formula means nothing
            for v in np.unique(variant):
                pipeline, away = self._pipeline(int(v), candidates), np.unique(offload[variant == v])
                # What is offloaded is arithmetic on time and memory; without, time is enough.
                plain = shared.costs(pipeline) if any(self.offloads[int(o)] for o in away) else None
                step = shared.time(pipeline) if plain is None else plain.step
                for o in away:
                    which = self.offloads[int(o)]
                    own = step
                    if plain is not None and which:
                        own = offloaded(plain, which, candidates.offload_share).step
                    mine = np.flatnonzero((variant == v) & (offload == o))
                    seconds = np.broadcast_to(own.expected, len(tokens)) / tokens
                    out[mine] = seconds[inverse[mine]]
        return out

    def _chunks(self, rows: Rows) -> Iterator[tuple[int, Index, tuple[Index, Index], tuple[LocalBlock, ...]]]:
        """Rows of one structure at a time, each place of the table once.

        Yields: structure; places in the table; which rows, and which of the places each has; what devices do there.
        """
        for s in np.unique(rows.structure):
            mine = np.flatnonzero(rows.structure == s)
            mine = mine[np.argsort(rows.at[mine], kind="stable")]
            places, inverse = np.unique(rows.at[mine], return_inverse=True)
            for begin in range(0, len(places), CHUNK):
                part = places[begin : begin + CHUNK]
                span = slice(*np.searchsorted(inverse, (begin, begin + len(part))))
                local = self.local(self.structures[s][1])(self.table.local[part])
                yield int(s), part, (mine[span], inverse[span] - begin), local

    def _candidates(self, work: Work, at: Index) -> Candidates:
        layers = self.problem.model.num_layers
        share = 1.0 if work.remat_layers is None else work.remat_layers / layers
        away = 1.0 if self.offload_layers is None else self.offload_layers / layers
        return self.table.candidates(at, remat_share=share, offload_share=away)

    def _pipeline(self, v: int, c: Candidates) -> Pipeline:
        variant: Variant = self.variants[v]
        return Pipeline.of(variant.schedule, c.stage, c.num_microbatches, float(variant.virtual_stages))

    def _groups(self, structure: LayoutChoices) -> tuple[tuple[str, ...], ...]:
        """Every group of mesh axes that some collective of the structure runs over."""
        if structure not in self.groups_of:
            groups = {
                tuple(sorted(item.collective.mesh_axes))
                for placed in (block.placed for block in self.problem.lowered.training(structure))
                for item in (*placed.forward, *placed.backward, *placed.step)
                if isinstance(item, Transfer)
            }
            self.groups_of[structure] = tuple(sorted(groups))
        return self.groups_of[structure]

    def _at_once(self, structure: LayoutChoices) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
        """Pairs of groups that send at the same time: weights beside collective matmuls, and beside rings."""
        if structure not in self.pairs_of:
            beside, weights = set(), set()
            for placed in (block.placed for block in self.problem.lowered.training(structure)):
                for item in (*placed.forward, *placed.backward, *placed.step):
                    if isinstance(item, Transfer):
                        axes = tuple(sorted(item.collective.mesh_axes))
                        if item.purpose in (Purpose.WEIGHTS, Purpose.GRADIENTS):
                            weights.add(axes)
                        elif item.purpose in (Purpose.RING, Purpose.MATMUL) or (
                            self.problem.calibration.collective_matmul and term_of(axes, item.purpose) == "tensor"
                        ):
                            beside.add(axes)
            self.pairs_of[structure] = tuple((a, b) for a in sorted(beside) for b in sorted(weights))
        return self.pairs_of[structure]

    def _placements(self, structure: LayoutChoices, ids: Index) -> list[Array]:
        """The undominated placements of meshes, each worked out when first asked for."""
        groups, pairs = self._groups(structure), self._at_once(structure)
        kind = groups, pairs
        new = [int(i) for i in ids if (kind, int(i)) not in self.worthy]
        if new:
            options = [placements(self.fabric.sizes, tuple(int(n) for n in self.table.meshes[i])) for i in new]
            counts = np.array([len(o) for o in options])
            starts = np.cumsum(counts) - counts
            factors = np.concatenate(options)
            kept = undominated(self.fabric, factors, starts, groups, self.problem.routing, at_once=pairs)
            owner = np.repeat(np.arange(len(new)), counts)[kept]
            for k, i in enumerate(new):
                self.worthy[kind, i] = factors[kept[_span(owner, k)]]
                self.counts[i] = int(counts[k])
        return [self.worthy[kind, int(i)] for i in ids]


def _span(owner: Index, k: int) -> slice:
    """Where `k` stands in the sorted `owner`."""
    return slice(int(np.searchsorted(owner, k)), int(np.searchsorted(owner, k, side="right")))
