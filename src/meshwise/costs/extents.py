"""Local lengths: how much of each axis a device holds, once for every (axis, split) that a placement mentions.

Sizes may be floats or arrays of candidates. Axes that do not divide are padded, as XLA pads them: the ceiling is the
waste. Not here: what holds or moves them (`memory`, `traffic`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from meshwise.costs.arithmetic import ceil
from meshwise.dtypes import DType
from meshwise.jobs import Precision
from meshwise.sharding.place import Held
from meshwise.tensors import Kind, Tensor

__all__ = [
    "NEVER_PADDED",
    "Extents",
    "Split",
    "Volume",
    "WeightedSum",
    "element_bytes",
    "held_bytes",
    "held_key",
    "volume_key",
    "weighted_sum",
]

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
    """

    def __init__(self, sizes: Mapping[str, Any], mesh: Mapping[str, Any]) -> None:
        self.sizes = sizes
        self.mesh = mesh
        self._devices: dict[Split, Any] = {(): 1.0}
        self._lengths: dict[tuple[str, Split], Any] = {}
        self._volumes: dict[Volume, Any] = {}

    def devices(self, split: Split) -> Any:
        """Devices along the mesh axes of `split` together."""
        if split not in self._devices:
            total: Any = 1.0
            for axis in split:
                total = total * self.mesh[axis]
            self._devices[split] = total
        return self._devices[split]

    def length(self, axis: str, split: Split) -> Any:
        """Elements of `axis` that one device holds, padding included."""
        key = (axis, split)
        if key not in self._lengths:
            size = self.sizes[axis]
            share = size / self.devices(split) if split else size
            self._lengths[key] = share if axis in NEVER_PADDED else ceil(share)
        return self._lengths[key]

    def volume(self, key: Volume) -> Any:
        """Product of the local lengths of `key`'s axes."""
        if key not in self._volumes:
            total: Any = 1.0
            for axis, split in key:
                total = total * self.length(axis, split)
            self._volumes[key] = total
        return self._volumes[key]

    def weighted(self, sum_of: WeightedSum) -> Any:
        """Sum of volumes, each times its weight (bytes per element, mostly)."""
        total: Any = 0.0
        for key, weight in sum_of:
            total = total + self.volume(key) * weight
        return total


def volume_key(axes: Iterable[str], splits: Iterable[Split]) -> Volume:
    """The key of a block with these axes and splits, equal for equal blocks."""
    return tuple(sorted(zip(axes, splits, strict=True)))


def held_key(held: Held) -> Volume:
    """The key of a tensor's block."""
    return volume_key(held.tensor.axes, held.sharding.splits)


def weighted_sum(terms: Iterable[tuple[Volume, float]]) -> WeightedSum:
    """Merge equal volumes."""
    merged: dict[Volume, float] = {}
    for key, weight in terms:
        merged[key] = merged.get(key, 0.0) + weight
    return tuple(merged.items())


def held_bytes(held: Iterable[Held], precision: Precision) -> WeightedSum:
    """Bytes of tensors as they are held, as a sum still to be given sizes."""
    return weighted_sum((held_key(h), element_bytes(h.tensor, precision)) for h in held)


def element_bytes(tensor: Tensor, precision: Precision) -> float:
    """Bytes of one element: the tensor's own format with its scales, else what the precision policy gives its kind."""
    if tensor.dtype is not None:
        return tensor.dtype.bytes + tensor.scale_bytes
    by_kind = {
        Kind.WEIGHT: precision.weights,
        Kind.ACTIVATION: precision.activations,
        Kind.GRADIENT: precision.gradients,
        Kind.KV_CACHE: precision.activations,
        Kind.INDEX: DType.FP32,  # 32-bit integers
    }
    return by_kind[tensor.kind].bytes
