"""The roofline of one operation on one chip: how long the arithmetic takes, how long the memory takes, which one binds.

Bounds only (efficiency one): the lower is perfect overlap, the upper none. Not here: how an operation is written
(`operation`), communication between chips (`collectives`), calibrated times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.core.tensors import Attention, Einsum, Op, Tensor
from meshwise.hardware import Chip


class Memory(StrEnum):
    """Where the operands come from and the result goes to."""

    HBM = "hbm"
    VMEM = "vmem"  # on-chip memory; shared memory or L2 on GPUs, as the catalog says
    HOST = "host"  # over the host link (PCIe, C2C)


@dataclass(frozen=True, slots=True)
class Rates:
    """The two slopes of a roofline.

    Args:
        flops_per_s: of the unit that computes, FLOP/s.
        bandwidth: of the memory that feeds it, bytes/s.
        unit: "matrix" or "vector".
        dtype: what the matrix unit computes in; None on the vector unit.
        capacity: of that memory in bytes, when known.
        tile: m, k, n of the matrix unit's tiles; None pads nothing.
    """

    flops_per_s: float
    bandwidth: float
    unit: str = "matrix"
    dtype: DType | None = None
    capacity: float | None = None
    tile: tuple[int, int, int] | None = None

    @property
    def ridge(self) -> float:
        """Intensity from which the arithmetic binds, FLOPs/byte.

        >>> round(Rates(1.97e14, 8.2e11).ridge, 1)  # TPU v5e; the book, Rooflines: about 240
        240.2
        """
        return self.flops_per_s / self.bandwidth


@dataclass(frozen=True, slots=True)
class Roofline:
    """An operation at given sizes against the two slopes of a chip.

    Args:
        flops: that the operation needs.
        padding: FLOPs that the tiles execute over those needed, at least 1.
        bytes_moved: inputs read once and the output written once.
        rates: the chip's two slopes.
    """

    flops: float
    padding: float
    bytes_moved: float
    rates: Rates

    @property
    def math_time(self) -> float:
        """Seconds of arithmetic, padding included."""
        return self.flops * self.padding / self.rates.flops_per_s

    @property
    def memory_time(self) -> float:
        """Seconds of moving the operands."""
        return self.bytes_moved / self.rates.bandwidth

    @property
    def lower(self) -> float:
        """Seconds with perfect overlap: the longer of the two."""
        return max(self.math_time, self.memory_time)

    @property
    def upper(self) -> float:
        """Seconds with no overlap: the sum."""
        return self.math_time + self.memory_time

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / self.bytes_moved

    @property
    def bound(self) -> str:
        """What binds: "compute" or "memory"."""
        return "compute" if self.math_time >= self.memory_time else "memory"

    @property
    def flops_per_s(self) -> float:
        """Useful FLOP/s when the lower bound is met."""
        return self.flops / self.lower

    @property
    def fits(self) -> bool | None:
        """Whether the operands fit in that memory together; None where its capacity is unknown."""
        return None if self.rates.capacity is None else self.bytes_moved <= self.rates.capacity


def rates_of(op: Op, chip: Chip, memory: Memory = Memory.HBM) -> Rates:
    """Pick the slopes for `op` on `chip`: matrix or vector unit, the operands' dtype, the memory.

    A product of mixed formats is computed at the rate of the narrowest format that holds both (`compute_dtype`); one
    that the chip has no rate for is widened (`Chip.peak`).

    Raises:
        MeshwiseError: the chip's on-chip bandwidth is not published.
        UnknownNameError: the chip has no rate for the operands' format.
    """
    bandwidth, capacity = {
        Memory.HBM: (chip.hbm_bandwidth, chip.hbm_capacity),
        Memory.VMEM: (chip.onchip_bandwidth, chip.onchip_capacity),
        Memory.HOST: (chip.host_link_bandwidth, None),
    }[memory]
    if bandwidth is None:
        raise MeshwiseError(
            f"{chip.title}: no bandwidth is published for its on-chip memory; give one (--memory-bandwidth 20TB/s)"
        )
    if not op.matmul:
        return Rates(chip.vector_flops_per_s, bandwidth, "vector", capacity=capacity)
    dtype = compute_dtype(*(t.dtype or DType.BF16 for t in op.inputs))
    return Rates(chip.peak(dtype), bandwidth, "matrix", dtype, capacity, chip.matmul_tile)


def roofline(op: Op, sizes: Mapping[str, float], rates: Rates) -> Roofline:
    """Time `op` at `sizes`; a tensor without a dtype counts as bf16.

    >>> from meshwise.costs.operation import parse_operation
    >>> op = parse_operation("bf16[B, D] * bf16[D, F] -> bf16[B, F]")
    >>> line = roofline(op, {"B": 64, "D": 4096, "F": 8192}, Rates(2.3e15, 8e12))
    >>> round(1e6 * line.lower, 1), line.bound  # B200; the book, GPUs, problem 4: 8.6 us
    (8.6, 'memory')
    """
    moved = sum(t.elements(sizes) * (t.dtype or DType.BF16).bytes for t in op.tensors)
    padding = tile_padding(op, sizes, rates.tile) if rates.tile and op.matmul else 1.0
    return Roofline(float(op.flops(sizes)), padding, float(moved), rates)


def tile_padding(op: Op, sizes: Mapping[str, float], tile: tuple[int, int, int]) -> float:
    """FLOPs that a matrix unit executes over those a product needs: partly filled tiles cost as much as full ones.

    The rows of either operand may be streamed while the other's tiles stay put; the better of the two is taken. Axes of
    one kind (free on the left, summed, free on the right) count as one long axis, fused attention as unpadded.

    >>> from meshwise.costs.operation import parse_operation
    >>> op = parse_operation("bf16[B, D] * bf16[D, F] -> bf16[B, F]")
    >>> tile_padding(op, {"B": 1, "D": 256, "F": 256}, (8, 128, 128))
    8.0
    """
    if not isinstance(op, Einsum):
        return 1.0
    left, right = op.inputs

    def extent(keep: set[str], drop: set[str]) -> float:
        return math.prod(sizes[a] for a in keep - drop)

    summed = set(op.contracted)
    m = extent(set(left.axes), set(right.axes) | summed)
    n = extent(set(right.axes), set(left.axes) | summed)
    k = extent(summed, set())

    def padded(shape: tuple[float, float, float]) -> float:
        return math.prod(math.ceil(size / t) * t for size, t in zip(shape, tile, strict=True))

    return float(min(padded((m, k, n)), padded((n, k, m))) / (m * k * n))


def flop_axes(op: Op) -> tuple[str, ...]:
    """The axes whose sizes' product the FLOPs are proportional to; attention has its positions twice."""
    return (*op.inputs[0].axes, op.key_axis) if isinstance(op, Attention) else op.axes


