"""Local lengths: how much of each axis a device holds, and the volumes and sums of bytes that follow from them.

A lowered program names its volumes and sums by number (`Symbols`); sizes, floats or arrays of candidates, come with a
mesh (`Extents`). Axes that do not divide are padded, as XLA pads them: the ceiling is the waste. Not here: what holds
or moves them (`memory`, `traffic`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

from meshwise.core.dtypes import DType
from meshwise.core.tensors import Kind, Tensor
from meshwise.costs.arithmetic import Condition, Num, ceil, maximum, where
from meshwise.jobs import Precision
from meshwise.sharding.placed import Held, LocalOp

#: The mesh axes that split an axis, major to minor.
Split = tuple[str, ...]

#: Number of a volume, and of a weighted sum of volumes, in `Symbols`. Sum 0 is the empty one.
Volume = int
WeightedSum = int

#: Sequences are refused at the door where they do not divide, and slots of experts are an average: neither is rounded
#: here.
NEVER_PADDED = ("B", "C")

#: Axis of the positions of a chunk whose logits are made at a time; one device's own.
CHUNK_AXIS = "chunk"

T = TypeVar("T", bound=Hashable)


class Distinct(Generic[T]):
    """Distinct values, numbered in the order in which they are first asked for."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._numbers: dict[T, int] = {}

    def __call__(self, value: T) -> int:
        """The number of `value`, a new one if it was not asked for before."""
        numbers = self._numbers
        if value in numbers:
            return numbers[value]
        number = numbers[value] = len(self.values)
        self.values.append(value)
        return number


class Symbols:
    """The volumes and weighted sums of a lowered program, each distinct one once, before sizes are known.

    A length is an axis and the mesh axes that split it, a volume a product of lengths, a term a volume times its
    weight (bytes per element, mostly), a sum a tuple of terms.
    """

    def __init__(self) -> None:
        self.lengths = Distinct[tuple[str, Split]]()
        self.volumes = Distinct[tuple[int, ...]]()
        self.terms = Distinct[tuple[Volume, float]]()
        self.sums = Distinct[tuple[int, ...]]()
        self.sums(())
        # What backward passes of these operations, which read and make these, hold at their largest (`memory_plan`).
        self.moments: dict[tuple[tuple[LocalOp, ...], frozenset[str], Precision], tuple[tuple[int, int], ...]] = {}
        self._held: dict[tuple[Split, tuple[Split, ...]], Volume] = {}  # placements ask for the same few all the time

    def volume(self, axes: Iterable[str], splits: Iterable[Split]) -> Volume:
        """The volume of a block with these axes and splits."""
        return self.volumes(tuple(self.lengths(pair) for pair in sorted(zip(axes, splits, strict=True))))

    def held(self, held: Held) -> Volume:
        """The volume of a tensor's block."""
        key = held.tensor.axes, held.sharding.splits
        return self._held[key] if key in self._held else self.block(*key)

    def block(self, axes: Split, splits: tuple[Split, ...]) -> Volume:
        """The volume of a block with these axes and splits, which is asked for often."""
        key = axes, splits
        if key not in self._held:
            self._held[key] = self.volume(*key)
        return self._held[key]

    def sum(self, terms: Iterable[tuple[Volume, float]]) -> WeightedSum:
        """A weighted sum; terms of equal volumes are merged."""
        merged: dict[Volume, float] = {}
        for volume, weight in terms:
            merged[volume] = merged[volume] + weight if volume in merged else 0.0 + weight
        return self.sums(tuple(map(self.terms, merged.items())))

    def held_bytes(self, held: Iterable[Held], precision: Precision) -> WeightedSum:
        """Bytes of tensors as they are held."""
        return self.sum((self.held(h), element_bytes(h.tensor, precision)) for h in held)

    def weights(self, total: WeightedSum) -> dict[Volume, float]:
        """Volume -> weight of the terms of a sum."""
        return dict(self.terms.values[term] for term in self.sums.values[total])


