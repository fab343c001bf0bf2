"""Rows of a table by index, where the rows are split: each device gives those it holds, and zeros for the others.

Not here: the table's gradient, which is the transpose of this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meshwise.runtime.local import complete, part_index
from meshwise.runtime.shardings import Placement
from meshwise.runtime.watched import Watched
from meshwise.sharding import Sharding
from meshwise.tensors import Lookup

__all__ = ["look_up"]


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
        return _look_up_watched(partial(look_up, op, placement=placement, splits=splits), index, table)
    if placement.mesh.size == 1:
        return jnp.take(table, index, axis=0)
    rows = placement.split(splits.get(op.inputs[1].axes[0], ()))
    made, home = Sharding.of(op.output.axes, splits), placement.strategy.home(op.output.axes)

    def local(index: jax.Array, table: jax.Array) -> jax.Array:
        own = index - part_index(rows, placement) * table.shape[0]
        held = (own >= 0) & (own < table.shape[0])
        picked = jnp.take(table, jnp.where(held, own, 0), axis=0)
        return complete(jnp.where(held[..., None], picked, 0), made, home, rows, placement)

    specs = tuple(placement.spec(Sharding.of(t.axes, splits)) for t in op.inputs)
    found: jax.Array = placement.local(local, specs, placement.spec(home))(index, table)
    return found


def _look_up_watched(pick: Callable[..., jax.Array], index: jax.Array, table: Watched) -> jax.Array:
    """Pick rows; their gradients are added up in the format of the sink."""
    shape, dtype = table.sink.shape, table.sink.dtype

    @jax.custom_vjp
    def picked(index: jax.Array, value: jax.Array, sink: jax.Array) -> jax.Array:  # noqa: ARG001
        return pick(index, value)

    def forward(index: jax.Array, value: jax.Array, sink: jax.Array) -> tuple[jax.Array, Any]:  # noqa: ARG001
        return pick(index, value), index

    def backward(index: jax.Array, gradient: jax.Array) -> tuple[Any, ...]:
        _, back = jax.vjp(lambda wide: pick(index, wide), jnp.zeros(shape, dtype))
        return None, jnp.zeros(shape, table.value.dtype), back(gradient.astype(dtype))[0]

    picked.defvjp(forward, backward)
    return picked(index, table.value, table.sink)
