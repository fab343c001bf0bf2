"""Arrays by the names of their axes: einsums and broadcasting that read a program's own axes.

Not here: what operations mean (`ops`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshwise.core.tensors import Einsum
from meshwise.runtime.watched import Watched, product


def subscripts(op: Einsum) -> tuple[str, str, str]:
    """Write both inputs and the output of an operation, a letter an axis."""
    letters = {axis: chr(ord("a") + i) for i, axis in enumerate(op.axes)}
    first, second, out = ("".join(letters[a] for a in t.axes) for t in (*op.inputs, op.output))
    return first, second, out


def named_einsum(op: Einsum, left: jax.Array, right: jax.Array | Watched) -> jax.Array:
    """Multiply two arrays over the named axes of an operation."""
    first, second, out = subscripts(op)
    equation = f"{first},{second}->{out}"
    return product(equation, left, right) if isinstance(right, Watched) else jnp.einsum(equation, left, right)


def align(x: jax.Array, axes: tuple[str, ...], onto: tuple[str, ...]) -> jax.Array:
    """Give `x` dimensions of size one for the axes of `onto` that it lacks.

    >>> align(jnp.ones((4,)), ("N",), ("B", "N", "H")).shape
    (1, 4, 1)
    """
    assert [a for a in onto if a in axes] == list(axes), f"{axes} in {onto}"
    return x.reshape(tuple(x.shape[axes.index(a)] if a in axes else 1 for a in onto))
