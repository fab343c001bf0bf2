"""Products of a block: plain ones over named axes, and collective matmuls where a layout places them; with gradients.

Expressed as constraints, a partial sum over several mesh axes becomes an AllReduce and a slice with some partitioners;
here it is the plan's ReduceScatter. A collective matmul is a `shard_map` forward and another one backward, so that what
travels is what the placed program says: activations round the tensor axis, gradients of weights to where they are
accumulated. Not here: where a layout puts what (`shardings`), rings (`collective_matmul`), and which products these are
(`sharding.collective_products`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshwise.core.tensors import Einsum, Kind, Tensor
from meshwise.runtime.circle import Circle
from meshwise.runtime.collective_matmul import Equation, gathered_products, scattered_products
from meshwise.runtime.kernels.counted import timed
from meshwise.runtime.shardings import Placement
from meshwise.runtime.watched import Frozen, Watched, linear, mapped, product, with_gradient
from meshwise.sharding import Sharding
from meshwise.sharding.collective_products import AXIS, CollectiveProducts, Form

Arrays = tuple[jax.Array, ...]


class PlacedProducts:
    """Products that share a collective, on a mesh.

    Args:
        products: which, and what their collective is.
        placement: of the layout.
        both_ways: whether pieces go round in both directions.
        again: whether the backward pass runs the products again before their gradients (recomputation), so that what
            came round for that need not come round once more.

    Attributes: `input`, `weights` and `outputs` are shardings: where the operands are read (the input by rows, where it
    is gathered), and where the results are left.
    """

    def __init__(self, products: CollectiveProducts, placement: Placement, *, both_ways: bool, again: bool) -> None:
        self.products, self.placement, self.form, self.again = products, placement, products.form, again
        self.circle = Circle(AXIS, placement.mesh.shape[AXIS], both_ways)
        ops, first = products.ops, products.ops[0]
        axes = [a for op in ops for a in op.axes]
        self.letter = _letters(axes)[products.along]  # of the rows by which pieces go round
        self.equations = tuple(Equation(*subscripts(op, axes), op.name) for op in ops)
        self.whole = placement.at(first, first.inputs[0])
        self.input = self._by_rows(first.inputs[0]) if self.form is Form.GATHER else self.whole
        self.weights = tuple(placement.at(op, op.inputs[1]) for op in ops)
        scattered = self.form is Form.SCATTER
        self.outputs = tuple(self._by_rows(op.output) if scattered else placement.at(op, op.output) for op in ops)

    def _by_rows(self, t: Tensor) -> Sharding:
        whole = self.placement.at(self.products.ops[0], t)
        rows = zip(t.axes, whole.splits, strict=True)
        return Sharding(tuple((*split, AXIS) if axis == self.products.along else split for axis, split in rows))

    def multiply(self, x: jax.Array, weights: Sequence[Any]) -> Arrays:
        """Multiply on the mesh.

        Args:
            x: where `input` has it.
            weights: where `weights` has them, each an array, `Watched` or `Frozen`.

        Returns: the results, where `outputs` has them.
        """
        spec, local, name = self.placement.spec, self.placement.local, self.products.moved.name
        held, at, outs = spec(self.input), tuple(map(spec, self.weights)), tuple(map(spec, self.outputs))
        reduced = tuple(self.placement.sum_spec(self.placement.reduced(op.inputs[1].axes)) for op in self.products.ops)
        trains = not all(isinstance(w, Frozen) for w in weights)

        def forward(x: jax.Array, *values: jax.Array) -> tuple[Arrays, Any]:
            with jax.named_scope(name):
                made, gathered = local(self._forward, (held, at), (outs, spec(self.whole)))(x, values)
            return made, ((gathered if self.again else x) if trains else None, values)

        def backward(kept: Any, d_outs: Arrays, *dtypes: Any) -> tuple[Any, ...]:
            reads = (spec(self.whole) if self.again else held) if trains else None, at, outs
            made = held, tuple(None if d is None else r for d, r in zip(dtypes, reduced, strict=True))
            back = partial(self._backward, dtypes=dtypes, dtype=x.dtype)
            with jax.named_scope(f"d_{name}"):
                d_x, d_weights = local(back, reads, made)(*kept, d_outs)
            return d_x, *d_weights

        return with_gradient(forward, backward, x, *weights)

    # On one device ----------------------------------------------------------------------------------------------------

    def _forward(self, x: jax.Array, weights: Arrays) -> tuple[Arrays, jax.Array]:
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

    def _backward(
        self, x: jax.Array | None, weights: Arrays, d_outs: Arrays, dtypes: Sequence[Any], dtype: Any
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Gradients of one device's blocks: of the input in `dtype`, of weights in `dtypes`, where they are added up.

        Frozen weights have none, and `x`, which is read for these, is not there.
        """
        equations, letter, circle = self.equations, self.letter, self.circle
        if x is None:
            return self._of_input(weights, d_outs, dtype), (None,) * len(weights)
        if self.form is Form.SCATTER:
            (equation,) = equations
            both = (equation.transposed_left, equation.transposed_right.swapped)
            (d_x, d_w), _ = gathered_products(d_outs[0], (*weights, x), both, letter, circle, dtypes=(dtype, *dtypes))
            return d_x, (self._accumulate(0, d_w),)
        turned = [e.transposed_right for e in equations]
        if self.form is Form.GATHER and not self.again:
            d_weights, _ = gathered_products(x, d_outs, turned, letter, circle, dtypes=dtypes)
        else:
            d_weights = tuple(e.multiply(x, d, t) for e, d, t in zip(turned, d_outs, dtypes, strict=True))
        d_x = self._of_input(weights, d_outs, dtype)
        return d_x, tuple(self._accumulate(i, d) for i, d in enumerate(d_weights))

    def _of_input(self, weights: Arrays, d_outs: Arrays, dtype: Any) -> jax.Array:
        """Gradient of one device's block of the input."""
        letter, circle, back = self.letter, self.circle, [e.transposed_left for e in self.equations]
        match self.form:
            case Form.SCATTER:
                return gathered_products(d_outs[0], weights, back, letter, circle, dtypes=(dtype,))[0][0]
            case Form.REDUCE:
                return back[0].multiply(d_outs[0], weights[0])
            case _:
                d_x = scattered_products(d_outs, weights, back, letter, circle, dtype=dtype)
                return self._whole(d_x, self.equations[0].left) if self.form is Form.COPY else d_x

    def _whole(self, shard: jax.Array, letters: str) -> jax.Array:
        return jax.lax.all_gather(shard, AXIS, axis=letters.index(self.letter), tiled=True)

    def _accumulate(self, number: int, gradient: jax.Array) -> jax.Array:
        """Add up a weight's gradient over devices that have other rows, each keeping its part."""
        op = self.products.ops[number]
        splits, weight = self.placement.splits(op), op.inputs[1]
        others = tuple(m for a in op.axes if a not in weight.axes for m in splits.get(a, ()))
        back = self.placement.reduced(weight.axes)
        return self.placement.add_up(gradient, self.weights[number], back, others)


