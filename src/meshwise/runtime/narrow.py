"""Weights held otherwise than in training: in fewer bits than they are multiplied in, or as rows of outputs.

Narrow is each output's column in int8 or fp8, with a scale of its own. A product reads the narrow values and scales
what it made, so that nothing as large as the wide weight is ever there. Not here: which weights these are (`params`),
formats of plans (`jobs.serving_precision`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshwise.core.dtypes import DType
from meshwise.core.tensors import Einsum
from meshwise.runtime.params import Parameter
from meshwise.runtime.products import align, named_einsum
from meshwise.runtime.shardings import Placement
from meshwise.sharding import Sharding

#: Format -> JAX's, and the largest number that a weight becomes in it.
FORMATS: dict[DType, tuple[Any, float]] = {
    DType.INT8: (jnp.int8, 127.0),
    DType.FP8: (jnp.float8_e4m3fn, 448.0),
}


class Held(ABC):
    """A weight of one device that is read as it is held, by a product of its own."""

    @abstractmethod
    def multiply(self, op: Einsum, x: jax.Array) -> jax.Array:
        """The product of activations with it, in their format."""


@partial(jax.tree_util.register_dataclass, data_fields=("value",), meta_fields=("shape", "summed"))
@dataclass(frozen=True)
class Turned(Held):
    """A weight as rows of what one output sums over, which a CPU reads for one token as fast as its memory gives them.

    Columns, as products of JAX have them, it reads at 0.7 to 0.85 of that where a matrix has some MB.

    Args:
        value: [outputs, summed].
        shape: of the weight, and `summed`: those of its dimensions that products sum over.
    """

    value: Any
    shape: tuple[int, ...]
    summed: tuple[int, ...]

    @classmethod
    def of(cls, weight: np.ndarray, summed: tuple[int, ...]) -> Turned:
        """One layer's weight on the host, turned."""
        rows = np.transpose(weight, (*_others(weight.shape, summed), *summed))
        return cls(rows.reshape(-1, row_size(weight.shape, summed)), weight.shape, summed)

    @classmethod
    def abstract(cls, weight: jax.ShapeDtypeStruct, summed: tuple[int, ...]) -> Turned:
        """The array that holds a weight of one device, without values."""
        width = row_size(weight.shape, summed)
        whole = NamedSharding(weight.sharding.mesh, PartitionSpec())
        rows = jax.ShapeDtypeStruct((weight.size // width, width), weight.dtype, sharding=whole)
        return cls(rows, weight.shape, summed)

    def multiply(self, op: Einsum, x: jax.Array) -> jax.Array:
        """The product of activations with it, in their format."""
        (left, right), out = (t.axes for t in op.inputs), op.output.axes
        across = [right[place] for place in self.summed]
        rest = [a for a in left if a not in across]
        moved = jnp.transpose(x, [left.index(a) for a in (*rest, *across)])
        flat = moved.reshape(*moved.shape[: len(rest)], -1)
        others = _others(self.shape, self.summed)
        made = jnp.einsum("...s,vs->...v", flat, self.value).reshape(
            *flat.shape[:-1], *(self.shape[place] for place in others)
        )
        named = [*rest, *(right[place] for place in others)]
        return jnp.transpose(made, [named.index(a) for a in out])


def _others(shape: tuple[int, ...], summed: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(place for place in range(len(shape)) if place not in summed)


def row_size(shape: tuple[int, ...], summed: tuple[int, ...]) -> int:
    """Numbers that one output of a weight sums over."""
    return math.prod(shape[place] for place in summed)


@partial(jax.tree_util.register_dataclass, data_fields=("value", "scale"), meta_fields=())
@dataclass(frozen=True)
class Narrow(Held):
    """A weight in few bits.

    Args:
        value: of its shape.
        scale: fp32, without the dimensions that products sum over: what stands for 1 of `value`.
    """

    value: Any
    scale: Any

    def multiply(self, op: Einsum, x: jax.Array) -> jax.Array:
        """The product of activations with it, in their format."""
        kept = tuple(a for a in op.inputs[1].axes if a in op.output.axes)
        # Whole numbers up to 127, and those of fp8, are exact in bf16.
        made = named_einsum(op, x, self.value.astype(x.dtype), wide=True)
        return (made * align(self.scale, kept, op.output.axes)).astype(x.dtype)


def narrow(wide: jax.Array, parameter: Parameter, dtype: DType) -> Narrow:
    """Round a weight, column by column, to the nearest numbers of a format.

    Args:
        wide: all its layers.
        parameter: what it is.
        dtype: of `FORMATS`.
    """
    format_, most = FORMATS[dtype]
    values = wide.astype(jnp.float32)
    dims = tuple(len(parameter.stack) + place for place in parameter.summed)
    largest = jnp.max(jnp.abs(values), axis=dims, keepdims=True)
    scale = jnp.where(largest > 0, largest / most, 1.0)
    scaled = values / scale
    rounded = jnp.rint(scaled) if jnp.issubdtype(format_, jnp.integer) else scaled
    return Narrow(rounded.astype(format_), jnp.squeeze(scale, dims))


def abstract_narrow(parameter: Parameter, placement: Placement, dtype: DType) -> Narrow:
    """The arrays that hold a weight, without values."""
    held = parameter.stacked_sharding(placement, "weights")
    dims = {len(parameter.stack) + place for place in parameter.summed}
    kept = [place for place in range(len(parameter.shape)) if place not in dims]
    own = Sharding(tuple(held.splits[place] for place in kept))
    scale = jax.ShapeDtypeStruct(
        tuple(parameter.shape[place] for place in kept),
        jnp.float32,
        sharding=NamedSharding(placement.mesh, placement.spec(own)),
    )
    return Narrow(parameter.abstract(placement, "weights", FORMATS[dtype][0]), scale)
