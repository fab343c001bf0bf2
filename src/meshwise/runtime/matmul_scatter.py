"""Matmul and ReduceScatter in one: sums go round, and each device adds the rows of its product that are asked for next.

Where a product's contracted dimension is split n ways, every device holds a partial sum of all rows. The sum of a shard
of rows starts at the device that is farthest from its home and grows by one addend a step; n - 1 shards are sent, as an
AllGather's are, so that it takes as long: V/W of the array's bytes V at the bandwidth W round the ring. Sources: book,
"Sharded Matrices" (a ReduceScatter as the AllGather's transpose) and "Training", tensor parallelism; Wang et al. 2023.
Not here: the other form (`gather_matmul`), and sums that everybody needs (`matmul_reduce`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meshwise.runtime.circle import Circle
from meshwise.runtime.equations import Equation
from meshwise.runtime.gather_matmul import gathered_products

Arrays = tuple[jax.Array, ...]
Equations = tuple[Equation, ...]


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def matmul_scatter(lefts: Arrays, rights: Arrays, equations: Equations, letter: str, circle: Circle) -> jax.Array:
    """Add up products of all devices of a mesh axis, and leave each its shard. For use within `jax.shard_map`.

    Its gradient is a `gather_matmul`: one round of the gradient's shards serves both operands of every product.

    Args:
        lefts, rights: operands of each product, whole along `letter`.
        equations: of each product; all have the same result.
        letter: of the dimension of the result that is scattered, in the order of devices; one operand has it.
        circle: of the devices; its size divides that dimension.

    Returns: this device's shard of the sum over products and devices.
    """
    dtype = jnp.result_type(*lefts, *rights)
    return scattered_products(lefts, rights, equations, letter, circle, dtype=dtype)


def scattered_products(
    lefts: Sequence[jax.Array],
    rights: Sequence[jax.Array],
    equations: Sequence[Equation],
    letter: str,
    circle: Circle,
    *,
    dtype: Any,
) -> jax.Array:
    """Multiply as `matmul_scatter` does, without a gradient; sums travel in `dtype`, and are added up in fp32 at least.

    Args:
        lefts, rights, equations, letter, circle: as there.
        dtype: of the result.
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
    cut: jax.Array = jax.lax.dynamic_slice_in_dim(x, at, count, letters.index(letter))
    return cut


def _length(left: jax.Array, right: jax.Array, equation: Equation, letter: str) -> int:
    if letter in equation.left:
        return left.shape[equation.left.index(letter)]
    return right.shape[equation.right.index(letter)]


def _forward(
    lefts: Arrays, rights: Arrays, equations: Equations, letter: str, circle: Circle
) -> tuple[jax.Array, tuple[Arrays, Arrays]]:
    return matmul_scatter(lefts, rights, equations, letter, circle), (lefts, rights)


def _backward(
    equations: Equations, letter: str, circle: Circle, kept: tuple[Arrays, Arrays], gradient: jax.Array
) -> tuple[Arrays, Arrays]:
    lefts, rights = kept
    others, transposed = (*rights, *lefts), [e.transposed_left for e in equations]
    transposed += [e.transposed_right.swapped for e in equations]
    made, _ = gathered_products(gradient, others, transposed, letter, circle)
    typed = [m.astype(o.dtype) for m, o in zip(made, (*lefts, *rights), strict=True)]
    return tuple(typed[: len(lefts)]), tuple(typed[len(lefts) :])


matmul_scatter.defvjp(_forward, _backward)
