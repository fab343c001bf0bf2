"""Which gathers of experts' weights are waited for before rows are sent to experts, and at which operation.

XLA's scheduler for GPUs takes collectives of programs with ragged AllToAlls for equally long: it starts gathers of
experts' weights where the exchange begins, which takes less than they do. One that has come before an operation in
front of it has to start as the layer does. Not here: how an operation waits (`forward`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from meshwise.core.tensors import Attention, Einsum, Kind, Op, Route, Tensor
from meshwise.runtime.kernels.counted import rates
from meshwise.runtime.shardings import Placement
from meshwise.sharding import Sharding

#: A weight, and where it is read.
Gathered = tuple[Tensor, Sharding]

#: Operations are not as fast as data sheets say: what comes this much later than the clock has come in time.
_LATER = 1.2


def waited_for(
    ops: Sequence[Op],
    gathers: Sequence[Gathered],
    held: Mapping[str, Sharding],
    placement: Placement,
    *,
    sizes: Mapping[str, float],
    width: int,
) -> dict[str, list[Gathered]]:
    """Which gathers are waited for, by the name of the operation that waits.

    Args:
        ops: of a layer, up to the dispatch of rows, of which it is the last.
        gathers: of all weights, in the order in which they are read.
        held: where weights are stored, by name.
        placement: of the layout.
        sizes: of the operations' axes.
        width: bytes of a number that travels.
    """
    dispatch, *before = ops[-1], *ops[:-1]
    assert isinstance(dispatch, Route), "the last operation sends rows"
    first = {t.name for op in before for t in op.inputs if t.kind is Kind.WEIGHT}
    rows = dispatch.inputs[0]
    sent = math.prod(sizes[a] for a in rows.axes) * sizes["top_k"] * width / placement.mesh.size
    exchange = sent * _seconds_of_byte(("expert",), placement)
    wire = 0.0
    due: list[tuple[Gathered, float, float]] = []
    for t, at in dict.fromkeys(gathers):
        splits = zip(held[t.name].splits, at.splits, strict=True)
        over = tuple(a for stored, read in splits for a in placement.split(stored) if a not in read)
        part = math.prod(sizes[a] for a in t.axes) / math.prod(placement.ways(s) for s in at.splits)
        begin, wire = wire, wire + part * width * _seconds_of_byte(over, placement)
        if t.name not in first:
            due.append(((t, at), begin, wire))
    long = [(gather, end) for gather, begin, end in due if wire - begin > exchange]
    found: dict[str, list[Gathered]] = {}
    clock = 0.0
    for op in ops:
        while long and long[0][1] <= _LATER * clock:
            found.setdefault(op.name, []).append(long.pop(0)[0])
        clock += 0.0 if op is dispatch else _seconds(op, placement, sizes, width)
    return found


def _seconds(op: Op, placement: Placement, sizes: Mapping[str, float], width: int) -> float:
    """Of an operation on a device."""
    known = rates(placement.kind)
    num_bytes = width * sum(math.prod(sizes[a] for a in t.axes) for t in op.tensors)
    flops = op.flops(sizes) if isinstance(op, (Attention, Einsum)) else 0.0
    return max(float(flops) / known.flops, num_bytes / known.memory) / placement.mesh.size


def _seconds_of_byte(axes: tuple[str, ...], placement: Placement) -> float:
    """Of each byte that a device holds after a gather over mesh axes, or sends along them."""
    if not axes:
        return 0.0
    places = [placement.mesh.axis_names.index(a) for a in axes]
    group = np.moveaxis(placement.mesh.devices, places, range(len(axes))).reshape(placement.ways(axes), -1)[:, 0]
    near, known = sum(device.process_index == group[0].process_index for device in group), rates(placement.kind)
    rate = known.near if near == len(group) else min(known.near, known.far * near)
    return (1 - 1 / len(group)) / rate
