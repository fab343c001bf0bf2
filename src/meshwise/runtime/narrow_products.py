"""Products of activations with weights in narrow formats, forward and backward, where a layout places them.

An activation, or a gradient, becomes narrow before it travels. Its scale is of its largest value on the devices that
exchange it: those that are never multiplied together have scales of their own, and products are scaled before sums
over devices are taken. Not here: formats and scales (`scaled`), products in wide formats (`products`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshwise.core.tensors import Einsum
from meshwise.runtime.products import align, others, spread_spec, subscripts
from meshwise.runtime.scaled import Narrowing, Scaled, largest_of, narrowed_by, scale_for
from meshwise.runtime.shardings import Placement, complete, part_index
from meshwise.runtime.watched import kept, linear, with_gradient
from meshwise.sharding import Sharding

Splits = Mapping[str, tuple[str, ...]]


class Operand(NamedTuple):
    """An activation as products read it.

    Args:
        value: in a narrow format.
        scale: of each device's block: so many numbers along each dimension as it is split into.
        carrier: takes the gradient, which is wide; nothing reads it.
    """

    value: jax.Array
    scale: jax.Array
    carrier: jax.Array


def narrow_operand(
    x: jax.Array, held: Sharding, wanted: Sharding, placement: Placement, *, dtype: Any, name: str
) -> Operand:
    """Bring an activation into a narrow format, and then to where products read it.

    Args:
        x: an activation.
        held, wanted: where it is, and where it is read.
        placement: of the layout.
        dtype: the format.
        name: by which a policy keeps it for the backward pass, where it is held.
    """
    made = _narrowed(jax.lax.stop_gradient(x), held, wanted, placement, dtype)
    value, scale = _bits_kept(made.value, name, placement.platform), kept(made.scale, name, placement.platform)
    return Operand(placement.move(value, held, wanted, held), scale, _carrier(x, held, wanted, placement))


def _bits_kept(x: jax.Array, name: str, platform: str) -> jax.Array:
    """Name an array by which a policy keeps it, as whole numbers.

    JAX rounds what is kept to its format as one of IEEE's, in which numbers of e4m3 above 240 are infinite.
    """
    bits = kept(jax.lax.bitcast_convert_type(x, jnp.int8), name, platform)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


def _narrowed(x: jax.Array, held: Sharding, wanted: Sharding, placement: Placement, dtype: Any) -> Scaled:
    """In a narrow format, held as before, with the scale of each block of `wanted`."""
    across = tuple(
        axis
        for before, after in zip(held.splits, wanted.splits, strict=True)
        for axis in placement.split(before)
        if axis not in after
    )

    def own(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        largest = largest_of(x)
        scale = scale_for(jax.lax.pmax(largest, across) if across else largest, dtype)
        return narrowed_by(x, scale, dtype), scale.reshape((1,) * x.ndim)

    there = placement.spec(held)
    return Scaled(*placement.local(own, there, (there, placement.spec(wanted)))(x))


# Gradients of activations ---------------------------------------------------------------------------------------------


def _carrier(x: jax.Array, held: Sharding, wanted: Sharding, placement: Placement) -> jax.Array:
    """Nothing, whose gradient is that of `x`: devices' own ones, added up once for all products that read it."""
    over = others(wanted, placement)
    first = wanted if not _refines(held, wanted, placement) else held

    def shape(x: jax.Array) -> jax.Array:
        made = jnp.zeros((placement.ways(over), *x.shape), x.dtype)
        if placement.mesh.size == 1:
            return made
        return jax.lax.with_sharding_constraint(made, NamedSharding(placement.mesh, spread_spec(wanted, placement)))

    def home(gradients: jax.Array) -> jax.Array:
        def added(own: jax.Array) -> jax.Array:
            return complete(own[0], wanted, first, over, placement)

        found = placement.local(added, spread_spec(wanted, placement), placement.spec(first))(gradients)
        moved: jax.Array = placement.move(found, first, held, first)
        return moved

    made: jax.Array = linear(shape, home)(x)
    return made


