"""The products and attentions of a plan's layers as one device computes them: names, shapes, and the seconds expected.

Not here: running them (`runtime.bench`), or adding them up (`compute`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwise.core.dtypes import DType
from meshwise.core.tensors import Attention, Block
from meshwise.costs.compute import OperationPrices
from meshwise.costs.estimate import layout_candidate
from meshwise.costs.evaluate import local_prices
from meshwise.costs.local_ops import LoweredOp
from meshwise.costs.problem import TrainingProblem
from meshwise.sharding.layout import Layout


@dataclass(frozen=True)
class LocalShape:
    """One operation of a layer on one device, for one microbatch.

    Args:
        name: of the operation, as reports name it, with its pass.
        block: the layer it is first found in.
        sizes: (m, k, n) of a product; (sequences, queries, keys, query heads, key/value heads, width) of an attention.
        dtype: of its operands.
        seconds: expected, by the plan's calibration.
        copies: how often a device computes such in a microbatch, all its layers together.
    """

    name: str
    block: str
    sizes: tuple[int, ...]
    dtype: DType
    seconds: float
    copies: float

    @property
    def attends(self) -> bool:
        """Whether it is an attention."""
        return len(self.sizes) > 3


def local_shapes(problem: TrainingProblem, layout: Layout) -> tuple[LocalShape, ...]:
    """The distinct products with weights, and forward attentions, of a layout's layers; of one shape the first name.

    Args:
        problem: of the plan.
        layout: complete.
    """
    structure, candidates = layout_candidate(problem.model, layout)
    prices = local_prices(problem, structure, candidates.local)
    found: dict[tuple[object, ...], LocalShape] = {}
    for lowered in problem.lowered.training(structure):
        block: Block = lowered.placed.block
        if block.role != "layer":
            continue
        for name, numbers in lowered.passes.items():
            for item, number in zip(lowered.items[name], numbers, strict=True):
                for sizes, dtype in _sizes(problem, prices, prices.ops[number]):
                    title = item.op.name if name == "forward" else f"{item.op.name} ({name})"
                    key, copies = (sizes, dtype), block.repeat / layout.stage
                    one = LocalShape(title, block.name, sizes, dtype, float(prices.op(number).seconds), copies)
                    known = found.get(key)
                    found[key] = one if known is None else _again(known, copies)
    return tuple(found.values())


def _again(known: LocalShape, copies: float) -> LocalShape:
    return LocalShape(known.name, known.block, known.sizes, known.dtype, known.seconds, known.copies + copies)


def _sizes(problem: TrainingProblem, prices: OperationPrices, op: LoweredOp) -> Iterator[tuple[tuple[int, ...], DType]]:
    """Shape and format of a product or a forward attention; nothing of other operations."""
    formats, extents = problem.job.formats, prices.extents
    if op.tiles is not None and op.matmul is not None:
        rows, depth, columns = (max(round(float(extents.volume(v))), 1) for v in op.tiles)
        batches = float(extents.volume(op.matmul)) / (rows * depth * columns)
        if round(batches) == 1:  # products of a batch, as of experts, are no single one
            yield (rows, depth, columns), formats.compute if op.narrow else formats.other_compute
    elif op.attention is not None and not op.attention[0].gradient:
        yield _attention(prices, *op.attention), formats.other_compute


def _attention(prices: OperationPrices, op: Attention, splits: tuple[tuple[str, object], ...]) -> tuple[int, ...]:
    extents, split = prices.extents, dict(splits)

    def local(axis: str) -> int:
        return max(round(float(extents.length(axis, split.get(axis, ())))), 1)  # type: ignore[arg-type]

    q = op.inputs[0].axes
    batch = [a for a in q if a not in (op.query_axis, op.heads_axis, q[-1])]
    sequences = 1
    for axis in batch:
        sequences *= local(axis)
    heads = local(op.heads_axis)
    kv_heads = max(min(local(op.kv_heads_axis), heads), 1)
    if op.kv_heads_axis not in extents.sizes or heads % kv_heads:
        kv_heads = heads
    return sequences, local(op.query_axis), round(float(extents.sizes[op.key_axis])), heads, kv_heads, local(q[-1])
