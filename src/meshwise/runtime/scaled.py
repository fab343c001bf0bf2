"""Numbers in 8 bits beside the scale that stands for 1 of them, and what a precision's recipe makes of a program.

Scales have 8 significant bits, so that they are exact in bf16, too: a compiler that takes products of widened operands
for products of narrow ones then multiplies by the same numbers as one that widens them. Not here: products and devices
(`narrow_products`), formats of plans (`jobs.precision`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from meshwise.core.dtypes import DType
from meshwise.core.tensors import Block, Einsum, Program
from meshwise.jobs.precision import Precision, narrowed

#: JAX's format -> the largest number that an operand becomes in it.
LARGEST: Mapping[Any, float] = {
    np.dtype(format_): float(largest)
    for format_, largest in ((jnp.float8_e4m3fn, 448), (jnp.float8_e5m2, 57344), (jnp.int8, 127))
}

#: The least scale: of fp32's numbers below it compilers make zeros.
_LEAST = float(np.finfo(np.float32).tiny)

#: Format of a plan -> those of operands, and of the gradients of what is made of them: these have more range.
_FORMATS: Mapping[DType, tuple[Any, Any]] = {
    DType.FP8: (jnp.float8_e4m3fn, jnp.float8_e5m2),
    DType.INT8: (jnp.int8, jnp.int8),
}


@partial(jax.tree_util.register_dataclass, data_fields=("value", "scale"), meta_fields=())
@dataclass(frozen=True)
class Scaled:
    """An array in a narrow format.

    Args:
        value: of its shape.
        scale: fp32, what stands for 1 of `value`; of a weight one for each layer of its stack.
    """

    value: Any
    scale: Any


@dataclass(frozen=True)
class Narrowing:
    """What a recipe makes of a program.

    Args:
        program: with conversions, where operands become narrow.
        operands, gradients: formats of operands, and of gradients of what is made of them.
        weights: format of a plan in which weights of `products` are stored; None: as all others.
    """

    program: Program
    operands: Any
    gradients: Any
    weights: DType | None

    @classmethod
    def of(cls, program: Program, precision: Precision) -> Self | None:
        """By the recipe of a precision, if it has one."""
        recipe = precision.recipe
        if recipe is None:
            return None
        stored = None if recipe.weights is None else recipe.weights.dtype
        return cls(narrowed(program, precision), *_FORMATS[recipe.activations.dtype], stored)

    def block(self, name: str) -> Block:
        """Find a block."""
        return next(b for b in self.program if b.name == name)

    def products(self, block: str) -> Mapping[str, str]:
        """Names of the operations of a block that multiply narrow operands, and what their first operand is called."""
        ops = (op for op in self.block(block).ops if isinstance(op, Einsum) and op.format is not None)
        return {op.name: op.inputs[0].name for op in ops}


def scale_for(largest: jax.Array, dtype: Any) -> jax.Array:
    """The least scale of 8 significant bits with which `largest` is in the range of a format; 1 for zeros.

    What compilers make of a division may be a little too large: 16 units of the last place are no reason for the next.

    >>> float(scale_for(jnp.float32(448), jnp.float8_e4m3fn)), float(scale_for(jnp.float32(449), jnp.float8_e4m3fn))
    (1.0, 1.0078125)
    """
    exact = largest.astype(jnp.float32) / LARGEST[np.dtype(dtype)]
    bits = jax.lax.bitcast_convert_type(exact, jnp.uint32)
    up = jax.lax.bitcast_convert_type((bits + jnp.uint32(0xFFEF)) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(largest == 0, 1.0, jnp.maximum(up, _LEAST))


def narrowed_by(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """The nearest numbers of a format to those of an array, divided by its scale."""
    values = x.astype(jnp.float32) / scale
    return (jnp.rint(values) if jnp.issubdtype(dtype, jnp.integer) else values).astype(dtype)


def largest_of(x: jax.Array, dims: tuple[int, ...] | None = None) -> jax.Array:
    """The largest magnitude over some dimensions, which stay with size one, or over all."""
    return jnp.max(jnp.abs(x), axis=dims, keepdims=dims is not None).astype(jnp.float32)


def scaled_weight(wide: jax.Array, layers: int, dtype: Any) -> Scaled:
    """A weight in a narrow format; `layers` dimensions in front number layers, each with a scale of its own."""
    own = tuple(range(layers, wide.ndim))
    scale = scale_for(largest_of(wide, own), dtype)
    return Scaled(narrowed_by(wide, scale, dtype), jnp.squeeze(scale, own))
