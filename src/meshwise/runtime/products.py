"""Products of a block: plain ones over named axes, and collective matmuls where a layout places them; with gradients.

Expressed as constraints, a partial sum over several mesh axes becomes an AllReduce and a slice with some partitioners;
here it is the plan's ReduceScatter. A collective matmul is a `shard_map` forward and another one backward, so that what
travels is what the placed program says: activations round the tensor axis, gradients of weights to where they are
accumulated. Not here: where a layout puts what (`shardings`), rings (`collective_matmul`), and which products these are
(`sharding.collective_products`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshwise.core.tensors import Einsum, Kind, Tensor
from meshwise.runtime.circle import Circle
from meshwise.runtime.collective_matmul import Equation, gathered_products, scattered_products
from meshwise.runtime.shardings import Placement, complete
from meshwise.runtime.watched import Watched, linear, product, with_gradient
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
    spec = how.placement.spec
    read = how.products.ops[0]
    whole = how.placement.at(read, read.inputs[0])
    held, at = spec(how.input), tuple(map(spec, how.weights))
    outs = tuple(map(spec, how.outputs))

    def forward(x: jax.Array, *values: jax.Array) -> tuple[Arrays, Any]:
        with jax.named_scope(how.products.moved.name):
            made, gathered = how.placement.local(how.forward, (held, at), (outs, spec(whole)))(x, values)
        return made, (gathered if how.again else x, values)

    def backward(kept: Any, d_outs: Arrays, *dtypes: Any) -> tuple[jax.Array, ...]:
        inputs = (spec(whole) if how.again else held, at, outs)
        outputs = (held, tuple(map(spec, how.gradients)))
        local = partial(how.backward, dtypes=dtypes)
        with jax.named_scope(f"d_{how.products.moved.name}"):
            d_x, d_weights = how.placement.local(local, inputs, outputs)(*kept, d_outs)
        return d_x, *d_weights

    return with_gradient(forward, backward, x, *weights)


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
