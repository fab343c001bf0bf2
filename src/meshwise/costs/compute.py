"""Time of a placed block's local operations on one chip: each as long as its FLOPs or its bytes need.

The structure is worked out once per placement; sizes, floats or arrays, come afterwards. Not here: collectives
(`traffic`), or how blocks make a step (`step`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.core.tensors import (
    Attention,
    AttentionGradient,
    Convert,
    Einsum,
    Elementwise,
    Fused,
    FusedGradient,
    Kind,
    Lookup,
    Op,
    Route,
)
from meshwise.costs.arithmetic import maximum
from meshwise.costs.calibration import Calibration
from meshwise.costs.extents import (
    Extents,
    Split,
    Volume,
    WeightedSum,
    element_bytes,
    held_bytes,
    held_key,
    the_same,
    volume_key,
    weighted_sum,
)
from meshwise.hardware import Chip
from meshwise.jobs import Precision
from meshwise.sharding.placed import LocalOp, PlacedBlock


@dataclass(frozen=True, slots=True)
class OpWork:
    """What one local operation will do, once sizes are known.

    Args:
        matmul: index space of an einsum, whose FLOPs are twice its volume; None for other operations.
        tiles: einsum only: rows, depth and columns of the local matmul.
        attention: the operation and the split of each of its axes, for attention.
        kernel: the same, for other fused kernels.
        vector: FLOPs on the vector unit, as a weighted sum.
        num_bytes: HBM bytes.
        fused: whether a fusion could remove the bytes (elementwise operations).
        in_passes: whether software that fuses less moves its bytes several times (not those of conversions, which say
            themselves how often they read and write).
        narrow: whether it runs at the rate of the precision's `compute`, else of its `other_compute`.
        routed: whether it is of a layer with experts.
        adds: whether it makes a gradient of a weight, which some software adds up by an operation of its own.
        weight: format of the weights that it multiplies; None where there are none.
        grouped: whether these are of experts, each with its own rows.
        alike: one and the same value for operations in which all of that is equal but `in_passes`, `routed`, `adds`,
            `weight` and `grouped`, which only some software sees.
        alike_to_software, alike_in_all: the same where the first three are equal, too, and where all five are.
        placed: the operation.
    """

    matmul: Volume | None
    tiles: tuple[Volume, Volume, Volume] | None
    attention: tuple[Attention, tuple[tuple[str, Split], ...]] | None
    kernel: tuple[Fused, tuple[tuple[str, Split], ...]] | None
    vector: WeightedSum
    num_bytes: WeightedSum
    fused: bool
    in_passes: bool
    narrow: bool
    routed: bool
    adds: bool
    weight: DType | None
    grouped: bool
    alike: object
    alike_to_software: object
    alike_in_all: object
    placed: LocalOp


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

    flops: Any
    busy: Any
    num_bytes: Any
    compute: Any
    memory: Any
    seconds: Any
    serial_seconds: Any


#: FLOPs of what the matrix unit has no part in, and sums of nothing.
_NONE: Any = 0.0


@dataclass(slots=True)
class PassCompute:
    """Sums over the operations of one pass of one block on one chip (floats or arrays).

    Args:
        flops: on the matrix unit, padding of uneven shards included.
        busy: seconds of those at the data-sheet rates of their formats.
        matmul_bytes: HBM traffic of matmuls, attention and lookups: what no fusion removes.
        seconds: expected: per operation the longer of its FLOPs (tiles padded) and its bytes, at achieved rates.
        serial_seconds: the same with nothing overlapped: FLOPs and bytes added up.
        attention_seconds: of `seconds`, those of attention itself, which a ring's sends hide behind.
    """

    flops: Any = 0.0
    busy: Any = 0.0
    matmul_bytes: Any = 0.0
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
        attention_backward: of attention's backward pass.
        half_depth, half_output, half_attention, elementwise_passes, gap, mixture_launch, unfused_attention,
            cache_start: as in `Calibration`.
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
    half_depth: float
    half_output: float
    half_attention: float
    elementwise_passes: float
    gap: float
    mixture_launch: float
    unfused_attention: bool
    added: float
    weight_byte: Mapping[DType, float]
    expert_byte: float
    cache_byte: float
    cache_start: float

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
            half_depth=calibration.half_depth,
            half_output=calibration.half_output,
            half_attention=calibration.half_attention,
            elementwise_passes=calibration.elementwise_passes,
            gap=calibration.gap,
            mixture_launch=calibration.mixture_launch,
            unfused_attention=calibration.unfused_attention,
            # The new gradient is read in the format of activations; what it is added to, read and written.
            added=calibration.adds_gradients * (precision.activations.bytes + 2 * precision.gradients.bytes),
            weight_byte={dtype: byte / share for dtype, share in calibration.weight_reads},
            expert_byte=1 / calibration.expert_reads,
            cache_byte=byte / (calibration.cache_reads or calibration.hbm_efficiency),
            cache_start=calibration.cache_start,
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


def pass_work(placed: PlacedBlock, precision: Precision) -> dict[str, tuple[OpWork, ...]]:
    """The local operations of each pass, with their structure resolved.

    Returns: "forward", "recompute", "backward" (gradients of activations), "weights" (gradients of weights).
    """
    works: dict[str, list[OpWork]] = {"forward": [], "recompute": [], "backward": [], "weights": []}
    routed = any(isinstance(op, Route) for op in placed.block.ops)
    for item in placed.forward:
        if isinstance(item, LocalOp):
            works["forward"].append(operation_work(item, precision, routed=routed))
    for item in placed.backward:
        if isinstance(item, LocalOp):
            name = "weights" if item.output.tensor.kind is Kind.GRADIENT else "backward"
            name = "recompute" if item.op.name in placed.recomputed else name
            works[name].append(operation_work(item, precision, routed=routed))
    return {name: tuple(items) for name, items in works.items()}


def operation_work(item: LocalOp, precision: Precision, *, routed: bool = False) -> OpWork:
    """Resolve the structure of one local operation; `routed` where it is of a layer with experts."""
    op, splits = item.op, dict(item.splits)

    def volume(axes: Iterable[str]) -> Volume:
        axes = tuple(axes)
        return volume_key(axes, (splits.get(a, ()) for a in axes))

    matmul = tiles = attention = kernel = None
    vector: WeightedSum = ()
    if isinstance(op, Einsum):
        left, right = op.inputs
        rows = [a for a in left.axes if a in op.output.axes and a not in right.axes]
        columns = [a for a in right.axes if a in op.output.axes and a not in left.axes]
        matmul, tiles = volume(op.axes), (volume(rows), volume(op.contracted), volume(columns))
    elif isinstance(op, Attention):
        attention = (op, tuple((a, splits.get(a, ())) for a in op.axes))
    elif isinstance(op, Fused):
        kernel = (op, tuple((a, splits.get(a, ())) for a in op.axes))
    elif isinstance(op, Elementwise):
        vector = weighted_sum([(volume(op.counted or op.axes), op.flops_per_element)])
    fused = not (op.matmul or isinstance(op, Lookup | Fused | FusedGradient))
    narrow = isinstance(op, Einsum) and op.narrow
    in_passes = fused and not isinstance(op, Convert)
    num_bytes = _operation_bytes(item, precision)
    alike = the_same((matmul, tiles, attention, kernel, vector, num_bytes, fused, narrow))
    adds = matmul is not None and item.output.tensor.kind is Kind.GRADIENT
    weight, grouped = _weight(op, precision)
    what = (matmul, tiles, attention, kernel, vector, num_bytes, fused, in_passes, narrow, routed, adds)
    to_software = the_same((id(alike), in_passes, routed, adds))
    in_all = the_same((id(alike), in_passes, routed, adds, weight, grouped))
    return OpWork(*what, weight, grouped, alike, to_software, in_all, placed=item)


def _weight(op: Op, precision: Precision) -> tuple[DType | None, bool]:
    """Format of the weights of a product, and whether they are of experts."""
    found = [t for t in op.inputs if t.kind is Kind.WEIGHT] if isinstance(op, Einsum) else []
    return (found[0].dtype or precision.weights, "E" in found[0].axes) if found else (None, False)


def _operation_bytes(item: LocalOp, precision: Precision) -> WeightedSum:
    """HBM bytes: inputs read once, output written once; a lookup touches only the rows it picks."""
    op = item.op
    if isinstance(op, Convert):
        return held_bytes((*item.inputs * op.reads, *(item.output,) * op.writes), precision)
    if isinstance(op, AttentionGradient | FusedGradient):  # its inputs were read by the kernel's first output
        return held_bytes((item.output,), precision)
    if isinstance(op, Fused):
        axes, num_bytes = op.spilled
        spilled = volume_key(axes, (dict(item.splits).get(a, ()) for a in axes))
        return weighted_sum([*held_bytes((*item.inputs, item.output), precision), (spilled, num_bytes)])
    if isinstance(op, Lookup):
        rows = item.inputs[1] if op.scatter else item.output
        return weighted_sum([(held_key(rows), 2 * element_bytes(rows.tensor, precision))])
    return held_bytes((*item.inputs, item.output), precision)


def passes_alike(works: Mapping[str, tuple[OpWork, ...]]) -> dict[str, object]:
    """For each pass one and the same value as for all passes whose operations are alike."""
    return {name: the_same(tuple(id(w.alike_to_software) for w in of)) for name, of in works.items()}


def price_key(rates: ComputeRates) -> Callable[[OpWork], object]:
    """Give what says of an operation a value that all have in common which `operation_compute` prices alike."""
    sees_software = rates.elementwise_passes != 1 or rates.mixture_launch or rates.added
    less = "alike_to_software" if sees_software else "alike"
    return attrgetter("alike_in_all" if rates.weight_byte else less)


class OperationPrices:
    """Prices of operations with the same sizes and rates, worked out once for all that are alike.

    Args:
        extents: local sizes; B is the sequences of one microbatch over all devices.
        rates: of the chip.
    """

    def __init__(self, extents: Extents, rates: ComputeRates) -> None:
        self.extents = extents
        self.rates = rates
        self._price_key = price_key(rates)
        self._operations: dict[int, OpCompute] = {}
        self._passes: dict[int, PassCompute] = {}

    def pass_compute(self, works: tuple[OpWork, ...], alike: object) -> PassCompute:
        """Price the operations of one pass of one block, for one microbatch; `alike` as from `passes_alike`."""
        known = self._passes.get(id(alike))
        if known is None:
            known = self._passes[id(alike)] = self._sum(works)
        return known

    def _sum(self, works: Iterable[OpWork]) -> PassCompute:
        alike, known = self._price_key, self._operations
        flops = busy = moved = seconds = serial = attention = _NONE
        for work in works:
            key = id(alike(work))
            one = known.get(key)
            if one is None:
                one = known[key] = operation_compute(work, self.extents, self.rates)
            if one.flops is not _NONE:
                flops = one.flops if flops is _NONE else flops + one.flops
                busy = one.busy if busy is _NONE else busy + one.busy
            if not work.fused:
                moved = one.num_bytes if moved is _NONE else moved + one.num_bytes
            seconds = one.seconds if seconds is _NONE else seconds + one.seconds
            serial = one.serial_seconds if serial is _NONE else serial + one.serial_seconds
            if work.attention is not None:
                attention = one.seconds if attention is _NONE else attention + one.seconds
        return PassCompute(flops, busy, moved, seconds, serial, attention)


def operation_compute(work: OpWork, extents: Extents, rates: ComputeRates) -> OpCompute:
    """Price one operation; arguments as in `OperationPrices`."""
    flops = busy = compute = _NONE
    if work.matmul is not None and work.tiles is not None:
        flops = 2 * extents.volume(work.matmul)
        busy = flops * (rates.matmul_sheet if work.narrow else rates.other_matmul_sheet)
        compute = flops * _matmul_rate(work, work.tiles, flops, extents, rates)
    elif work.attention is not None:
        flops = _attention_flops(*work.attention, extents)
        busy = flops * rates.other_matmul_sheet
        if rates.unfused_attention:
            return _unfused(work, flops, busy, extents, rates)
        compute = flops * (rates.attention_backward if work.attention[0].gradient else rates.attention)
        if rates.half_attention:
            compute = compute * (1 + rates.half_attention / extents.sizes[work.attention[0].key_axis])
    elif work.kernel is not None:
        operations = _kernel_flops(*work.kernel, extents)
        if work.kernel[0].matmul:
            flops, busy, compute = operations, operations * rates.other_matmul_sheet, operations * rates.attention
        else:
            compute = operations * rates.vector
    elif work.vector:
        compute = extents.weighted(work.vector) * rates.vector
    num_bytes = extents.weighted(work.num_bytes)
    memory = num_bytes * _byte(work, rates)
    if work.in_passes and rates.elementwise_passes != 1:
        memory = memory * rates.elementwise_passes
    seconds, serial = maximum(compute, memory), compute + memory
    if rates.added and work.adds:
        adding = extents.volume(held_key(work.placed.output)) * (rates.added * rates.byte)
        seconds, serial = seconds + adding, serial + adding
    if started := rates.gap + (0.0 if work.attention is None else rates.cache_start):
        seconds, serial = seconds + started, serial + started
    if work.routed and rates.mixture_launch:
        seconds, serial = maximum(seconds, rates.mixture_launch), maximum(serial, rates.mixture_launch)
    return OpCompute(flops, busy, num_bytes, compute, memory, seconds, serial)


def _byte(work: OpWork, rates: ComputeRates) -> float:
    """Seconds of an operation's byte of HBM."""
    if work.weight is not None:
        byte = rates.weight_byte.get(work.weight, rates.byte)
        return byte * rates.expert_byte if work.grouped else byte
    return rates.byte if work.attention is None else rates.cache_byte


