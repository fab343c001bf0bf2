"""Rows of a table by index, where the rows are split: each device gives those it holds, and zeros for the others.

The table's gradient is the transpose of this. Not here: sums over devices (`shardings`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshwise.core.tensors import Lookup
from meshwise.runtime.products import others, spread, spread_spec
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
    if isinstance(table, Watched):
        return _look_up_watched(op, index, table, placement, splits)
    if placement.mesh.size == 1:
        return jnp.take(table, index, axis=0)
    pick, home = _picking(op, placement, splits), placement.strategy.home(op.output.axes)

    def local(index: jax.Array, copies: jax.Array) -> jax.Array:
        return pick(index, copies[0])

    read, axes = Sharding.of(op.inputs[0].axes, splits), op.inputs[1].axes
    held = Sharding.of(axes, splits)
    copies = spread(table, held, placement.reduced(axes), placement)
    specs = (placement.spec(read), spread_spec(held, placement))
    return placement.local(local, specs, placement.spec(home))(index, copies)


def _picking(
    op: Lookup, placement: Placement, splits: Mapping[str, tuple[str, ...]]
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Give what a device does with its part of index and table."""
    rows = placement.split(splits.get(op.inputs[1].axes[0], ()))
    made, home = Sharding.of(op.output.axes, splits), placement.strategy.home(op.output.axes)

    def pick(index: jax.Array, table: jax.Array) -> jax.Array:
        own = index - part_index(rows, placement) * table.shape[0]
        held = (own >= 0) & (own < table.shape[0])
        picked = jnp.take(table, jnp.where(held, own, 0), axis=0)
        return complete(jnp.where(held[..., None], picked, 0), made, home, rows, placement)

    return pick


def _look_up_watched(
    op: Lookup, index: jax.Array, table: Watched, placement: Placement, splits: Mapping[str, tuple[str, ...]]
) -> jax.Array:
    """Pick rows; their gradients are added up in the format of the sink."""
    shape, dtype = table.sink.shape, table.sink.dtype

    @jax.custom_vjp
    def picked(index: jax.Array, value: jax.Array, sink: jax.Array) -> jax.Array:  # noqa: ARG001
        return look_up(op, index, value, placement, splits)

    def forward(index: jax.Array, value: jax.Array, sink: jax.Array) -> tuple[jax.Array, Any]:
        return picked(index, value, sink), index

    def backward(index: jax.Array, gradient: jax.Array) -> tuple[Any, ...]:
        found = _gradient(op, index, gradient.astype(dtype), shape=shape, placement=placement, splits=splits)
        return None, jnp.zeros(shape, table.value.dtype), found

    picked.defvjp(forward, backward)
    return picked(index, table.value, table.sink)


def _gradient(
    op: Lookup,
    index: jax.Array,
    gradient: jax.Array,
    *,
    shape: tuple[int, ...],
    placement: Placement,
    splits: Mapping[str, tuple[str, ...]],
) -> jax.Array:
    """Give the gradient of a table of this shape, where gradients are accumulated.

    Differentiated on each device: between two `shard_map`s a stage of a pipeline could hand nothing over.
    """
    if placement.mesh.size == 1:
        return jnp.zeros(shape, gradient.dtype).at[index].add(gradient)
    pick, home, axes = _picking(op, placement, splits), placement.strategy.home(op.output.axes), op.inputs[1].axes
    held, back = Sharding.of(axes, splits), placement.reduced(axes)
    own = tuple(n // placement.ways(split) for n, split in zip(shape, held.splits, strict=True))
    over = others(held, placement)
    # Devices that hold the same rows of the output have the same gradient of them, of which each takes its share.
    alike = math.prod(placement.mesh.shape[a] for a in others(home, placement))

    def local(index: jax.Array, gradient: jax.Array) -> jax.Array:
        _, transposed = jax.vjp(lambda table: pick(index, table), jnp.zeros(own, gradient.dtype))
        (part,) = transposed(gradient / alike)
        return complete(part, held, back, over, placement)

    specs = (placement.spec(Sharding.of(op.inputs[0].axes, splits)), placement.spec(home))
    return placement.local(local, specs, placement.spec(back))(index, gradient)
