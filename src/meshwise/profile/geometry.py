"""How groups of TPUs lie on their slice: the rings that they form, and the links that these share.

Numbers of devices run along the first axis first, two to a chip where JAX sees two, as libtpu numbers them. Not here:
which group a collective has (`reading`), what it costs (`causes`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshwise.core.errors import MeshwiseError
from meshwise.hardware import Chip, parse_cluster
from meshwise.hardware.network import Torus

Point = tuple[int, ...]

#: Groups of up to so many chips are put in the best order, larger ones row by row, back and forth.
_EXACT = 7


@dataclass(frozen=True, slots=True)
class Slice:
    """Where each device of a job stands."""

    torus: Torus
    devices_per_chip: int

    @property
    def text(self) -> str:
        """Its shape."""
        return "x".join(map(str, self.torus.shape))

    def place(self, device: int) -> Point:
        """The chip of a device, by its coordinates.

        >>> from meshwise.hardware import load_chip
        >>> [slice_of(load_chip("v6e"), 8).place(n) for n in (0, 1, 2, 7)]
        [(0, 0), (1, 0), (0, 1), (1, 3)]
        """
        rest, found = device // self.devices_per_chip, []
        for size in self.torus.shape:
            found.append(rest % size)
            rest //= size
        return tuple(found)

    def load(self, groups: Sequence[Sequence[int]]) -> float:
        """How much longer the busiest link takes than one of a ring of neighbours, all groups sending at once.

        1 on rings of neighbours, 2 on lines (the way back takes the same links) and on pairs of neighbours.

        >>> from meshwise.hardware import load_chip
        >>> v6e = slice_of(load_chip("v6e"), 8)
        >>> v6e.load([[0, 1, 2, 3], [4, 5, 6, 7]]), v6e.load([[0, 2, 4, 6], [1, 3, 5, 7]])
        (1.0, 2.0)
        >>> v6e.load([[0, 1], [2, 3]]), v6e.load([[0, 4], [1, 5], [2, 6], [3, 7]])
        (2.0, 4.0)
        """
        sent: Counter[tuple[Point, Point]] = Counter()
        placed = [tuple(dict.fromkeys(self.place(device) for device in group)) for group in groups]
        if all(map(_fills_box, placed)):
            return 1.0
        for points in placed:
            ring = self._ring(points)
            for here, there in zip(ring, (*ring[1:], ring[0]), strict=True):
                hops = list(itertools.pairwise(self._way(here, there)))
                sent.update(hops)
                sent.update((b, a) for a, b in hops)
        return float(max(sent.values(), default=0))

    def _ring(self, points: tuple[Point, ...]) -> tuple[Point, ...]:
        if len(points) <= 3:
            return points
        if len(points) > _EXACT:
            return _snake(points)
        return min(
            ((points[0], *rest) for rest in itertools.permutations(points[1:])),
            key=lambda ring: sum(len(self._way(a, b)) for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)),
        )

    def _way(self, here: Point, there: Point) -> tuple[Point, ...]:
        return _way(here, there, tuple((axis.size, axis.wraps) for axis in self.torus.axes))


@lru_cache(maxsize=65536)
def _way(here: Point, there: Point, axes: tuple[tuple[int, bool], ...]) -> tuple[Point, ...]:
    """The chips on the way from one to another, one axis after the other, the shorter way round."""
    found, at = [here], list(here)
    for axis, (size, wraps) in enumerate(axes):
        ahead = (there[axis] - at[axis]) % size
        step = 1 if (there[axis] > at[axis] if not wraps else ahead <= size - ahead) else -1
        while at[axis] != there[axis]:
            at[axis] = (at[axis] + step) % size
            found.append(tuple(at))
    return tuple(found)


def _fills_box(points: tuple[Point, ...]) -> bool:
    """Whether an even number of chips fills a box of two dimensions or more: then a ring goes through all."""
    sizes = [max(along) - min(along) + 1 for along in zip(*points, strict=True)]
    return math.prod(sizes) == len(points) and sum(size > 1 for size in sizes) > 1 and len(points) % 2 == 0


def _snake(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """A tour of many chips, row by row, back and forth; the first column is the way back."""
    rows: dict[Point, list[Point]] = {}
    for point in sorted(points, key=lambda p: (*reversed(p[1:]), p[0])):
        rows.setdefault(point[1:], []).append(point)
    first = [row[0] for row in rows.values()]
    rest = [row[1:] if number % 2 == 0 else row[:0:-1] for number, row in enumerate(rows.values())]
    if len(rows) > 1 and all(len(row) > 1 for row in rows.values()):
        return (*(p for row in rest for p in row), *reversed(first))
    return tuple(p for number, row in enumerate(rows.values()) for p in (row if number % 2 == 0 else row[::-1]))


def slice_of(chip: Chip, num_devices: int) -> Slice | None:
    """The slice of so many devices: the most compact one; None if the chip has no torus, or no such slice."""
    if chip.num_links <= 1 or num_devices % chip.devices_per_chip:
        return None
    try:
        network = parse_cluster(f"{chip.name}:{num_devices // chip.devices_per_chip}").network
    except MeshwiseError:
        return None
    return Slice(network, chip.devices_per_chip) if isinstance(network, Torus) else None
