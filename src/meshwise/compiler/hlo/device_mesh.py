"""The mesh that a program was compiled for: its axes, and which of its places lie in which slice.

Programs of several slices are compiled once for all slices: their groups count the devices of one slice, and what
crosses slices is sent by the multi-slice runtime. Not here: devices themselves (`meshwise.compiler.placement`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """A mesh.

    Args:
        sizes: axis -> size, outermost first.
        slices: slice of each place of the flattened mesh; empty where there is one.

    >>> mesh = DeviceMesh({"fsdp": 2, "tensor": 4}, (0, 0, 0, 0, 1, 1, 1, 1))
    >>> mesh.num_slices, mesh.slice_axes, mesh.partitions(4)
    (2, ('fsdp',), (0, 1, 2, 3))
    """

    sizes: Mapping[str, int]
    slices: Sequence[int] = ()

    @property
    def num_devices(self) -> int:
        """Places of the mesh."""
        return math.prod(self.sizes.values())

    @property
    def num_slices(self) -> int:
        """How many slices its devices lie in."""
        return len(set(self.slices)) or 1

    @property
    def slice_axes(self) -> tuple[str, ...]:
        """Mesh axes that cross slices, outermost first."""
        if self.num_slices == 1:
            return ()
        array = np.array(self.slices).reshape(tuple(self.sizes.values()))
        return tuple(name for d, name in enumerate(self.sizes) if bool((np.diff(array, axis=d) != 0).any()))

    def partitions(self, number: int) -> tuple[int, ...]:
        """Places of the mesh of the partitions that a program counts: all, or those of the first slice."""
        if number == self.num_devices or not self.slices:
            return tuple(range(number))
        return tuple(p for p, s in enumerate(self.slices) if s == min(self.slices))
