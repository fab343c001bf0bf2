"""AllGather and matmul in one: each shard is multiplied when it comes round, while the next one is on its way.

With X rows split n ways, n - 1 shards come to every device. A round is hidden where multiplying a shard takes longer
than sending it: 2 (B/n) D (F/n) / FLOPs/s > 2 (B/n) D / W, that is F/n > FLOPs/s / W, whatever B and D, for one link
one way of bandwidth W (both ways, half of that). Sources: book, "Sharded Matrices" (an AllGather as n - 1 hops round a
ring) and "Training", tensor parallelism; Wang et al. 2023, "Overlap communication with dependent computation via
decomposition". Not here: the other form (`matmul_scatter`), which its gradient is made of as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meshwise.runtime.circle import Circle, Piece
from meshwise.runtime.equations import Equation

Arrays = tuple[jax.Array, ...]
Equations = tuple[Equation, ...]


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def gather_matmul(x: jax.Array, others: Arrays, equations: Equations, letter: str, circle: Circle) -> Arrays:
    """Multiply an array that is split over a mesh axis, gathered, with others. For use within `jax.shard_map`.

    Its gradient takes the same way back: those of `others` gather `x` once more, that of `x` is a `matmul_scatter`.

    Args:
        x: this device's shard of an array.
        others: what it is multiplied with, all in the one round of its shards.
        equations: of each product; `x` is its left operand.
        letter: of the dimension along which `x` is split, in whose order devices are. Where a right operand has it,
            too, that is whole and the letter is summed over; else it is in the result.
        circle: of the devices.

    Returns: the product of each, `letter` whole.

    >>> from jax.sharding import PartitionSpec as P
    >>> from meshwise.runtime.backend import make_mesh
    >>> mesh, circle = make_mesh({"x": 1}, jax.devices()[:1]), Circle("x", 1, both_ways=True)
    >>> product = lambda x, w: gather_matmul(x, (w,), (Equation.read("bd,df->bf"),), "b", circle)
    >>> jax.shard_map(product, mesh=mesh, in_specs=(P("x"), P(None, "x")), out_specs=P(None, "x"))(
    ...     jnp.ones((4, 2)), jnp.ones((2, 3))
    ... )[0].shape
    (4, 3)
    """
    return gathered_products(x, others, equations, letter, circle)[0]


def gathered_products(
    x: jax.Array,
    others: Sequence[jax.Array],
    equations: Sequence[Equation],
    letter: str,
    circle: Circle,
    *,
    dtypes: Sequence[Any] | None = None,
) -> tuple[Arrays, jax.Array]:
    """Multiply as `gather_matmul` does, without a gradient; what is not read costs nothing once it is compiled.

    Args:
        x, others, equations, letter, circle: as there.
        dtypes: of the results; where left out, as an einsum gives them.

    Returns: the products, and `x` gathered.
    """
    dimension = equations[0].left.index(letter)
    rows = x.shape[dimension]
    kinds = dtypes or [jnp.result_type(x, other) for other in others]
    made: list[jax.Array | None] = [None] * len(others)
    gathered = _room(x.shape, dimension, circle, x.dtype)
    with jax.named_scope("collective_matmul.gather"):
        for piece in circle.arriving(x, dimension):
            at = piece.origin * rows + piece.start
            gathered = jax.lax.dynamic_update_slice_in_dim(gathered, piece.value, at, dimension)
            for i, (equation, other, kind) in enumerate(zip(equations, others, kinds, strict=True)):
                made[i] = _with_piece(made[i], piece, other, equation, letter, at=at, circle=circle, dtype=kind)
    return tuple(m.astype(k) for m, k in zip(made, kinds, strict=True) if m is not None), gathered


def _with_piece(
    made: jax.Array | None,
    piece: Piece,
    other: jax.Array,
    equation: Equation,
    letter: str,
    *,
    at: jax.Array,
    circle: Circle,
    dtype: Any,
) -> jax.Array:
    """Put the product with one piece in its place, or add it up where the letter is summed over."""
    rows = piece.value.shape[equation.left.index(letter)]
    if letter in equation.right:
        other = jax.lax.dynamic_slice_in_dim(other, at, rows, equation.right.index(letter))
    if letter not in equation.out:
        product = equation.multiply(piece.value, other, jnp.promote_types(dtype, jnp.float32))
        return product if made is None else made + product
    product = equation.multiply(piece.value, other, dtype)
    place = equation.out.index(letter)
    if made is None:  # the first piece is a whole shard
        made = _room(product.shape, place, circle, dtype)
    return jax.lax.dynamic_update_slice_in_dim(made, product, at, place)


def _room(shape: Sequence[int], dimension: int, circle: Circle, dtype: Any) -> jax.Array:
    """Zeros for the shards of all devices."""
    return jnp.zeros([n * circle.size if d == dimension else n for d, n in enumerate(shape)], dtype)


def _forward(
    x: jax.Array, others: Arrays, equations: Equations, letter: str, circle: Circle
) -> tuple[Arrays, tuple[jax.Array, Arrays]]:
    return gather_matmul(x, others, equations, letter, circle), (x, others)


def _backward(
    equations: Equations, letter: str, circle: Circle, kept: tuple[jax.Array, Arrays], gradients: Arrays
) -> tuple[jax.Array, Arrays]:
    from meshwise.runtime.matmul_scatter import scattered_products  # noqa: PLC0415 -- each is the other's transpose

    x, others = kept
    d_others, _ = gathered_products(x, gradients, [e.transposed_right for e in equations], letter, circle)
    d_x = scattered_products(gradients, others, [e.transposed_left for e in equations], letter, circle, dtype=x.dtype)
    return d_x, tuple(d.astype(o.dtype) for d, o in zip(d_others, others, strict=True))


gather_matmul.defvjp(_forward, _backward)