def _refines(fine: Sharding, coarse: Sharding, placement: Placement) -> bool:
    """Whether one sharding splits each dimension as another does, or further."""
    pairs = zip(fine.splits, coarse.splits, strict=True)
    return all(placement.split(a)[: len(placement.split(b))] == placement.split(b) for a, b in pairs)


# Products -------------------------------------------------------------------------------------------------------------


def multiply_narrow(
    op: Einsum,
    x: Operand,
    w: Any,
    placement: Placement,
    splits: Splits,
    *,
    formats: Narrowing,
    in_turn: bool = False,
) -> jax.Array:
    """Multiply an activation with a weight of a layer.

    Args:
        op: of the program.
        x: its first input, where `splits` has it.
        w: the second: `Watched` or an array; in a narrow format, or in a wide one that is narrowed as it is read.
        placement: of the layout.
        splits: of the operation's iteration space.
        formats: of the recipe.
        in_turn: whether the sink of `w` is of `reduced_in_turn`.

    Returns: the product, partial sums added, at home.
    """
    how = _Product(op, placement, splits, formats, dtype=x.carrier.dtype, in_turn=in_turn)
    made: jax.Array = with_gradient(how.forward, how.backward, x, w)
    return made


class _Product:
    """One product; arguments as in `multiply_narrow`, `dtype`: of activations."""

    def __init__(
        self, op: Einsum, placement: Placement, splits: Splits, formats: Narrowing, *, dtype: Any, in_turn: bool
    ) -> None:
        self.placement, self.formats, self.dtype, self.in_turn = placement, formats, dtype, in_turn
        self.letters = subscripts(op, op.axes)
        self.x, self.w, self.out = (Sharding.of(t.axes, splits) for t in op.tensors)
        every = [m for a in op.axes for m in placement.split(splits.get(a, ()))]
        self.summed, self.of_x, self.of_w = (
            tuple(m for m in every if m not in own.splitting_axes) for own in (self.out, self.x, self.w)
        )
        home = placement.strategy.home(op.output.axes)
        self.home = home if self.summed else self.out
        self.back = placement.reduced(op.inputs[1].axes)

    def forward(self, x: Operand, w: Any) -> tuple[jax.Array, Any]:
        """The product, and what the backward pass reads."""
        spec, (left, right, out) = self.placement.spec, self.letters
        first = self.home if _refines(self.home, self.out, self.placement) else self.out

        def own(value: jax.Array, scale: jax.Array, w: Any) -> jax.Array:
            narrow, by = self._weight(w, [a for a in right if a not in out], out)
            made = self._multiplied(f"{left},{right}->{out}", (value, narrow), scale.reshape(()), by, self.dtype)
            return complete(made, self.out, first, self.summed, self.placement)

        reads = spec(self.x), spec(self.x), self._weight_spec(w)
        made = self.placement.local(own, reads, spec(first))(x.value, x.scale, w)
        return self.placement.move(made, first, self.home, first), (x.value, x.scale, w)

    def backward(self, read: Any, gradient: jax.Array, dtype: Any) -> tuple[Operand, Any]:
        """Gradients of the activation, by its carrier, and of the weight, in `dtype`."""
        value, scale, w = read
        narrow = _narrowed(gradient, self.home, self.out, self.placement, self.formats.gradients)
        d_out = Scaled(self.placement.move(narrow.value, self.home, self.out, self.home), narrow.scale)
        if self.placement.weights_first:
            d_w, d_out = self._of_weight(value, scale, d_out, dtype)
            return Operand(None, None, self._of_input(d_out, w)), d_w  # type: ignore[arg-type]
        d_x = self._of_input(d_out, w)
        return Operand(None, None, d_x), self._of_weight(value, scale, d_out, dtype)[0]  # type: ignore[arg-type]

    def _of_weight(self, value: jax.Array, scale: jax.Array, d_out: Scaled, dtype: Any) -> tuple[jax.Array, Scaled]:
        """Gradient of the weight; and that of the result again, there no sooner where this is to be made first."""
        placement, (left, right, out) = self.placement, self.letters

        def own(value: jax.Array, scale: jax.Array, d: jax.Array, by: jax.Array) -> tuple[jax.Array, jax.Array]:
            part = self._multiplied(f"{left},{out}->{right}", (value, d), scale.reshape(()), by.reshape(()), dtype)
            if placement.weights_first:
                part, d = jax.lax.optimization_barrier((part, d))
            return part[None] if self.in_turn else placement.add_up(part, self.w, self.back, self.of_w), d

        x, d = placement.spec(self.x), placement.spec(self.out)
        made = spread_spec(self.w, placement) if self.in_turn else placement.sum_spec(self.back)
        d_w, again = placement.local(own, (x, x, d, d), (made, d))(value, scale, d_out.value, d_out.scale)
        return d_w, Scaled(again, d_out.scale)

    def _of_input(self, d_out: Scaled, w: Any) -> jax.Array:
        """Each device's own gradient of the activation, numbered in front."""
        placement, (left, right, out) = self.placement, self.letters
        same = tuple(a for a in others(self.x, placement) if a not in self.of_x)

        def own(d: jax.Array, by: jax.Array, w: Any) -> jax.Array:
            narrow, scale = self._weight(w, [a for a in right if a not in left], left)
            made = self._multiplied(f"{out},{right}->{left}", (d, narrow), by.reshape(()), scale, self.dtype)
            return (jnp.where(part_index(same, placement) == 0, made, 0) if same else made)[None]

        d = placement.spec(self.out)
        made: jax.Array = placement.local(
            own, (d, d, self._weight_spec(w)), spread_spec(self.x, placement)
        )(d_out.value, d_out.scale, w)  # fmt: skip
        return made

    def _weight_spec(self, w: Any) -> Any:
        there = self.placement.spec(self.w)
        return Scaled(there, PartitionSpec()) if isinstance(w, Scaled) else there

    def _weight(self, w: Any, summed: list[str], onto: str) -> tuple[jax.Array, jax.Array]:
        """A device's block of the weight in the format of operands, and its scale, or those of the result's columns."""
        if isinstance(w, Scaled):
            return w.value, w.scale
        right = self.letters[1]
        scale = scale_for(largest_of(w, tuple(right.index(a) for a in summed)), self.formats.operands)
        rest = tuple(sorted((a for a in right if a not in summed), key=onto.index))
        turned = jnp.transpose(jnp.squeeze(scale, tuple(right.index(a) for a in summed)), _order(right, summed, rest))
        return narrowed_by(w, scale, self.formats.operands), align(turned, rest, tuple(onto))

    def _multiplied(
        self, text: str, operands: tuple[jax.Array, jax.Array], one: jax.Array, other: jax.Array, dtype: Any
    ) -> jax.Array:
        """Multiply narrow operands with their scales, added up in fp32 or int32.

        NVIDIA's compiler makes a product of fp8 numbers, which scales what it writes, of one of widened operands with
        scales; others take narrow operands as they are. CPUs have none of this: fp8 is exact in fp32.
        """
        whole = jnp.issubdtype(operands[0].dtype, jnp.integer)
        if self.placement.is_nvidia and not whole:
            wide = [
                x.astype(jnp.bfloat16) * s.astype(jnp.bfloat16) for x, s in zip(operands, (one, other), strict=True)
            ]
            return jnp.einsum(text, *wide, preferred_element_type=dtype)
        if self.placement.platform == "cpu" and not whole:
            operands = operands[0].astype(jnp.float32), operands[1].astype(jnp.float32)
        made = jnp.einsum(text, *operands, preferred_element_type=jnp.int32 if whole else jnp.float32)
        return (made.astype(jnp.float32) * (one * other)).astype(dtype)


def _order(right: str, summed: list[str], rest: tuple[str, ...]) -> tuple[int, ...]:
    left = [a for a in right if a not in summed]
    return tuple(left.index(a) for a in rest)
