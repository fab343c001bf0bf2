"""Products of a block as collective matmuls where a layout places them, with gradients that are collective matmuls too.

A `shard_map` forward and another one backward, so that what travels is what the placed program says: activations round
the tensor axis, gradients of weights to where they are accumulated. Not here: rings (`collective_matmul`),
and which products these are (`sharding.collective_products`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meshwise.core.tensors import Einsum, Tensor
from meshwise.runtime.circle import Circle
from meshwise.runtime.collective_matmul import Equation, gathered_products, scattered_products
from meshwise.runtime.shardings import Placement, complete
from meshwise.runtime.watched import Watched
from meshwise.sharding import Sharding
from meshwise.sharding.collective_products import AXIS, CollectiveProducts, Form

Arrays = tuple[jax.Array, ...]


@dataclass(frozen=True)
class PlacedProducts:
    """Products that share a collective, on a mesh.

    Args:
        products: which, and what their collective is.
        placement: of the layout.
        both_ways: whether pieces go round in both directions.
        again: whether the backward pass runs the products again before their gradients (recomputation), so that what
            came round for that need not come round once more.
    """

    products: CollectiveProducts
    placement: Placement
    both_ways: bool
    again: bool

    @property
    def circle(self) -> Circle:
        """Devices of the tensor axis."""
        return Circle(AXIS, self.placement.mesh.shape[AXIS], self.both_ways)

    @property
    def form(self) -> Form:
        """What the collective is."""
        return self.products.form

    @property
    def letter(self) -> str:
        """Of the rows by which pieces go round."""
        return self._letters[self.products.along]

    @property
    def equations(self) -> tuple[Equation, ...]:
        """Of the products."""
        return tuple(
            Equation(self._spell(op.inputs[0]), self._spell(op.inputs[1]), self._spell(op.output), op.name)
            for op in self.products.ops
        )

    def _spell(self, t: Tensor) -> str:
        return "".join(self._letters[a] for a in t.axes)

    @property
    def _letters(self) -> dict[str, str]:
        axes = dict.fromkeys(a for op in self.products.ops for a in op.axes)
        return {axis: chr(ord("a") + i) for i, axis in enumerate(axes)}

    # Where things are -------------------------------------------------------------------------------------------------

    @property
    def input(self) -> Sharding:
        """Where the input is held: by rows, where it is gathered."""
        (op, *_) = self.products.ops
        return self._by_rows(op.inputs[0]) if self.form is Form.GATHER else self._read(op, op.inputs[0])

    @property
    def outputs(self) -> tuple[Sharding, ...]:
        """Where the results are left."""
        if self.form is Form.SCATTER:
            return (self._by_rows(self.products.ops[0].output),)
        return tuple(self._read(op, op.output) for op in self.products.ops)

    @property
    def weights(self) -> tuple[Sharding, ...]:
        """Where the weights are read."""
        return tuple(self._read(op, op.inputs[1]) for op in self.products.ops)

    @property
    def gradients(self) -> tuple[Sharding, ...]:
        """Where the gradients of the weights are reduced to."""
        return tuple(self.placement.reduced(op.inputs[1].axes) for op in self.products.ops)

    def _read(self, op: Einsum, t: Tensor) -> Sharding:
        return self.placement.at(op, t)

    def _by_rows(self, t: Tensor) -> Sharding:
        whole = self._read(self.products.ops[0], t)
        rows = zip(t.axes, whole.splits, strict=True)
        return Sharding(tuple((*split, AXIS) if axis == self.products.along else split for axis, split in rows))

    # On one device ----------------------------------------------------------------------------------------------------

    def forward(self, x: jax.Array, weights: Arrays) -> tuple[Arrays, jax.Array]:
        """Multiply one device's blocks.

        Returns: the results, and what the backward pass reads of the input where it runs this again.
        """
        equations, letter, circle = self.equations, self.letter, self.circle
        match self.form:
            case Form.GATHER:
                return gathered_products(x, weights, equations, letter, circle)
            case Form.COPY:
                return tuple(e.multiply(x, w) for e, w in zip(equations, weights, strict=True)), x
            case _:
                made = scattered_products((x,), weights, equations, letter, circle, dtype=jnp.result_type(x, *weights))
                return (self._whole(made, equations[0].out) if self.form is Form.REDUCE else made,), x

    def backward(
        self, x: jax.Array, weights: Arrays, d_outs: Arrays, dtypes: Sequence[Any]
    ) -> tuple[jax.Array, Arrays]:
        """Gradients of one device's blocks; those of weights in `dtypes`, where they are accumulated."""
        equations, letter, circle = self.equations, self.letter, self.circle
        if self.form is Form.SCATTER:
            (equation,) = equations
            both = (equation.transposed_left, equation.transposed_right.swapped)
            (d_x, d_w), _ = gathered_products(d_outs[0], (*weights, x), both, letter, circle, dtypes=(x.dtype, *dtypes))
            return d_x, (self._accumulate(0, d_w),)
        turned = [e.transposed_right for e in equations]
        if self.form is Form.GATHER and not self.again:
            d_weights, _ = gathered_products(x, d_outs, turned, letter, circle, dtypes=dtypes)
        else:
            d_weights = tuple(e.multiply(x, d, t) for e, d, t in zip(turned, d_outs, dtypes, strict=True))
        back = [e.transposed_left for e in equations]
        if self.form is Form.REDUCE:
            d_x = back[0].multiply(d_outs[0], weights[0])
        else:
            d_x = scattered_products(d_outs, weights, back, letter, circle, dtype=x.dtype)
        if self.form is Form.COPY:
            d_x = self._whole(d_x, equations[0].left)
        return d_x, tuple(self._accumulate(i, d) for i, d in enumerate(d_weights))

    def _whole(self, shard: jax.Array, letters: str) -> jax.Array:
        return jax.lax.all_gather(shard, AXIS, axis=letters.index(self.letter), tiled=True)

    def _accumulate(self, number: int, gradient: jax.Array) -> jax.Array:
        """Add up a weight's gradient over devices that have other rows, each keeping its part."""
        op = self.products.ops[number]
        splits, weight = self.placement.splits(op), op.inputs[1]
        others = tuple(m for a in op.axes if a not in weight.axes for m in splits.get(a, ()))
        return complete(gradient, self.weights[number], self.gradients[number], others, self.placement)