def bytes_per_flop(op: Op, sizes: Mapping[str, float]) -> float:
    """One over the intensity; an axis that `sizes` lacks is taken as very large, and the limit is exact.

    >>> from meshwise.costs.operation import parse_operation
    >>> op = parse_operation("bf16[B, D] * bf16[D, F] -> bf16[B, F]")
    >>> 1 / bytes_per_flop(op, {"B": 240})  # the book, Rooflines: the intensity of a large matmul is its batch
    240.0
    """
    return sum(_bytes_per_flop_by_tensor(op, sizes))


def _bytes_per_flop_by_tensor(op: Op, sizes: Mapping[str, float]) -> list[float]:
    """For each tensor, bytes over FLOPs: the axes that both have cancel."""
    per_point = op.flops(dict.fromkeys(op.axes, 1))
    if per_point == 0:
        return [math.inf] * len(op.tensors)
    return [
        (t.dtype or DType.BF16).bytes / (per_point * math.prod(sizes.get(a, math.inf) for a in _beyond(op, t)))
        for t in op.tensors
    ]


def _beyond(op: Op, t: Tensor) -> list[str]:
    """Axes of the FLOPs that a tensor lacks; an axis that the FLOPs have twice, and the tensor once, is among them."""
    left = list(flop_axes(op))
    for axis in t.axes:
        left.remove(axis)
    return left


def critical_size(op: Op, axis: str, sizes: Mapping[str, float], ridge: float) -> float:
    """Find the size of `axis` from which `op` is compute-bound; padding left out, axes not in `sizes` very large.

    Returns: a real number; `inf` when no size suffices, 0 when every size does.

    >>> from meshwise.costs.operation import parse_operation
    >>> op = parse_operation("bf16[B, D] * int8[D, F] -> bf16[B, F]")
    >>> round(critical_size(op, "B", {}, 1.97e14 / 8.2e11), 1)  # the book, Rooflines, question 2: 120
    120.1
    >>> round(critical_size(op, "B", {"D": 4096, "F": 4096}, 1.97e14 / 8.2e11), 1)
    136.1
    >>> q, kv = "bf16[B, T, K, G, H]", "bf16[B, T, K, H]"
    >>> prefill = parse_operation(f"attention({q}, {kv}, {kv}) -> {q}")
    >>> round(critical_size(prefill, "T", {"G": 8}, 240), 1)  # (1 + 1 / G) x 240
    270.0
    """
    others = {a: size for a, size in sizes.items() if a != axis}
    # Bytes per FLOP are p / size + q: p from the tensors that lack the axis, q from those that have it.
    terms = list(zip(op.tensors, _bytes_per_flop_by_tensor(op, {**others, axis: 1}), strict=True))
    lacking = sum(value for t, value in terms if axis in _beyond(op, t))
    having = sum(value for t, value in terms if axis not in _beyond(op, t))
    slack = 1 / ridge - having
    if slack <= 0:
        return math.inf
    return lacking / slack


def compute_dtype(*operands: DType) -> DType:
    """Find the format in which a product of `operands` is computed: the narrowest that holds them all without loss.

    int8 weights with bf16 activations are widened and computed as bf16; int8 with int8 as int8. Where neither format
    holds the other (fp8 with int8) it is bf16, and fp32 for fp16 with bf16.

    >>> compute_dtype(DType.BF16, DType.INT8), compute_dtype(DType.INT8, DType.INT4)
    (<DType.BF16: 'bf16'>, <DType.INT8: 'int8'>)
    """
    result = operands[0]
    for other in operands[1:]:
        result = _wider(result, other)
    return result


_INTEGERS = (DType.INT8, DType.INT4)


def _wider(a: DType, b: DType) -> DType:
    if a == b:
        return a
    narrow, wide = sorted((a, b), key=lambda d: d.bits)
    if {a, b} == {DType.FP16, DType.BF16}:
        return DType.FP32
    if {a, b} == {DType.FP32, DType.TF32}:
        return DType.FP32
    holds = wide not in _INTEGERS or narrow in _INTEGERS
    return wide if holds and narrow.bits < wide.bits else DType.BF16
