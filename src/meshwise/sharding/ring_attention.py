"""Ring attention: keys and values go round where they are gathered otherwise, and their gradients where they scatter.

A block is placed alike with either; what goes round has a purpose of its own. Not here: seconds (`costs.overlap`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from meshwise.core.backward import backward
from meshwise.core.tensors import Attention, AttentionGradient, Block
from meshwise.sharding.collective_products import moves_beside_products
from meshwise.sharding.placed import LocalOp, PlacedBlock, Purpose, Transfer
from meshwise.sharding.reshard import CollectiveKind
from meshwise.sharding.strategy import Strategy

#: Of a pass.
Items = tuple[LocalOp | Transfer, ...]

#: What a ring of attention replaces: keys and values gathered before, their gradients scattered after.
_CIRCLED = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)


def with_ring(placed: PlacedBlock, strategy: Strategy) -> PlacedBlock:
    """The same block with a ring of attention instead of gathers over `context`; what moves beside products does."""
    around = _going_round(placed.block)
    if strategy.pieces:
        beside = moves_beside_products(placed.block, strategy)
        around = {
            name: frozenset(t for t in circling if t.removeprefix("d_") not in beside)
            for name, circling in around.items()
        }
    return replace(placed, forward=_circled(placed.forward, around), backward=_circled(placed.backward, around))


@lru_cache(maxsize=256)  # every policy asks again
def _going_round(block: Block) -> Mapping[str, frozenset[str]]:
    """Name of an operation that attends -> names of the tensors that a ring sends round.

    Keys and values that it reads, gradients of these that it writes.
    """
    ops = (op for op in (*block.ops, *backward(block)) if isinstance(op, Attention | AttentionGradient))
    return {op.name: _circling(op) for op in ops}


def _circling(op: Attention | AttentionGradient) -> frozenset[str]:
    if isinstance(op, Attention):
        return frozenset(t.name for t in op.inputs if any(a.partition(".")[0] == op.key_axis for a in t.axes))
    return frozenset((op.output.name, *(t.name for t in op.inputs if op.source.key_axis in t.axes)))


def _circled(items: Items, around: Mapping[str, frozenset[str]]) -> Items:
    """Items of a pass, with what goes round from the first operation on that needs it."""
    found, circling = list(items), frozenset[str]()
    for at, item in enumerate(items):
        name = item.waits if item.moves else item.op.name
        if name in around:
            circling |= around[name]
        if item.moves and item.tensor.name in circling and item.collective.kind in _CIRCLED:
            found[at] = replace(item, purpose=Purpose.RING)
    return tuple(found)
