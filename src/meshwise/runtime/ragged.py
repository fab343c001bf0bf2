"""Rows dealt to groups of unequal sizes: their exchange between devices, and products of each group with its matrix.

Bookkeeping of offsets and sizes, from how many rows every device has for every group. Not here: which rows these are
(`ragged_mixture`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meshwise.runtime.watched import Watched


@dataclass(frozen=True)
class RaggedExchange:
    """Rows on their way to the devices of their groups, and back, none of them padded.

    Devices along a mesh axis hold groups / ways groups each, in order. Each has its rows sorted by group.

    Args:
        sizes: rows that each device has for each group [ways, groups]; the same on all of them.
        axis: mesh axis.
        room: rows that a device has room for; as many as could come.
    """

    sizes: jax.Array
    axis: str
    room: int

    @property
    def _sent(self) -> jax.Array:
        """Rows from each device to each: [from, to]."""
        ways = self.sizes.shape[0]
        return jnp.sum(self.sizes.reshape(ways, ways, -1), axis=-1)

    @property
    def own(self) -> jax.Array:
        """Rows of this device's groups, by the device that they came from: [ways, groups / ways]."""
        ways = self.sizes.shape[0]
        each = self.sizes.shape[1] // ways
        mine: jax.Array = jax.lax.dynamic_slice_in_dim(self.sizes, self._here * each, each, axis=1)
        return mine

    @property
    def _here(self) -> jax.Array:
        return jax.lax.axis_index(self.axis)

    def leave(self, rows: jax.Array) -> jax.Array:
        """Send rows [n, ...] to the devices of their groups: [room, ...], by the device that they came from."""
        sent, here = self._sent, self._here
        start = _before(sent, axis=1)[here]  # in this device's rows
        there = _before(sent, axis=0)[here]  # at the device that they go to
        empty = jnp.zeros((self.room, *rows.shape[1:]), rows.dtype)
        return _exchange(rows, empty, start, sent[here], there, sent[:, here], self.axis)

    def come_back(self, rows: jax.Array, count: int) -> jax.Array:
        """Send what was made of rows [room, ...] back to where these came from: [count, ...], in their order there."""
        sent, here = self._sent, self._here
        start = _before(sent, axis=0)[:, here]
        there = _before(sent, axis=1)[:, here]
        empty = jnp.zeros((count, *rows.shape[1:]), rows.dtype)
        return _exchange(rows, empty, start, sent[:, here], there, sent[here], self.axis)


def _before(counts: jax.Array, axis: int) -> jax.Array:
    return jnp.cumsum(counts, axis=axis) - counts


def _exchange(  # noqa: PLR0917 -- as the primitive takes them
    rows: jax.Array,
    into: jax.Array,
    starts: jax.Array,
    sizes: jax.Array,
    places: jax.Array,
    received: jax.Array,
    axis: str,
) -> jax.Array:
    """Send slices of rows, each to a place of one device's array `into`."""
    made: jax.Array = jax.lax.ragged_all_to_all(rows, into, starts, sizes, places, received, axis_name=axis)
    return made


def by_group(sizes: jax.Array, room: int) -> tuple[jax.Array, jax.Array]:
    """Order rows by group.

    They stand in stretches: in each, rows of every source one after the other, by group, and then empty ones.

    Args:
        sizes: rows of each stretch, source and group [stretches, sources, groups].
        room: rows of a stretch, empty ones included.

    Returns: the order [stretches x room], empty rows last, and the group of each row in that order (the number of
        groups where empty).
    """
    stretches, sources, groups = sizes.shape
    full = sizes.reshape(stretches, -1)
    counts = jnp.concatenate([full, room - jnp.sum(full, axis=1, keepdims=True)], axis=1)
    numbers = jnp.append(jnp.tile(jnp.arange(groups), sources), groups)
    group = jnp.repeat(jnp.tile(numbers, stretches), counts.reshape(-1), total_repeat_length=stretches * room)
    order = jnp.argsort(group, stable=True)
    return order, group[order]


def grouped_product(rows: jax.Array, matrices: jax.Array | Watched, sizes: jax.Array) -> jax.Array:
    """Multiply each group's rows with its matrix.

    Args:
        rows: [n, D], sorted by group, empty ones last.
        matrices: [groups, D, F]; gradients of watched ones are made in the wider format.
        sizes: rows of each group.

    Returns: [n, F], empty rows zero.
    """
    if isinstance(matrices, Watched):
        return _grouped(rows, matrices.value, matrices.sink, sizes)
    return jax.lax.ragged_dot(rows, matrices, sizes)


@jax.custom_vjp
def _grouped(rows: jax.Array, matrices: jax.Array, sink: jax.Array, sizes: jax.Array) -> jax.Array:  # noqa: ARG001
    return jax.lax.ragged_dot(rows, matrices, sizes)


def _grouped_forward(
    rows: jax.Array, matrices: jax.Array, sink: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, tuple[Any, ...]]:
    return jax.lax.ragged_dot(rows, matrices, sizes), (rows, matrices, jnp.zeros((), sink.dtype), sizes)


#: Of the rows of both, one matrix for each group of them.
_SUMMED = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def _grouped_backward(kept: tuple[Any, ...], gradient: jax.Array) -> tuple[Any, ...]:
    rows, matrices, like, sizes = kept
    d_rows = jax.lax.ragged_dot(gradient, jnp.swapaxes(matrices, 1, 2), sizes)
    general = partial(jax.lax.ragged_dot_general, ragged_dot_dimension_numbers=_SUMMED)
    d_matrices = general(rows, gradient, sizes, preferred_element_type=like.dtype)
    return d_rows.astype(rows.dtype), jnp.zeros_like(matrices), d_matrices, None


_grouped.defvjp(_grouped_forward, _grouped_backward)
