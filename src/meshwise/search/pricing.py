"""Prices of candidates on one network: a bound of their work, a bound for any placement, and real placements.

Columns of candidates in, columns out, by the one evaluator. Not here: which of them are looked at (`search`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from meshwise.costs.evaluate import evaluated, offloaded
from meshwise.costs.layout_choices import Candidates, LayoutChoices
from meshwise.costs.local import LocalBlock
from meshwise.costs.memory import StageMemory
from meshwise.costs.pipeline import Pipeline
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.step import Wires
from meshwise.costs.traffic import term_of
from meshwise.search.bounds import CHUNK, Bounds, expanded
from meshwise.search.candidates import Array, CandidateBatch, Choices, Index, Mask, distinct
from meshwise.search.memory import MemoryPrices
from meshwise.search.network import SearchedNetwork
from meshwise.search.placement_bounds import IdealMapping, PlacementBounds, Placements
from meshwise.search.ranking import Found, kinds_of
from meshwise.search.space import WireTable, placements, undominated
from meshwise.sharding.layout import MESH_AXES, Layout
from meshwise.sharding.placed import Purpose

#: Mesh axes of a group of chips.
Group = tuple[str, ...]


@dataclass(frozen=True)
class Priced:
    """Complete layouts that were priced in full.

    Args:
        batch: one candidate for each.
        factors: [candidates, axes, dimensions] their placements.
        seconds: per token.
        covered: complete layouts that these stand for, placements that others beat included.
    """

    batch: CandidateBatch
    factors: Array
    seconds: Array
    covered: int


class Pricing:
    """Everything that is worked out once for one network.

    Args:
        network: and what may be chosen on it.
        tick: called before each chunk; raises what ends the search.
    """

    def __init__(self, network: SearchedNetwork, tick: Callable[[], None] = lambda: None) -> None:
        self.network, self.problem, self.table, self.tick = network, network.problem, network.table, tick
        self.bounds = Bounds(network)
        self.memory = MemoryPrices(self.bounds)
        mappings = IdealMapping(network.ideal), Placements(network.fabric, self.table, self.problem.routing)
        self.placement_bounds = [PlacementBounds(self.bounds, m) for m in mappings]
        self.groups_of: dict[LayoutChoices, tuple[tuple[Group, ...], tuple[tuple[Group, Group], ...]]] = {}
        self.worthy: dict[tuple[object, int], Array] = {}  # groups of axes, mesh -> its undominated placements
        self.counts: dict[int, int] = {}  # mesh -> all its placements
        # Numbers of candidates, with seconds of a placement that was priced, and with seconds that none undercuts.
        self.least, self.bounded_at = list[tuple[Index, Array]](), list[tuple[Index, Array]]()

    @cached_property
    def kinds(self) -> tuple[dict[tuple[int, ...], int], Index]:
        """Numbers of the kinds of layouts, by their chips and sizes, and the kind of each of the bounds' keys."""
        each = self.kinds_at(self.bounds.members[self.bounds.begins])
        first, kind_of = distinct(list(each.T))
        chips = math.prod(self.network.fabric.sizes)
        return {(chips, *kind): number for number, kind in enumerate(each[first].astype(int).tolist())}, kind_of

    def kinds_at(self, at: Index) -> Array:
        """[rows, axes]: sizes that tell kinds of layouts apart, of rows of the table."""
        return kinds_of(self.table.meshes[self.table.mesh_id[at]])

    def least_memory(self, least: float = math.inf, *, exact: bool = True) -> float:
        """Least memory of any candidate, bytes, with whatever the host has room for.

        Args:
            least: of those that are known.
            exact: of all; else of some, to know that there are any.
        """
        for groups in self.bounds.by_memory():
            self.tick()
            begin, size = 0, max(CHUNK // 32, 1)
            while begin < len(groups) and groups.memory[begin] < least and (exact or math.isinf(least)):
                batch = self.taken(self.bounds.members_of(groups.take(slice(begin, begin + size))))
                begin, size = begin + size, min(4 * size, CHUNK)
                floors = self.bounds.memory_floor(batch)
                order, at, go = np.argsort(floors, kind="stable"), 0, max(CHUNK // 32, 1)
                while at < len(order) and floors[order[at]] < least and (exact or math.isinf(least)):
                    least = min(least, self.fitting(batch.take(order[at : at + go]))[1])
                    at, go = at + go, min(8 * go, 4 * CHUNK)
            if math.isfinite(least) and not exact:
                break
        return least

    def numbers(self, batch: CandidateBatch) -> Index:
        """A number for each candidate of the network."""
        network = self.network
        return (batch.at * len(network.choices) + batch.choices) * len(network.schedules) + batch.schedule

    def taken(self, batch: CandidateBatch) -> CandidateBatch:
        """The candidates that some tool takes, with whatever saves memory."""
        return batch.where(self.network.runs(batch.choices, batch.schedule, batch.at))

    def possible(self, batch: CandidateBatch) -> CandidateBatch:
        """The candidates that may fit."""
        return batch.where(self.bounds.memory_floor(batch) <= self.network.capacity)

    def raised(
        self, batch: CandidateBatch, below: Callable[[Array, Index], Mask], *, placed: bool = False
    ) -> CandidateBatch:
        """The candidates whose bounds are `below`, with bounds that count their weight traffic on the best mapping.

        That is the one onto links which no placement beats, or, `placed`, the best of all placements.
        """
        batch = self.placement_bounds[placed].raised(batch)
        if placed:
            batch.placed = np.ones(len(batch), bool)
            self.bounded_at.append((self.numbers(batch), batch.bound))
        return batch.where(below(batch.bound, self.bounds.key_of[batch.at]))

    def fitting(self, batch: CandidateBatch, asked: Choices | None = None) -> tuple[CandidateBatch, float]:
        """The candidates that fit in memory, with their memory; and the least memory of any.

        Where one does not fit, copies of it that save memory do, perhaps: but none that offloads all that
        another does which fits, for it is no faster. A loss in chunks takes no other time than a whole one.

        Args:
            batch: candidates.
            asked: with the ways to save memory that count; None for all.
        """
        found, least, savings = [CandidateBatch.none()], math.inf, self.network.savings
        nested = all(set(savings[0].offload) <= set(saving.offload) for saving in savings)
        order = np.argsort(batch.choices, kind="stable")
        for begin in range(0, len(batch), 2 * CHUNK):
            self.tick()
            mine = batch.take(order[begin : begin + 2 * CHUNK])
            stages: dict[str, tuple[Index, StageMemory]] = {}
            tried: list[tuple[frozenset[str], Mask]] = []
            for o, saving in enumerate(savings):
                needed = np.ones(len(mine), bool)
                for smaller, fitted in tried:
                    if smaller <= set(saving.offload):
                        needed &= ~fitted  # it is no faster than what fits
                if not needed.any() or not (asked is None or saving.among(asked)):
                    continue
                if saving.loss not in stages:
                    rows = np.flatnonzero(needed) if nested else np.arange(len(mine))  # later ones are among these
                    stages[saving.loss] = rows, self.memory.stages(mine.take(rows), saving.loss)
                rows, held = stages[saving.loss]
                sizes = np.full(len(mine), math.inf)
                sizes[rows] = self.memory.total(held, saving.offload, len(rows))
                sizes = np.where(self.network.runs(mine.choices, mine.schedule, mine.at, o), sizes, math.inf)
                least = min(least, float(sizes.min()))
                fits = sizes <= self.network.capacity
                tried.append((frozenset(saving.offload), fits))
                kept = np.flatnonzero(needed & fits)
                chosen = mine.take(kept)
                chosen.memory, chosen.saving = sizes[kept], np.full(len(kept), o)
                found.append(chosen)
        return CandidateBatch.joined(found), least

    def bounded(self, batch: CandidateBatch) -> CandidateBatch:
        """The candidates, priced on links that no placement beats."""
        out = batch.take(slice(None))
        out.bound = np.zeros(len(batch))
        for c, at, (index, inverse), local in self._chunks(batch):
            links = self.network.ideal.at(self.table.mesh_id[at])
            mine = batch.take(index)
            seconds = self._seconds(c, self._candidates(c, at), links, local, mine, inverse)
            out.bound[index] = np.maximum(mine.bound, seconds)
        return out

    def placed(self, batch: CandidateBatch) -> Iterator[Priced]:
        """Price every placement of candidates that no other of the same mesh undercuts."""
        for c in np.unique(batch.choices):
            self.tick()
            choices, mine = self.network.choices[c], batch.take(np.flatnonzero(batch.choices == c))
            ids, inverse = np.unique(self.table.mesh_id[mine.at], return_inverse=True)
            options = self._placements(choices, ids)
            number = np.array([len(o) for o in options])
            factors, begins = np.concatenate(options), np.cumsum(number) - number
            row, offset = expanded(number[inverse])
            placement = begins[inverse[row]] + offset
            covered = int(np.array([self.counts[int(i)] for i in ids])[inverse].sum())
            for begin in range(0, len(row), CHUNK):
                part = slice(begin, begin + CHUNK)
                chosen, where = mine.take(row[part]), factors[placement[part]]
                links = WireTable(self.network.fabric, where, self.problem.routing)
                local = self.network.blocks(choices, self.table.local[chosen.at])
                candidates = self._candidates(int(c), chosen.at)
                seconds = self._seconds(int(c), candidates, links, local, chosen, np.arange(len(chosen)))
                yield Priced(chosen, where, seconds, covered if begin == 0 else 0)

    def found(self, priced: Priced, i: int, score: float) -> Found:
        """Spell row `i` out as a layout."""
        batch, factors, table = priced.batch, priced.factors[i], self.table
        at, c, s, o = (int(column[i]) for column in (batch.at, batch.choices, batch.schedule, batch.saving))
        sizes: dict[str, Any] = {a: int(n[0]) for a, n in table.axes(table.mesh_id[at : at + 1]).items()}
        choices = self.network.layout_choices(c, s, o)
        shared = math.prod(sizes[a] for a in ("context", "ulysses", "expert")) > 1
        # Where no axis is used that a choice is about, it is as if it had not been made.
        if sizes["data"] == 1 and (choices["fully_sharded"] or not shared):
            choices["zero"] = 0
        if sizes["tensor"] == 1:
            choices |= {"expert_tensor_parallel": True, "collective_matmul": "compiler"}
        if sizes["context"] == 1:
            choices["context_method"] = "gather"
        layout = Layout(
            **sizes,
            **choices,
            micro_batch=int(table.micro_batch[at]),
            num_microbatches=int(table.num_microbatches[at]),
            wires=tuple((a, tuple(int(e) for e in factors[k])) for k, a in enumerate(MESH_AXES)),
        )
        return Found(layout, self.network.fabric, score, float(priced.seconds[i]), float(batch.memory[i]))

    def _seconds(  # noqa: PLR0917 -- columns that belong together
        self,
        c: int,
        candidates: Candidates,
        links: Wires,
        local: tuple[LocalBlock, ...],
        batch: CandidateBatch,
        inverse: Index,
    ) -> Array:
        """Seconds per token under one of the layout choices; `inverse` says which of `candidates` is whose."""
        shared = evaluated(self.problem, self.network.choices[c], candidates, links, local, bounded=False)
        tokens = np.broadcast_to(candidates.sequences * self.problem.job.seq_len, np.size(candidates.micro_batch))
        out, savings = np.zeros(len(batch)), self.network.savings
        with np.errstate(all="ignore"):  # where a schedule cannot run, its formula means nothing
            for s in np.unique(batch.schedule):
                pipeline, ways = self._pipeline(int(s), candidates), np.unique(batch.saving[batch.schedule == s])
                # What is offloaded is arithmetic on time and memory; without, time is enough.
                plain = shared.costs(pipeline) if self.network.offloads[ways].any() else None
                step = shared.time(pipeline) if plain is None else plain.step
                for o in ways:
                    which, own = savings[int(o)].offload, step
                    if plain is not None and which:
                        own = offloaded(plain, which, candidates.offload_share).step
                    mine = np.flatnonzero((batch.schedule == s) & (batch.saving == o))
                    seconds = np.broadcast_to(own.expected, len(tokens)) / tokens
                    out[mine] = seconds[inverse[mine]]
        return out

    def _chunks(
        self, batch: CandidateBatch
    ) -> Iterator[tuple[int, Index, tuple[Index, Index], tuple[LocalBlock, ...]]]:
        """Candidates of one of the layout choices at a time, each place of the table once.

        Yields: which choices; places in the table; which candidates, and which of the places each has; what devices
            do there.
        """
        for c in np.unique(batch.choices):
            self.tick()
            mine = np.flatnonzero(batch.choices == c)
            mine = mine[np.argsort(batch.at[mine], kind="stable")]
            places, inverse = np.unique(batch.at[mine], return_inverse=True)
            for begin in range(0, len(places), CHUNK):
                part = places[begin : begin + CHUNK]
                span = slice(*np.searchsorted(inverse, (begin, begin + len(part))))
                local = self.network.blocks(self.network.choices[c], self.table.local[part])
                yield int(c), part, (mine[span], inverse[span] - begin), local

    def _candidates(self, c: int, at: Index) -> Candidates:
        layers, variant = self.problem.model.num_layers, self.network.variants[self.network.variant_of[c]]
        share = 1.0 if variant.remat_layers is None else variant.remat_layers / layers
        away = self.network.asked.offload_layers
        return self.table.candidates(at, remat_share=share, offload_share=1.0 if away is None else away / layers)

    def _pipeline(self, s: int, c: Candidates) -> Pipeline:
        variant = self.network.schedules[s]
        return Pipeline.of(variant.schedule, c.stage, c.num_microbatches, float(variant.virtual_stages))

    def _placements(self, choices: LayoutChoices, ids: Index) -> list[Array]:
        """The undominated placements of meshes, each worked out when first asked for."""
        if choices not in self.groups_of:
            self.groups_of[choices] = groups_that_send(self.problem, choices)
        groups, fabric = self.groups_of[choices], self.network.fabric
        new = [i for i in ids.tolist() if (groups, i) not in self.worthy]
        for i, mesh in zip(new, self.table.meshes[np.array(new, int)].astype(int).tolist(), strict=True):
            options = placements(fabric.sizes, tuple(mesh))
            self.worthy[groups, i], self.counts[i] = options, len(options)
        if several := [i for i in new if self.counts[i] > 1]:  # one has none to be compared with
            counts = np.array([self.counts[i] for i in several])
            factors, starts = np.concatenate([self.worthy[groups, i] for i in several]), np.cumsum(counts) - counts
            kept = undominated(fabric, factors, starts, groups[0], self.problem.routing, at_once=groups[1])
            owner = np.repeat(np.arange(len(several)), counts)[kept]
            for k, i in enumerate(several):
                self.worthy[groups, i] = factors[kept[owner == k]]
        return [self.worthy[groups, i] for i in ids.tolist()]


def groups_that_send(
    problem: TrainingProblem, choices: LayoutChoices
) -> tuple[tuple[Group, ...], tuple[tuple[Group, Group], ...]]:
    """Every group of mesh axes that some collective runs over, and pairs of those that send at the same time.

    Weights are sent beside collective matmuls, and beside rings.
    """
    groups, beside, weights = set[Group](), set[Group](), set[Group]()
    beside_compute = problem.calibration.collective_matmul or problem.calibration.beside_sums
    for axes, purpose in (sent for block in problem.lowered.training(choices) for sent in block.sent):
        groups.add(axes)
        if purpose in (Purpose.WEIGHTS, Purpose.GRADIENTS):
            weights.add(axes)
        elif purpose in (Purpose.RING, Purpose.MATMUL) or (beside_compute and term_of(axes, purpose) == "tensor"):
            beside.add(axes)
    return tuple(sorted(groups)), tuple((a, b) for a in sorted(beside) for b in sorted(weights))
