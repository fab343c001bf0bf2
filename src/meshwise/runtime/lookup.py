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
from meshwise.runtime.watched import Frozen, Watched, with_gradient
from meshwise.sharding import Sharding


def look_up(
    op: Lookup,
    index: jax.Array,
    table: jax.Array | Watched | Frozen,
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
    shape = (table.value if isinstance(table, Watched | Frozen) else table).shape
    if placement.mesh.size == 1:

        def add(index: jax.Array, gradient: jax.Array, dtype: Any) -> tuple[None, jax.Array]:
            return None, jnp.zeros(shape, dtype).at[index].add(gradient.astype(dtype))

        return with_gradient(lambda index, table: (jnp.take(table, index, axis=0), index), add, index, table)
    found, held, made = (Sharding.of(t.axes, splits) for t in (*op.inputs, op.output))
    home, back = placement.strategy.home(op.output.axes), placement.reduced(op.inputs[1].axes)
    split, over = placement.split(held.splits[0]), others(held, placement)
    # Devices that hold the same rows of the output have the same gradient of them, of which each takes its share.
    alike = placement.ways(others(home, placement))
    index_spec, table_spec, home_spec = map(placement.spec, (found, held, home))

    def rows(index: jax.Array, height: int) -> tuple[jax.Array, jax.Array]:
        """Which of one device's rows are picked, and whether it holds them."""
        own = index - part_index(split, placement) * height
        here = (own >= 0) & (own < height)
        return jnp.where(here, own, 0), here[..., None]

    def added_up(picked: jax.Array, here: jax.Array) -> jax.Array:
        return complete(jnp.where(here, picked, 0), made, home, split, placement)

    def pick(index: jax.Array, table: jax.Array) -> jax.Array:
        """Pick rows from one device's part of the table, zeros for those of others, and add up."""
        own, here = rows(index, table.shape[0])
        return added_up(jnp.take(table, own, axis=0), here)

    def forward(index: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
        return placement.local(pick, (index_spec, table_spec), home_spec)(index, table), index

    def backward(index: jax.Array, gradient: jax.Array, dtype: Any) -> tuple[None, Any]:
        """Differentiate on each device: between two `shard_map`s a stage of a pipeline could hand nothing over."""
        own = tuple(n // placement.ways(split) for n, split in zip(shape, held.splits, strict=True))

        def local(index: jax.Array, gradient: jax.Array) -> jax.Array:
            place, here = rows(index, own[0])
            like = jax.ShapeDtypeStruct((*index.shape, own[1]), gradient.dtype)
            (d_rows,) = jax.linear_transpose(lambda picked: added_up(picked, here), like)(gradient / alike)
            # Else zeros for the whole table are made, and held, long before they are added to.
            zero, d_rows = jax.lax.optimization_barrier((jnp.zeros((), d_rows.dtype), d_rows))
            return placement.add_up(jnp.broadcast_to(zero, own).at[place].add(d_rows), held, back, over)

        made = placement.sum_spec(back)
        return None, placement.local(local, (index_spec, home_spec), made)(index, gradient.astype(dtype))

    return with_gradient(forward, backward, index, table)
