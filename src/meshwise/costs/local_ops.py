"""Local operations of a placed block as rows of a lowered program: what each needs, before sizes are known.

Not here: seconds (`compute`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from meshwise.core.dtypes import DType
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
from meshwise.costs.extents import Split, Symbols, Volume, WeightedSum, element_bytes
from meshwise.jobs import Precision
from meshwise.sharding.placed import Held, LocalOp


class LoweredOp(NamedTuple):
    """What one local operation will do, once sizes are known. Equal ones cost the same.

    Args:
        matmul: index space of an einsum, whose FLOPs are twice its volume; None for other operations.
        tiles: einsum only: rows, depth and columns of the local matmul.
        attention: the operation and the split of each of its axes, for attention.
        kernel: the same, for other fused kernels.
        vector: FLOPs on the vector unit.
        intensity: those per byte, counting no bytes but of its own volume.
        num_bytes: HBM bytes.
        stored: those of them that are of weights and caches.
        kept: the others, tensor by tensor: activations, which may stay on the chip between operations.
        fusible: whether a fusion could remove the bytes, so that bounds of our own programs alone count them.
        in_passes: whether software that fuses less moves its bytes several times (not those of conversions, which say
            themselves how often they read and write).
        narrow: whether it runs at the rate of the precision's `compute`, else of its `other_compute`.
        routed: whether it is of a layer with experts.
        added: the gradient of a weight that it makes, which some software adds up by an operation of its own; else
            None.
        weight: format of the weights that it multiplies; None where there are none.
        grouped: whether these are of experts, each with its own rows.
        permutes: whether it moves tokens to the slots of their experts, or back.
        launched: whether it is a kernel of its own, not a further output of the one before.
        joins: how engines that fuse it do without a kernel of its own (`fusions`); "" where none does.
    """

    matmul: Volume | None
    tiles: tuple[Volume, Volume, Volume] | None
    attention: tuple[Attention, tuple[tuple[str, Split], ...]] | None
    kernel: tuple[Fused, tuple[tuple[str, Split], ...]] | None
    vector: WeightedSum
    intensity: float
    num_bytes: WeightedSum
    stored: WeightedSum
    kept: tuple[WeightedSum, ...]
    fusible: bool
    in_passes: bool
    narrow: bool
    routed: bool
    added: Volume | None
    weight: DType | None
    grouped: bool
    permutes: bool
    launched: bool
    joins: str


def lower_op(
    item: LocalOp,
    symbols: Symbols,
    precision: Precision,
    *,
    routed: bool = False,
    bounded: bool = False,
    joins: str = "",
) -> LoweredOp:
    """Resolve the structure of one local operation.

    Args:
        item: as placed.
        symbols: of the program.
        precision: bytes per element.
        routed: whether it is of a layer with experts.
        bounded: whether bounds count its bytes although a fusion could remove them.
        joins: as in `LoweredOp`.
    """
    op, splits = item.op, dict(item.splits)

    def volume(axes: Iterable[str]) -> Volume:
        axes = tuple(axes)
        return symbols.volume(axes, (splits.get(a, ()) for a in axes))

    matmul = tiles = attention = kernel = None
    vector: WeightedSum = 0
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
        vector = symbols.sum([(volume(op.counted or op.axes), op.flops_per_element)])
    fusible = not (op.matmul or isinstance(op, Lookup | Fused | FusedGradient))
    weight, grouped = _weight(op, precision)
    traffic = _traffic(item, symbols, precision)
    return LoweredOp(
        matmul=matmul,
        tiles=tiles,
        attention=attention,
        kernel=kernel,
        vector=vector,
        intensity=_intensity(symbols.weights(vector), [term for _, term in traffic]),
        num_bytes=symbols.sum(term for _, term in traffic),
        stored=symbols.sum(term for stored, term in traffic if stored),
        kept=tuple(symbols.sum([term]) for stored, term in traffic if not stored),
        fusible=fusible and not bounded,
        in_passes=fusible and not isinstance(op, Convert),
        narrow=isinstance(op, Einsum) and op.narrow,
        routed=routed,
        added=symbols.held(item.output) if matmul is not None and item.output.tensor.kind is Kind.GRADIENT else None,
        weight=weight,
        grouped=grouped,
        permutes=isinstance(op, Route),
        launched=not _beside(op),
        joins=joins,
    )


def _intensity(flops: Mapping[Volume, float], traffic: Sequence[tuple[Volume, float]]) -> float:
    """FLOPs per byte of the same volume at most."""
    own = {volume: sum(num_bytes for other, num_bytes in traffic if other == volume) for volume in flops}
    return max((f / max(own[volume], 1e-30) for volume, f in flops.items()), default=0.0)


def _beside(op: Op) -> bool:
    """Whether the kernel of the operation before it makes it as well."""
    return isinstance(op, AttentionGradient | FusedGradient) or (isinstance(op, Elementwise) and op.beside)


def _weight(op: Op, precision: Precision) -> tuple[DType | None, bool]:
    """Format of the weights of a product, and whether they are of experts."""
    found = [t for t in op.inputs if t.kind is Kind.WEIGHT] if isinstance(op, Einsum) else []
    return (found[0].dtype or precision.weights, "E" in found[0].axes) if found else (None, False)


#: What lies in HBM from one step to the next, whatever the chip has room for.
_STORED = (Kind.WEIGHT, Kind.KV_CACHE)


def _traffic(item: LocalOp, symbols: Symbols, precision: Precision) -> list[tuple[bool, tuple[Volume, float]]]:
    """HBM bytes: inputs read once, output written once; a lookup touches only the rows it picks.

    Returns: of each, whether it is of a weight or a cache, its volume and bytes of an element.
    """

    def of(held: Iterable[Held]) -> list[tuple[bool, tuple[Volume, float]]]:
        return [(h.tensor.kind in _STORED, (symbols.held(h), element_bytes(h.tensor, precision))) for h in held]

    op = item.op
    if isinstance(op, Convert):
        return of((*item.inputs * op.reads, *(item.output,) * op.writes))
    if _beside(op):  # its inputs were read for the kernel's first output
        return of((item.output,))
    if isinstance(op, Lookup):
        rows = item.inputs[1] if op.scatter else item.output
        touched = symbols.held(rows), element_bytes(rows.tensor, precision)
        return [(True, touched), (False, touched)]
    terms = of((*item.inputs, item.output))
    if isinstance(op, Fused):
        axes, num_bytes = op.spilled
        terms.append((False, (symbols.volume(axes, (dict(item.splits).get(a, ()) for a in axes)), num_bytes)))
    return terms
