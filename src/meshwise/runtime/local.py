"""Collectives that a device's own code asks for, inside `shard_map`: partial sums completed where a value lives.

Not here: what is asked of the partitioner by constraints (`shardings`).
"""

from __future__ import annotations

from collections.abc import Collection

import jax

from meshwise.runtime.shardings import Placement
from meshwise.sharding import Sharding


def complete(
    x: jax.Array, source: Sharding, home: Sharding, partial: Collection[str], placement: Placement
) -> jax.Array:
    """Add up partial sums and leave each device its part.

    Args:
        x: one device's block, split as `source`.
        source, home: of the whole value; `home` splits each dimension as `source` does, or further.
        partial: mesh axes over which `x` is a partial sum.
        placement: of the layout.

    Returns: the block of `home`.
    """
    waiting = list(placement.split(tuple(partial)))
    for dimension, (before, after) in enumerate(zip(source.splits, home.splits, strict=True)):
        had, wanted = placement.split(before), placement.split(after)
        assert wanted[: len(had)] == had, f"{source} to {home}"
        for a in wanted[len(had) :]:
            if a in waiting:  # one after the other, as planned: the second has less to send
                waiting.remove(a)
                x = jax.lax.psum_scatter(x, a, scatter_dimension=dimension, tiled=True)
            else:
                each = x.shape[dimension] // placement.mesh.shape[a]
                x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(a) * each, each, axis=dimension)
    whole: jax.Array = jax.lax.psum(x, tuple(waiting)) if waiting else x
    return whole


def part_index(axes: tuple[str, ...], placement: Placement) -> jax.Array | int:
    """Index of this device's part along mesh axes, major to minor."""
    index: jax.Array | int = 0
    for a in placement.split(axes):
        index = index * placement.mesh.shape[a] + jax.lax.axis_index(a)
    return index
