"""Which device stands where in a mesh: mesh axes laid along the network as a layout's wires say.

Not here: choosing wires (`planning`), or what a group of devices can send (`costs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshwise.compiler.hlo.groups import DeviceMesh
from meshwise.core.errors import CompilerError
from meshwise.sharding.layout import MESH_AXES, Layout


def place_devices(devices: Sequence[Any], layout: Layout) -> Any:
    """Arrange devices as the layout's wires place its mesh axes on the network.

    Within one dimension of the network axes nest in the order of `MESH_AXES`, innermost first, as costs price them.

    Args:
        devices: of the target, in any order: TPUs know their coordinates and slice, GPUs their number.
        layout: with wires.

    Returns: an array of the mesh's shape, axes of more than one device, outermost first (or one axis of size 1).

    Raises:
        CompilerError: another number of devices than the layout has chips; a layout without wires.
    """
    if layout.wires is None:
        raise CompilerError(f"layout {layout}: expected wires, which say where each mesh axis lies; plans have them")
    if len(devices) != layout.num_chips:
        raise CompilerError(f"layout {layout} has {layout.num_chips:,} chips, found {len(devices):,} devices")
    sizes = {axis: layout.sizes[axis] for axis in layout.used_axes} or {"data": 1}
    wires = dict(layout.wires)
    return arrange(devices, sizes, {axis: wires[axis] for axis in MESH_AXES if axis in wires})


def arrange(devices: Sequence[Any], sizes: Mapping[str, int], wires: Mapping[str, Sequence[int]]) -> Any:
    """Arrange devices as mesh axes lie on the network.

    Args:
        devices: of the target, in any order.
        sizes: of the mesh axes, outermost first.
        wires: mesh axis -> its extents on the network, axes in the order in which they nest, innermost first.

    Returns: an array of the mesh's shape.
    """
    dimensions = max((len(extents) for extents in wires.values()), default=0)
    factors = [(axis, wires[axis][d]) for d in range(dimensions) for axis in wires if wires[axis][d] > 1]
    ordered = np.empty(len(devices), dtype=object)
    ordered[:] = sorted(devices, key=_place)
    grid = ordered.reshape([extent for _, extent in reversed(factors)])  # outermost first
    names = [axis for axis, _ in reversed(factors)]
    order = [d for axis in sizes for d, name in enumerate(names) if name == axis]
    return grid.transpose(order).reshape(tuple(sizes.values()))


def device_mesh(placed: Any, layout: Layout) -> DeviceMesh:
    """Describe the mesh of placed devices: its axes, and the slices of its places where there are several."""
    return mesh_of(placed, {axis: layout.sizes[axis] for axis in layout.used_axes} or {"data": 1})


def mesh_of(placed: Any, sizes: Mapping[str, int]) -> DeviceMesh:
    """As `device_mesh`, of any mesh."""
    slices = tuple(_slice_of(device) for device in placed.reshape(-1))
    return DeviceMesh(dict(sizes), slices if len(set(slices)) > 1 else ())


def _slice_of(device: Any) -> int:
    return int(getattr(device, "slice_index", 0) or 0)


def _place(device: Any) -> tuple[int, ...]:
    """Order devices as they lie in the network: the first dimension fastest, slices last; GPUs by number.

    Coordinates of GPUs are those of domain, host and place in it, the last of which is fastest.
    """
    coordinates = (getattr(device, "coords", None) or ()) if device.platform == "tpu" else ()
    return (_slice_of(device), *reversed([int(c) for c in coordinates]), int(device.id))