class Extents:
    """Axis sizes on a mesh, and what they make of a program's symbols: each worked out once, when first asked for.

    Args:
        symbols: of the lowered program.
        sizes: tensor axis -> global size.
        mesh: mesh axis -> number of devices along it.
        never_padded: tensor axes whose shares are not rounded up.
    """

    def __init__(
        self,
        symbols: Symbols,
        sizes: Mapping[str, Num],
        mesh: Mapping[str, Num],
        never_padded: tuple[str, ...] = NEVER_PADDED,
    ) -> None:
        self.symbols = symbols
        self.never_padded = never_padded
        self.sizes = sizes
        self.mesh = mesh
        self._devices: dict[Split, Num] = {(): 1.0}
        self._remote: dict[Split, Num] = {}
        self._lengths: dict[int, Num] = {}
        self._volumes: dict[Volume, Num] = {}
        self._tiled: dict[tuple[Volume, int], Num] = {}
        self._terms: dict[int, Num] = {}
        self._sums: dict[WeightedSum, Num] = {0: 0.0}

    def devices(self, split: Split) -> Num:
        """Devices along the mesh axes of `split` together."""
        if split not in self._devices:
            known: Num = 1.0
            for axis in split:
                known = known * self.mesh[axis]
            self._devices[split] = known
        return self._devices[split]

    def remote_fraction(self, split: Split) -> Num:
        """Share of an array split over `split` that a device does not hold."""
        known = self._remote.get(split)
        if known is None:
            known = self._remote[split] = 1 - 1 / self.devices(split)
        return known

    def length(self, axis: str, split: Split) -> Num:
        """Elements of `axis` that one device holds, padding included.

        Where weights are stored over more ways than the model is wide, a second dimension of theirs is split, or all
        elements in a row: a device holds a part of a row, and nothing is padded.
        """
        size = self.sizes[axis]
        share = size / self.devices(split) if split else size
        if axis in self.never_padded:
            return share
        return where(share < 1, share, ceil(share)) if axis == "D" and split else ceil(share)

    def volume(self, volume: Volume) -> Num:
        """Product of its local lengths."""
        if volume in self._volumes:
            return self._volumes[volume]
        symbols, lengths = self.symbols, self._lengths
        known: Num | None = None
        for number in symbols.volumes.values[volume]:
            if number not in lengths:
                lengths[number] = self.length(*symbols.lengths.values[number])
            known = lengths[number] if known is None else known * lengths[number]
        self._volumes[volume] = 1.0 if known is None else known
        return self._volumes[volume]

    def tiled(self, volume: Volume, unit: int) -> Num:
        """Padded over real length when a volume is rounded up to whole tiles of `unit`."""
        known = self._tiled.get((volume, unit))
        if known is None:
            length = self.volume(volume)
            known = self._tiled[volume, unit] = ceil(length / unit) * unit / length
        return known

    def weighted(self, total: WeightedSum) -> Num:
        """A sum of volumes, each times its weight."""
        if total in self._sums:
            return self._sums[total]
        symbols, terms = self.symbols, self._terms
        known: Num | None = None
        for number in symbols.sums.values[total]:
            if number not in terms:
                volume, weight = symbols.terms.values[number]
                terms[number] = self.volume(volume) * weight
            known = terms[number] if known is None else known + terms[number]
        assert known is not None, "the empty sum is known"
        self._sums[total] = known
        return known

    def over_stages(self, total: WeightedSum) -> Num:
        """Share of a sum whose tensors have a dimension that stages can divide: over no other axis than tensor."""
        whole, shared = self.weighted(total), 0.0 * self.weighted(total)
        for volume, weight in self.symbols.weights(total).items():
            pairs = (self.symbols.lengths.values[number] for number in self.symbols.volumes.values[volume])
            divides: Condition = False
            for axis, split in pairs:
                alone = self.devices(tuple(a for a in split if a != "tensor")) == 1
                divides = divides | (alone & (self.sizes[axis] % (self.devices(split) * self.mesh["stage"]) == 0))
            shared = shared + divides * self.volume(volume) * weight
        return shared / maximum(whole, 1.0)


def element_bytes(tensor: Tensor, precision: Precision) -> float:
    """Bytes of one element: the tensor's own format with its scales, else what the precision policy gives its kind."""
    if tensor.dtype is not None:
        return tensor.dtype.bytes + tensor.scale_bytes
    match tensor.kind:
        case Kind.WEIGHT:
            return precision.weights.bytes
        case Kind.GRADIENT:
            return precision.gradients.bytes
        case Kind.ACTIVATION | Kind.KV_CACHE:
            return precision.activations.bytes
        case Kind.INDEX:
            return DType.FP32.bytes  # 32-bit integers