def subscripts(op: Einsum, axes: Iterable[str]) -> tuple[str, str, str]:
    """Einsum letters of both inputs and of the output, given out in the order of `axes`."""
    letters = _letters(axes)
    first, second, out = ("".join(letters[a] for a in t.axes) for t in op.tensors)
    return first, second, out


def _letters(axes: Iterable[str]) -> dict[str, str]:
    return {axis: chr(ord("a") + i) for i, axis in enumerate(dict.fromkeys(axes))}


def named_einsum(op: Einsum, left: jax.Array, right: jax.Array | Watched | Frozen, *, wide: bool = False) -> jax.Array:
    """Multiply two arrays over the named axes of an operation; `wide`: into fp32."""
    first, second, out = letters = subscripts(op, op.axes)
    if isinstance(right, Watched | Frozen):
        return product(letters, left, right)
    return jnp.einsum(f"{first},{second}->{out}", left, right, preferred_element_type=jnp.float32 if wide else None)


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
    op: Einsum,
    x: jax.Array,
    w: jax.Array | Watched | Frozen,
    placement: Placement,
    splits: Mapping[str, tuple[str, ...]],
    *,
    in_turn: bool = False,
) -> jax.Array:
    """Multiply where a layout places it.

    Args:
        op: of the program.
        x, w: its inputs, where `splits` has them.
        placement: of the layout.
        splits: of the operation's iteration space.
        in_turn: whether the sink of `w` is of `reduced_in_turn`, which adds up the gradients of devices.

    Returns: the product, whose partial sums are still to be said complete.
    """
    if placement.mesh.size == 1 or op.inputs[1].kind is not Kind.WEIGHT or isinstance(w, Frozen):
        return named_einsum(op, x, w)
    left, right, out = letters = subscripts(op, op.axes)
    held, back = Sharding.of(op.inputs[1].axes, splits), placement.reduced(op.inputs[1].axes)
    over = [m for s in splits.values() for m in s if m not in held.splitting_axes]

    def reduced(x: jax.Array, gradient: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        def local(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
            with timed(f"{left},{out}->{right}", x, gradient) if known else nullcontext():
                part = jnp.einsum(f"{left},{out}->{right}", x, gradient, preferred_element_type=dtype)
            if first:
                part, gradient = jax.lax.optimization_barrier((part, gradient))
            return part[None] if in_turn else placement.add_up(part, held, back, over), gradient

        reads = tuple(placement.spec(Sharding.of(t.axes, splits)) for t in (op.inputs[0], op.output))
        made = spread_spec(held, placement) if in_turn else placement.sum_spec(back)
        return placement.local(local, reads, (made, reads[1]))(x, gradient)

    gathered = placement.spec(held) != placement.spec(placement.strategy.stored(op.inputs[1].axes, "weights"))
    known = placement.is_nvidia and "expert" not in placement.axes  # by schedules that were compared
    after = op.name == "lm_head" and (gathered or not placement.weights_first)
    first = placement.weights_first and not after
    return product(letters, x, w, reduced, first=first, after=after)


#: The sink of a weight, how operations read the weight, and where its gradient is reduced to.
Reduced = tuple[jax.Array, Sharding, Sharding]


def reduced_in_turn(
    weights: Mapping[str, Reduced], turn: jax.Array, placement: Placement
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Sinks for each device's own gradients, which are added up over devices one after the other, the last first.

    They share the wires: a scheduler that takes sums in flight together for as fast as each alone starts them too late.

    Args:
        weights: by name, in the order in which they are read.
        turn: what the layer before gives; sums of its gradients wait for those of this layer.
        placement: of the layout.

    Returns: sinks as `spread_spec` says, and the turn of the layer after.
    """

    def apart(given: tuple[Mapping[str, jax.Array], jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
        sinks, turn = given
        return {name: _each_has(sink, *weights[name][1:], placement) for name, sink in sinks.items()}, turn

    def added_up(given: tuple[Mapping[str, jax.Array], jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
        gradients, turn = given
        found: dict[str, jax.Array] = {}
        for name in reversed([*weights]):
            own, before = gradients[name], next(reversed(found), None)
            if before is None:
                own, turn = jax.lax.optimization_barrier((own, turn))
            else:  # what is read later: compilers leave out of a barrier what nothing reads
                own, found[before] = jax.lax.optimization_barrier((own, found[before]))
            found[name] = _add_copies(own, *weights[name][1:], placement)
        found[name], turn = jax.lax.optimization_barrier((found[name], turn))
        return found, turn

    return linear(apart, added_up)(({name: sink for name, (sink, *_) in weights.items()}, turn))


def _each_has(sink: jax.Array, held: Sharding, back: Sharding, placement: Placement) -> jax.Array:
    """What each device adds up for itself: a sink as large as what it reads of the weight."""
    pending = bool(placement.pending(back))

    def read(sink: jax.Array) -> jax.Array:
        ways = (placement.ways(b) // placement.ways(h) for b, h in zip(back.splits, held.splits, strict=True))
        shape = sink.shape[1:] if pending else sink.shape
        return jnp.broadcast_to(sink.reshape(-1)[0], (1, *(n * m for n, m in zip(shape, ways, strict=True))))

    return placement.local(read, placement.sum_spec(back), spread_spec(held, placement))(sink)


def _add_copies(gradients: jax.Array, held: Sharding, back: Sharding, placement: Placement) -> jax.Array:
    """The gradients of all copies of a weight, reduced to one."""
    over = others(held, placement)

    def reduced(gradient: jax.Array) -> jax.Array:
        return placement.add_up(gradient[0], held, back, over)

    return placement.local(reduced, spread_spec(held, placement), placement.sum_spec(back))(gradients)


def spread(w: Any, held: Sharding, back: Sharding, placement: Placement, *, in_turn: bool = False) -> Any:
    """Copy the part of a weight that each device holds; the gradients of all copies are reduced to one.

    For code in a `shard_map`, which would add up gradients whole.

    Args:
        w: a weight (or a watched one), held as `held`.
        held, back: sharding of the weight, and of its gradient.
        placement: of the layout.
        in_turn: whether its sink is of `reduced_in_turn`.

    Returns: the copies, numbered in front, as `spread_spec` says.
    """
    one, many = placement.spec(held), spread_spec(held, placement)
    copied = placement.local(lambda w: w[None], one, many)
    home = partial(_add_copies, held=held, back=back, placement=placement)
    if in_turn:
        return Watched(jax.lax.stop_gradient(copied(w.value)), w.sink)
    if placement.pending(back):
        each = linear(partial(_each_has, held=held, back=back, placement=placement), home)
        return mapped(w, lambda w: jax.lax.stop_gradient(copied(w)), each)
    return mapped(w, linear(copied, home))


def spread_spec(held: Sharding, placement: Placement) -> PartitionSpec:
    """How the copies that `spread` makes are split."""
    return PartitionSpec(others(held, placement) or None, *placement.spec(held))


def others(held: Sharding, placement: Placement) -> tuple[str, ...]:
    """Mesh axes along which devices hold the same of what is split so; of stages each has its own."""
    return tuple(a for a in placement.axes if a not in held.splitting_axes | _STAGES)
