"""Blocks of a training program, placed and worked out once in a process for every size that is asked for.

Not here: sizes, or what they cost (`evaluate`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from meshwise.core.tensors import Attention, Block, Op, Program, Route
from meshwise.costs.arithmetic import take
from meshwise.costs.compute import OpWork, PassCompute, pass_work, passes_alike
from meshwise.costs.layout_choices import LayoutChoices
from meshwise.costs.memory import LocalMemory
from meshwise.costs.memory_plan import MemoryPlan, memory_plan
from meshwise.costs.pipeline import Part
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.traffic import FlowPlan, flow_plans
from meshwise.costs.update import UpdatePlan, update_plan
from meshwise.jobs import Optimizer, Precision
from meshwise.models import Model
from meshwise.sharding.place import place_block
from meshwise.sharding.placed import PlacedBlock
from meshwise.sharding.remat import remat_policy


@dataclass(frozen=True)
class LoweredBlock:
    """A placed block with its structure worked out, each part when first asked for; the rest is arithmetic on sizes.

    Args:
        placed: itself.
        formats, optimizer: of the job.
    """

    placed: PlacedBlock
    formats: Precision
    optimizer: Optimizer

    @cached_property
    def again(self) -> tuple[Op, ...]:
        """Its matmuls that are computed again."""
        return tuple(op for op in self.placed.block.ops if op.name in self.placed.recomputed and op.matmul)

    @cached_property
    def works(self) -> Mapping[str, tuple[OpWork, ...]]:
        """Local operations by pass."""
        return pass_work(self.placed, self.formats)

    @cached_property
    def alike(self) -> Mapping[str, object]:
        """What equal passes share."""
        return passes_alike(self.works)

    @cached_property
    def flows(self) -> tuple[FlowPlan, ...]:
        """What it sends."""
        return flow_plans(self.placed, self.formats, self.optimizer)

    @cached_property
    def memory(self) -> MemoryPlan:
        """What it holds."""
        return memory_plan(self.placed, self.formats, self.optimizer)

    @cached_property
    def update(self) -> UpdatePlan:
        """What updating its weights takes."""
        return update_plan(self.placed, self.formats, self.optimizer)

    def part(self, structure: LayoutChoices, remat_share: Any) -> Part:
        """Which copies of its block it stands for; `remat_share` as in `Candidates`."""
        block = self.placed.block
        if not structure.partial_remat or block.role != "layer":
            return Part(block)
        if block.name.endswith(_REST):
            return Part(block, 1 - remat_share, rest=True)
        return Part(block, remat_share)


@dataclass(frozen=True, slots=True)
class LocalBlock:
    """What depends only on the sizes in `LocalSizes`."""

    passes: Mapping[str, PassCompute]
    flows: Mapping[int, Any]  # index of the flow plan -> bytes
    memory: LocalMemory

    def take(self, index: Any) -> LocalBlock:
        """The same for other rows: entries `index` of every array."""
        return LocalBlock(take(self.passes, index), take(self.flows, index), take(self.memory, index))

    def joined(self, other: LocalBlock, numbers: tuple[int, int]) -> LocalBlock:
        """The rows of this one, then those of `other`; `numbers` of each."""

        def join(a: Any, b: Any) -> Any:
            if not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray) and a == b:
                return a  # the same for all rows
            return np.concatenate([np.broadcast_to(v, n) for v, n in zip((a, b), numbers, strict=True)])

        def join_all(a: Any, b: Any) -> Any:
            return type(a)(*(join(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)))

        passes = {name: join_all(p, other.passes[name]) for name, p in self.passes.items()}
        flows = {i: join(v, other.flows[i]) for i, v in self.flows.items()}
        return LocalBlock(passes, flows, join_all(self.memory, other.memory))


#: Placements kept at a time: a few models with all their structures; a long-lived process then starts over.
_KEPT = 4096

#: Ends the name of the copies of a layer that a partial remat policy leaves out.
_REST = " (all kept)"

_PLACED: dict[tuple[int, LayoutChoices, bool], tuple[Block, PlacedBlock]] = {}
_PLANNED: dict[tuple[int, Precision, Optimizer], tuple[PlacedBlock, LoweredBlock]] = {}
_STRUCTURES: dict[tuple[int, LayoutChoices, Precision, Optimizer], tuple[Program, tuple[LoweredBlock, ...]]] = {}


def place_structure(problem: TrainingProblem | Model, structure: LayoutChoices) -> tuple[PlacedBlock, ...]:
    """Place every block of a training program; each (block, structure) once in a process.

    Where only some layers follow the remat policy, a layer is placed twice: as the policy says, then keeping all.
    """
    placed = []
    whole = replace(structure, partial_remat=False, offload=())
    for block in problem.train_program():
        own = _heeded(whole, block)
        placed.append(_placed(block, own))
        if structure.partial_remat and block.role == "layer":
            placed.append(_placed(block, replace(own, remat="none"), rest=True))
    return tuple(placed)


def _placed(block: Block, structure: LayoutChoices, *, rest: bool = False) -> PlacedBlock:
    """Place one block, or find where it was placed before; `rest` marks copies that a policy leaves out."""
    key = (id(block), structure, rest)
    if len(_PLACED) > _KEPT:
        _PLACED.clear()
    if key not in _PLACED:  # the block is kept beside its placement, so that its id stays its own
        named = replace(block, name=block.name + _REST) if rest else block
        _PLACED[key] = (block, place_block(named, structure.strategy, remat_policy(structure.remat)))
    return _PLACED[key][1]


def _heeded(structure: LayoutChoices, block: Block) -> LayoutChoices:
    """The structure with every choice that means nothing to `block` set to one value, so that it is placed once."""
    kinds = {type(op) for op in block.ops}
    return replace(
        structure,
        remat=structure.remat if block.role == "layer" else "none",
        expert_tensor_parallel=structure.expert_tensor_parallel or Route not in kinds,
        context_method=structure.context_method if Attention in kinds else "gather",
    )


def plan_structure(problem: TrainingProblem, structure: LayoutChoices) -> tuple[LoweredBlock, ...]:
    """Place every block and work out what its costs are sums of; once in a process."""
    formats, optimizer = problem.job.formats, problem.job.optimizer_kind
    program = problem.train_program()  # kept beside its blocks, so that its id stays its own
    whole = id(program), structure, formats, optimizer
    if len(_STRUCTURES) > _KEPT:
        _STRUCTURES.clear()
    if whole not in _STRUCTURES:
        _STRUCTURES[whole] = program, _plan_blocks(problem, structure, formats, optimizer)
    return _STRUCTURES[whole][1]


def _plan_blocks(
    problem: TrainingProblem, structure: LayoutChoices, formats: Precision, optimizer: Optimizer
) -> tuple[LoweredBlock, ...]:
    planned = []
    for placed in place_structure(problem, structure):
        key = (id(placed), formats, optimizer)
        if len(_PLANNED) > _KEPT:
            _PLANNED.clear()
        if key not in _PLANNED:
            block = LoweredBlock(placed, formats, optimizer)
            _PLANNED[key] = (placed, block)
        planned.append(_PLANNED[key][1])
    return tuple(planned)
