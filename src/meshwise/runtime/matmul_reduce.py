"""Matmul and AllReduce in one: the ReduceScatter form, whose shards are then gathered.

An AllReduce of V bytes is a ReduceScatter and an AllGather, 2 V/W; the first half hides behind the matmul that makes
the sums, the second has nothing of its own to hide behind. Source: book, "Sharded Matrices", AllReduce. Not here: the
two halves (`matmul_scatter`, JAX's AllGather).
"""

from __future__ import annotations

import jax

from meshwise.runtime.circle import Circle
from meshwise.runtime.equations import Equation
from meshwise.runtime.matmul_scatter import matmul_scatter

Arrays = tuple[jax.Array, ...]


def matmul_reduce(
    lefts: Arrays, rights: Arrays, equations: tuple[Equation, ...], letter: str, circle: Circle
) -> jax.Array:
    """Add up products of all devices of a mesh axis for everybody. For use within `jax.shard_map`.

    Args: as in `matmul_scatter`; `letter` is the dimension by whose shards sums go round.

    Returns: the sum over products and devices, whole; its gradient is scattered, and gathered for the products.
    """
    shard = matmul_scatter(lefts, rights, equations, letter, circle)
    whole: jax.Array = jax.lax.all_gather(shard, circle.axis, axis=equations[0].out.index(letter), tiled=True)
    return whole
