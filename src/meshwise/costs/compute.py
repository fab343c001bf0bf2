"""Time of a placed block's local operations on one chip: each as long as its FLOPs or its bytes need.

The structure is worked out once per placement; sizes, floats or arrays, come afterwards. Not here: collectives
(`traffic`), or how blocks make a step (`step`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.core.tensors import Attention, Fused
from meshwise.costs.arithmetic import Num, ceil, maximum, minimum, where
from meshwise.costs.calibration import Calibration
from meshwise.costs.extents import Extents, Split, Volume, WeightedSum
from meshwise.costs.fusions import kernel_gap
from meshwise.costs.local_ops import LoweredOp
from meshwise.costs.own_program import HeldOnChip, OwnProgram, computed_again
from meshwise.costs.tiles import few_rows, filling, padded
from meshwise.hardware import Chip
from meshwise.jobs import SERVING_PRECISIONS, Precision, parse_serving_precision
from meshwise.models import Model


@dataclass(slots=True)
class OpCompute:
    """One operation on one chip (floats or arrays).

    Args:
        flops: on the matrix unit.
        busy: seconds of those at the data-sheet rate of their format.
        num_bytes: HBM traffic.
        compute: seconds of its FLOPs (tiles padded) at achieved rates, on whichever unit does them.
        memory: seconds of its bytes.
        seconds: the longer of the two.
        serial_seconds: both, one after the other.
    """

    flops: Num
    busy: Num
    num_bytes: Num
    compute: Num
    memory: Num
    seconds: Num
    serial_seconds: Num


#: FLOPs of what the matrix unit has no part in, and sums of nothing.
_NONE: Num = 0.0


@dataclass(slots=True)
class PassCompute:
    """Sums over the operations of one pass of one block on one chip (floats or arrays).

    Args:
        flops: on the matrix unit, padding of uneven shards included.
        busy: seconds of those at the data-sheet rates of their formats.
        least_bytes: HBM traffic that the lower bound counts: of matmuls, attention and lookups, which no fusion
            removes, nor a chip that holds what it is said to; of our own programs, which are what XLA fuses, that of
            all operations.
        seconds: expected: per operation the longer of its FLOPs (tiles padded) and its bytes, at achieved rates.
        serial_seconds: the same with nothing overlapped: FLOPs and bytes added up.
        attention_seconds: of `seconds`, those of attention itself, which a ring's sends hide behind.
    """

    flops: Any = 0.0
    busy: Any = 0.0
    least_bytes: Any = 0.0
    seconds: Any = 0.0
    serial_seconds: Any = 0.0
    attention_seconds: Any = 0.0

    def __add__(self, other: PassCompute) -> PassCompute:
        """Both passes, one after the other."""
        return PassCompute(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class ComputeRates:
    """Seconds per FLOP and per byte at achieved rates, and the tiles of the matrix unit.

    Args:
        tile: rows, depth, columns.
        matmul, other_matmul: of matmuls in the precision's `compute` and `other_compute`.
        attention: of attention, and of other kernels of many small matmuls, in `other_compute`.
        matmul_sheet, other_matmul_sheet: the same at data-sheet rates.
        vector: of the vector unit.
        byte: of HBM.
        weight_byte: format of weights -> of HBM for matmuls that read them, where it is another.
        expert_byte: of HBM for matmuls of experts, over that of other matmuls.
        cache_byte: of HBM for attention.
        few_rows, other_few_rows: (rows, share of the rate with few weights, with many) of products of few rows in
            `compute` and `other_compute`.
        attention_backward: of attention's backward pass.
        calibration: what operations wait for besides; waits: whether for anything.
        added: bytes that adding an element of a gradient moves, where that is an operation of its own; else 0.
    """

    tile: tuple[int, int, int]
    matmul: float
    other_matmul: float
    attention: float
    matmul_sheet: float
    other_matmul_sheet: float
    vector: float
    byte: float
    attention_backward: float
    calibration: Calibration
    waits: bool
    added: float
    weight_byte: Mapping[DType, float]
    expert_byte: float
    cache_byte: float
    few_rows: tuple[tuple[int, float, float], ...] = ()
    other_few_rows: tuple[tuple[int, float, float], ...] = ()

    @classmethod
    def of(cls, chip: Chip, precision: Precision, calibration: Calibration) -> ComputeRates:
        """Derive from the data sheet and what is achieved of it.

        Raises:
            MeshwiseError: a format that the chip cannot multiply.
        """
        check_precision(chip, precision)
        narrow, other = 1 / chip.peak(precision.compute), 1 / chip.peak(precision.other_compute)
        attention = other / calibration.attention(precision.other_compute)
        byte = 1 / chip.hbm_bandwidth
        few_rows = dict(calibration.few_rows)
        return cls(
            tile=chip.matmul_tile,
            matmul=narrow / calibration.matmul(precision.compute),
            other_matmul=other / calibration.matmul(precision.other_compute),
            attention=attention,
            matmul_sheet=narrow,
            other_matmul_sheet=other,
            vector=1 / chip.vector_flops_per_s,
            byte=byte / calibration.hbm_efficiency,
            attention_backward=attention / calibration.attention_backward,
            calibration=calibration,
            waits=bool(calibration.gap or calibration.cache_start or calibration.mixture_launch),
            # The new gradient is read in the format of activations; what it is added to, read and written.
            added=calibration.adds_gradients * (precision.activations.bytes + 2 * precision.gradients.bytes),
            weight_byte={dtype: byte / share for dtype, share in calibration.weight_reads},
            expert_byte=1 / calibration.expert_reads,
            cache_byte=byte / (calibration.cache_reads or calibration.hbm_efficiency),
            few_rows=few_rows.get(precision.compute, ()),
            other_few_rows=few_rows.get(precision.other_compute, ()),
        )


def check_precision(chip: Chip, precision: Precision) -> None:
    """Refuse a recipe on a chip without matrix units for its format: widened operands only cost more than bf16.

    Raises:
        MeshwiseError: names the precision, the chip and the formats it has.
    """
    recipe = precision.recipe
    if recipe is None:
        return
    missing = [d.value for d in recipe.needs if d not in chip.flops_per_s]
    if missing:
        has = ", ".join(d.value for d in chip.flops_per_s)
        raise MeshwiseError(
            f"precision {precision.name}: needs {' and '.join(missing)} matrix units, {chip.title} has {has}; "
            "use another precision, or chips that have them"
        )
    if recipe.vendor and chip.vendor != recipe.vendor:
        raise MeshwiseError(
            f"precision {precision.name}: a format of {recipe.vendor} chips, found {chip.title}; use another precision"
        )


def published_precision(model: Model, chip: Chip | None = None) -> str:
    """Formats in which a model's checkpoint is published, as `--precision` of serving takes them.

    Operands are as narrow as the checkpoint says where the chip multiplies such; else, and without a chip, weights are
    widened as they are read. "bf16" where nothing is quantised.

    Raises:
        MeshwiseError: a method of quantisation that is not known.
    """
    found = model.quantization
    if found is None:
        return "bf16"
    if found.weights is None:
        raise MeshwiseError(
            f"precision: {model.name}'s checkpoint is quantised by {found.method or 'a method'!r}, which is not known "
            "here; say its formats yourself: --precision weights=int4,kv=fp8"
        )
    roles = {
        "weights": found.weights,
        "attention": found.attention,
        "experts": found.experts if model.mixtures else None,
        "compute": found.operands if chip and found.operands in chip.flops_per_s else None,
        "kv": found.kv,
    }
    given = [f"{role}={dtype.value}" for role, dtype in roles.items() if dtype is not None]
    stored = {found.weights, found.attention, roles["experts"]}
    if found.group and DType.INT4 in stored:
        given.append(f"group={found.group}")
    made = parse_serving_precision(",".join(given))
    same = (p.name for p in SERVING_PRECISIONS.values() if replace(made, name=p.name, meaning=p.meaning) == p)
    return next(same, made.name)


class OperationPrices:
    """Prices of a program's operations for some sizes and rates, each distinct one worked out once.

    Args:
        ops: of the lowered program.
        extents: local sizes; B is the sequences of one microbatch over all devices.
        rates: of the chip.
        bounded: whether bounds are asked for; else passes have expected seconds alone.
        leaves: what of activations leaves the chip between operations, by what bounds count: of an engine, or of a step
            of our own runtime, whose bounds count what operations between matmuls move, and what attention computes
            besides. None: all that matmuls read and write.
    """

    def __init__(
        self,
        ops: Sequence[LoweredOp],
        extents: Extents,
        rates: ComputeRates,
        *,
        bounded: bool = True,
        leaves: HeldOnChip | OwnProgram | None = None,
    ) -> None:
        self.ops = ops
        self.extents = extents
        self.rates = rates
        self.bounded = bounded
        self.leaves = leaves
        self.own = leaves if isinstance(leaves, OwnProgram) else None
        self._some_stay = leaves is not None and leaves.some_stay
        self._known: dict[int, OpCompute] = {}
        self._passes: dict[tuple[int, ...], PassCompute] = {}
        self._leaving: dict[WeightedSum, Num] = {}  # bytes of activations that leave the chip

    def op(self, number: int) -> OpCompute:
        """Price one operation."""
        known = self._known.get(number)
        if known is None:
            known = op_compute(self.ops[number], self.extents, self.rates, bounded=self.bounded)
            if not self.bounded:  # arrays that nobody asks for would fill the cache
                known = OpCompute(*(_NONE,) * 5, known.seconds, _NONE)
            elif self.own is not None and known.busy is not _NONE:
                again = known.busy * computed_again(self.ops[number], self.extents, self.own)
                known = replace(known, busy=minimum(again, maximum(known.busy, known.seconds)))  # none above expected
            self._known[number] = known
        return known

    def pass_compute(self, numbers: tuple[int, ...]) -> PassCompute:
        """Add up the operations of one pass of one block, for one microbatch."""
        known = self._passes.get(numbers)
        if known is None:
            known = self._passes[numbers] = self._sum(numbers)
        return known

    def products_alone(self, numbers: tuple[int, ...]) -> PassCompute:
        """The same of a pass whose products read as they compute: bounds count the bytes of nothing else."""
        return replace(self.pass_compute(numbers), least_bytes=sum(self.least_bytes(n, alone=True) for n in numbers))

    def least_bytes(self, number: int, *, alone: bool = False) -> Num:
        """HBM traffic of an operation that bounds count: weights, caches, and of activations what leaves the chip.

        Of operations between products only our own programs' count, and none where products stand `alone`.
        """
        op = self.ops[number]
        if op.fusible and (alone or self.own is None):
            return _NONE
        if self.leaves is None or not self._some_stay:
            return self.op(number).num_bytes
        least: Num = self.extents.weighted(op.stored)
        for activation in op.kept:  # made once, read several times
            if activation not in self._leaving:
                self._leaving[activation] = self.leaves.hbm_bytes(self.extents.weighted(activation))
            least = least + self._leaving[activation]
        return least

    def _sum(self, numbers: Iterable[int]) -> PassCompute:
        flops = busy = least = seconds = serial = attention = _NONE
        for number in numbers:
            op, one = self.ops[number], self.op(number)
            seconds = one.seconds if seconds is _NONE else seconds + one.seconds
            if op.attention is not None:
                attention = one.seconds if attention is _NONE else attention + one.seconds
            if not self.bounded:
                continue
            if one.flops is not _NONE:
                flops = one.flops if flops is _NONE else flops + one.flops
                busy = one.busy if busy is _NONE else busy + one.busy
            if self.own is not None or not op.fusible:
                num_bytes = self.least_bytes(number) if self._some_stay else one.num_bytes
                least = num_bytes if least is _NONE else least + num_bytes
            serial = one.serial_seconds if serial is _NONE else serial + one.serial_seconds
        return PassCompute(flops, busy, least, seconds, serial, attention)


def op_compute(op: LoweredOp, extents: Extents, rates: ComputeRates, *, bounded: bool = True) -> OpCompute:
    """Price one operation; arguments as in `OperationPrices`."""
    achieved = rates.calibration
    flops = busy = compute = _NONE
    if op.matmul is not None and op.tiles is not None:
        flops = 2 * extents.volume(op.matmul)
        busy = flops * (rates.matmul_sheet if op.narrow else rates.other_matmul_sheet) if bounded else _NONE
        compute = flops * _matmul_rate(op, op.tiles, flops, extents, rates)
    elif op.attention is not None:
        flops = _attention_flops(*op.attention, extents)
        busy = flops * rates.other_matmul_sheet
        if achieved.unfused_attention and np.max(extents.sizes[op.attention[0].query_axis]) > 1:  # a token has kernels
            return _unfused(op, flops, busy, extents, rates)
        compute = flops * _attention_rate(*op.attention, extents, rates)
    elif op.kernel is not None:
        operations = _kernel_flops(*op.kernel, extents)
        if op.kernel[0].matmul:
            flops, busy, compute = operations, operations * rates.other_matmul_sheet, operations * rates.attention
        else:
            compute = operations * rates.vector
    elif op.vector and (bounded or op.intensity * rates.vector > rates.byte):  # else its bytes take longer
        compute = extents.weighted(op.vector) * rates.vector
    num_bytes = extents.weighted(op.num_bytes)
    memory = num_bytes * _byte(op, rates)
    if op.attention is not None and achieved.query_bandwidth:
        memory = maximum(memory, num_bytes * _reads_anew(op.attention[0], extents, achieved))
    if op.permutes and achieved.permute_passes != 1:
        memory = memory * achieved.permute_passes
    elif op.in_passes and achieved.elementwise_passes != 1:
        memory = memory * achieved.elementwise_passes
    seconds = memory if compute is _NONE else maximum(compute, memory)
    serial = compute + memory if bounded else _NONE
    if rates.added and op.added is not None:
        adding = extents.volume(op.added) * (rates.added * rates.byte)
        seconds, serial = seconds + adding, serial + adding if bounded else _NONE
    if op.launched and rates.waits:
        gap = kernel_gap(op.joins, extents, achieved)
        seconds, serial = _launched(op, seconds, gap, achieved), _launched(op, serial, gap, achieved)
    return OpCompute(flops, busy, num_bytes, compute, memory, seconds, serial)


def _reads_anew(op: Attention, extents: Extents, achieved: Calibration) -> Num:
    """Seconds of a cache's byte that each query head of a group reads for itself; none where one kernel is for all."""
    sizes, queries = extents.sizes, op.inputs[0].axes
    group = sizes[op.heads_axis] / (sizes[op.kv_heads_axis] if op.kv_heads_axis in op.inputs[1].axes else 1)
    grouped = group in achieved.grouped_heads and sizes[queries[-1]] == 128 and op.window is None
    return where((sizes[op.query_axis] > 1) | grouped, 0.0, group / achieved.query_bandwidth)


