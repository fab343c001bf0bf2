"""Rows of a table by index, where the rows are split: each device gives those it holds, and zeros for the others.

The table's gradient is the transpose of this. Not here: sums over devices (`shardings`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshwise.core.tensors import Lookup
from meshwise.runtime.products import others
from meshwise.runtime.shardings import Placement, complete, part_index
from meshwise.runtime.watched import Watched
from meshwise.sharding import Sharding


def look_up(
    op: Lookup,
    index: jax.Array,
    table: jax.Array | Watched,
    placement: Placement,
    splits: Mapping[str, tuple[str, ...]],
) -> jax.Array:
    """Pick rows.

    Args:
        op: of the program.
        index, table: its inputs, where `splits` has them.
        placement: of the layout.
        splits: of the operation's iteration space.

    Returns: the rows, where the output lives.
    """
    value, sink = (table.value, table.sink) if isinstance(table, Watched) else (table, None)
    rows, shape, narrow = _Rows(op, placement, splits), value.shape, value.dtype
    watched, dtype = sink is not None, narrow if sink is None else sink.dtype

    def picked(index: jax.Array, value: jax.Array, sink: jax.Array | None) -> jax.Array:  # noqa: ARG001
        return rows.pick(index, value)

    def backward(index: jax.Array, gradient: jax.Array) -> tuple[Any, ...]:
        found = rows.gradient(index, gradient.astype(dtype), shape)
        return (None, jnp.zeros(shape, narrow), found) if watched else (None, found, None)

    function = jax.custom_vjp(picked)
    function.defvjp(lambda index, value, sink: (picked(index, value, sink), index), backward)
    return function(index, value, sink)


class _Rows:
    """The rows of a table that a lookup reads, where a layout places them."""

    def __init__(self, op: Lookup, placement: Placement, splits: Mapping[str, tuple[str, ...]]) -> None:
        index, table = op.inputs
        self.placement = placement
        self.index, self.table, self.made = (Sharding.of(t.axes, splits) for t in (index, table, op.output))
        self.home, self.back = placement.strategy.home(op.output.axes), placement.reduced(table.axes)

    def pick(self, index: jax.Array, table: jax.Array) -> jax.Array:
        """Pick rows."""
        if self.placement.mesh.size == 1:
            return jnp.take(table, index, axis=0)
        index_spec, table_spec, home = map(self.placement.spec, (self.index, self.table, self.home))
        return self.placement.local(self._pick_local, (index_spec, table_spec), home)(index, table)

    def _pick_local(self, index: jax.Array, table: jax.Array) -> jax.Array:
        """Pick rows from one device's part of the table, zeros for those of others, and add up."""
        split = self.placement.split(self.table.splits[0])
        own = index - part_index(split, self.placement) * table.shape[0]
        held = (own >= 0) & (own < table.shape[0])
        picked = jnp.take(table, jnp.where(held, own, 0), axis=0)
        return complete(jnp.where(held[..., None], picked, 0), self.made, self.home, split, self.placement)

    def gradient(self, index: jax.Array, gradient: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The gradient of a table of this shape, where gradients are accumulated.

        Differentiated on each device: between two `shard_map`s a stage of a pipeline could hand nothing over.
        """
        placement = self.placement
        if placement.mesh.size == 1:
            return jnp.zeros(shape, gradient.dtype).at[index].add(gradient)
        own = tuple(n // placement.ways(split) for n, split in zip(shape, self.table.splits, strict=True))
        # Devices that hold the same rows of the output have the same gradient of them, of which each takes its share.
        alike = placement.ways(others(self.home, placement))

        def local(index: jax.Array, gradient: jax.Array) -> jax.Array:
            _, transposed = jax.vjp(lambda table: self._pick_local(index, table), jnp.zeros(own, gradient.dtype))
            (part,) = transposed(gradient / alike)
            return complete(part, self.table, self.back, others(self.table, placement), placement)

        index_spec, home, back = map(placement.spec, (self.index, self.home, self.back))
        return placement.local(local, (index_spec, home), back)(index, gradient)
