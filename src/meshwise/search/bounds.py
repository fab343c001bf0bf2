"""Bounds of groups of candidates: what their activations alone take, in memory and in time, whatever is stored where.

Worked out for the few distinct sizes of one device's work, and for the few distinct pipelines; a candidate is a pair of
them. Not here: bounds that count weights (`placement_bounds`), or prices (`pricing`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import TypeVar

import numpy as np

from meshwise.costs.arithmetic import Num, array, joined, take
from meshwise.costs.ends import End, pipeline_ends
from meshwise.costs.evaluate import ActivationPrices, evaluate_activations, rates_of
from meshwise.costs.layout_choices import LayoutChoices
from meshwise.costs.memory import STATE_CLASSES
from meshwise.costs.offload import HOST_CLASSES
from meshwise.costs.overlap import COMPUTE_TERMS, RoleSums
from meshwise.costs.pipeline import Part, Pipeline, Shares, device_shares, num_layers
from meshwise.costs.step import Wires
from meshwise.costs.step_time import passes_makespan
from meshwise.costs.weight_traffic import evaluate_weight_state
from meshwise.search.candidates import (
    Array,
    CandidateBatch,
    Columns,
    ComputeVariant,
    Index,
    Mask,
    allowed,
    distinct,
)
from meshwise.search.floors import HeldActivations, held_activations, leaner, memory_floor
from meshwise.search.network import SearchedNetwork, WeightColumns
from meshwise.search.rings import first_of_remat
from meshwise.search.space import IdealWires
from meshwise.search.tables import FEW, Recent, RowTable

T = TypeVar("T")

#: Candidates evaluated at a time: arrays stay in the cache.
CHUNK = 8192

#: Sizes under compute variants that are worked out at a time, of about 400 bytes each.
_ROWS = 1 << 18

#: Sizes of one device's work that are worked out at a time.
_SIZES = 2 * CHUNK

#: Keys of a compute variant among which a first look chooses.
_LOOKED_AT = 4096

#: Keys bounded at a time: a bound is less arithmetic than a price, so what each go costs weighs more.
_KEYS = 4 * CHUNK


@dataclass(slots=True)
class Groups(Columns):
    """Candidates that share their compute and its cut into microbatches, whatever is stored where; parallel columns.

    Args:
        bound: lower bound of the seconds per token of every candidate of the group.
        memory: lower bound of their bytes on the fullest chip.
        key: which sizes of one device's work, in which pipeline.
        variant, schedule: of compute, and of the pipeline.
    """

    bound: Array
    memory: Array
    key: Index
    variant: Index
    schedule: Index

    @classmethod
    def sorted_by(cls, column: str, parts: Iterable[Groups]) -> Groups:
        """Groups of all parts, those with the smallest of a column first."""
        none = cls(np.zeros(0), np.zeros(0), *(np.zeros(0, int) for _ in range(3)))
        whole = cls.joined([none, *parts])
        return whole.take(np.argsort(getattr(whole, column), kind="stable"))


class Bounds:
    """Bounds on one network; a key is a size of one device's work with a number of stages and of microbatches.

    Args:
        network: and what may be chosen on it.
    """

    def __init__(self, network: SearchedNetwork) -> None:
        self.network, self.problem, table = network, network.problem, network.table
        self.layers = num_layers(self.problem.train_program())
        first, self.key_of = distinct((table.local, table.axis("stage"), table.num_microbatches))
        self.members, self.number = np.argsort(self.key_of, kind="stable"), np.bincount(self.key_of)  # key by key
        self.begins = np.cumsum(self.number) - self.number
        candidates = table.candidates(first)
        self.size = table.local[first]
        pipelines = table.axis("stage", first), table.num_microbatches[first]
        at, self.pipe = distinct(pipelines)
        self.stages, self.num_microbatches = (column[at] for column in pipelines)
        self.tokens = array(candidates.sequences * self.problem.job.seq_len)
        shards = candidates.context * candidates.ulysses * candidates.tensor
        # Of all chips, those that share one microbatch's work on a stage, over the microbatch's tokens.
        chips = math.prod(network.fabric.sizes)
        self.per_token = array(shards / (candidates.micro_batch * chips * self.problem.job.seq_len))  # by key
        self._weight_state = WeightColumns(network, self._evaluate_state, lambda: np.arange(len(table.meshes)))
        self._pipelines: dict[int, tuple[Pipeline, Mask, tuple[End, ...], tuple[Shares, ...]]] = {}
        self._sums, self._prices = Recent[Mapping[str, RoleSums]](4), Recent[ActivationPrices](2)
        plain = {v.with_remat(): v for v in network.variants}
        axis = partial(table.axis, at=first)
        self._meant = {own: v.means(axis) for own, v in plain.items()}
        self._keys = {own: np.flatnonzero(v.applies(axis)) for own, v in plain.items()}
        self.keys = [self._keys[v.with_remat()] for v in network.variants]  # where each compute variant applies
        self._needs_stages = np.array([v.needs_stages for v in network.variants], bool)
        self._first = first_of_remat(network.variants)
        self.num_sizes = np.size(table.sizes.micro_batch)
        # Of a compute variant with a size.
        self._sums_of, self._held = RowTable(self._evaluate_sums), RowTable(self._evaluate_held)
        self.ideal = IdealWires(
            network.fabric,
            {a: getattr(table.sizes, a) for a in table.sizes.mesh},
            self.problem.routing,
        )

    def rows_of(self, variant: Index, size: Index) -> Index:
        """Rows of `activations` of sizes under compute variants."""
        return self._sums_of.rows(self.numbers(self._sums_of, variant, size, self.num_sizes))

    @staticmethod
    def numbers(table: RowTable[T], kind: Index, entry: Index, most: int) -> Index:
        """Numbers in a table of entries, `most` of each kind; where these are few, all of a kind are made at once."""
        numbers = kind * most + entry
        if most <= FEW and len(new := np.flatnonzero(np.bincount(kind[~table.which(numbers)]))):
            table.rows((new[:, None] * most + np.arange(most)).ravel())
        return numbers

    def _evaluate_sums(self, numbers: Index) -> Mapping[str, RoleSums]:
        """Sums of one microbatch on ideal links, of some sizes of each compute variant."""
        return self._evaluate(numbers, lambda v, sizes: self.mixed(v, partial(self._ideal_sums, sizes)))

    def _evaluate_held(self, numbers: Index) -> HeldActivations:
        """What activations of one microbatch hold, likewise."""
        return self._evaluate(numbers, self._held_under)

    def _evaluate(self, numbers: Index, of: Callable[[ComputeVariant, Index], T]) -> T:
        found, lengths = [], []
        variant, size = np.divmod(numbers, self.num_sizes)
        for v in np.unique(variant):
            mine = size[variant == v]
            found.append(of(self.network.variants[v], mine))
            lengths.append(len(mine))
        whole: T = joined(found, lengths)
        return whole

    @property
    def activations(self) -> Mapping[str, RoleSums]:
        """What `rows_of` worked out so far: sums of one microbatch, by role."""
        return self._sums_of.values

    @cached_property
    def busy(self) -> dict[LayoutChoices, Array]:
        """Seconds that one device computes for a microbatch at least, and nothing again; infinite for other sizes."""
        found = {}
        for own, keys in self._keys.items():
            choices, every = self._computing(own, "none"), np.flatnonzero(np.bincount(self.size[keys]))
            found[own] = np.full(self.num_sizes, math.inf)
            for begin in range(0, len(every), _SIZES):
                sizes = every[begin : begin + _SIZES]
                found[own][sizes] = self.network.busy(choices, sizes)
        return found

    def _busy_under(self, variant: Index, size: Index) -> Array:
        """The same of sizes under compute variants, with what they compute again."""
        found = np.zeros(len(size))
        for v in np.unique(variant):
            mine = np.flatnonzero(variant == v)
            for remat, share in self._remats(self.network.variants[v]).items():
                found[mine] += share * self.network.busy(
                    self._computing(self.network.variants[v].own, remat), size[mine]
                )
        return found

    def _computing(self, choices: LayoutChoices, remat: str) -> LayoutChoices:
        """Those that stand for what computes alike under a remat policy, however it attends over `context`."""
        return choices.but(remat=remat, partial_remat=False, context_method="gather")

    def _remats(self, variant: ComputeVariant) -> dict[str, float]:
        """The share of the layers that follows each remat policy."""
        if variant.remat_layers is None:
            return {variant.own.remat: 1.0}
        share = variant.remat_layers / self.problem.model.num_layers
        return {variant.own.remat: share, "none": 1 - share}

    def groups(
        self,
        schedules: Sequence[int],
        below: Callable[[Array, Index], Mask],
        chosen: Callable[[Array, Index], Mask] | None = None,
        remat: str | None = None,
    ) -> Groups:
        """All groups of some schedules whose bounds, of their keys, are `below`, smallest first; weights cost nothing.

        How replicas are split between data and fsdp makes no difference to that, nor does what is stored where. Groups
        whose activations alone do not fit are left out; so are, for a first look, all but those `chosen` by the seconds
        that they compute at least, and those of other remat policies than one, where that is given.
        """
        found, parts, rows = list[Groups](), list[tuple[Index, Index, Array]](), 0
        some = [v for v, one in enumerate(self.network.variants) if chosen is None or not one.needs_stages]
        some = [v for v in some if remat in (None, self.network.variants[v].own.remat)]
        for v in some:
            keys = self.keys[v]
            # No schedule is faster than all devices computing all the time.
            least = self.busy[self.network.variants[v].with_remat()][self.size[keys]] * self.per_token[keys]
            possible = below(least, keys)
            kept, least = keys[possible], least[possible]
            # What is computed again counts, too: where sizes are not many, before any sends are bounded.
            if self.num_sizes <= _SIZES:
                new = np.flatnonzero(~self._sums_of.which(v * self.num_sizes + self.size[kept]))
                least[new] = self._busy_under(np.full(len(new), v), self.size[kept[new]]) * self.per_token[kept[new]]
                possible = below(least, kept)
                kept, least = kept[possible], least[possible]
            if chosen is not None and len(kept) > _LOOKED_AT:  # where keys are many, those of least seconds are enough
                best = np.argpartition(least, _LOOKED_AT)[:_LOOKED_AT]
                kept, least = kept[best], least[best]
            parts.append((np.full(len(kept), v), kept, least))
            rows += int(np.count_nonzero(np.bincount(self.size[kept])))
            if rows > _ROWS or v == some[-1]:
                variant, key, least = map(np.concatenate, zip(*parts, strict=True))
                found += self._groups_among(variant, key, least, schedules, below=below, chosen=chosen)
                parts, rows = [], 0
        return Groups.sorted_by("bound", found)

    def _below_with_ring(
        self, variant: Index, key: Index, schedules: Sequence[int], below: Callable[[Array, Index], Mask]
    ) -> Mask:
        """Which keys of compute variants have a bound `below` with a ring instead of gathers, which is never higher."""
        found = np.ones(len(key), bool)
        gathers = np.flatnonzero(self._needs_stages[variant])
        found[gathers] = False
        for s in schedules:
            mine = gathers[self.pipeline(s)[1][self.pipe[key[gathers]]] & ~found[gathers]]
            if len(mine):
                row = self.rows_of(self._first[variant[mine]], self.size[key[mine]])
                found[mine] = below(self._least_of(row, key[mine], s), key[mine])
        return found

    def _groups_among(
        self,
        variant: Index,
        key: Index,
        least: Array,
        schedules: Sequence[int],
        *,
        below: Callable[[Array, Index], Mask],
        chosen: Callable[[Array, Index], Mask] | None,
    ) -> list[Groups]:
        """Groups among some keys of compute variants; what their bounds are made of is kept for these alone."""
        if self._needs_stages[variant].any():
            worthy = self._below_with_ring(variant, key, schedules, below)
            variant, key, least = variant[worthy], key[worthy], least[worthy]
        fitting = list(self._fitting(variant, key, schedules, self.network.capacity))
        fits = np.zeros(len(key), bool)
        for _, mine, _ in fitting:
            fits[mine] = True
        if chosen is not None:
            fits[np.flatnonzero(fits)] = chosen(least[fits], key[fits])
        before, some = self._sums_of.numbers(), np.flatnonzero(fits)
        for begin in range(0, self.num_sizes, _SIZES):
            each = some[(self.size[key[some]] >= begin) & (self.size[key[some]] < begin + _SIZES)]
            self.rows_of(variant[each], self.size[key[each]])
        at = self.rows_of(variant[some], self.size[key[some]])
        sums = self.activations.values() if len(at) else ()
        busy: Num = sum(own.terms[name] for own in sums for name in COMPUTE_TERMS)
        computed = (1 - 1e-12) * np.broadcast_to(take(busy, at), len(at)) * self.per_token[key[some]]
        fits[some] = below(computed, key[some])
        found: list[Groups] = []
        for s, mine, floors in fitting:
            kept = np.flatnonzero(fits[mine])
            for begin in range(0, len(kept), _KEYS):
                of = mine[part := kept[begin : begin + _KEYS]]
                found.append(self._groups_of(variant[of], key[of], s, floors[part], below))
        if len(self._sums_of) > _ROWS:
            numbers = (g.variant * self.num_sizes + self.size[g.key] for g in found)
            self._sums_of.keep(np.concatenate([before, *numbers]))
        if len(self._held) > _ROWS:
            self._held.keep(np.zeros(0, int))
        return found

    def _groups_of(
        self, variant: Index, key: Index, s: int, floors: Array, below: Callable[[Array, Index], Mask]
    ) -> Groups:
        bound = self._least_of(self.rows_of(variant, self.size[key]), key, s)
        kept = np.flatnonzero(below(bound, key))
        return Groups(bound[kept], floors[kept], key[kept], variant[kept], np.full(len(kept), s))

    def _least_of(self, row: Index, key: Index, s: int) -> Array:
        """Seconds per token of passes at least, of sums in these rows."""
        seconds = self.makespan({role: sums.at(row) for role, sums in self.activations.items()}, s, key)
        # The terms of a step are added up in another order: never above it for a last bit.
        return np.asarray((1 - 1e-12) * seconds / self.tokens[key])

    def _fitting(
        self, variant: Index, key: Index, schedules: Sequence[int], capacity: float
    ) -> Iterator[tuple[int, Index, Array]]:
        """Schedule by schedule, which keys it can run with activations that fit, and the bytes that these need."""
        for s in schedules:
            mine = np.flatnonzero(self.pipeline(s)[1][self.pipe[key]])
            if len(mine):
                floors = self._floor(s, variant[mine], key[mine])
                fits = np.flatnonzero((floors <= capacity) & np.isfinite(floors))
                yield s, mine[fits], floors[fits]

    def _floor(self, s: int, variant: Index, key: Index, state: Mapping[str, Array] | None = None) -> Array:
        """Bytes that the fullest chip holds at least under a schedule."""
        kept_alike = self._first[variant]  # what a ring spares is no more than a buffer, which no floor counts
        held = self._held(self.numbers(self._held, kept_alike, self.size[key], self.num_sizes))
        ends, hbm = take(self.pipeline(s)[2], self.pipe[key]), self.problem.cluster.chip.hbm_usable
        away = any("activations" in saving.offload for saving in self.network.savings)
        return np.broadcast_to(memory_floor(held, ends, hbm, offloaded=away, state=state), len(key))

    def all_groups(self, below: Callable[[Array, Index], Mask]) -> Groups:
        """All groups that can run, whether they fit or not, of which what one device computes is `below`."""
        found = []
        for v, keys in enumerate(self.keys):
            least = self._busy_under(np.full(len(keys), v), self.size[keys]) * self.per_token[keys]
            kept = np.flatnonzero(below(least, keys))
            for s in range(len(self.network.schedules)):
                mine = kept[self.pipeline(s)[1][self.pipe[keys[kept]]]]
                which = np.full(len(mine), v), np.full(len(mine), s)
                found.append(Groups(least[mine], np.zeros(len(mine)), keys[mine], *which))
        return Groups.joined(found)

    def by_memory(self) -> Iterator[Groups]:
        """All groups that can run, whether they fit or not, a few at a time; of these the leanest come first.

        What recomputes most comes before the rest, for it is leanest.
        """
        schedules = range(len(self.network.schedules))
        order = sorted(range(len(self.keys)), key=lambda n: self.network.variants[n].own.remat != "full")
        parts = [(v, self.keys[v][at : at + _KEYS]) for v in order for at in range(0, len(self.keys[v]), _KEYS)]
        for v, key in parts:
            of = self._fitting(np.full(len(key), v), key, schedules, math.inf)
            found = (Groups(np.zeros(len(m)), f, key[m], np.full(len(m), v), np.full(len(m), s)) for s, m, f in of)
            yield Groups.sorted_by("memory", found)
            if len(self._held) > _ROWS:
                self._held.keep(np.zeros(0, int))

    def examined(self, schedules: Sequence[int]) -> int:
        """Layouts that `groups` of some schedules bounds: every member of every key in all its choices."""
        table, plainest = self.network.table, self.network.variants[0]
        meant = np.sum([plainest.differs(stored, table.axis) for stored in plainest.stored], axis=0)
        members = np.bincount(self.key_of, meant)  # of each key, in all choices
        runs = [self.pipeline(s)[1][self.pipe] for s in schedules]
        total = {own: sum(int(members[meant & can].sum()) for can in runs) for own, meant in self._meant.items()}
        return sum(total[v.with_remat()] for v in self.network.variants)

    def members_of(self, groups: Groups) -> CandidateBatch:
        """All candidates of groups, whether a tool takes them or not.

        They are every member of each with all choices that mean something there.
        """
        network, found = self.network, [CandidateBatch.none()]
        group, offset = expanded(self.number[groups.key])
        at = self.members[self.begins[groups.key][group] + offset]
        axes = {a: network.table.axis(a, at) for a in ("data", "context", "ulysses", "expert")}
        plainest = network.variants[0]  # all variants are stored in the same ways
        for c, stored in enumerate(plainest.stored):
            kept = np.flatnonzero(plainest.differs(stored, axes.__getitem__))
            own = group[kept]
            choices = groups.variant[own] * len(plainest.stored) + c
            found.append(CandidateBatch.of(at[kept], choices, groups.schedule[own], groups.bound[own]))
        return CandidateBatch.joined(found)

    def memory_floor(self, batch: CandidateBatch) -> Array:
        """Bytes that each candidate holds at least, the training state that no offloading moves included."""
        state = self._weight_state(self.network.held_as(batch), self.network.table.mesh_id[batch.at])
        out, key, variant = np.zeros(len(batch)), self.key_of[batch.at], self.network.variant_of[batch.choices]
        for s in np.unique(batch.schedule):
            mine = np.flatnonzero(batch.schedule == s)
            own = {role: of[mine] for role, of in state.items()}
            out[mine] = self._floor(int(s), variant[mine], key[mine], own)
        return out

    def _evaluate_state(self, choices: LayoutChoices, meshes: Index) -> dict[str, Array]:
        away = {name for saving in self.network.savings for part in saving.offload for name in HOST_CLASSES[part]}
        classes = [name for name in STATE_CLASSES if name not in away]
        return evaluate_weight_state(self.problem, choices, self.network.table.axes(meshes), classes)

    def makespan(self, sums: Mapping[str, RoleSums], s: int, key: Index) -> Num:
        """Seconds of a step's passes of some keys under a schedule."""
        pipeline = self.pipeline(s)[0].at(self.pipe[key])
        seconds: Num = passes_makespan(sums, self.problem.calibration, self.layers, pipeline)
        return seconds

    def _ideal_sums(self, sizes: Index, choices: LayoutChoices) -> Mapping[str, RoleSums]:
        key = choices.expert_tensor_parallel, sizes.tobytes()
        prices = self._prices(key, lambda: self.prices(choices, self.ideal.at(sizes)))
        return self._sums((choices, key), lambda: self.sums(sizes, prices, choices))

    def prices(self, choices: LayoutChoices, links: Wires) -> ActivationPrices:
        """Prices of collectives on given links, for all choices that split experts alike."""
        return ActivationPrices(rates_of(self.problem, choices, links, bounded=False), None)

    def sums(self, sizes: Index, prices: ActivationPrices, choices: LayoutChoices) -> Mapping[str, RoleSums]:
        """Sums of one microbatch of some of the table's sizes."""
        return evaluate_activations(self.problem, choices, prices, self.network.blocks(choices, sizes))

    def mixed(
        self, variant: ComputeVariant, sums: Callable[[LayoutChoices], Mapping[str, RoleSums]]
    ) -> dict[str, RoleSums]:
        """Sums under the variant's remat policy, from those of a policy for all layers, which are linear in layers."""
        whole = sums(variant.with_remat(variant.own.remat))
        if variant.remat_layers is not None:
            rest, share = sums(variant.with_remat("none")), variant.remat_layers / self.problem.model.num_layers
            whole = {role: RoleSums.between(rest[role], own, share) for role, own in whole.items()}
        return {role: own.at(slice(None)) for role, own in whole.items()}  # what bounds need, and no more

    def _held_under(self, variant: ComputeVariant, sizes: Index) -> HeldActivations:
        parts = []
        for remat, share in self._remats(variant).items():
            choices = variant.with_remat(remat)
            each_held = self.network.memory(choices, "whole", sizes)
            for b, held in zip(self.problem.lowered.training(choices), each_held, strict=True):
                if b.role == "head":
                    each = (self.network.head(choices, loss, sizes, held) for loss in self.network.losses)
                    held = reduce(leaner, each)  # noqa: PLW2901 -- what the head holds with the leanest loss
                if b.role == "layer" or remat == variant.own.remat:
                    parts.append((Part(b.placed.block, share if b.role == "layer" else 1.0), held))
        return held_activations(parts)

    def pipeline(self, s: int) -> tuple[Pipeline, Mask, tuple[End, ...], tuple[Shares, ...]]:
        """Each distinct pipeline under a schedule: its sizes, whether it can run, what its devices hold and store."""
        if s not in self._pipelines:
            one, made, length = self.network.schedules[s], self.problem.made_in_step, self.problem.job.seq_len
            pipeline = Pipeline.of(one.schedule, self.stages, self.num_microbatches, float(one.virtual_stages))
            with np.errstate(all="ignore"):  # where a schedule cannot run, its formula means nothing
                can = allowed(one, self.network.schedules[0], pipeline, self.problem.model.num_layers)
                ends, shares = pipeline_ends(self.layers, pipeline, made, length), device_shares(self.layers, pipeline)
            self._pipelines[s] = pipeline, np.broadcast_to(can, len(self.stages)), ends, shares
        return self._pipelines[s]


def expanded(number: Index) -> tuple[Index, Index]:
    """Owner, and number among its own, of as many entries as each owner has."""
    owner = np.repeat(np.arange(len(number)), number)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(number) - number, number)