def _launched(op: LoweredOp, seconds: Num, gap: Num, achieved: Calibration) -> Num:
    """Seconds of a kernel with what it waits for: its launch, and in layers with experts the host at least."""
    started = gap if op.attention is None else gap + achieved.cache_start
    if not isinstance(started, float) or started:
        seconds = seconds + started
    return maximum(seconds, achieved.mixture_launch) if op.routed and achieved.mixture_launch else seconds


def _byte(op: LoweredOp, rates: ComputeRates) -> float:
    """Seconds of an operation's byte of HBM."""
    if op.weight is not None:
        byte = rates.weight_byte.get(op.weight, rates.byte)
        return byte * rates.expert_byte if op.grouped else byte
    return rates.byte if op.attention is None else rates.cache_byte


def _matmul_rate(
    op: LoweredOp, tiles: tuple[Volume, Volume, Volume], flops: Num, extents: Extents, rates: ComputeRates
) -> Num:
    """Seconds of a matmul's FLOP: at the rate of large ones, tiles padded, filling and last waves included."""
    seconds = (rates.matmul if op.narrow else rates.other_matmul) * padded(tiles, extents, rates.tile)
    if curve := rates.few_rows if op.narrow else rates.other_few_rows:
        seconds = seconds * few_rows(curve, *(extents.volume(t) for t in tiles))
    if rates.calibration.half_depth or rates.calibration.compute_units:
        seconds = seconds * filling(tiles, flops, extents, rates.calibration)
    if op.grouped and rates.calibration.grouped_efficiency != 1:
        seconds = seconds / rates.calibration.grouped_efficiency
    return seconds


