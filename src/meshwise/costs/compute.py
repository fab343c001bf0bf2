"""Time of a placed block's local operations on one chip: each as long as its FLOPs or its bytes need.

Not here: collectives (`traffic`), or how blocks make a step (`step`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from meshwise.costs.arithmetic import ceil, maximum
from meshwise.costs.calibration import Calibration
from meshwise.costs.extents import Extents, element_bytes
from meshwise.hardware import Chip
from meshwise.jobs import Precision
from meshwise.sharding.place import LocalOp, PlacedBlock, Transfer
from meshwise.tensors import Attention, AttentionGradient, Einsum, Lookup

__all__ = ["PassCompute", "block_compute"]


@dataclass(slots=True)
class PassCompute:
    """Sums over the operations of one pass of one block on one chip (floats or arrays).

    Args:
        flops: on the matrix unit, padding of uneven shards included.
        matmul_bytes: HBM traffic of matmuls, attention and lookups: what no fusion removes.
        bytes: HBM traffic of all operations, each reading its inputs and writing its output.
        seconds: expected: per operation the longer of its FLOPs (tiles padded) and its bytes, at achieved rates.
        serial_seconds: the same with nothing overlapped: FLOPs and bytes added up.
    """

    flops: Any = 0.0
    matmul_bytes: Any = 0.0
    bytes: Any = 0.0
    seconds: Any = 0.0
    serial_seconds: Any = 0.0


def block_compute(
    placed: PlacedBlock, extents: Extents, chip: Chip, precision: Precision, calibration: Calibration
) -> tuple[PassCompute, PassCompute, PassCompute]:
    """Price the forward pass, the recomputation and the backward pass of one block, for one microbatch.

    Args:
        placed: the block on its mesh.
        extents: local sizes; B is the sequences of one microbatch over all devices.
        chip, precision, calibration: rates, formats, achieved shares of the rates.

    Returns: forward, recompute, backward.
    """
    rates = _Rates(chip, precision, calibration)
    forward, recompute, backward = PassCompute(), PassCompute(), PassCompute()
    for item in placed.forward:
        if not isinstance(item, Transfer):
            _add(forward, item, extents, rates)
    for item in placed.backward:
        if not isinstance(item, Transfer):
            _add(recompute if item.op.name in placed.recomputed else backward, item, extents, rates)
    return forward, recompute, backward


class _Rates:
    """Seconds per FLOP and per byte, ideal and achieved."""

    def __init__(self, chip: Chip, precision: Precision, calibration: Calibration) -> None:
        self.precision = precision
        self.tile = chip.matmul_tile
        self.matmul = 1 / (chip.peak(precision.compute) * calibration.matmul_efficiency)
        self.vector = 1 / chip.vector_flops_per_s
        self.byte = 1 / (chip.hbm_bandwidth * calibration.hbm_efficiency)


def _add(total: PassCompute, item: LocalOp, extents: Extents, rates: _Rates) -> None:
    """Add one operation."""
    op = item.op
    splits = dict(item.splits)
    num_bytes = _operation_bytes(item, extents, rates.precision)
    if isinstance(op, Einsum):
        flops = 2 * extents.volume(tuple((a, splits.get(a, ())) for a in op.axes))
        compute = flops * _tile_waste(op, splits, extents, rates.tile) * rates.matmul
    elif isinstance(op, Attention):
        flops = _attention_flops(op, splits, extents)
        compute = flops * rates.matmul
    else:
        flops = 0.0
        vector = 0.0 if isinstance(op, AttentionGradient | Lookup) else getattr(op, "flops_per_element", 0.0)
        compute = vector * extents.volume(tuple((a, splits.get(a, ())) for a in op.axes)) * rates.vector if vector else 0.0
    memory = num_bytes * rates.byte
    total.flops = total.flops + flops
    total.bytes = total.bytes + num_bytes
    if op.matmul or isinstance(op, Lookup):
        total.matmul_bytes = total.matmul_bytes + num_bytes
    total.seconds = total.seconds + maximum(compute, memory)
    total.serial_seconds = total.serial_seconds + compute + memory


def _operation_bytes(item: LocalOp, extents: Extents, precision: Precision) -> Any:
    """HBM bytes: inputs read once, output written once; a lookup touches only the rows it picks."""
    op = item.op
    if isinstance(op, AttentionGradient):  # its inputs were read by the kernel's first output
        return extents.held_bytes(item.output, precision)
    if isinstance(op, Lookup):
        rows = item.output if not op.scatter else item.inputs[1]
        return 2 * extents.held_bytes(rows, precision)
    total: Any = extents.elements(item.output.tensor, item.output.sharding) * element_bytes(item.output.tensor, precision)
    for held in item.inputs:
        total = total + extents.held_bytes(held, precision)
    return total


def _attention_flops(op: Attention, splits: dict[str, tuple[str, ...]], extents: Extents) -> Any:
    """FLOPs of this device's queries; positions are dealt out so that causal work is even (zig-zag order)."""
    sizes = {a: extents.length(a, splits.get(a, ())) for a in op.axes if a not in (op.query_axis, op.key_axis)}
    sizes |= {a: extents.sizes[a] for a in (op.query_axis, op.key_axis)}
    return op.flops(sizes) / extents.devices(splits.get(op.query_axis, ()))


def _tile_waste(op: Einsum, splits: dict[str, tuple[str, ...]], extents: Extents, tile: tuple[int, int, int]) -> Any:
    """Padded over real FLOPs when rows, depth and columns of the local matmul are rounded up to the matrix unit's tiles."""
    left, right = op.inputs
    rows = [a for a in left.axes if a in op.output.axes and a not in right.axes]
    columns = [a for a in right.axes if a in op.output.axes and a not in left.axes]
    waste: Any = 1.0
    for axes, unit in ((rows, tile[0]), (list(op.contracted), tile[1]), (columns, tile[2])):
        length = extents.volume(tuple((a, splits.get(a, ())) for a in axes))
        if isinstance(length, float) and math.fmod(length, unit) == 0:
            continue
        waste = waste * (ceil(length / unit) * unit / length)
    return waste
