"""Routed experts without slots: every token goes to its experts, and none is padded or dropped.

Rows are sorted by expert, sent as they are, sorted again where they arrive, and multiplied expert by expert; offsets
and sizes follow from how many rows every device has for every expert. Not here: experts with slots (`mixture`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwise.core.tensors import Einsum, Elementwise, Kind, Op, Route
from meshwise.runtime.grouped import Groups, each_row, for_each, grouped_product, kernel_for
from meshwise.runtime.mixture import Arrays, Experts
from meshwise.runtime.ops import elementwise
from meshwise.runtime.shardings import part_index
from meshwise.runtime.watched import plain, with_gradient
from meshwise.sharding import Sharding


@dataclass(frozen=True)
class RaggedExchange:
    """Rows on their way to the devices of their groups, and back, none of them padded.

    Devices along a mesh axis hold groups / ways groups each, in order. Each has its rows sorted by group, and gets
    those of its own groups sorted likewise: rows of each group from each device travel on their own.

    Args:
        sizes: rows that each device has for each group [ways, groups]; the same on all of them.
        axis: mesh axis.
        room: rows that a device has room for; as many as could come.
        platform: as JAX names that of the devices.
    """

    sizes: jax.Array
    axis: str
    room: int
    platform: str = "cpu"

    @property
    def own(self) -> jax.Array:
        """Rows that come of each of this device's groups: [groups / ways]."""
        return self._of(jnp.sum(self.sizes, axis=0))

    def _of(self, by_group: jax.Array) -> jax.Array:
        """Of numbers of all groups [..., groups], those of this device's groups."""
        each = self.sizes.shape[1] // self.sizes.shape[0]
        return jax.lax.dynamic_slice_in_dim(by_group, jax.lax.axis_index(self.axis) * each, each, axis=-1)

    def leave(self, rows: jax.Array) -> jax.Array:
        """Send rows [n, ...] to the devices of their groups: [room, ...], by group; what is in empty rows is open."""
        return self._both_ways(rows, there=True, count=len(rows))

    def come_back(self, rows: jax.Array, count: int) -> jax.Array:
        """Send what was made of rows [room, ...] back to where these came from: [count, ...], in their order there."""
        return self._both_ways(rows, there=False, count=count)

    def _both_ways(self, rows: jax.Array, *, there: bool, count: int) -> jax.Array:
        """Send rows there or back, and their gradients the other way."""

        def forward(given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return replace(self, sizes=given[1])._sent(given[0], there=there, count=count), given[1]

        def backward(sizes: jax.Array, gradient: jax.Array) -> tuple[Any]:
            return ((replace(self, sizes=sizes)._sent(gradient, there=not there, count=count), None),)

        sent: jax.Array = with_gradient(forward, backward, (rows, self.sizes))
        return sent

    def _sent(self, rows: jax.Array, *, there: bool, count: int) -> jax.Array:
        here = jax.lax.axis_index(self.axis)
        ways, groups = self.sizes.shape
        each = groups // ways
        of_device = _before(self.sizes, axis=1)  # where rows of a group begin among those of a device
        among = jnp.sum(self.sizes, axis=0).reshape(ways, each)
        of_group = _before(self.sizes, axis=0) + _before(among, axis=1).reshape(-1)  # and among those that come
        outward = of_device[here], self.sizes[here], of_group[here]
        mine = self._of(self.sizes).reshape(-1)
        inward = self._of(of_group).reshape(-1), mine, self._of(of_device).reshape(-1)
        (start, size, place), came = (outward, mine) if there else (inward, self.sizes[here])
        empty = self._empty((self.room if there else count, *rows.shape[1:]), rows.dtype, rows)
        return jax.lax.ragged_all_to_all(rows, empty, start, size, place, came, axis_name=self.axis)

    def _empty(self, shape: tuple[int, ...], dtype: Any, after: jax.Array) -> jax.Array:
        """Rows with whatever is in them, of these rows alone: what gradients would share is copied."""
        if (kernel := kernel_for(self.platform)) is None:
            return jnp.zeros(shape, dtype)
        made: jax.Array = kernel.unwritten(jax.ShapeDtypeStruct(shape, dtype), after[:1].reshape(-1)[:1])
        return made


def _before(counts: jax.Array, axis: int) -> jax.Array:
    return jnp.cumsum(counts, axis=axis) - counts


def by_group(sizes: jax.Array, room: int) -> tuple[jax.Array, jax.Array]:
    """Order rows by group.

    They stand in stretches, in each of them by group, and then empty ones.

    Args:
        sizes: rows of each stretch and group [stretches, groups].
        room: rows of a stretch, empty ones included.

    Returns: the order [stretches x room], empty rows last, and the group of each row in that order (the number of
        groups where empty).
    """
    stretches, groups = sizes.shape
    counts = jnp.concatenate([sizes, room - jnp.sum(sizes, axis=1, keepdims=True)], axis=1)
    numbers = jnp.tile(jnp.arange(groups + 1), stretches)
    group = jnp.repeat(numbers, counts.reshape(-1), total_repeat_length=stretches * room)
    if stretches == 1:  # as they come
        return jnp.arange(room), group
    order = jnp.argsort(group, stable=True)
    return order, group[order]


@dataclass(frozen=True)
class Order:
    """Rows in another order, there and back; gradients of what is read in an order are read the other way.

    Args:
        there: number of the row that comes to each place, each once.
        back: number of the place that each row comes to.
    """

    there: jax.Array
    back: jax.Array

    @classmethod
    def of(cls, there: jax.Array) -> Order:
        """The order, and its inverse."""
        return cls(there, jnp.argsort(there))

    @property
    def reverse(self) -> Order:
        """The way back."""
        return Order(self.back, self.there)

    def move(self, rows: jax.Array, copies: int = 1) -> jax.Array:
        """Bring rows [n, ...] to their places [n x copies, ...], each row to that many."""

        def forward(given: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            rows, there, back = given
            return rows[there // copies if copies > 1 else there], back

        def backward(back: jax.Array, gradient: jax.Array) -> tuple[Any]:
            own = gradient[back]
            if copies > 1:
                own = own.reshape(-1, copies, *own.shape[1:])
                own = jnp.sum(own.astype(jnp.float32), axis=1).astype(gradient.dtype)
            return ((own, None, None),)

        moved: jax.Array = with_gradient(forward, backward, (rows, self.there, self.back))
        return moved


@dataclass(frozen=True)
class _Ways:
    """Where the rows of one device's tokens go, a row for each pair of a token and one of its experts.

    Args:
        picked: how many tokens, and experts of each.
        order: of pairs (token x top_k + choice) by expert.
        exchange: of rows, None where all experts are here.
        groups: rows of each expert here.
        arrived: order of the rows that came by expert, None where they came in it.
        expert: of each row in that order, past the last where it is empty.
    """

    picked: tuple[int, ...]
    order: Order
    exchange: RaggedExchange | None
    groups: Groups
    arrived: Order | None
    expert: jax.Array


@dataclass(frozen=True)
class RaggedExperts(Experts):
    """The routed part of a block; fields as in `Experts`. Rows of experts are arrays [1, rows, width].

    Where there is no ragged exchange (CPU), devices gather all tokens, and each works on those of its own experts.
    """

    @property
    def _assembled(self) -> tuple[str, ...]:
        """Mesh axes over which tokens are gathered for that."""
        tokens = super()._token_axes
        return tuple(a for a in self._split if a in tokens) if self.placement.platform == "cpu" else ()

    @property
    def _token_axes(self) -> frozenset[str]:
        return super()._token_axes - frozenset(self._assembled)

    def _local(self, x: jax.Array, gates: jax.Array, chosen: jax.Array, weights: Arrays) -> jax.Array:
        for a in reversed(self._assembled):
            x, gates, chosen = (jax.lax.all_gather(v, a, axis=1, tiled=True) for v in (x, gates, chosen))
        return super()._local(x, gates, chosen, weights)

    def _source(self) -> Sharding:
        gathered, source = self._assembled, super()._source()
        return Sharding(tuple(tuple(a for a in split if a not in gathered) for split in source.splits))

    def _ways(self, picked: jax.Array) -> _Ways:
        """Plan the ways of rows from the experts of each token [tokens, top_k]."""
        (tokens, top_k), chosen = picked.shape, picked.reshape(-1)
        experts = self.num_experts // self.placement.ways(self._copied)
        if self._copied:  # what goes to experts elsewhere is worked on there
            chosen -= part_index(self._copied, self.placement) * experts
            chosen = jnp.where((chosen >= 0) & (chosen < experts), chosen, experts)
        sizes = jnp.bincount(chosen, length=experts + 1)[:-1]
        exchange, room, came = None, picked.size, sizes
        if exchanged := [a for a in self._split if a not in self._copied]:
            (axis,) = exchanged
            others = self.placement.mesh.shape[axis]
            room = others * tokens * min(top_k, experts // others)
            # summed, not gathered: XLA makes gathers of the next layer beside this one, with all that they are made of,
            # and would compute its attention twice
            own = jnp.arange(others)[:, None] == jax.lax.axis_index(axis)
            every = jax.lax.psum(jnp.where(own, sizes, 0), axis)
            exchange = RaggedExchange(every, axis, room, self.placement.platform)
            came = exchange.own
        stretches = came[None]
        for axis in self._gathered:
            stretches = jax.lax.all_gather(stretches, axis, axis=0, tiled=True)
        order = Order.of(jnp.argsort(chosen, stable=True))
        there, expert = by_group(stretches, room)
        arrived = Order.of(there) if self._gathered else None
        mean = picked.size * self.placement.ways(self._gathered) // self.placement.ways(self._copied)
        rest = exchange is None and bool(self._copied)  # what goes to experts elsewhere counts as zeros here
        groups = Groups(jnp.sum(stretches, axis=0), mean, self.placement.platform, rest=rest)
        return _Ways(picked.shape, order, exchange, groups, arrived, expert)

    def _leave(self, op: Route, given: jax.Array, ways: _Ways) -> jax.Array:
        """Bring values of tokens [tokens, 1 or top_k, ...] to their experts: a row a pair, by expert."""
        pairs = given.reshape(-1, *given.shape[2:])
        rows = ways.order.move(pairs, copies=ways.picked[1] // given.shape[1])
        with jax.named_scope(op.name):
            if ways.exchange is not None:
                rows = ways.exchange.leave(rows)
            for axis in self._gathered:
                rows = jax.lax.all_gather(rows, axis, axis=0, tiled=True)
            rows = rows if ways.arrived is None else ways.arrived.move(rows)
            return checkpoint_name(rows[None], op.output.name)

    def _return(self, made: jax.Array, ways: _Ways) -> jax.Array:
        """Bring what the experts made back to where the tokens are: [tokens, top_k, D]."""
        with jax.named_scope(self.combine.name):
            rows = made[0] if ways.arrived is None else ways.arrived.reverse.move(made[0])
            for axis in reversed(self._gathered):
                rows = jax.lax.psum_scatter(rows, axis, scatter_dimension=0, tiled=True)
            rows = rows if ways.exchange is None else ways.exchange.come_back(rows, len(ways.order.there))
        return ways.order.reverse.move(rows).reshape(*ways.picked, -1)

    def _run(self, op: Op, inputs: Sequence[jax.Array], ways: _Ways) -> jax.Array:
        if isinstance(op, Einsum):
            expert, summed, _ = op.inputs[1].axes
            assert expert in op.output.axes and summed in op.contracted, f"{op.name} multiplies by [E, in, out]"  # noqa: PT018
            weight, read, moved = op.inputs[1].axes, self.placement.at(op, op.inputs[1]), self.placement.moved_axis
            stored, reduced = self.placement.strategy.stored(weight, "weights"), self.placement.reduced(weight)
            # As devices send gathered weights, and as gradients are scattered.
            groups = replace(ways.groups, major=moved(stored, read), summed_major=moved(reduced, read))
            return grouped_product(inputs[0][0], inputs[1], groups, first=self.placement.in_turn)[None]
        if self._few(ways) and not self._partial_after(op):
            return self._each_row(op, inputs, ways)
        rows = list(inputs)
        for place, t in enumerate(op.inputs):
            if t.kind is Kind.WEIGHT:  # of each expert: of each row, by its expert
                of_each = plain(inputs[place])
                rows[place] = jnp.concatenate([of_each, jnp.zeros_like(of_each[:1])])[ways.expert][None]
        tensors = tuple(replace(t, axes=op.output.axes) if t.kind is Kind.WEIGHT else t for t in op.inputs)
        return self._compute(replace(op, inputs=tensors), rows)

    def _few(self, ways: _Ways) -> bool:
        """Whether most rows may be empty, and a kernel can leave them alone."""
        return ways.groups.mean < len(ways.expert) and kernel_for(ways.groups.platform) is not None

    def _for_each(self, made: jax.Array, readers: int, ways: _Ways) -> Sequence[jax.Array]:
        if readers < 2 or made.ndim < 3 or not self._few(ways):  # gates are few bytes
            return super()._for_each(made, readers, ways)
        return [rows[None] for rows in for_each(made[0], readers, ways.groups)]

    def _each_row(self, op: Op, inputs: Sequence[Any], ways: _Ways) -> jax.Array:
        """Run an elementwise operation on the rows that came; axes of blocks are [rows, columns]."""
        assert isinstance(op, Elementwise), f"refused before: {op.name}"
        of_rows = op.output.axes[1:]
        tensors = [replace(t, axes=of_rows if t.kind is Kind.WEIGHT else t.axes[1:]) for t in op.inputs]
        own = replace(op, inputs=tuple(tensors), output=replace(op.output, axes=of_rows))
        forms = ["vectors" if t.kind is Kind.WEIGHT else "rows" if len(t.axes) > 1 else "numbers" for t in own.inputs]
        operands = [(form, x if form == "vectors" else x[0]) for form, x in zip(forms, inputs, strict=True)]
        width = next(jax.tree.leaves(x)[0].shape[-1] for form, x in operands if form != "numbers")
        made = jax.ShapeDtypeStruct((len(ways.expert), width), self.around.activations)

        def function(*blocks: jax.Array) -> jax.Array:
            return elementwise(own, blocks, self.around)

        return each_row(function, operands, ways.groups, made, linear=op.linear)[None]