def _attention_rate(op: Attention, splits: tuple[tuple[str, Split], ...], extents: Extents, rates: ComputeRates) -> Num:
    """Seconds of a FLOP of fused attention: short rows, scores on the vector unit and uneven rings included."""
    achieved, sizes = rates.calibration, extents.sizes
    seconds: Num = rates.attention_backward if op.gradient else rates.attention
    if operations := achieved.score_flops[op.gradient]:
        widths = [sizes[op.inputs[i].axes[-1]] for i in (0, 2)]
        tile = rates.tile[1]  # heads narrower than the matrix unit leave a part of it idle
        seconds = seconds * (sum(ceil(w / tile) * tile for w in widths) / sum(widths))
        flops = 2 * sum(widths) * (2.5 if op.gradient else 1)
        seconds = maximum(seconds, operations * rates.vector / flops)
    if achieved.half_attention:  # one query of a sequence has no diagonal: FlashMLA decodes at 660 TFLOP/s on H800
        half = where(sizes[op.query_axis] > 1, achieved.half_attention, 0.0)
        seconds = seconds * (1 + half / sizes[op.key_axis])
    if achieved.uneven_ring and op.causal and op.window is None and op.chunk is None:
        ways = extents.devices(dict(splits).get(op.query_axis, ()))
        seconds = seconds * (2 - 1 / ways)  # of n parts the last sees n - 1/2 of the keys' parts, an even share is n/2
    return seconds


