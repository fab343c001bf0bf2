"""The products and attentions of a plan's layers as one device computes them: names, shapes, and the seconds expected.

Not here: running them (`runtime.bench`), or adding them up (`compute`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwise.core.dtypes import DType
from meshwise.core.tensors import Attention, Block
from meshwise.costs.alone import AttentionShape
from meshwise.costs.compute import OperationPrices
from meshwise.costs.estimate import layout_candidate
from meshwise.costs.local import local_prices
from meshwise.costs.local_ops import LoweredOp
from meshwise.costs.problem import TrainingProblem
from meshwise.sharding.layout import Layout


@dataclass(frozen=True)
class ProductShape:
    """Products of (m, k) by (k, n), one for each group of rows.

    Args:
        m, k, n: see there.
        groups: of rows, such as those of an expert, each with a matrix of its own.
        summed: whether k counts the rows of a group (gradients of matrices), else m.
    """

    m: int
    k: int
    n: int
    groups: int = 1
    summed: bool = False


@dataclass(frozen=True)
class LocalShape:
    """One operation of a layer on one device, for one microbatch.

    Args:
        name: of the operation, as reports name it, with its pass.
        block: the layer it is first found in.
        work: what it computes.
        dtype: of its operands.
        seconds: expected, by the plan's calibration.
        copies: how often a device computes such in a microbatch, all its layers together.
    """

    name: str
    block: str
    work: ProductShape | AttentionShape
    dtype: DType
    seconds: float
    copies: float


def local_shapes(problem: TrainingProblem, layout: Layout) -> tuple[LocalShape, ...]:
    """The distinct products with weights, and attentions, of a layout's layers; of one shape the first name.

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
        copies = block.repeat * float(lowered.part(structure, candidates.remat_share).share) / layout.stage
        for name, numbers in lowered.passes.items():
            for item, number in zip(lowered.items[name], numbers, strict=True):
                for work, dtype in _work(problem, prices, prices.ops[number], summed=name == "weights"):
                    title = item.op.name if name == "forward" else f"{item.op.name} ({name})"
                    one = LocalShape(title, block.name, work, dtype, float(prices.op(number).seconds), copies)
                    known = found.get((work, dtype))
                    found[work, dtype] = one if known is None else replace(known, copies=known.copies + one.copies)
    return tuple(found.values())


def _work(
    problem: TrainingProblem, prices: OperationPrices, op: LoweredOp, *, summed: bool
) -> Iterator[tuple[ProductShape | AttentionShape, DType]]:
    """Shape and format of a product or an attention; nothing of other operations."""
    formats, extents = problem.job.formats, prices.extents
    if op.tiles is not None and op.matmul is not None:
        rows, depth, columns = (max(round(float(extents.volume(v))), 1) for v in op.tiles)
        groups = max(round(float(extents.volume(op.matmul)) / (rows * depth * columns)), 1)
        if groups == 1 or op.routed:  # other products of a batch are no products with weights
            dtype = formats.compute if op.narrow else formats.other_compute
            yield ProductShape(rows, depth, columns, groups, summed and groups > 1), dtype
    elif op.attention is not None:
        yield _attention(prices, *op.attention), formats.other_compute


def _attention(prices: OperationPrices, op: Attention, splits: tuple[tuple[str, object], ...]) -> AttentionShape:
    extents, split = prices.extents, dict(splits)

    def local(axis: str) -> int:
        return max(round(float(extents.length(axis, split.get(axis, ())))), 1)  # type: ignore[arg-type]

    q, value = op.inputs[0].axes, op.inputs[2].axes
    sequences = math.prod(local(a) for a in q if a not in (op.query_axis, op.heads_axis, q[-1]))
    heads = local(op.heads_axis)
    kv_heads = max(min(local(op.kv_heads_axis), heads), 1)
    if op.kv_heads_axis not in extents.sizes or heads % kv_heads:
        kv_heads = heads
    queries, keys = local(op.query_axis), round(float(extents.sizes[op.key_axis]))
    pairs = float(op.pairs({op.query_axis: keys, op.key_axis: keys})) * queries / keys
    return AttentionShape(
        sequences, queries, keys, heads, kv_heads, local(q[-1]), local(value[-1]),
        op.causal, pairs, op.window, op.chunk, op.gradient,
    )  # fmt: skip
