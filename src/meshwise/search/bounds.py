"""Bounds of groups of candidates: what their activations alone take, in memory and in time, whatever is stored where.

Worked out for the few distinct sizes of one device's work, and for the few distinct pipelines; a candidate is a pair of
them. Not here: bounds and prices of single candidates (`pricing`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.costs.arithmetic import array, take
from meshwise.costs.evaluate import evaluate_activations, evaluate_local, evaluate_local_memory
from meshwise.costs.fabric import Fabric
from meshwise.costs.layout_choices import LayoutChoices, LocalSizes
from meshwise.costs.memory import End, HeldActivations, held_activations, memory_floor, pipeline_ends
from meshwise.costs.network import GroupLink
from meshwise.costs.overlap import COMPUTE_TERMS, RoleSums
from meshwise.costs.pipeline import Pipeline, num_layers
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.step_time import StepParts, passes_makespan
from meshwise.search.local import LocalTables
from meshwise.search.rows import Rows, Table, distinct
from meshwise.search.space import IdealWires
from meshwise.search.structures import Choices, Work, allowed, works

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: Rows evaluated at a time: arrays stay in the cache.
CHUNK = 8192

#: Keys bounded at a time: a bound is less arithmetic than a price, so what each go costs weighs more.
_KEYS = 4 * CHUNK


@dataclass(slots=True)
class Groups:
    """Candidates that share their work and its cut into microbatches, whatever is stored where; parallel columns.

    Args:
        bound: lower bound of the seconds per token of every candidate of the group.
        memory: lower bound of their bytes on the fullest chip.
        key: which work in which cut.
        work, variant: which kind of work, and which schedule of the pipeline.
    """

    bound: Array
    memory: Array
    key: Index
    work: Index
    variant: Index

    @classmethod
    def none(cls) -> Groups:
        """Without a group."""
        return cls(np.zeros(0), np.zeros(0), *(np.zeros(0, int) for _ in range(3)))

    def __len__(self) -> int:
        return len(self.bound)

    def take(self, index: Any) -> Groups:
        """Other groups."""
        return Groups(*(getattr(self, f.name)[index] for f in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[Groups]) -> Groups:
        """Groups of all parts, smallest bound first."""
        whole = cls(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)))
        return whole.take(np.argsort(whole.bound, kind="stable"))


@dataclass(frozen=True, slots=True)
class _Family:
    """Where works that differ in nothing but the remat policy apply.

    Args:
        keys: those that they apply to.
        sizes: of one device's work that these have, indices into the table's.
        row: of each key there is in `sizes`, where the works apply.
        row_of_size: the same of each of the table's sizes.
    """

    keys: Index
    sizes: Index
    row: Index
    row_of_size: Index


def ideal_chip_seconds_per_token(problem: TrainingProblem, choices: Choices) -> float:
    """Chip-seconds of one token that no layout on any number of chips undercuts.

    A chip computes the whole batch in one go, as large as it may be rounded: nothing is sent, waited for, computed
    twice, padded or started more often than it must be, and operations are as large as they can be.
    """
    tokens = float(problem.job.batch_tokens) * (1 + problem.job.batch_slack)
    whole = LocalSizes(tokens / float(problem.job.seq_len))
    least = math.inf
    for structure in {replace(w.own, remat="none", partial_remat=False) for w in works(problem.model, choices)}:
        blocks = zip(problem.lowered.training(structure), evaluate_local(problem, structure, whole), strict=True)
        passes = (b.placed.block.repeat * p.seconds for b, own in blocks for p in own.passes.values())
        least = min(least, sum(passes))
    return (1 - 1e-9) * least / tokens


class Bounds:
    """Bounds on one network; a key is a size of one device's work with a number of stages and of microbatches.

    Args:
        problem: model, job, cluster, calibration.
        fabric: the network.
        works: the kinds of work.
        choices: that they were made of.
        table: meshes and cuts of the batch.
        local: what one device does on its own.
        capacity: bytes of a chip that may be filled.
        offloaded: whether activations may be in the host's memory.
    """

    def __init__(  # noqa: PLR0917 -- what bounds are made of
        self,
        problem: TrainingProblem,
        fabric: Fabric,
        works: tuple[Work, ...],
        choices: Choices,
        table: Table,
        local: LocalTables,
        capacity: float,
        *,
        offloaded: bool,
    ) -> None:
        self.problem, self.works, self.variants = problem, works, choices.variants
        self.local, self.capacity, self.offloaded = local, capacity, offloaded
        self.layers = num_layers(problem.train_program())
        first, which = distinct((table.local, table.axis("stage"), table.num_microbatches))
        self.key_of = which  # of each row of the table
        self.members = np.argsort(which, kind="stable")  # rows of the table, key by key
        self.number = np.bincount(which)
        self.begins = np.cumsum(self.number) - self.number
        meant = [works[0].differs(s, table.axis) for s in works[0].structures]
        self.meant = np.bincount(which, np.sum(meant, axis=0))  # members of a key in all structures
        candidates = table.candidates(first)
        self.axes = candidates.mesh
        self.size = table.local[first]
        at, self.pipe = distinct((candidates.stage, candidates.num_microbatches))
        self.stages, self.num_microbatches = candidates.stage[at], candidates.num_microbatches[at]
        self.tokens = array(candidates.sequences * problem.job.seq_len)
        shards = candidates.context * candidates.ulysses * candidates.tensor
        # Of all chips, those that share one microbatch's work on a stage, over the microbatch's tokens.
        per_token = shards / (candidates.micro_batch * math.prod(fabric.sizes) * problem.job.seq_len)
        self.per_token = np.zeros(len(table.sizes.micro_batch))
        self.per_token[self.size] = per_token
        sizes = {f.name: getattr(table.sizes, f.name) for f in fields(table.sizes) if f.name != "micro_batch"}
        self.ideal = IdealWires(fabric, sizes, problem.routing)  # of all sizes
        self.families: dict[LayoutChoices, _Family] = {}
        self.sums_of: dict[LayoutChoices, StepParts] = {}
        self.held_of: dict[tuple[LayoutChoices, float], HeldActivations] = {}
        self.pipelines_of: dict[int, tuple[Pipeline, Mask, tuple[End, ...]]] = {}

    def groups(self, variants: Sequence[int], below: Callable[[Array], Mask], most: int | None = None) -> Groups:
        """All groups of some variants whose bound is `below`, smallest bound first; weights and gradients cost nothing.

        How replicas are split between data and fsdp makes no difference to that, nor does what is stored where. Groups
        whose activations alone do not fit are left out; so are, for a first look, all but about the best `most` of each
        kind of work.
        """
        found = [Groups.none()]
        for w, work in enumerate(self.works if variants else ()):
            family = self._family(work)
            if not len(family.keys):
                continue
            # No schedule is faster than all devices computing all the time.
            sums = self.sums(work).sums.values()
            busy: Any = sum(own.terms[name] for own in sums for name in COMPUTE_TERMS)
            least = np.broadcast_to((1 - 1e-12) * busy * self.per_token[family.sizes], len(family.sizes))
            possible = below(least)
            if most is not None and most < len(least):
                possible = possible & (least <= np.partition(least, most)[most])
            keys = family.keys if possible.all() else family.keys[possible[family.row[family.keys]]]
            for begin in range(0, len(keys), _KEYS):
                found += self._groups_of(w, keys[begin : begin + _KEYS], variants, below)
        return Groups.joined(found)

    def examined(self, variants: Sequence[int]) -> int:
        """Layouts that `groups` of some variants bounds: every member of every key in every structure."""
        total = 0
        for v in variants:
            runs = self.pipeline(v)[1][self.pipe]
            by_family: dict[LayoutChoices, int] = {}
            for work in self.works:
                own = _all_remats(work)
                if own not in by_family:
                    keys = self._family(work).keys
                    by_family[own] = int(self.meant[keys[runs[keys]]].sum())
                total += by_family[own]
        return total

    def _groups_of(
        self, w: int, keys: Index, variants: Sequence[int], below: Callable[[Array], Mask]
    ) -> Iterator[Groups]:
        parts = self.sums(self.works[w])
        for v, mine, floors in self._fitting(w, keys, variants):
            pipeline, row = self.pipeline(v)[0], self._family(self.works[w]).row[mine]
            sums = {role: own.at(row) for role, own in parts.sums.items()}
            seconds = passes_makespan(replace(parts, sums=sums), pipeline.at(self.pipe[mine]))
            # The terms of a step are added up in another order: never above it for a last bit.
            bound = np.asarray((1 - 1e-12) * seconds / self.tokens[mine])
            kept = np.flatnonzero(below(bound))
            yield self._made(w, v, mine[kept], bound[kept], floors[kept])

    def _fitting(
        self, w: int, keys: Index, variants: Sequence[int], capacity: float | None = None
    ) -> Iterator[tuple[int, Index, Array]]:
        """Variant by variant, the keys that it can run and whose activations fit, with the bytes that these need."""
        limit = self.capacity if capacity is None else capacity
        held, hbm = self._held(self.works[w]), self.problem.cluster.chip.hbm_usable
        row = self._family(self.works[w]).row
        for v in variants:
            _, can, ends = self.pipeline(v)
            mine = keys[can[self.pipe[keys]]]
            if len(mine):
                own, there = take(held, row[mine]), take(ends, self.pipe[mine])
                floors = np.broadcast_to(memory_floor(own, there, hbm, offloaded=self.offloaded), len(mine))
                fits = np.flatnonzero((floors <= limit) & np.isfinite(floors))
                yield v, mine[fits], floors[fits]

    def fits(self, work: Work, rows: Rows, state: Mapping[str, Array]) -> Mask:
        """Which candidates of one kind of work fit with their training state, by role, and nothing on the host."""
        held, hbm = self._held(work), self.problem.cluster.chip.hbm_usable
        key = self.key_of[rows.at]
        size, fits = self._family(work).row[key], np.zeros(len(rows), bool)
        for v in np.unique(rows.variant):
            mine = np.flatnonzero(rows.variant == v)
            own, there = take(held, size[mine]), take(self.pipeline(int(v))[2], self.pipe[key[mine]])
            floor = memory_floor(own, there, hbm, state={role: of[mine] for role, of in state.items()})
            fits[mine] = floor <= self.capacity
        return fits

    def by_memory(self) -> Groups:
        """All groups that can run, whether they fit or not; those whose activations need least come first."""
        found = [Groups.none()]
        for w, work in enumerate(self.works):
            keys = self._family(work).keys
            for v, mine, floors in self._fitting(w, keys, range(len(self.variants)), math.inf):
                found.append(self._made(w, v, mine, np.zeros(len(mine)), floors))
        groups = Groups.joined(found)
        return groups.take(np.argsort(groups.memory, kind="stable"))

    def sizes_of(self, work: Work) -> Index:
        """The sizes of one device's work that a kind of work has, indices into the table's."""
        return self._family(work).sizes

    def row_of_size(self, work: Work) -> Index:
        """For each of the table's sizes, its row in `sizes_of`."""
        return self._family(work).row_of_size

    def _made(self, w: int, v: int, keys: Index, bound: Array, memory: Array) -> Groups:
        return Groups(bound, memory, keys, np.full(len(keys), w), np.full(len(keys), v))

    def _family(self, work: Work) -> _Family:
        own = _all_remats(work)
        if own not in self.families:
            keys = np.flatnonzero(work.applies(self.axes.__getitem__))
            sizes = np.unique(self.size[keys])
            row = np.full(len(self.per_token), -1)
            row[sizes] = np.arange(len(sizes))
            self.families[own] = _Family(keys, sizes, row[self.size], row)
        return self.families[own]

    def sums(self, work: Work) -> StepParts:
        """Sums of one microbatch, for the sizes of its family."""
        return self._mixed(work, lambda remat: self._sums_of(remat, work))

    def placed_sums(self, work: Work, sizes: Index, wires: Callable[[tuple[str, ...]], GroupLink]) -> StepParts:
        """The same for some of the table's sizes, on wires of real placements."""

        def sums(remat: str) -> StepParts:
            structure = replace(work.own, remat=remat, partial_remat=False)
            return evaluate_activations(self.problem, structure, wires, self.local(structure)(sizes))

        return self._mixed(work, sums)

    def _mixed(self, work: Work, sums: Callable[[str], StepParts]) -> StepParts:
        """Sums under the work's remat policy, from those of a policy for all layers."""
        whole = sums(work.own.remat)
        if work.remat_layers is None:
            return whole
        rest, share = sums("none"), work.remat_layers / self.problem.model.num_layers
        mixed = {r: RoleSums.between(rest.sums[r], own, share) for r, own in whole.sums.items()}  # linear in the layers
        return replace(whole, sums=mixed)

    def _sums_of(self, remat: str, work: Work) -> StepParts:
        structure = replace(work.own, remat=remat, partial_remat=False)
        if structure not in self.sums_of:
            wires = self.ideal.at(self._family(work).sizes)
            local = self.local(structure)(self._family(work).sizes)
            self.sums_of[structure] = evaluate_activations(self.problem, structure, wires, local)
        return self.sums_of[structure]

    def _held(self, work: Work) -> HeldActivations:
        """Activations that one device holds, for the sizes of its family."""
        share = 1.0 if work.remat_layers is None else work.remat_layers / self.problem.model.num_layers
        if (work.own, share) not in self.held_of:
            blocks = evaluate_local_memory(self.problem, work.own, take(self.local.sizes, self._family(work).sizes))
            self.held_of[work.own, share] = held_activations([(b.part(work.own, share), m) for b, m in blocks])
        return self.held_of[work.own, share]

    def pipeline(self, v: int) -> tuple[Pipeline, Mask, tuple[End, ...]]:
        """Of each distinct pipeline under a schedule: its sizes, whether it can run, what its devices hold."""
        if v not in self.pipelines_of:
            variant = self.variants[v]
            pieces = float(variant.virtual_stages)
            pipeline = Pipeline.of(variant.schedule, self.stages, self.num_microbatches, pieces)
            with np.errstate(all="ignore"):  # where a schedule cannot run, its formula means nothing
                can = allowed(variant, self.variants[0], pipeline, self.problem.model.num_layers)
                ends = pipeline_ends(self.layers, pipeline)
            self.pipelines_of[v] = pipeline, np.broadcast_to(can, len(self.stages)), ends
        return self.pipelines_of[v]


def _all_remats(work: Work) -> LayoutChoices:
    """What works that differ in nothing but the remat policy have in common."""
    return replace(work.own, remat="", partial_remat=False)
