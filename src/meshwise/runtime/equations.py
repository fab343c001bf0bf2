"""Einsums of two arrays as text, and the pieces of them: what a slice of one letter needs, and their transposes.

Not here: einsums over the axes of a program (`named`).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


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