def _matmul_rate(
    work: OpWork, tiles: tuple[Volume, Volume, Volume], flops: Any, extents: Extents, rates: ComputeRates
) -> Any:
    """Seconds of a matmul's FLOP: at the rate of large ones, tiles padded, filling and last waves included."""
    seconds = (rates.matmul if work.narrow else rates.other_matmul) * _tile_waste(tiles, extents, rates.tile)
    if rates.half_depth or rates.half_output:
        seconds = seconds * filling(tiles, flops, extents, rates)
    return seconds


def filling(tiles: tuple[Volume, Volume, Volume], flops: Any, extents: Extents, rates: ComputeRates) -> Any:
    """How many times as long a matmul takes as a large one of as many FLOPs: pipelines that fill, waves partly idle."""
    depth = extents.volume(tiles[1])
    waves = rates.half_output * 2 * depth / maximum(flops, 1.0)  # products of a batch share waves of tiles
    return (1 + rates.half_depth / depth) * (1 + waves)


#: Bytes that one score of attention moves where kernels are not fused, its values of 16 bits. Forward: written by
#: q k, read and written by the softmax, read and written by dropout, which writes a mask of a byte, read by the product
#: with v. Backward: the same the other way round, where products read the gradient of the scores twice.
_SCORE_BYTES, _SCORE_GRADIENT_BYTES = 13.0, 19.0


