"""A program whose matmuls with weights run in the narrow format of a precision. Not here: formats (`precision`).

Conversions become operations of the program, so that what is kept, gathered and dispatched in the narrow format
follows from where they stand.
"""

from __future__ import annotations

from dataclasses import replace

from meshwise.core.tensors import Block, Einsum, Format, Kind, Op, Program, Route, Tensor, convert
from meshwise.jobs.precision import Precision, Recipe


def narrowed(program: Program, precision: Precision) -> Program:
    """Give the program as `precision` computes it; itself where all its matmuls run in one format."""
    if precision.recipe is None and precision.compute == precision.other_compute:
        return program
    blocks = (_narrow_block(b, precision.recipe) if b.role == "layer" else b for b in program)
    return replace(program, blocks=tuple(blocks))


def is_projection(op: Op) -> bool:
    """Whether `op` multiplies activations with a weight matrix of a layer (the router left out)."""
    if not isinstance(op, Einsum):
        return False
    weights = [t for t in op.inputs if t.kind is Kind.WEIGHT]
    return len(weights) == 1 and len(weights[0].axes) > 1 and not weights[0].name.startswith("w_router")


def _narrow_block(block: Block, recipe: Recipe | None) -> Block:
    if recipe is None:
        marked = (replace(op, narrow=True) if isinstance(op, Einsum) and is_projection(op) else op for op in block.ops)
        return replace(block, ops=tuple(marked))
    return replace(block, ops=tuple(_Narrowing(block, recipe).run()))


class _Narrowing:
    """Walks over the operations of a block and puts conversions where operands first become narrow."""

    def __init__(self, block: Block, recipe: Recipe) -> None:
        self.block = block
        self.recipe = recipe
        self.made = {op.output.name: op for op in block.ops}
        self.projected = {t.name for op in block.ops if is_projection(op) for t in op.inputs}
        self.narrow: dict[str, Tensor] = {}
        self.ops: list[Op] = []

    def run(self) -> list[Op]:
        for op in self.block.ops:
            if isinstance(op, Einsum) and is_projection(op) and not self.crosses(op):
                inputs = tuple(self.operand(t) for t in op.inputs)
                self.ops.append(replace(op, inputs=inputs, narrow=True, format=self.recipe.activations))
            elif isinstance(op, Route) and self.recipe.dispatches:
                self.ops.append(self.route(op))
            else:
                self.ops.append(op)
        return self.ops

    def crosses(self, op: Op) -> bool:
        """Whether it reads what an encoder left for all decoder layers, which stays in the wider format."""
        return any(t.name in self.block.inputs[1:] for t in op.inputs)

    def operand(self, t: Tensor) -> Tensor:
        """Give an operand of a projection in its format."""
        if t.kind is Kind.WEIGHT:
            into = self.recipe.weights
            return t if into is None else replace(t, dtype=into.dtype, scale_bytes=into.scale_bytes)
        return self.converted(t, self.recipe.activations)

    def converted(self, t: Tensor, into: Format) -> Tensor:
        if t.name not in self.narrow:
            self.ops.append(convert(f"convert.{t.name}", t, into))
            self.narrow[t.name] = self.ops[-1].output
        return self.narrow[t.name]

    def route(self, op: Route) -> Route:
        """Dispatch narrow tokens to experts that multiply them; let gradients go to the experts narrow, too."""
        source, *others = op.inputs
        if op.combine:
            maker = self.made.get(source.name)
            return replace(op, format=self.recipe.activations) if maker is not None and is_projection(maker) else op
        if op.output.name not in self.projected:
            return op
        narrow = self.converted(source, self.recipe.activations)
        slots = replace(op.output, dtype=narrow.dtype, scale_bytes=narrow.scale_bytes)
        self.narrow[op.output.name] = slots
        return replace(op, inputs=(narrow, *others), output=slots)
