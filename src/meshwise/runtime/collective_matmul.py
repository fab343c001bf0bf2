"""Collective matmuls: products in pieces that go round the devices of a mesh axis, while others are multiplied.

AllGather and matmul in one: each shard is multiplied when it arrives, while the next one is on its way. With X rows
split n ways, n - 1 shards come to every device. A round is hidden where multiplying a shard takes longer than sending
it: 2 (B/n) D (F/n) / FLOPs/s > 2 (B/n) D / W, that is F/n > FLOPs/s / W, whatever B and D, for one link one way of
bandwidth W (both ways, half of that).

Matmul and ReduceScatter in one: where the contracted dimension is split n ways, every device holds a partial sum of all
rows. The sum of a shard starts at the device farthest from its home and grows by one addend a step; n - 1 shards are
sent, as in an AllGather: V/W for an array of V bytes at bandwidth W round the ring.

Each is the transpose of the other. Sources: book, "Sharded Matrices" (an AllGather as n - 1 hops round a ring) and
"Training", tensor parallelism; Wang et al. 2023, "Overlap communication with dependent computation via decomposition".
Not here: which products of a block these are, and their gradients (`products`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshwise.runtime.circle import Circle, Piece


@dataclass(frozen=True, slots=True)
class Equation:
    """An einsum of two arrays.

    Args:
        left, right, out: a letter for each dimension.
        name: of the scope that it is multiplied in, if any.

    >>> Equation.read("btd,dnh->btnh").transposed_left
    Equation(left='btnh', right='dnh', out='btd', name='')
    """

    left: str
    right: str
    out: str
    name: str = ""

    @classmethod
    def read(cls, text: str) -> Equation:
        """Read "left,right->out"."""
        operands, out = text.split("->")
        left, right = operands.split(",")
        return cls(left, right, out)

    @property
    def transposed_left(self) -> Equation:
        """The einsum from the gradient of the result, and the right operand, to the gradient of the left one."""
        return Equation(self.out, self.right, self.left, self.name)

    @property
    def transposed_right(self) -> Equation:
        """The einsum from the left operand, and the gradient of the result, to the gradient of the right one."""
        return Equation(self.left, self.out, self.right, self.name)

    @property
    def swapped(self) -> Equation:
        """The same with its operands the other way round."""
        return Equation(self.right, self.left, self.out, self.name)

    def multiply(self, left: jax.Array, right: jax.Array, dtype: Any = None) -> jax.Array:
        """Multiply, in the operands' format unless `dtype` says another."""
        text = f"{self.left},{self.right}->{self.out}"
        with jax.named_scope(self.name) if self.name else nullcontext():
            return jnp.einsum(text, left, right, preferred_element_type=dtype)


def gathered_products(
    x: jax.Array,
    others: Sequence[jax.Array],
    equations: Sequence[Equation],
    letter: str,
    circle: Circle,
    *,
    dtypes: Sequence[Any] | None = None,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Multiply an array that is split over a mesh axis, gathered, with others. For use within `jax.shard_map`.

    Args:
        x: this device's shard of an array.
        others: what it is multiplied with, all in the one round of its shards.
        equations: of each product; `x` is its left operand.
        letter: of the dimension along which `x` is split, in whose order devices are. Where a right operand has it,
            too, that is whole and the letter is summed over; else it is in the result.
        circle: of the devices.
        dtypes: of the results; where left out, as an einsum gives them.

    Returns: the products, `letter` whole, and `x` gathered; what is not read costs nothing once it is compiled.

    >>> from jax.sharding import PartitionSpec as P
    >>> from meshwise.runtime.devices import make_mesh
    >>> mesh, circle = make_mesh({"x": 1}, jax.devices()[:1]), Circle("x", 1, both_ways=True)
    >>> product = lambda x, w: gathered_products(x, (w,), (Equation.read("bd,df->bf"),), "b", circle)[0]
    >>> jax.shard_map(product, mesh=mesh, in_specs=(P("x"), P(None, "x")), out_specs=P(None, "x"))(
    ...     jnp.ones((4, 2)), jnp.ones((2, 3))
    ... )[0].shape
    (4, 3)
    """
    dimension = equations[0].left.index(letter)
    rows = x.shape[dimension]
    kinds = dtypes or [jnp.result_type(x, other) for other in others]
    made: list[jax.Array | None] = [None] * len(others)
    gathered = _buffer(x.shape, dimension, circle, x.dtype)
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
        made = _buffer(product.shape, place, circle, dtype)
    return jax.lax.dynamic_update_slice_in_dim(made, product, at, place)


def _buffer(shape: Sequence[int], dimension: int, circle: Circle, dtype: Any) -> jax.Array:
    """Zeros for the shards of all devices."""
    return jnp.zeros([n * circle.size if d == dimension else n for d, n in enumerate(shape)], dtype)


def scattered_products(
    lefts: Sequence[jax.Array],
    rights: Sequence[jax.Array],
    equations: Sequence[Equation],
    letter: str,
    circle: Circle,
    *,
    dtype: Any,
) -> jax.Array:
    """Add up products of all devices of a mesh axis, and leave each its shard. For use within `jax.shard_map`.

    Args:
        lefts, rights: operands of each product, whole along `letter`.
        equations: of each product; all have the same result.
        letter: of the dimension of the result that is scattered, in the order of devices; one operand has it.
        circle: of the devices; its size divides that dimension.
        dtype: of the result, in which sums travel; they are added up in fp32 at least.

    Returns: this device's shard of the sum over products and devices.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    rows = _length(lefts[0], rights[0], equations[0], letter) // circle.size

    def part(device: jax.Array, start: int, count: int) -> jax.Array:
        total: jax.Array | None = None
        for left, right, equation in zip(lefts, rights, equations, strict=True):
            at = device * rows + start
            own = (_rows(left, equation.left, letter, at, count), _rows(right, equation.right, letter, at, count))
            product = equation.multiply(*own, wide)
            total = product if total is None else total + product
        assert total is not None, "there is a product"
        return total

    with jax.named_scope("collective_matmul.scatter"):
        return circle.summed(part, rows, equations[0].out.index(letter), dtype)


def _rows(x: jax.Array, letters: str, letter: str, at: jax.Array, count: int) -> jax.Array:
    """Cut rows out of an operand that has the letter."""
    if letter not in letters:
        return x
    return jax.lax.dynamic_slice_in_dim(x, at, count, letters.index(letter))


def _length(left: jax.Array, right: jax.Array, equation: Equation, letter: str) -> int:
    if letter in equation.left:
        return left.shape[equation.left.index(letter)]
    return right.shape[equation.right.index(letter)]
