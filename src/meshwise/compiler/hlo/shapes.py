"""Shapes of compiled programs: element types, dimensions, layouts, tiles, memory spaces, and their bytes.

`bf16[512,16,128]{2,0,1:T(8,128)(2,1)S(1)}` is an array of which the last dimension is minor-most, in tiles of 8 x 128,
in memory space 1 (VMEM of a TPU). Not here: what produces an array (`instructions`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from meshwise.core.errors import CompilerError

#: Number of a memory space as TPU programs write it -> what it is.
MEMORY_SPACES = {0: "HBM", 1: "VMEM", 2: "SMEM", 3: "HBM", 4: "SFLAG", 5: "host"}

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"(?P<dtype>[a-z][a-z0-9]*)\[(?P<dims>[^\]]*)\](?:\{(?P<layout>[^{}]*)\})?")
_BETWEEN = re.compile(r"[,\s]*")
_TILE = re.compile(r"\(([\d,*]*)\)")


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """One array.

    Args:
        dtype: of its elements, as XLA writes it (`bf16`, `f32`, `s32`, `pred`, ...).
        dims: sizes; of dynamic dimensions the largest.
        minor_to_major: dimensions, the one whose neighbours are next to each other first.
        tiles: each laid over what the one before leaves; the outermost first.
        memory_space: a key of `MEMORY_SPACES`, 0 where nothing is said.
    """

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...] = ()
    tiles: tuple[tuple[int, ...], ...] = ()
    memory_space: int = 0

    @property
    def element_bits(self) -> int:
        """Bits of one element: 16 of bf16; 8 of a truth value.

        >>> [parse_shape(s).element_bits for s in ("bf16[2]", "f8e4m3fn[2]", "s4[2]", "c64[2]", "pred[]")]
        [16, 8, 4, 64, 8]
        """
        if self.dtype in _BITS:
            return _BITS[self.dtype]
        found = re.search(r"\d+", self.dtype)
        assert found is not None, f"an element type without a size: {self.dtype}"
        return int(found[0])

    @property
    def elements(self) -> int:
        """How many there are, padding left out."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements, padding left out."""
        return math.ceil(self.elements * self.element_bits / 8)

    @property
    def padded_bytes(self) -> int:
        """Bytes that it takes in memory: the minor-most dimensions are rounded up to whole tiles of the first kind.

        >>> parse_shape("bf16[2048,8]{1,0:T(8,128)(2,1)}").padded_bytes
        524288
        """
        if not self.tiles or not self.dims:
            return self.num_bytes
        sizes = [self.dims[d] for d in self.minor_to_major]
        for place, tile in enumerate(reversed(self.tiles[0])):
            if place < len(sizes) and tile > 0:
                sizes[place] = math.ceil(sizes[place] / tile) * tile
        return math.ceil(math.prod(sizes) * self.element_bits / 8)

    @property
    def arrays(self) -> tuple[ArrayShape, ...]:
        """Itself."""
        return (self,)


@dataclass(frozen=True, slots=True)
class TupleShape:
    """Several shapes together."""

    parts: tuple[Shape, ...]

    @property
    def arrays(self) -> tuple[ArrayShape, ...]:
        """All arrays in it, in order."""
        return tuple(array for part in self.parts for array in part.arrays)

    @property
    def num_bytes(self) -> int:
        """Bytes of all, padding left out."""
        return sum(array.num_bytes for array in self.arrays)

    @property
    def padded_bytes(self) -> int:
        """Bytes that all take in memory."""
        return sum(array.padded_bytes for array in self.arrays)


Shape = ArrayShape | TupleShape


@lru_cache(maxsize=1 << 16)  # programs write the same shapes over and over
def parse_shape(text: str) -> Shape:
    """Read a shape.

    >>> parse_shape("(f32[2,3]{1,0}, s32[])").num_bytes
    28

    Raises:
        CompilerError: text that is no shape.
    """
    shape, end = _shape(text, 0)
    if text[end:].strip():
        raise CompilerError(f"HLO text: expected a shape, found {text!r}")
    return shape


def _shape(text: str, start: int) -> tuple[Shape, int]:
    """Read the shape that begins at `start`; give it and where it ends."""
    if text.startswith("(", start):
        parts = []
        at = start + 1
        while not text.startswith(")", at):
            part, at = _shape(text, at)
            parts.append(part)
            at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # (it matches nothing, too)
        return TupleShape(tuple(parts)), at + 1
    match = _ARRAY.match(text, start)
    if match is None:
        raise CompilerError(f"HLO text: expected a shape, found {text[start : start + 40]!r}")
    return _array(match["dtype"], match["dims"], match["layout"] or ""), match.end()


def _array(dtype: str, dims: str, layout: str) -> ArrayShape:
    order, _, rest = layout.partition(":")
    space = re.search(r"S\((\d+)\)", rest)
    tiled = re.search(r"T((?:\([\d,*]*\))+)", rest)
    sizes = tuple(int(d.strip().removeprefix("<=")) for d in dims.split(",") if d.strip())
    return ArrayShape(
        dtype=dtype,
        dims=sizes,
        minor_to_major=tuple(_numbers(order)) if order else tuple(reversed(range(len(sizes)))),
        tiles=tuple(tuple(_tile(t)) for t in _TILE.findall(tiled[1])) if tiled else (),
        memory_space=int(space[1]) if space else 0,
    )


def _numbers(text: str) -> Iterator[int]:
    return (int(n) for n in text.split(",") if n)


def _tile(text: str) -> Iterator[int]:
    """Sizes of a tile; `*` (the whole dimension) counts as 0, which pads nothing."""
    return (0 if n == "*" else int(n) for n in text.split(",") if n)
