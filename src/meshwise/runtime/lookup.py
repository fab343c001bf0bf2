"""Rows of a table by index, where the rows are split: each device gives those it holds, and zeros for the others.

Not here: the table's gradient, which is the transpose of this.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from meshwise.runtime.local import complete, part_index
from meshwise.runtime.shardings import Placement
from meshwise.sharding import Sharding
from meshwise.tensors import Lookup

__all__ = ["look_up"]


def look_up(
    op: Lookup, index: jax.Array, table: jax.Array, placement: Placement, splits: Mapping[str, tuple[str, ...]]
) -> jax.Array:
    """Pick rows.

    Args:
        op: of the program.
        index, table: its inputs, where `splits` has them.
        placement: of the layout.
        splits: of the operation's iteration space.

    Returns: the rows, where the output lives.
    """
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
