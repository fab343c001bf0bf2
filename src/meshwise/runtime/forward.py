"""Executes a model's `Program`, operation by operation, where the layout's rule tables place each.

The walk is that of `sharding.place`: an operation's inputs are brought to its iteration space, partial sums are
completed where the tensor lives. Not here: loops over layers (`layers`), gradients (`train`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwise.runtime.attention import Masks
from meshwise.runtime.attention_placed import attend_placed
from meshwise.runtime.named import named_einsum
from meshwise.runtime.ops import Surroundings, elementwise
from meshwise.runtime.shardings import Placement
from meshwise.sharding import Sharding
from meshwise.sharding.place import iteration_space
from meshwise.tensors import Attention, Block, Einsum, Elementwise, Kind, Lookup, Op, Tensor

__all__ = ["run_block"]


@dataclass
class _Walk:
    """What a block has made so far, and where each tensor is held."""

    placement: Placement
    around: Surroundings
    arrays: dict[str, jax.Array]
    held: dict[str, Sharding]
    copies: dict[tuple[str, Sharding], jax.Array] = field(default_factory=dict)

    def bring(self, t: Tensor, splits: Mapping[str, tuple[str, ...]]) -> jax.Array:
        """Give tensor `t` where an operation with these splits reads it; a copy that was made before is read again."""
        wanted, held = Sharding.of(t.axes, splits), self.held[t.name]
        if t.kind is Kind.INDEX or wanted == held:
            return self.arrays[t.name]
        if (t.name, wanted) not in self.copies:
            back = self.placement.strategy.stored(t.axes, "gradients") if t.kind is Kind.WEIGHT else held
            self.copies[t.name, wanted] = self.placement.move(self.arrays[t.name], back, wanted)
        return self.copies[t.name, wanted]

    def run(self, op: Op) -> None:
        """Execute one operation."""
        splits = iteration_space(self.placement.strategy, op)
        inputs = [self.bring(t, splits) for t in op.inputs]
        with jax.named_scope(op.name):
            out = self._compute(op, inputs, splits)
        local = Sharding.of(op.output.axes, splits)
        split = {m for s in local.splits for m in s}
        pending = {m for a in op.axes for m in splits.get(a, ())} - split
        home = self.placement.strategy.home(op.output.axes) if pending else local
        out = self.placement.move(out, local, home)
        self.arrays[op.output.name] = checkpoint_name(out, op.output.name)
        self.held[op.output.name] = home

    def _compute(self, op: Op, inputs: list[jax.Array], splits: Mapping[str, tuple[str, ...]]) -> jax.Array:
        if isinstance(op, Einsum):
            return named_einsum(op, *inputs)
        if isinstance(op, Elementwise):
            return elementwise(op, inputs, self.around)
        if isinstance(op, Lookup):
            index, table = inputs
            return jnp.take(table, index, axis=0)
        assert isinstance(op, Attention), f"refused before: {op.name}"
        numerics = self.around.numerics
        scale = numerics.attention_scale[self.around.block]
        masks = Masks(op.causal, op.window, op.chunk, scale, numerics.attention_cap)
        out, _ = attend_placed(op, inputs, masks, self.placement, splits)
        return out


def run_block(
    block: Block,
    arrays: Mapping[str, jax.Array],
    weights: Mapping[str, jax.Array],
    placement: Placement,
    around: Surroundings,
) -> dict[str, jax.Array]:
    """Execute one copy of a block.

    Args:
        block: of the program.
        arrays: what enters, by name, where activations live.
        weights: of this copy, by name, as stored.
        placement: of the layout.
        around: what operations read besides.

    Returns: the block's outputs by name, where they live.
    """
    read = {t.name: t for op in block.ops for t in op.inputs if t.name in weights or t.name in arrays}
    strategy = placement.strategy
    walk = _Walk(placement, around, dict(arrays), {})
    for name, t in read.items():
        if t.kind is Kind.WEIGHT:
            walk.arrays[name] = weights[name].astype(around.activations)
            walk.held[name] = strategy.stored(t.axes, "weights")
        else:
            walk.held[name] = strategy.home(t.axes)
    for op in block.ops:
        walk.run(op)
    return {name: walk.arrays[name] for name in block.outputs}
