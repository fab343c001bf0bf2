"""Bytes of candidates of any choices and schedules, all at once.

What a block holds is looked up for each of the layout choices, what a pipeline's devices hold for each schedule; the
rest is arithmetic on rows of all of them, so that a few hundred choices take hardly longer than one. Not here: bounds
of them (`bounds`), or which candidates fit (`pricing`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np

from meshwise.costs.arithmetic import Num, joined, take
from meshwise.costs.ends import End, own_positions
from meshwise.costs.memory import LocalMemory, StageMemory, stage_memory
from meshwise.costs.offload import offloaded_bytes
from meshwise.costs.pipeline import Part
from meshwise.costs.weight_traffic import evaluate_states, state_sums
from meshwise.search.bounds import Bounds
from meshwise.search.candidates import Array, CandidateBatch, Index
from meshwise.search.network import RowTable

T = TypeVar("T")

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
        self._state_of = np.full(len(self.share), -1)  # of each of the choices that were asked for
        self._with_state: dict[tuple[tuple[int, ...], ...], int] = {}  # what a state is a sum of -> one of the choices
        self._states = RowTable(self._evaluate_states)  # of a state on a mesh
        self._num_meshes = len(self.network.table.meshes)

    def stages(self, batch: CandidateBatch, loss: str) -> tuple[StageMemory, ...]:
        """What the devices hold that may be the fullest with a loss, of candidates sorted by their choices."""
        partial = bool(self.partial[batch.choices].any())
        share = self.share[batch.choices]
        local, state = self._local(batch, loss), self._states_of(batch)
        blocks, held, number = list[tuple[Part, LocalMemory]](), list[Mapping[str, Num]](), 0
        for block in self.program:
            for rest in (False, True) if block.role == "layer" else (False,):
                if partial or not rest:
                    copies: Num = 1.0 if block.role != "layer" or not partial else 1 - share if rest else share
                    blocks.append((Part(block, copies, rest), local[number]))
                    held.append(state[number])
                number += 1
        pipe = self.bounds.pipe[self.bounds.key_of[batch.at]]
        ends = take(self._ends, batch.schedule * len(self.bounds.stages) + pipe)
        if self.problem.in_step:
            mesh = self.network.table.axes(self.network.table.mesh_id[batch.at])
            parallel = np.array([c.sequence_parallel for c in self.network.choices])[batch.choices]
            positions = own_positions(self.problem.job.seq_len, mesh, sequence_parallel=parallel)
            ends = tuple(end.dealt(positions, mesh["stage"]) for end in ends)
        return tuple(stage_memory(blocks, held, end) for end in ends)

    def total(self, stages: Sequence[StageMemory], offload: tuple[str, ...], rows: int) -> Array:
        """Bytes on the fullest chip with parts in the host's memory, infinite where it has too little."""
        num_bytes = offloaded_bytes(self.problem.cluster.chip, stages, offload, self.offload_share)
        return np.broadcast_to(num_bytes, rows)

    def _doubled(self, c: int, blocks: Sequence[T]) -> tuple[T, ...]:
        """Values of all blocks under one of the choices, with two of each layer."""
        if self.partial[c]:
            return tuple(blocks)
        twice = ([value] * (1 + (block.role == "layer")) for block, value in zip(self.program, blocks, strict=True))
        return tuple(value for values in twice for value in values)

    def _local(self, batch: CandidateBatch, loss: str) -> tuple[LocalMemory, ...]:
        found, lengths = [], []
        # What is stored where makes no difference to activations.
        begins = np.unique(self.network.variant_of[batch.choices], return_index=True)[1]
        for c, begin, end in zip(batch.choices[begins], begins, [*begins[1:], len(batch)], strict=True):
            sizes = self.network.table.local[batch.at[begin:end]]
            found.append(self._doubled(int(c), self.network.memory(self.network.choices[c], loss, sizes)))
            lengths.append(int(end - begin))
        held: tuple[LocalMemory, ...] = joined(found, lengths)
        return held

    def _states_of(self, batch: CandidateBatch) -> _States:
        for c in np.unique(batch.choices[self._state_of[batch.choices] < 0]):
            sums = self._doubled(int(c), state_sums(self.problem, self.network.choices[c]))
            self._with_state.setdefault(sums, int(c))
            self._state_of[c] = list(self._with_state).index(sums)
        return self._states(self._state_of[batch.choices] * self._num_meshes + self.network.table.mesh_id[batch.at])

    def _evaluate_states(self, numbers: Index) -> _States:
        found, lengths = [], []
        state, mesh = np.divmod(numbers, self._num_meshes)
        representatives = list(self._with_state.values())
        for s in np.unique(state):
            c, own = representatives[s], mesh[state == s]
            sizes = self.network.table.axes(own)
            shared = self.problem.made_in_step is not None
            states = evaluate_states(self.problem, self.network.choices[c], sizes, shared=shared)
            found.append(self._doubled(c, states))
            lengths.append(len(own))
        every: _States = joined(found, lengths)
        return every

    @cached_property
    def _ends(self) -> tuple[End, ...]:
        """Devices that may be the fullest: three for each pipeline, some of them alike, schedule by schedule."""
        found = []
        for s in range(len(self.network.schedules)):
            ends = self.bounds.pipeline(s)[2]
            found.append((*ends, *(ends[0],) * (3 - len(ends))))
        every: tuple[End, ...] = joined(found, [len(self.bounds.stages)] * len(found))
        return every
