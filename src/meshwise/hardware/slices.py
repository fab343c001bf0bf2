"""Which slices of a TPU generation exist, what shape a count stands for, and which of their axes wrap around.

Not here: names that users type (`names`), or what a collective costs on a torus (`costs`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from meshwise.core.errors import ClusterError
from meshwise.hardware.chip import Chip, Source
from meshwise.hardware.network import Torus, TorusAxis, can_twist

_CUBE = 4  # v4 and later 3D pods are wired from 4x4x4 cubes; the optical switches between cubes make the wraparounds
_PART = (1, 2, 4)


@dataclass(frozen=True, slots=True, repr=False)
class SliceRules:
    """The slices of one TPU generation.

    `largest` is the shape of the largest slice. `wraps`: "cubes" joins the ends of every axis when the slice is built
    of full 4x4x4 cubes; "full-axis" joins the ends only of an axis as long as the pod's. `counts` is what the cloud's
    names count ("v5p-128": cores, "v5litepod-16": chips). `twists`: slices of k x k x 2k and k x 2k x 2k whole cubes
    can be wired as twisted tori. DCN figures are per chip, one way, bytes/s, and seconds.
    """

    name: str
    title: str
    num_axes: int
    largest: tuple[int, ...]
    wraps: Literal["cubes", "full-axis"]
    counts: Literal["cores", "chips"]
    cloud_name: str
    dcn_bandwidth_per_chip_one_way: float
    dcn_latency: float
    source: Source
    twists: bool = False

    def __repr__(self) -> str:
        return f"<SliceRules: {self.title}>"

    @property
    def largest_num_chips(self) -> int:
        """Chips of the largest slice."""
        return math.prod(self.largest)

    def torus(self, shape: tuple[int, ...], chip: Chip, *, twisted: bool = False) -> Torus:
        """GroupLink a slice of `shape`, with the wraparounds that it has; `twisted` where it was asked for.

        Raises:
            ClusterError: for a shape that the generation does not have, or cannot twist.
        """
        self.check(shape, chip)
        if twisted and not self.twists:
            raise ClusterError(f"{chip.title} has no twisted slices; v4 and v5p have. Leave '_twisted' out")
        if twisted and (not can_twist(shape) or min(shape) % _CUBE):
            raise ClusterError(
                f"{chip.title} has no twisted slice {_text(shape)}: expected two equal axes and a third of half or "
                f"twice their length, of whole cubes, for example 4x4x8_twisted or 4x8x8_twisted"
            )
        if self.wraps == "cubes":
            cubes = all(size % _CUBE == 0 for size in shape)
            axes = tuple(TorusAxis(size, cubes) for size in shape)
        else:
            axes = tuple(TorusAxis(size, size == max(self.largest)) for size in shape)
        return Torus(axes, chip.link_bandwidth_one_way, chip.hop_latency, twisted)

    def check(self, shape: tuple[int, ...], chip: Chip) -> None:
        """Refuse a shape that the generation does not have, saying which rule it breaks and what is near."""
        if len(shape) != self.num_axes:
            raise ClusterError(self._wrong_axes(shape, chip))
        text = _text(shape)
        if math.prod(shape) > self.largest_num_chips or not self._fits(shape):
            raise ClusterError(f"{chip.title} has no slice {text} ({math.prod(shape):,} chips): {self._limit(chip)}")
        if not self._exists(shape):
            near = self._nearest(math.prod(shape))
            raise ClusterError(f"{chip.title} has no slice {text}: {self._rule()}. Nearest: {near}")

    def shape_of(self, num_chips: int, chip: Chip) -> tuple[int, ...]:
        """The shape that a bare count of chips stands for: the most compact slice, short axes first.

        Raises:
            ClusterError: when no slice has that many chips; names the nearest counts.
        """
        if num_chips > self.largest_num_chips:
            raise ClusterError(f"{chip.title} has no slice of {num_chips:,} chips: {self._limit(chip)}")
        shapes = self._shapes(num_chips)
        if not shapes:
            near = self._nearest(num_chips)
            raise ClusterError(f"{chip.title} has no slice of {num_chips:,} chips: {self._rule()}. Nearest: {near}")
        return min(shapes, key=_compactness)

    def _limit(self, chip: Chip) -> str:
        largest = f"the largest is {_text(self.largest)} ({self.largest_num_chips:,} chips)"
        return f"{largest}. For more, join slices over the data-centre network: {chip.name}:SHAPE*2"

    def counts_near(self, num_chips: int) -> tuple[int, ...]:
        """The nearest counts of chips below and above that a slice can have."""
        below = next((n for n in range(min(num_chips - 1, self.largest_num_chips), 0, -1) if self._shapes(n)), None)
        above = next((n for n in range(num_chips + 1, self.largest_num_chips + 1) if self._shapes(n)), None)
        return tuple(n for n in (below, above) if n is not None)

    def slice_counts(self) -> tuple[int, ...]:
        """All counts of chips that a slice can have, rising."""
        limit = self.largest_num_chips
        sizes = [n for n in range(1, limit + 1) if self._exists((n,) * self.num_axes)]

        def shapes(head: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
            left = self.num_axes - len(head)
            if left == 0:
                yield head
            for size in (n for n in sizes if left and n >= max(head, default=1)):
                if math.prod(head) * size**left > limit:
                    return
                yield from shapes((*head, size))

        return tuple(sorted({math.prod(s) for s in shapes(()) if self._exists(s) and self._fits(s)}))

    def _nearest(self, num_chips: int) -> str:
        counts = ([num_chips] if self._shapes(num_chips) else []) + list(self.counts_near(num_chips))
        shapes = [min(self._shapes(n), key=_compactness) for n in counts]
        return ", ".join(f"{_text(shape)} ({math.prod(shape):,} chips)" for shape in shapes)

    def _fits(self, shape: tuple[int, ...]) -> bool:
        """Cubes can be joined in any arrangement; a fixed 2D pod can only be cut."""
        if self.wraps == "cubes":
            return True
        return all(size <= limit for size, limit in zip(sorted(shape), sorted(self.largest), strict=True))

    def _exists(self, shape: tuple[int, ...]) -> bool:
        if self.wraps == "cubes":
            return all(size % _CUBE == 0 for size in shape) or all(size in _PART for size in shape)
        return all(size & (size - 1) == 0 for size in shape)

    def _shapes(self, num_chips: int) -> list[tuple[int, ...]]:
        """List the shapes with `num_chips` chips, axes in ascending order."""
        sizes = [n for n in range(1, num_chips + 1) if num_chips % n == 0]
        shapes = []
        for head in itertools.combinations_with_replacement(sizes, self.num_axes - 1):
            last, rest = divmod(num_chips, math.prod(head))
            if rest == 0 and last >= head[-1] and self._exists((*head, last)) and self._fits((*head, last)):
                # the cloud writes one host's worth of a 3D pod as 2x2x1, not 1x2x2
                shapes.append((last, *head[::-1]) if self.num_axes == 3 and head[0] == 1 else (*head, last))
        return shapes

    def _rule(self) -> str:
        if self.wraps == "cubes":
            parts = "full 4x4x4 cubes (every axis a multiple of 4)"
            return f"a 3D slice is built of {parts} or is a part of one cube (axes of 1, 2 or 4)"
        return f"axes are powers of two up to {_text(self.largest)}"

    def _wrong_axes(self, shape: tuple[int, ...], chip: Chip) -> str:
        has = f"{chip.title} slices have {self.num_axes} axes (the largest is {_text(self.largest)})"
        found = f"{has}, found {len(shape)} in {_text(shape)!r}"
        if len(shape) == self.num_axes + 1:
            return f"{found}. For {shape[-1]} slices write {chip.name}:{_text(shape[:-1])}*{shape[-1]}"
        fits = math.prod(shape) <= self.largest_num_chips
        return f"{found}. Nearest: {self._nearest(math.prod(shape)) if fits else _text(self.largest)}"


def _compactness(shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Order shapes of one count: the smaller the sum of the axes, the shorter the rings."""
    return sum(shape), shape[::-1]


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape)
