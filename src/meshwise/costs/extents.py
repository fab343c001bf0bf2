"""Local lengths: how much of each axis a device holds, once for every (axis, split) that a placement mentions.

Sizes may be floats or arrays of candidates. Axes that do not divide are padded, as XLA pads them: the ceiling is the waste.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwise.costs.arithmetic import ceil
from meshwise.dtypes import DType
from meshwise.jobs import Precision
from meshwise.sharding import Sharding
from meshwise.sharding.place import Held
from meshwise.tensors import Kind, Tensor

__all__ = ["Extents", "element_bytes"]

Split = tuple[str, ...]

#: Sequences are refused at the door where they do not divide, and slots of experts are an average: neither is rounded here.
_NEVER_PADDED = ("B", "C")


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
        self._elements: dict[tuple[tuple[str, Split], ...], Any] = {}

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
            self._lengths[key] = share if axis in _NEVER_PADDED else ceil(share)
        return self._lengths[key]

    def volume(self, pairs: tuple[tuple[str, Split], ...]) -> Any:
        """Product of local lengths of `pairs` of (axis, split)."""
        key = tuple(sorted(pairs))
        if key not in self._elements:
            total: Any = 1.0
            for axis, split in key:
                total = total * self.length(axis, split)
            self._elements[key] = total
        return self._elements[key]

    def elements(self, tensor: Tensor, sharding: Sharding) -> Any:
        """Elements of one device's block."""
        return self.volume(tuple(zip(tensor.axes, sharding.splits, strict=True)))

    def held_bytes(self, held: Held, precision: Precision) -> Any:
        """Bytes of one device's block."""
        return self.elements(held.tensor, held.sharding) * element_bytes(held.tensor, precision)


def element_bytes(tensor: Tensor, precision: Precision) -> float:
    """Bytes of one element: the tensor's own format, else what the precision policy gives its kind."""
    if tensor.dtype is not None:
        return tensor.dtype.bytes
    by_kind = {
        Kind.WEIGHT: precision.weights,
        Kind.ACTIVATION: precision.activations,
        Kind.GRADIENT: precision.gradients,
        Kind.KV_CACHE: precision.activations,
        Kind.INDEX: DType.FP32,  # 32-bit integers
    }
    return by_kind[tensor.kind].bytes