def multiply_placed(how: PlacedProducts, x: jax.Array, weights: Sequence[Any]) -> Arrays:
    """Multiply on a mesh.

    Args:
        how: see there.
        x: where `how.input` has it.
        weights: where `how.weights` has them, each an array or `Watched`.

    Returns: the results, where `how.outputs` has them.
    """
    values = tuple(w.value if isinstance(w, Watched) else w for w in weights)
    sinks = tuple(w.sink if isinstance(w, Watched) else None for w in weights)
    return _multiplied(x, values, sinks, how)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _multiplied(x: jax.Array, values: Arrays, sinks: tuple[Any, ...], how: PlacedProducts) -> Arrays:
    return _forward(x, values, sinks, how)[0]


def _forward(x: jax.Array, values: Arrays, sinks: tuple[Any, ...], how: PlacedProducts) -> tuple[Arrays, Any]:
    spec = how.placement.spec
    read = how.products.ops[0]
    passed = how._read(read, read.inputs[0])
    weights = tuple(map(spec, how.weights))
    outputs = (tuple(map(spec, how.outputs)), spec(passed))
    with jax.named_scope(how.products.moved.name):
        made, gathered = how.placement.local(how.forward, (spec(how.input), weights), outputs)(x, values)
    kept = gathered if how.again else x
    return made, (kept, values, tuple(None if s is None else jnp.zeros((), s.dtype) for s in sinks))


def _backward(how: PlacedProducts, kept: Any, d_outs: Arrays) -> tuple[jax.Array, Arrays, tuple[Any, ...]]:
    x, values, formats = kept
    spec = how.placement.spec
    dtypes = tuple(v.dtype if f is None else f.dtype for v, f in zip(values, formats, strict=True))
    read = how.products.ops[0]
    held = how._read(read, read.inputs[0]) if how.again else how.input
    inputs = (spec(held), tuple(map(spec, how.weights)), tuple(map(spec, how.outputs)))
    outputs = (spec(how.input), tuple(map(spec, how.gradients)))
    local = partial(how.backward, dtypes=dtypes)
    with jax.named_scope(f"d_{how.products.moved.name}"):
        d_x, d_weights = how.placement.local(local, inputs, outputs)(x, values, d_outs)
    both = list(zip(values, formats, d_weights, strict=True))
    d_values = tuple(d if f is None else jnp.zeros_like(v) for v, f, d in both)
    return d_x, d_values, tuple(None if f is None else d for _, f, d in both)


_multiplied.defvjp(_forward, _backward)
