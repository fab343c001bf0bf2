"""One network of a search: everything that candidates on it are made of, and tables that their bounds and prices share.

Tables are filled as entries are asked for. Not here: bounds (`bounds`, `placement_bounds`), or prices (`pricing`).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache, cached_property, partial
from typing import Any, TypeVar

import numpy as np

from meshwise.costs.arithmetic import Num, maximum
from meshwise.costs.fabric import Fabric
from meshwise.costs.layout_choices import LayoutChoices, LocalSizes
from meshwise.costs.local import (
    LocalBlock,
    LocalPrices,
    evaluate_local,
    evaluate_local_memory,
    evaluate_passes,
    local_prices,
    repeats_whole,
)
from meshwise.costs.memory import LocalMemory
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.weight_traffic import weight_choices
from meshwise.search.asked import SearchSpace
from meshwise.search.candidates import (
    Array,
    CandidateBatch,
    CandidateTable,
    Choices,
    ComputeVariant,
    Index,
    Mask,
    PipelineVariant,
    Saving,
    compute_variants,
)
from meshwise.search.rings import RING_FIRST, stands_for_gathers
from meshwise.search.space import IdealWires
from meshwise.search.tables import NO_NUMBERS, Recent, RowTable
from meshwise.search.tools import Tool, ToolMasks, possible_meshes, possible_schedules, possible_variants
from meshwise.sharding.layout import MESH_AXES

T = TypeVar("T")
U = TypeVar("U")

#: Of compute, schedules and losses, what may be chosen.
#: Which of `LocalSizes` tells several stages from one.
_LOOPED = [f.name for f in fields(LocalSizes)].index("looped")

_Possible = tuple[tuple[ComputeVariant, ...], tuple[PipelineVariant, ...], tuple[str, ...]]

#: Rows of what one device does on its own that are kept, of about 700 bytes.
_MOST_ROWS = 100_000

#: Parameters of glibc's `mallopt`, and what they are set to, in bytes: what may lie free at the end of the heap, and
#: from what size on an array is mapped on its own (glibc allows no more).
_TRIM_THRESHOLD, _FREE = -1, 1 << 30
_MMAP_THRESHOLD, _LARGE = -3, 32 << 20


class SearchedNetwork:
    """A network, and what may be chosen on it.

    Args:
        local: what one device does on its own, shared by all networks and spaces of a search.
        space: what may be chosen.
        fabric: the network.
        table: meshes and cuts of the batch.
    """

    def __init__(self, local: LocalTables, space: SearchSpace, fabric: Fabric, table: CandidateTable) -> None:
        self.local, self.problem, self.fabric, self.table = local, local.problem, fabric, table
        self.capacity, self.asked = self.problem.cluster.chip.hbm_usable * space.memory_share, space.choices
        self.variants, schedules, self.losses = local.possible(space.tools, self.asked)
        self.sizes = local.numbers(table.sizes)  # of each of the table's sizes in `local`
        self.choices = tuple(stored for variant in self.variants for stored in variant.stored)
        self.variant_of = np.repeat(np.arange(len(self.variants)), [len(v.stored) for v in self.variants])
        self.schedules = schedules if table.axis("stage").max(initial=1) > 1 else schedules[:1]  # one stage has one
        self.masks = ToolMasks(space.tools, table) if space.tools else None
        has_host = self.problem.cluster.chip.host_memory is not None
        offloads = (parts for parts in self.asked.offload if has_host or not parts)
        self.savings = tuple(Saving(loss, parts) for parts in offloads for loss in self.losses)
        self.offloads = np.array([bool(saving.offload) for saving in self.savings], bool)  # whether each does
        self.ideal = IdealWires(fabric, table.axes(), self.problem.routing)  # of all meshes
        # Of combinations of choices, numbers of what tools refuse; the last of the savings stands for any.
        self._numbers = np.full((len(self.choices), len(self.schedules), len(self.savings) + 1), -1, np.int32)

    def runs(self, choices: Index, schedule: Index, at: Index, saving: int | None = None) -> Mask:
        """Which candidates some tool takes: whatever saves memory, or with this one of the savings."""
        if self.masks is None:
            return np.ones(len(at), bool)
        numbers = self._numbers[:, :, -1 if saving is None else saving]
        new = np.zeros(numbers.shape, bool)
        new[choices, schedule] = True
        savings = range(len(self.savings)) if saving is None else (saving,)
        for c, s in np.argwhere(new & (numbers < 0)).tolist():
            numbers[c, s] = self.masks.number(
                [self._parts[0][c] | self._parts[1][s] | self._parts[2][o] for o in savings]
            )
        return self.masks.takes(numbers[choices, schedule].astype(int), at)

    def layout_choices(self, c: int, s: int, o: int) -> dict[str, Any]:
        """One combination of choices, as `Layout` names them."""
        named = self._parts[0][c] | self._parts[1][s] | self._parts[2][o]
        del named["strategy"]
        return named

    @cached_property
    def _alone(self) -> Index:
        """Of each of the choices, the number of those that hold the same state where a step is one microbatch."""
        numbers = {c: n for n, c in enumerate(self.choices)}
        return np.array([numbers[self.problem.held_as(c)] for c in self.choices])

    def held_as(self, batch: CandidateBatch) -> Index:
        """Numbers of the choices whose state each candidate holds."""
        if not self.problem.own_program:
            return batch.choices
        lone = (self.table.num_microbatches[batch.at] == 1) & (self.table.axis("stage", batch.at) == 1)
        return np.where(lone, self._alone[batch.choices], batch.choices)

    @cached_property
    def weights(self) -> tuple[tuple[LayoutChoices, ...], Index]:
        """Choices whose weights differ, and which of them stands for each of the choices."""
        numbers: dict[LayoutChoices, int] = {}
        alike: dict[LayoutChoices, list[int]] = {}  # of those that are stored in the same ways
        number: list[int] = []
        for v in self.variants:
            if (plain := weight_choices(v.own)) not in alike:
                alike[plain] = [numbers.setdefault(weight_choices(c), len(numbers)) for c in v.stored]
            number += alike[plain]
        return tuple(numbers), np.array(number)

    @cached_property
    def _parts(self) -> tuple[list[dict[str, object]], ...]:
        """What the layout choices, the schedules and the savings are, as `Layout` names it, and their rule tables."""
        variants = (self.variants[v].layout_choices for v in self.variant_of)
        stored = [own | _storage(c) for own, c in zip(variants, self.choices, strict=True)]
        layers, away = self.asked.offload_layers, list[dict[str, object]]()
        for s in self.savings:
            share = layers if "activations" in s.offload else None
            away.append({"loss": s.loss, "offload": s.offload, "offload_layers": share})
        return stored, [s.layout_choices for s in self.schedules], away

    def memory(self, choices: LayoutChoices, loss: str, sizes: Index) -> tuple[LocalMemory, ...]:
        """What blocks hold, for some of the table's sizes."""
        whole = self.local.memory(choices, self.sizes[sizes])
        if loss == "whole":
            return whole
        blocks = zip(self.problem.lowered.training(choices), whole, strict=True)
        return tuple(self.head(choices, loss, sizes, own) if b.role == "head" else own for b, own in blocks)

    def head(self, choices: LayoutChoices, loss: str, sizes: Index, whole: LocalMemory) -> LocalMemory:
        """What the head holds that with whole logits holds `whole`, for some of the table's sizes."""
        return whole if loss == "whole" else self.local.head(choices.but(loss=loss), self.sizes[sizes])

    def blocks(self, choices: LayoutChoices, sizes: Index) -> tuple[LocalBlock, ...]:
        """What one device does, for some of the table's sizes."""
        return self.local(choices, self.sizes[sizes])

    def busy(self, choices: LayoutChoices, sizes: Index) -> Array:
        """Seconds that one device computes for a microbatch at least, for some of the table's sizes."""
        return self.local.busy(choices, self.sizes[sizes])


