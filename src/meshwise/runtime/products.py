"""Products over the named axes of a program, and weight gradients that each device reduces to their accumulators.

Expressed as constraints, a partial sum over several mesh axes becomes an AllReduce and a slice with some partitioners;
here it is the plan's ReduceScatter. Not here: where a layout puts what (`shardings`), collective matmuls
(`placed_products`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshwise.core.tensors import Einsum, Kind
from meshwise.runtime.shardings import Placement, complete
from meshwise.runtime.watched import Watched, linear, product
from meshwise.sharding import Sharding


def subscripts(op: Einsum) -> tuple[str, str, str]:
    """Einsum letters of both inputs and of the output."""
    letters = {axis: chr(ord("a") + i) for i, axis in enumerate(op.axes)}
    first, second, out = ("".join(letters[a] for a in t.axes) for t in (*op.inputs, op.output))
    return first, second, out


def named_einsum(op: Einsum, left: jax.Array, right: jax.Array | Watched) -> jax.Array:
    """Multiply two arrays over the named axes of an operation."""
    first, second, out = letters = subscripts(op)
    if isinstance(right, Watched):
        return product(letters, left, right)
    return jnp.einsum(f"{first},{second}->{out}", left, right)


def align(x: jax.Array, axes: tuple[str, ...], onto: tuple[str, ...]) -> jax.Array:
    """Add dimensions of size one for the axes of `onto` that `x` lacks.

    >>> align(jnp.ones((4,)), ("N",), ("B", "N", "H")).shape
    (1, 4, 1)
    """
    assert [a for a in onto if a in axes] == list(axes), f"{axes} in {onto}"
    return x.reshape(tuple(x.shape[axes.index(a)] if a in axes else 1 for a in onto))


#: Mesh axes along which devices hold weights of their own.
_STAGES = frozenset({"stage"})


def multiply(
    op: Einsum, x: jax.Array, w: jax.Array | Watched, placement: Placement, splits: Mapping[str, tuple[str, ...]]
) -> jax.Array:
    """Multiply where a layout places it.

    Args:
        op: of the program.
        x, w: its inputs, where `splits` has them.
        placement: of the layout.
        splits: of the operation's iteration space.

    Returns: the product, whose partial sums are still to be said complete.
    """
    if placement.mesh.size == 1 or op.inputs[1].kind is not Kind.WEIGHT:
        return named_einsum(op, x, w)
    left, right, out = letters = subscripts(op)
    held, back = Sharding.of(op.inputs[1].axes, splits), placement.reduced(op.inputs[1].axes)
    partial = [m for s in splits.values() for m in s if m not in held.splitting_axes]

    def reduced(x: jax.Array, gradient: jax.Array, dtype: Any) -> jax.Array:
        def local(x: jax.Array, gradient: jax.Array) -> jax.Array:
            part = jnp.einsum(f"{left},{out}->{right}", x, gradient, preferred_element_type=dtype)
            return complete(part, held, back, partial, placement)

        reads = tuple(placement.spec(Sharding.of(t.axes, splits)) for t in (op.inputs[0], op.output))
        return placement.local(local, reads, placement.spec(back))(x, gradient)

    return product(letters, x, w, reduced)


def spread(w: Any, held: Sharding, back: Sharding, placement: Placement) -> Any:
    """Copy the part of a weight that each device holds; the gradients of all copies are reduced to one.

    For code in a `shard_map`, which would add up gradients whole.

    Args:
        w: a weight (or a watched one), held as `held`.
        held, back: sharding of the weight, and of its gradient.
        placement: of the layout.

    Returns: the copies, numbered in front, as `spread_spec` says.
    """
    if isinstance(w, Watched):
        return w.map(lambda part: spread(part, held, back, placement))
    one, many, over = placement.spec(held), spread_spec(held, placement), others(held, placement)

    def reduced(gradient: jax.Array) -> jax.Array:
        return complete(gradient[0], held, back, over, placement)

    copied = placement.local(lambda w: w[None], one, many)
    return linear(copied, placement.local(reduced, many, placement.spec(back)))(w)


def spread_spec(held: Sharding, placement: Placement) -> PartitionSpec:
    """How the copies that `spread` makes are split."""
    return PartitionSpec(others(held, placement) or None, *placement.spec(held))


def others(held: Sharding, placement: Placement) -> tuple[str, ...]:
    """Mesh axes along which devices hold the same of what is split so; of stages each has its own."""
    return tuple(a for a in placement.axes if a not in held.splitting_axes | _STAGES)