def _unfused(work: OpWork, flops: Any, busy: Any, extents: Extents, rates: ComputeRates) -> OpCompute:
    """Price attention as products and a softmax that hand each other the scores of all pairs through memory.

    `flops` and `busy` count what causality leaves, as for fused attention: a bound must hold for both.
    """
    assert work.attention is not None
    op, splits = work.attention
    whole = _attention_flops(op, splits, extents, full=True)
    axes = (op.inputs[0].axes[-1], op.inputs[2].axes[-1])
    width = sum(extents.sizes[a] for a in axes)
    scores = whole / (2 * width * (2.5 if op.gradient else 1))
    products = whole * (2 / 2.5 if op.gradient else 1) * rates.other_matmul  # nothing is computed again
    moved = scores * (_SCORE_GRADIENT_BYTES if op.gradient else _SCORE_BYTES)
    num_bytes = extents.weighted(work.num_bytes)
    memory = (num_bytes + moved) * rates.byte
    seconds = products + memory + rates.gap
    return OpCompute(flops, busy, num_bytes, products, memory, seconds, seconds)


def _attention_flops(
    op: Attention, splits: tuple[tuple[str, Split], ...], extents: Extents, *, full: bool = False
) -> Any:
    """FLOPs of this device's queries, and keys where a cache is split by positions.

    Positions are dealt out so that causal work is even (zig-zag order). `full` counts every pair.
    """
    positions = (op.query_axis, op.key_axis)
    sizes = {a: extents.length(a, split) for a, split in splits if a not in positions}
    sizes |= {a: extents.sizes[a] for a in positions}
    shared = dict.fromkeys(m for a, split in splits if a.partition(".")[0] in positions for m in split)
    return (op.full_flops if full else op.flops)(sizes) / extents.devices(tuple(shared))


def _kernel_flops(op: Fused, splits: tuple[tuple[str, Split], ...], extents: Extents) -> Any:
    """Operations on this device's part of every axis."""
    return op.flops({a: extents.length(a, split) for a, split in splits})


def _tile_waste(tiles: tuple[Volume, Volume, Volume], extents: Extents, units: tuple[int, int, int]) -> Any:
    """Padded over real FLOPs when rows, depth and columns of the local matmul are rounded up to whole tiles."""
    rows, depth, columns = map(extents.tiled, tiles, units)
    return rows * depth * columns
