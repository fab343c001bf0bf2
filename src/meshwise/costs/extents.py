"""Local lengths: how much of each axis a device holds, once for every (axis, split) that a placement mentions.

Sizes may be floats or arrays of candidates. Axes that do not divide are padded, as XLA pads them: the ceiling is the
waste. Not here: what holds or moves them (`memory`, `traffic`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from meshwise.core.dtypes import DType
from meshwise.core.tensors import Kind, Tensor
from meshwise.costs.arithmetic import ceil
from meshwise.jobs import Precision
from meshwise.sharding.placed import Held

#: The mesh axes that split an axis, major to minor.
Split = tuple[str, ...]
Volume = tuple[tuple[str, Split], ...]  # (axis, split), sorted
WeightedSum = tuple[tuple[Volume, float], ...]

#: Sequences are refused at the door where they do not divide, and slots of experts are an average: neither is rounded
#: here.
NEVER_PADDED = ("B", "C")


class Extents:
    """Axis sizes on a mesh.

    Args:
        sizes: tensor axis -> global size.
        mesh: mesh axis -> number of devices along it.
        never_padded: tensor axes whose shares are not rounded up.
    """

    def __init__(
        self, sizes: Mapping[str, Any], mesh: Mapping[str, Any], never_padded: tuple[str, ...] = NEVER_PADDED
    ) -> None:
        self.never_padded = never_padded
        self.sizes = sizes
        self.mesh = mesh
        self._devices: dict[Split, Any] = {(): 1.0}
        self._lacking: dict[Split, Any] = {}
        self._lengths: dict[tuple[str, Split], Any] = {}
        # By the identities of what plans hold once for all that are equal: hashing long keys would take longer than the
        # arithmetic. They are kept, so that their identities stay their own.
        self._kept: list[object] = []
        self._shares: dict[int, Any] = {}
        self._volumes: dict[int, Any] = {}
        self._tiled: dict[tuple[int, int], Any] = {}
        self._parts: dict[int, Any] = {}
        self._sums: dict[int, Any] = {}
        self._scaled: dict[tuple[int, Split], Any] = {}

    def devices(self, split: Split) -> Any:
        """Devices along the mesh axes of `split` together."""
        if split not in self._devices:
            total: Any = 1.0
            for axis in split:
                total = total * self.mesh[axis]
            self._devices[split] = total
        return self._devices[split]

    def lacking(self, split: Split) -> Any:
        """Share of an array split over `split` that a device does not hold."""
        known = self._lacking.get(split)
        if known is None:
            known = self._lacking[split] = 1 - 1 / self.devices(split)
        return known

    def length(self, axis: str, split: Split) -> Any:
        """Elements of `axis` that one device holds, padding included."""
        key = (axis, split)
        if key not in self._lengths:
            size = self.sizes[axis]
            share = size / self.devices(split) if split else size
            self._lengths[key] = share if axis in self.never_padded else ceil(share)
        return self._lengths[key]

    def volume(self, key: Volume) -> Any:
        """Product of the local lengths of `key`'s axes."""
        known = self._volumes.get(id(key))
        if known is not None:
            return known
        total: Any = None
        for pair in key:
            length = self._shares.get(id(pair))
            if length is None:
                length = self._shares[id(pair)] = self.length(*pair)
            total = length if total is None else total * length
        self._kept.append(key)
        self._volumes[id(key)] = total = 1.0 if total is None else total
        return total

    def tiled(self, key: Volume, unit: int) -> Any:
        """Padded over real length when a volume is rounded up to whole tiles of `unit`."""
        known = self._tiled.get((id(key), unit))
        if known is None:
            length = self.volume(key)
            known = self._tiled[id(key), unit] = ceil(length / unit) * unit / length
        return known

    def weighted(self, sum_of: WeightedSum) -> Any:
        """Sum of volumes, each times its weight (bytes per element, mostly); worked out once for each sum."""
        known = self._sums.get(id(sum_of))
        if known is not None:
            return known
        total: Any = None
        for pair in sum_of:
            part = self._parts.get(id(pair))
            if part is None:
                part = self._parts[id(pair)] = self.volume(pair[0]) * pair[1]
            total = part if total is None else total + part
        self._kept.append(sum_of)
        self._sums[id(sum_of)] = total = 0.0 if total is None else total
        return total

    def scaled(self, sum_of: WeightedSum, split: Split) -> Any:
        """The same times the devices along `split`; equal ones are one and the same value."""
        key = id(sum_of), split
        known = self._scaled.get(key)
        if known is None:
            known = self._scaled[key] = self.weighted(sum_of) * self.devices(split)
        return known


def volume_key(axes: Iterable[str], splits: Iterable[Split]) -> Volume:
    """The key of a block with these axes and splits, one and the same for equal blocks."""
    key: Volume = the_same(tuple(the_same(pair) for pair in sorted(zip(axes, splits, strict=True))))
    return key


def held_key(held: Held) -> Volume:
    """The key of a tensor's block."""
    return volume_key(held.tensor.axes, held.sharding.splits)


def weighted_sum(terms: Iterable[tuple[Volume, float]]) -> WeightedSum:
    """Merge equal volumes; equal sums are one and the same value."""
    merged: dict[Volume, float] = {}
    for key, weight in terms:
        merged[key] = merged.get(key, 0.0) + weight
    whole: WeightedSum = the_same(tuple(the_same(pair) for pair in merged.items()))
    return whole


_VALUES: dict[Any, Any] = {}


def the_same(value: Any) -> Any:
    """One value for all that are equal, so that what depends on it can be told by its identity, and done once."""
    return _VALUES.setdefault(value, value)


def held_bytes(held: Iterable[Held], precision: Precision) -> WeightedSum:
    """Bytes of tensors as they are held, as a sum still to be given sizes."""
    return weighted_sum((held_key(h), element_bytes(h.tensor, precision)) for h in held)


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
