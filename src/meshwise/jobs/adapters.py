"""A program with low-rank adapters beside frozen weights. Not here: which there are (`fine_tuning`)."""

from __future__ import annotations

from dataclasses import replace

from meshwise.core.errors import MeshwiseError
from meshwise.core.tensors import Block, Convert, Einsum, Elementwise, Kind, Op, Program, Tensor
from meshwise.jobs.fine_tuning import FineTuning
from meshwise.jobs.narrowing import is_projection

#: The axis of an adapter's rank.
RANK = "Ra"


def with_adapters(program: Program, tuning: FineTuning) -> Program:
    """Freeze all weights; give each targeted projection y = x W an adapter, y = x W + (x A) B.

    Norms, biases, embedding, head and router stay as they are. An expert has adapters of its own.

    Raises:
        MeshwiseError: the targets name no projection of the model.
    """
    if tuning.full:
        return program
    assert RANK not in program.sizes, "the axis of the rank is taken"
    blocks = tuple(
        replace(b, ops=tuple(_adapt(b, tuning)), idle=tuple(replace(t, frozen=True) for t in b.idle)) for b in program
    )
    adapted = replace(program, blocks=blocks, sizes={**program.sizes, RANK: tuning.rank})
    if not trainable_parameters(adapted):
        raise MeshwiseError(
            f"fine_tune {tuning.name!r}: the model has no projection of {', '.join(tuning.targets)}; use targets=all"
        )
    return adapted


def trainable_parameters(program: Program) -> int:
    """Parameters that are not frozen.

    >>> from meshwise.jobs import parse_fine_tuning
    >>> attention = Einsum.parse("q", "x[B, D] * w_q[D, H] -> q[B, H]", weights=("w_q",))
    >>> program = Program("train", (Block("layer", (attention,), repeat=2),), {"D": 64, "H": 32})
    >>> trainable_parameters(with_adapters(program, parse_fine_tuning("lora:rank=4")))
    768
    """
    return int(
        sum(b.repeat * t.elements(program.sizes) for b in program for t in b.weights if not t.frozen),
    )


def _adapt(block: Block, tuning: FineTuning) -> list[Op]:
    ops: list[Op] = []
    for op in block.ops:
        frozen = replace(op, inputs=tuple(replace(t, frozen=True) if t.kind is Kind.WEIGHT else t for t in op.inputs))
        if block.role != "layer" or not isinstance(frozen, Einsum) or not is_projection(frozen):
            ops.append(frozen)
            continue
        weight = next(t for t in frozen.inputs if t.kind is Kind.WEIGHT)
        adapted = tuning.adapts(weight.name)
        base = replace(frozen, output=replace(op.output, name=f"{op.output.name}.base")) if adapted else frozen
        ops += _stored(base, weight, tuning)
        if adapted:
            ops += _adapter(frozen, weight, base.output)
    return ops


def _stored(op: Einsum, weight: Tensor, tuning: FineTuning) -> list[Op]:
    """Give `op` on a weight as it is stored: one in few bits is widened each time it is multiplied."""
    if tuning.stored is None:
        return [op]
    few = replace(weight, dtype=tuning.stored.dtype, scale_bytes=tuning.stored.scale_bytes)
    wide = Tensor(f"wide.{weight.name}", weight.axes, frozen=True)
    widen = Convert(name=f"widen.{weight.name}", inputs=(few,), output=wide, lasting=False)
    return [widen, replace(op, inputs=tuple(wide if t is weight else t for t in op.inputs))]


def _adapter(op: Einsum, weight: Tensor, base: Tensor) -> list[Op]:
    """Give (x A) B and its sum with what the frozen weight made."""
    (x,) = (t for t in op.inputs if t is not weight)
    y = op.output
    rows = tuple(a for a in weight.axes if a not in y.axes)
    stack = tuple(a for a in weight.axes if a in y.axes and a in x.axes)
    columns = tuple(a for a in weight.axes if a in y.axes and a not in x.axes)
    down = Tensor(f"{weight.name}.a", (*stack, *rows, RANK), Kind.WEIGHT)
    up = Tensor(f"{weight.name}.b", (*stack, RANK, *columns), Kind.WEIGHT)
    low = Tensor(f"{y.name}.low", (*(a for a in x.axes if a not in rows), RANK))
    added = Tensor(f"{y.name}.adapter", y.axes)
    return [
        Einsum(name=f"{op.name}.a", inputs=(x, down), output=low),
        Einsum(name=f"{op.name}.b", inputs=(low, up), output=added),
        Elementwise(name=f"{op.name}.add", inputs=(base, added), output=y, linear=True, joins=True),
    ]
