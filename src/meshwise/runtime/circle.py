"""Devices of a mesh axis as a circle: pieces of an array that come round to every device, and sums that go round home.

The two walks that collective matmuls are made of, one way round or both ways at once; written out rather than looped,
so that a compiler may send one piece while another is multiplied. Not here: what is multiplied
(`collective_matmul`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one device's shard.

    Args:
        origin: number of the device whose shard it is of.
        start: first row within that shard.
        value: the rows.
    """

    origin: jax.Array
    start: int
    value: jax.Array


@dataclass(frozen=True, slots=True)
class Circle:
    """The devices along a mesh axis, each of which sends to its neighbours only.

    One way round, a shard takes size - 1 steps to reach everybody. Both ways it takes half as many, each link carrying
    half of the bytes in each direction; where the size is even, the shard of the device opposite comes in two halves,
    one from each side, so that no direction carries more than the other.

    Args:
        axis: mesh axis.
        size: devices on it.
        both_ways: whether to send in both directions at once.
    """

    axis: str
    size: int
    both_ways: bool = False

    @property
    def own(self) -> jax.Array:
        """Number of this device."""
        return jax.lax.axis_index(self.axis)

    def pass_on(self, x: jax.Array, by: int) -> jax.Array:
        """Send to the next device (by 1) or to the one before (by -1)."""
        pairs = [(i, (i + by) % self.size) for i in range(self.size)]
        return jax.lax.ppermute(x, self.axis, pairs)

    def arriving(self, shard: jax.Array, dimension: int) -> Iterator[Piece]:
        """The shards of all devices as they come round, this device's first.

        Args:
            shard: this device's.
            dimension: along which it is cut in halves where it comes from both sides.
        """
        yield Piece(self.own, 0, shard)
        ways = dict.fromkeys(self._ways, shard)
        for step in range(1, self._steps + 1):
            for by in ways:
                ways[by] = self.pass_on(ways[by], by)
                yield Piece(self._at(-by * step), 0, ways[by])
        for by, start, rows in self._halves(shard.shape[dimension]):
            half = jax.lax.slice_in_dim(ways[by], start, start + rows, axis=dimension)
            yield Piece(self._at(-by * (self._steps + 1)), start, self.pass_on(half, by))

    def summed(
        self, part: Callable[[jax.Array, int, int], jax.Array], rows: int, dimension: int, dtype: Any
    ) -> jax.Array:
        """Add up every device's part of this device's shard: sums go round, and each device adds its own to them.

        Args:
            part: (device, first row, rows) -> this device's addend to those rows of that device's shard.
            rows: of a shard along `dimension`.
            dtype: in which sums travel; they are added up in the format of `part`.
        """
        begun = {by: (by, start, count) for by, start, count in self._halves(rows)}
        arrived = []
        for by in self._ways:
            coming: tuple[jax.Array, int] | None = None
            if by in begun:
                _, start, count = begun[by]
                first = part(self._at(by * (self._steps + 1)), start, count)
                coming = self.pass_on(first.astype(dtype), by), start
            for step in range(self._steps, 0, -1):
                total = _added(part(self._at(by * step), 0, rows), coming, dimension)
                coming = self.pass_on(total.astype(dtype), by), 0
            arrived.append(coming)
        total = part(self.own, 0, rows)
        for coming in arrived:
            total = _added(total, coming, dimension)
        return total.astype(dtype)

    @property
    def _ways(self) -> tuple[int, ...]:
        return (1, -1) if self.both_ways else (1,)

    @property
    def _steps(self) -> int:
        """Steps that whole shards take."""
        return (self.size - 1) // len(self._ways)

    def _halves(self, rows: int) -> list[tuple[int, int, int]]:
        """Of the shard of the device opposite: (direction, first row, rows) of what goes each way; else nothing."""
        if not self.both_ways or self.size % 2:
            return []
        half = (rows + 1) // 2
        return [(by, start, count) for by, start, count in ((1, 0, half), (-1, half, rows - half)) if count]

    def _at(self, steps: int) -> jax.Array:
        """Number of the device `steps` ahead."""
        return (self.own + steps) % self.size


def _added(total: jax.Array, coming: tuple[jax.Array, int] | None, dimension: int) -> jax.Array:
    """Add rows that came to those of `total` that they belong to."""
    if coming is None:
        return total
    rows, start = coming[0].astype(total.dtype), coming[1]
    after = total.shape[dimension] - start - rows.shape[dimension]
    if start or after:
        rows = jnp.pad(rows, [(start, after) if d == dimension else (0, 0) for d in range(total.ndim)])
    return total + rows
