"""Bytes of candidates of any choices and schedules, all at once.

What a block holds is looked up for each of the layout choices, what a pipeline's devices hold for each schedule; the
rest is arithmetic on rows of all of them, so that a few hundred choices take hardly longer than one. Not here: bounds
of them (`bounds`), or which candidates fit (`pricing`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import TypeVar

import numpy as np

from meshwise.costs.arithmetic import Num, joined, take
from meshwise.costs.ends import End, own_positions
from meshwise.costs.layout_choices import LayoutChoices
from meshwise.costs.memory import LocalMemory, StageMemory, stage_memory
from meshwise.costs.offload import offloaded_bytes
from meshwise.costs.pipeline import Part
from meshwise.costs.weight_traffic import evaluate_states, state_sums
from meshwise.search.bounds import Bounds
from meshwise.search.candidates import Array, CandidateBatch, Index
from meshwise.search.tables import RowTable

T = TypeVar("T")

#: Rows of what devices hold that are kept, of about a kilobyte.
_MOST_ROWS = 100_000

#: The training state of one copy of each block.
_States = tuple[Mapping[str, Num], ...]


class MemoryPrices:
    """What candidates on one network hold. Every layer comes twice: with copies that follow the remat policy, and rest.

    Args:
        bounds: of the network, which know its pipelines.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds, self.network, self.problem = bounds, bounds.network, bounds.problem
        self.program = self.problem.lowered.program
        layers, asked = self.problem.model.num_layers, self.network.asked.offload_layers
        self.offload_share = 1.0 if asked is None else asked / layers
        followers = [self.network.variants[v].remat_layers for v in self.network.variant_of]
        self.partial = np.array([n is not None for n in followers], bool)  # of each of the choices, as the next two
        self.share = np.array([1.0 if n is None else n / layers for n in followers])
        self._state_of = np.full(len(self.network.weights[0]), -1)  # of each of the weights that were asked for
        self._with_state: dict[tuple[tuple[int, ...], ...], LayoutChoices] = {}  # what a state is a sum of -> a choice
        self._states = RowTable(self._evaluate_states)  # of a state on a mesh
        self._local = dict[str, RowTable[tuple[LocalMemory, ...]]]()  # loss -> of a compute variant with a size
        self._num_meshes = len(self.network.table.meshes)

    def stages(self, batch: CandidateBatch, loss: str) -> StageMemory:
        """What the devices hold that may be the fullest with a loss: one of each candidate, then the next of each."""
        mixed = bool(self.partial[batch.choices].any())
        share = np.tile(self.share[batch.choices], self._num_ends)
        local, state = self._local_of(batch, loss), self._states_of(batch)
        blocks, held, number = list[tuple[Part, LocalMemory]](), list[Mapping[str, Num]](), 0
        for block in self.program:
            for rest in (False, True) if block.role == "layer" else (False,):
                if mixed or not rest:
                    copies: Num = 1.0 if block.role != "layer" or not mixed else 1 - share if rest else share
                    blocks.append((Part(block, copies, rest), local[number]))
                    held.append(state[number])
                number += 1
        rows = batch.schedule * len(self.bounds.stages) + self.bounds.pipe[self.bounds.key_of[batch.at]]
        kinds = np.arange(self._num_ends)[:, None] * (len(self.network.schedules) * len(self.bounds.stages))
        end: End = take(self._ends, (kinds + rows).ravel())
        if self.problem.in_step:
            mesh = self.network.table.axes(np.tile(self.network.table.mesh_id[batch.at], self._num_ends))
            parallel = np.array([c.sequence_parallel for c in self.network.choices])[batch.choices]
            parallel = np.tile(parallel, self._num_ends)
            end = end.dealt(own_positions(self.problem.job.seq_len, mesh, sequence_parallel=parallel), mesh["stage"])
        formats = self.problem.job.formats
        return stage_memory(blocks, held, end, formats.gradients.bytes / formats.weights.bytes)

    def total(self, stages: StageMemory, offload: tuple[str, ...], rows: int) -> Array:
        """Bytes on the fullest chip with parts in the host's memory, infinite where it has too little."""
        num_bytes = offloaded_bytes(self.problem.cluster.chip, (stages,), offload, self.offload_share)
        most: Array = np.broadcast_to(num_bytes, self._num_ends * rows).reshape(self._num_ends, rows).max(axis=0)
        return most

    def _doubled(self, blocks: Sequence[T]) -> tuple[T, ...]:
        """Values of all blocks under choices that all layers follow, with two of each layer."""
        twice = ([value] * (1 + (block.role == "layer")) for block, value in zip(self.program, blocks, strict=True))
        return tuple(value for values in twice for value in values)

    def _local_of(self, batch: CandidateBatch, loss: str) -> tuple[LocalMemory, ...]:
        if loss not in self._local or len(self._local[loss]) > _MOST_ROWS:
            self._local[loss] = RowTable(partial(self._evaluate_local, loss))
        table, variant = self._local[loss], self.network.variant_of[batch.choices]
        sizes = self.network.table.local[batch.at]
        rows = table.rows(self.bounds.numbers(table, variant, sizes, self.bounds.num_sizes))
        return take(table.values, np.tile(rows, self._num_ends))  # type: ignore[no-any-return]

    def _evaluate_local(self, loss: str, numbers: Index) -> tuple[LocalMemory, ...]:
        found, lengths = [], []
        variant, size = np.divmod(numbers, self.bounds.num_sizes)
        for v in np.unique(variant):
            mine, c = size[variant == v], int(np.searchsorted(self.network.variant_of, v))
            blocks = self.network.memory(self.network.choices[c], loss, mine)
            found.append(tuple(blocks) if self.partial[c] else self._doubled(blocks))
            lengths.append(len(mine))
        held: tuple[LocalMemory, ...] = joined(found, lengths)
        return held

    def _states_of(self, batch: CandidateBatch) -> _States:
        stored, number = self.network.weights
        weights = number[self.network.held_as(batch)]
        for w in np.unique(weights[self._state_of[weights] < 0]):
            sums = state_sums(self.problem, stored[w])
            self._with_state.setdefault(sums, stored[w])
            self._state_of[w] = list(self._with_state).index(sums)
        state, mesh = self._state_of[weights], self.network.table.mesh_id[batch.at]
        rows = self._states.rows(self.bounds.numbers(self._states, state, mesh, self._num_meshes))
        return take(self._states.values, np.tile(rows, self._num_ends))  # type: ignore[no-any-return]

    def _evaluate_states(self, numbers: Index) -> _States:
        found, lengths = [], []
        state, mesh = np.divmod(numbers, self._num_meshes)
        representatives = list(self._with_state.values())
        for s in np.unique(state):
            own = mesh[state == s]
            sizes = self.network.table.axes(own)
            shared = self.problem.made_in_step is not None
            found.append(self._doubled(evaluate_states(self.problem, representatives[s], sizes, shared=shared)))
            lengths.append(len(own))
        every: _States = joined(found, lengths)
        return every

    @cached_property
    def _num_ends(self) -> int:
        """How many devices of a pipeline may be the fullest."""
        return max(len(self.bounds.pipeline(s)[2]) for s in range(len(self.network.schedules)))

    @cached_property
    def _ends(self) -> End:
        """Devices that may be the fullest, of each pipeline, schedule by schedule; some of a pipeline are alike."""
        found = []
        for number in range(self._num_ends):
            each = (self.bounds.pipeline(s)[2] for s in range(len(self.network.schedules)))
            found += [ends[number] if number < len(ends) else ends[0] for ends in each]
        every: End = joined(found, [len(self.bounds.stages)] * len(found))
        return every