#: Choices that tell apart those of one compute variant, and the rule tables.
_STORAGE = ("zero", "fully_sharded", "strategy")


def _storage(stored: LayoutChoices) -> dict[str, object]:
    """The choices that tell apart those of one compute variant, as `Layout` names them, and their rule tables."""
    return {name: getattr(stored, name) for name in _STORAGE}


class LocalTables:
    """What one device does on its own under each of the layout choices, for the distinct sizes that were asked for.

    Args:
        problem: model, job, cluster, calibration.
    """

    def __init__(self, problem: TrainingProblem) -> None:
        self.problem = problem
        self._numbers: dict[bytes, int] = {}
        self._sizes = np.zeros((len(fields(LocalSizes)), 0))  # of each number
        self._latest = NO_NUMBERS  # those of the network that is searched
        self._tables: dict[LayoutChoices, RowTable[tuple[LocalBlock, ...]]] = {}
        self._memory: dict[LayoutChoices, RowTable[tuple[LocalMemory, ...]]] = {}
        self._heads: dict[LayoutChoices, RowTable[LocalMemory]] = {}
        self._busy: dict[LayoutChoices, RowTable[Array]] = {}
        self._prices = Recent[LocalPrices](2)
        self._possible: dict[object, _Possible] = {}
        self.ideal: dict[object, float] = {}  # chip-seconds of a token that none of these undercuts
        self._values: dict[object, dict[str, dict[object, None]]] = {}  # name of a choice -> what it may be

    def possible(self, tools: tuple[Tool, ...], asked: Choices) -> _Possible:
        """What of the choices of a search some tool may take: alike on all networks."""
        key = tools, asked
        if key not in self._possible:
            losses = tuple(way for way in asked.loss if not tools or any(t.may_run({"loss": way}) for t in tools))
            variants = possible_variants(tools, self._variants(tools, asked)) if losses else ()
            self._possible[key] = variants, possible_schedules(tools, asked.variants), losses
        return self._possible[key]

    def _variants(self, tools: tuple[Tool, ...], asked: Choices) -> tuple[ComputeVariant, ...]:
        """Every compute variant; rings first, where they stand for gathers on one stage."""
        if not stands_for_gathers(self.problem, tools, asked):
            return compute_variants(self.problem.model, asked)
        every = compute_variants(self.problem.model, replace(asked, context_method=RING_FIRST))
        return tuple(replace(v, needs_stages=v.own.context_method != RING_FIRST[0]) for v in every)

    def meshes(self, space: SearchSpace, rows: Index) -> Index:
        """Those of some meshes, [meshes, axes], that some tool may take with the choices of a space."""
        if not space.tools:
            return rows
        if (key := (space.tools, space.choices)) not in self._values:
            variants, schedules, _ = self.possible(*key)
            values = self._values[key] = {}
            for choices in (*(v.layout_choices for v in variants), *(s.layout_choices for s in schedules)):
                for name, value in choices.items():
                    values.setdefault(name, {})[value] = None
            stored = [own for v in variants for own in v.stored]
            values |= {name: dict.fromkeys([getattr(own, name) for own in stored]) for name in _STORAGE}
        sizes = dict(zip(MESH_AXES, rows.T.astype(float), strict=True))
        return rows[possible_meshes(space.tools, sizes, self._values[key])]

    def numbers(self, sizes: LocalSizes) -> Index:
        """The number of each of some sizes; new ones get the next."""
        rows, known = np.column_stack([getattr(sizes, f.name) for f in fields(LocalSizes)]), len(self._numbers)
        keys = rows.view(f"V{rows.itemsize * rows.shape[1]}").ravel().tolist()
        found = np.array([self._numbers.setdefault(key, len(self._numbers)) for key in keys], int)
        self._sizes = np.pad(self._sizes, ((0, 0), (0, len(self._numbers) - known)))
        self._sizes[:, found] = rows.T
        self._latest = found
        return found

    def __call__(self, choices: LayoutChoices, numbers: Index) -> tuple[LocalBlock, ...]:
        """Blocks with one row for each number of sizes."""
        return self._blocks(choices)(numbers)

    def _blocks(self, choices: LayoutChoices) -> RowTable[tuple[LocalBlock, ...]]:
        _forget(self._tables)
        if choices not in self._tables:
            self._tables[choices] = RowTable(partial(self.evaluate, choices), lambda: self._latest)
        return self._tables[choices]

    def memory(self, choices: LayoutChoices, numbers: Index) -> tuple[LocalMemory, ...]:
        """What blocks hold, with one row for each number of sizes."""
        _forget(self._memory)
        if (own := choices.stored_plainly) not in self._memory:
            self._memory[own] = RowTable(partial(self._evaluate_memory, own), lambda: self._latest)
        return self._memory[own](numbers)

    def head(self, choices: LayoutChoices, numbers: Index) -> LocalMemory:
        """What the head holds, with one row for each number of sizes; all remat policies share it."""
        _forget(self._heads)
        own = choices.stored_plainly.but(remat="none", partial_remat=False)
        if own not in self._heads:
            self._heads[own] = RowTable(partial(self._evaluate_head, own), lambda: self._latest)
        return self._heads[own](numbers)

    def busy(self, choices: LayoutChoices, numbers: Index) -> Array:
        """Seconds that the device computes for a microbatch at least, all copies of its blocks."""
        if choices not in self._busy:
            made = self._evaluate_busy if choices.remat == "none" else self._evaluate_busier
            self._busy[choices] = RowTable(partial(made, choices), lambda: self._latest)
        return self._busy[choices](numbers)

    def _evaluate_busy(self, choices: LayoutChoices, numbers: Index) -> Array:
        found = evaluate_passes(self.problem, choices, self._priced(choices, numbers))
        blocks = zip(self.problem.lowered.training(choices), found, strict=True)
        seconds: Num = sum(b.placed.block.repeat * p.seconds for b, passes in blocks for p in passes.values())
        return np.array(np.broadcast_to((1 - 1e-9) * seconds, len(numbers)))  # added up in another order

    def _evaluate_busier(self, choices: LayoutChoices, numbers: Index) -> Array:
        """With what a remat policy computes again: operations of the forward pass, so that it need not be placed."""
        keeps_all = choices.but(remat="none")
        prices, seconds = self._priced(choices, numbers), self.busy(keeps_all, numbers)
        for b in self.problem.lowered.training(keeps_all):
            if operations := b.repeated(choices.remat) if b.role == "layer" else ():
                again = prices.pass_compute(operations).seconds
                if repeats_whole(self.problem, choices):
                    forward, needed = (prices.pass_compute(b.passes[p]).seconds for p in ("forward", "recompute"))
                    again = maximum(again, forward - needed)
                seconds = seconds + (1 - 1e-9) * b.placed.block.repeat * again
        return seconds

    def _evaluate_memory(self, choices: LayoutChoices, numbers: Index) -> tuple[LocalMemory, ...]:
        if choices in self._tables and self._tables[choices].knows(numbers):
            return self._tables[choices].part(numbers, lambda blocks: tuple(block.memory for block in blocks))
        return evaluate_local_memory(self.problem, choices, self._priced(choices, numbers))

    def _evaluate_head(self, choices: LayoutChoices, numbers: Index) -> LocalMemory:
        return evaluate_local_memory(self.problem, choices, self._priced(choices, numbers), "head")[0]

    def _priced(self, choices: LayoutChoices, numbers: Index) -> LocalPrices:
        def made() -> LocalPrices:
            sizes = LocalSizes(*(column[numbers] for column in self._sizes))
            return local_prices(self.problem, choices, sizes, bounded=False)

        return self._prices((choices.expert_tensor_parallel, numbers.tobytes()), made)

    def evaluate(self, choices: LayoutChoices, numbers: Index) -> tuple[LocalBlock, ...]:
        """What is no table's, yet: blocks with one row for each number of sizes."""
        own = choices.stored_plainly
        known = None if choices == own else self(own, numbers)  # the arithmetic is the same
        of_own = self._memory.get(own)
        memories = of_own(numbers) if known is None and of_own is not None and of_own.knows(numbers) else None
        looped = self._sizes[_LOOPED, numbers]
        return evaluate_local(self.problem, choices, self._priced(choices, numbers), known, memories, looped=looped)


