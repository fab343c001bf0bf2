"""The backward pass of a block, derived from its forward pass.

One rule for each kind of operation says which operations give the gradients of its inputs; nobody writes the backward
pass of a model. Not here: what of the forward pass is kept for it (sharding/remat.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, singledispatch

from meshwise.core.tensors import (
    Attention,
    AttentionGradient,
    Block,
    Convert,
    Einsum,
    Elementwise,
    Fused,
    FusedGradient,
    Kind,
    Lookup,
    Op,
    Route,
    Tensor,
    convert,
)

Contribute = Callable[..., Tensor]
"""(tensor, name of the operation, optionally a tensor whose format it has) -> the part of the tensor's gradient."""


@lru_cache(maxsize=256)  # every strategy and every policy asks again
def backward(block: Block) -> tuple[Op, ...]:
    """Derive the backward pass of `block`, operation by operation.

    Every einsum gives two (the gradient of each input), attention gives one op that writes three gradients (its output
    stands for d_q; d_k and d_v follow as zero-FLOP outputs of `Elementwise`), elementwise ops give one that reads the
    gradient and what the forward pass read. Where a tensor feeds several operations, the partial gradients are added by
    an op named `add.*`. The gradient of tensor `x` is named `d_x`; weights' gradients have kind GRADIENT.

    Returns: operations in order of execution. The gradients of the block's outputs are taken as given.
    """
    parts: dict[str, list[Tensor]] = {name: [] for name in block.outputs}
    produced = {op.output.name for op in block.ops}
    ops: list[Op] = []

    def gradient_of(t: Tensor) -> Tensor:
        kind = Kind.GRADIENT if t.kind is Kind.WEIGHT else t.kind
        return replace(t, name=f"d_{t.name}", kind=kind, dtype=None, scale_bytes=0.0)

    def collect(t: Tensor) -> Tensor:
        """The whole gradient of `t`: the sum of what its readers contributed."""
        grads = parts.get(t.name, [])
        total = gradient_of(t)
        if t.name in block.outputs:  # arrives from the next block, besides any inner readers
            grads = [total, *grads] if grads else []
        if len(grads) > 1:
            whole = replace(total, name=f"{total.name}.sum") if t.name in block.outputs else total
            ops.append(Elementwise(name=f"add.{t.name}", inputs=tuple(grads), output=whole, linear=True,
                                   flops_per_element=len(grads) - 1))  # fmt: skip
            return whole
        return grads[0] if grads else total

    def contribute(t: Tensor, op_name: str, like: Tensor | None = None) -> Tensor:
        """Name the contribution of one reader to the gradient of `t`, in the format of `like`."""
        g = gradient_of(t)
        if like is not None:
            g = replace(g, dtype=like.dtype, scale_bytes=like.scale_bytes)
        readers = sum(t.name == i.name for op in block.ops for i in op.inputs)
        part = g if readers == 1 and t.name not in block.outputs else replace(g, name=f"{g.name}.{op_name}")
        parts.setdefault(t.name, []).append(part)
        return part

    for op in reversed(block.ops):
        grad = collect(op.output)
        if isinstance(op, Convert):  # the gradient passes through
            parts |= {t.name: [*parts.get(t.name, ()), grad] for t in _trained(op)}
            continue
        if isinstance(op, Einsum | Route) and op.format is not None and grad.dtype != op.format.dtype:
            ops.append(convert(f"convert.d{op.name}", grad, op.format))
            grad = ops[-1].output
        ops.extend(_backward_of(op, grad, contribute))
    for name in dict.fromkeys(t.name for op in block.ops for t in op.inputs):
        source = next(t for op in block.ops for t in op.inputs if t.name == name)
        if name not in produced and len(parts.get(name, [])) > 1:
            collect(source)
    return tuple(ops)


@singledispatch
def _backward_of(op: Op, grad: Tensor, contribute: Contribute) -> list[Op]:  # noqa: ARG001  each rule reads them
    """The operations that turn the gradient of `op.output` into gradients of its inputs."""
    raise AssertionError(f"no backward rule for {type(op).__name__}")


@_backward_of.register
def _(op: Einsum, grad: Tensor, contribute: Contribute) -> list[Op]:
    out: list[Op] = []
    for t in _trained(op):
        others = tuple(o for o in op.inputs if o is not t)
        out.append(replace(op, name=f"d{op.name}.{t.name}", inputs=(grad, *others), output=contribute(t, op.name)))
    return out


@_backward_of.register
def _(op: Attention, grad: Tensor, contribute: Contribute) -> list[Op]:
    q, *further = op.inputs
    read = (*op.inputs, op.output, grad)
    first = replace(op, name=f"d{op.name}", inputs=read, output=contribute(q, op.name), gradient=True)
    # d_k and d_v come out of the same kernel: they cost their bytes, not FLOPs of their own. As gradients of what
    # the k and v projections made, their positions are called T again.
    written = [
        AttentionGradient(
            name=f"d{op.name}.{t.name}", inputs=(first.output, t), output=contribute(made, op.name), source=op
        )
        for t in further
        if op.key_axis in t.axes
        for made in [replace(t, axes=tuple(op.query_axis if a == op.key_axis else a for a in t.axes))]
    ]
    along = [t for t in further if op.key_axis not in t.axes]  # what is known of each query, such as its choice
    return [first, *written, *(FusedGradient.of(first, op, t, contribute(t, op.name)) for t in along)]


@_backward_of.register
def _(op: Fused, grad: Tensor, contribute: Contribute) -> list[Op]:
    source, *further = op.inputs
    kernel = replace(
        op, name=f"d{op.name}", inputs=(*op.inputs, grad), output=contribute(source, op.name), gradient=True
    )
    trained = _trained(op)
    return [kernel, *(FusedGradient.of(kernel, op, t, contribute(t, op.name)) for t in further if t in trained)]


@_backward_of.register
def _(op: Route, grad: Tensor, contribute: Contribute) -> list[Op]:
    source, *chosen = op.inputs
    made = contribute(source, op.name, grad)
    return [replace(op, name=f"d{op.name}", inputs=(grad, *chosen), output=made, combine=not op.combine)]


@_backward_of.register
def _(op: Lookup, grad: Tensor, contribute: Contribute) -> list[Op]:
    index, _ = op.inputs
    made = [contribute(t, op.name) for t in _trained(op)]
    return [Lookup(name=f"d{op.name}", inputs=(index, grad), output=t, scatter=True) for t in made]


@_backward_of.register
def _(op: Elementwise, grad: Tensor, contribute: Contribute) -> list[Op]:
    read = () if op.linear else (op.output,) if op.by_output else op.inputs
    adds = op.linear and len(op.inputs) > 1
    trained = _trained(op)
    first = {t.kind: t for t in reversed(trained)}  # gradients of weights may be made later than those of activations
    return [
        Elementwise(
            name=f"d{op.name}.{t.name}",
            inputs=(grad, *read),
            output=contribute(t, op.name),
            flops_per_element=op.flops_per_element,
            reduced=op.reduced,
            counted=op.counted,
            free=adds and t.axes == op.output.axes,
            beside=t is not first[t.kind],
        )
        for t in trained
    ]


def _trained(op: Op) -> list[Tensor]:
    """The inputs that have a gradient."""
    return [t for t in op.inputs if t.kind is not Kind.INDEX and not t.frozen]
