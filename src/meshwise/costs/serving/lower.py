"""Blocks of a serving step, placed and worked out once in a process for every size that is asked for.

Not here: sizes, or what they cost (`step`, `memory`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from meshwise.core.tensors import Attention, Block, CacheUpdate, Elementwise, Fused, Kind, Op, Route, Tensor
from meshwise.costs.compute import OpWork, operation_work
from meshwise.costs.extents import WeightedSum, element_bytes, held_bytes, held_key, weighted_sum
from meshwise.costs.serving.problem import ServingProblem, Step
from meshwise.costs.traffic import FlowPlan, forward_flow_plans
from meshwise.jobs import Precision
from meshwise.sharding.place import place_forward
from meshwise.sharding.placed import Held, LocalOp, PlacedBlock
from meshwise.sharding.serving_layout import ServingLayoutChoices
from meshwise.sharding.strategy import Strategy


@dataclass(frozen=True, slots=True)
class LoweredServingBlock:
    """A placed block of a serving step with its structure worked out: what remains is arithmetic on sizes.

    Args:
        placed: as placed.
        works: term that an operation's time counts under, and the operation.
        flows: what it sends.
        weights: bytes of one copy as stored, idle ones included.
        tied: of weights that another block owns.
        gathered: of weights as used, where they are gathered first; `each`, of each weight alone.
        caches: bytes of one copy's caches.
        moments: activations that operations hold, equal ones once; `compiled_moments`, where a compiler lets what is
            elementwise write over what it reads.
    """

    placed: PlacedBlock
    works: tuple[tuple[str, OpWork], ...]
    flows: tuple[FlowPlan, ...]
    weights: WeightedSum
    tied: WeightedSum
    gathered: WeightedSum
    each: tuple[WeightedSum, ...]
    caches: WeightedSum
    moments: tuple[WeightedSum, ...]
    compiled_moments: tuple[WeightedSum, ...]

    @property
    def role(self) -> str:
        """Which role the block plays."""
        return self.placed.block.role


def reads_positions(op: Op) -> bool:
    """Whether an operation has an axis of cached positions."""
    return any(a.partition(".")[0] == "S" for a in op.axes)


def mixes_positions(op: Op) -> bool:
    """Whether what an operation costs depends on how many positions are cached."""
    return isinstance(op, Fused) or reads_positions(op)


def _term(op: Op) -> str:
    if mixes_positions(op) or (isinstance(op, CacheUpdate) and op.name.startswith("state.")):
        return "attention"
    return "matmuls" if op.matmul else "elementwise"


_PLANNED: dict[tuple[object, ...], tuple[object, tuple[LoweredServingBlock, ...]]] = {}
_BLOCKS: dict[tuple[int, Strategy, Precision], tuple[Block, LoweredServingBlock]] = {}
_KEPT = 1024


def plan_step(problem: ServingProblem, step: Step, structure: ServingLayoutChoices) -> tuple[LoweredServingBlock, ...]:
    """Place every block of a step and work out what its costs are sums of; once in a process."""
    program = problem.program(step, wide=structure.wide)
    key = (id(program), step, structure)
    if len(_PLANNED) > _KEPT:
        _PLANNED.clear()
    if key not in _PLANNED:  # the program is kept beside, so that its id stays its own
        strategy = structure.strategy(step)
        formats = problem.load.formats.formats
        _PLANNED[key] = program, tuple(_planned(block, strategy, formats) for block in program)
    return _PLANNED[key][1]


def _planned(block: Block, strategy: Strategy, formats: Precision) -> LoweredServingBlock:
    """Place and plan one block, or find where that was done under rules that are the same to it."""
    own = heeded(strategy, block)
    key = (id(block), own, formats)
    if len(_BLOCKS) > _KEPT:
        _BLOCKS.clear()
    if key not in _BLOCKS:  # the block is kept beside, so that its id stays its own
        _BLOCKS[key] = block, _plan(place_forward(block, own), formats)
    return _BLOCKS[key][1]


def heeded(strategy: Strategy, block: Block) -> Strategy:
    """The rules without those that mean nothing to `block`: of attention where there is none, of axes it has not.

    What routes tokens heeds all of them.
    """
    kinds = {type(op) for op in block.ops}
    if any(issubclass(kind, Route) for kind in kinds):
        return strategy
    attends = any(issubclass(kind, Attention | CacheUpdate | Fused) for kind in kinds)
    axes = {a.partition(".")[0] for op in block.ops for a in op.axes}
    tables: dict[str, Any] = {
        f.name: tuple(rule for rule in getattr(strategy, f.name) if axes & set(rule.axes))
        for f in fields(strategy)
        if f.name not in ("ring", "pieces")
    }
    own = replace(strategy, **tables)
    return own if attends else replace(own, attention=(), caches=(), ring=False)


def _plan(placed: PlacedBlock, formats: Precision) -> LoweredServingBlock:
    local = [item for item in placed.forward if isinstance(item, LocalOp)]
    routed = any(isinstance(item.op, Route) for item in local)
    return LoweredServingBlock(
        placed=placed,
        works=tuple((_term(item.op), operation_work(item, formats, routed=routed)) for item in local),
        flows=forward_flow_plans(placed, formats),
        weights=held_bytes(placed.weights, formats),
        tied=held_bytes(placed.tied, formats),
        gathered=held_bytes(placed.gathered, formats),
        each=tuple(held_bytes([h], formats) for h in placed.gathered),
        caches=held_bytes(placed.caches, formats),
        moments=tuple(dict.fromkeys(_moment(item, formats) for item in local)),
        compiled_moments=tuple(dict.fromkeys(_moment(item, formats, compiled=True) for item in local)),
    )


def _moment(item: LocalOp, formats: Precision, *, compiled: bool = False) -> WeightedSum:
    """Activations that an operation reads and writes."""
    in_place = compiled and isinstance(item.op, Elementwise)
    held = [
        h
        for h in (*item.inputs, *(() if in_place else (item.output,)))
        if h.tensor.kind in (Kind.ACTIVATION, Kind.INDEX)
    ]
    return weighted_sum((held_key(h), element_bytes(h.tensor, formats)) for h in held)


def residual_bytes(problem: ServingProblem, step: Step, structure: ServingLayoutChoices) -> WeightedSum:
    """Bytes of the residual stream as a device holds it between layers."""
    x = Tensor("x", problem.model.residual_axes)
    strategy = structure.strategy(step)
    return held_bytes([Held(x, strategy.home(x.axes))], problem.load.formats.formats)