#: Bytes that one score of attention moves where kernels are not fused, its values of 16 bits. Forward: written by
#: q k, read and written by the softmax, read and written by dropout, which writes a mask of a byte, read by the product
#: with v. Backward: the same the other way round, where products read the gradient of the scores twice.
_SCORE_BYTES, _SCORE_GRADIENT_BYTES = 13.0, 19.0

#: Kernels that do so: two products, softmax and dropout; of each product the gradients of both inputs.
_KERNELS, _GRADIENT_KERNELS = 4, 6


def _unfused(op: LoweredOp, flops: Num, busy: Num, extents: Extents, rates: ComputeRates) -> OpCompute:
    """Price attention as products and a softmax that hand each other the scores of all pairs through memory.

    `flops` and `busy` count what causality leaves, as for fused attention: a bound must hold for both.
    """
    assert op.attention is not None
    attention, splits = op.attention
    whole = _attention_flops(attention, splits, extents, full=True)
    axes = (attention.inputs[0].axes[-1], attention.inputs[2].axes[-1])
    width = sum(extents.sizes[a] for a in axes)
    scores = whole / (2 * width * (2.5 if attention.gradient else 1))
    products = whole * (2 / 2.5 if attention.gradient else 1) * rates.other_matmul  # nothing is computed again
    of_scores = scores * (_SCORE_GRADIENT_BYTES if attention.gradient else _SCORE_BYTES)
    num_bytes = extents.weighted(op.num_bytes)
    memory = (num_bytes + of_scores) * rates.byte
    launched = _GRADIENT_KERNELS if attention.gradient else _KERNELS
    seconds = products + memory + launched * rates.calibration.gap
    return OpCompute(flops, busy, num_bytes, products, memory, seconds, seconds)


def _attention_flops(
    op: Attention, splits: tuple[tuple[str, Split], ...], extents: Extents, *, full: bool = False
) -> Num:
    """FLOPs of this device's queries, and keys where a cache is split by positions.

    Positions are dealt out so that causal work is even (zig-zag order). `full` counts every pair.
    """
    positions = (op.query_axis, op.key_axis)
    sizes = {a: extents.length(a, split) for a, split in splits if a not in positions}
    sizes |= {a: extents.sizes[a] for a in positions}
    shared = dict.fromkeys(m for a, split in splits if a.partition(".")[0] in positions for m in split)
    return (op.full_flops if full else op.flops)(sizes) / extents.devices(tuple(shared))


def _kernel_flops(op: Fused, splits: tuple[tuple[str, Split], ...], extents: Extents) -> Num:
    """Operations on this device's part of every axis."""
    return op.flops({a: extents.length(a, split) for a, split in splits})