def _forget(tables: dict[LayoutChoices, RowTable[T]]) -> None:
    """Forget all rows where they are too many."""
    if sum(map(len, tables.values())) > _MOST_ROWS:
        tables.clear()


class WeightColumns:
    """What weights take under each of the layout choices, for the entries (meshes, or mappings) that were asked for.

    Args:
        network: whose choices they are; those with the same weights share their columns.
        evaluate: prices some entries under one of the choices: role -> [..., entries].
        together: as in `RowTable`.
    """

    def __init__(
        self,
        network: SearchedNetwork,
        evaluate: Callable[[LayoutChoices, Index], Mapping[str, Array]],
        together: Callable[[], Index] = lambda: NO_NUMBERS,
    ) -> None:
        stored, self.number = network.weights
        self.tables = [RowTable(partial(evaluate, c), together) for c in stored]

    def __call__(self, choices: Index, at: Index) -> dict[str, Array]:
        """By role, of entries `at`, each under one of the choices."""
        number, out = self.number[choices], dict[str, Array]()
        for n in np.unique(number):
            mine = np.flatnonzero(number == n)
            rows = self.tables[n].rows(at[mine])
            for role, column in self.tables[n].values.items():
                out.setdefault(role, np.zeros((*column.shape[:-1], len(at))))[..., mine] = column[..., rows]
        return out


@cache
def keep_freed_memory() -> None:
    """Let the C library keep what arrays free, for the arrays that come next; once in a process.

    glibc hands memory at the end of its heap back and asks for it again with every chunk: page faults would take a
    third of a search. Nothing happens where the C library is another one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _FREE)
        mallopt(_MMAP_THRESHOLD, _LARGE)
