"""Operations of the recurrences that stand where attention does, and the shapes of their weights.

Axes: heads `Nr` of width `Hr`, groups `Kr` that share keys and queries of width `Sr`, channels `Cr` of Mamba-1, taps
`W` of the short convolution, the rank `Rt` of its time steps. Not here: attention and feed-forward parts (`build`).
"""

from __future__ import annotations

from meshwise.core.kernels import Scan, SelectiveScan, ShortConvolution
from meshwise.core.tensors import Tensor
from meshwise.models.operations import ACT_FLOPS, NORM_FLOPS, TOKENS, Axes, Ops, weight
from meshwise.models.recurrences import GatedDelta, LightningAttention, Recurrence, SelectiveStateSpace, StateSpace
from meshwise.models.spec import Norm


def build_recurrence(spec: Recurrence, x: Tensor, axes: Axes, ops: Ops) -> Tensor:
    """Add the operations of a recurrence that reads `x`, and give its output, of the residual's width."""
    if isinstance(spec, SelectiveStateSpace):
        return _selective(spec, x, axes, ops)
    if isinstance(spec, StateSpace):
        return _state_space(spec, x, axes, ops)
    if isinstance(spec, GatedDelta):
        return _gated_delta(spec, x, axes, ops)
    return _lightning(spec, x, axes, ops)


def _into(name: str, x: Tensor, own: tuple[str, ...], ops: Ops, bias: bool = False) -> Tensor:
    """Project the last axis of `x` to the axes `own`."""
    t = ops.einsum(name, x, weight(f"w_{name}", x.axes[-1], *own), (*TOKENS, *own))
    return ops.bias(name, t, bias)


def _out(name: str, x: Tensor, ops: Ops, bias: bool = False) -> Tensor:
    """Project back to the residual's width."""
    t = ops.einsum(name, x, weight(f"w_{name}", *x.axes[2:], "D"), (*TOKENS, "D"))
    return ops.bias(name, t, bias)


def _convolve(name: str, x: Tensor, taps: str, bias: bool, ops: Ops) -> Tensor:
    """Add a short causal convolution of every channel of `x`, and SiLU."""
    own = x.axes[2:]
    weights = [weight(f"w_{name}", *own, taps), *([weight(f"b_{name}", *own)] if bias else [])]
    return ops.add(ShortConvolution(name=name, inputs=(x, *weights), output=Tensor(name, x.axes)))


def _norm_of_all_heads(name: str, x: Tensor, ops: Ops) -> Tensor:
    """An RMS norm over all heads together: devices that hold some of them exchange one number a position."""
    squares = ops.elementwise(f"{name}.squares", x, output=f"{name}.squares", flops=2, axes=TOKENS, counted=x.axes)
    scale = weight(name, *x.axes[2:])
    return ops.elementwise(f"{name}.scale", x, squares, scale, output=f"{name}.scale", flops=NORM_FLOPS)


def _selective(spec: SelectiveStateSpace, x: Tensor, axes: Axes, ops: Ops) -> Tensor:
    c, s, r = axes("Cr", spec.channels), axes("Sr", spec.state), axes("Rt", spec.step_rank)
    value = _into("ssm.x", x, (c,), ops, spec.bias)
    gate = _into("ssm.z", x, (c,), ops, spec.bias)
    value = _convolve("ssm.conv", value, axes("W", spec.taps), spec.conv_bias, ops)

    def low(name: str, width: str) -> Tensor:
        t = ops.einsum(f"ssm.{name}", value, weight(f"w_ssm.{name}", c, width), (*TOKENS, width))
        if not spec.inner_norms:
            return t
        own = Norm(weight=not spec.weightless)
        return ops.norm(f"norm.ssm.{name}", t, own, f"ssm.{name}.norm", over=(width,), own=(width,))

    step, key, query = low("rank", r), low("b", s), low("c", s)
    step = ops.einsum("ssm.step", step, weight("w_ssm.step", r, c), (*TOKENS, c))
    step = ops.elementwise("ssm.softplus", step, weight("b_ssm.step", c), output="ssm.dt", flops=ACT_FLOPS)
    decay = weight("w_ssm.a", c, s)
    y = ops.add(
        SelectiveScan(
            name="ssm.scan",
            inputs=(value, step, decay, key, query),
            output=Tensor("ssm.scan", (*TOKENS, c)),
            channels_axis=c,
        )
    )
    y = ops.elementwise("ssm.skip", y, value, weight("w_ssm.d", c), output="ssm.skip", flops=2)
    y = ops.elementwise("ssm.gate", y, gate, output="ssm.gate", flops=ACT_FLOPS)
    return _out("ssm.o", y, ops, spec.bias)


def _state_space(spec: StateSpace, x: Tensor, axes: Axes, ops: Ops) -> Tensor:
    n, h = axes("Nr", spec.heads), axes("Hr", spec.head_dim)
    k, s, taps = axes("Kr", spec.groups), axes("Sr", spec.state), axes("W", spec.taps)
    gate = _into("ssm.z", x, (n, h), ops, spec.bias)

    def convolved(name: str, *own: str) -> Tensor:
        return _convolve(f"ssm.conv.{name}", _into(f"ssm.{name}", x, own, ops, spec.bias), taps, spec.conv_bias, ops)

    value, key, query = convolved("x", n, h), convolved("b", k, s), convolved("c", k, s)
    step = _into("ssm.step", x, (n,), ops, spec.bias)
    step = ops.elementwise("ssm.softplus", step, weight("b_ssm.dt", n), output="ssm.dt", flops=ACT_FLOPS)
    decay = ops.elementwise("ssm.decay", step, weight("w_ssm.a", n), output="ssm.decay", flops=2)
    y = ops.add(
        Scan(
            name="ssm.scan",
            inputs=(value, key, query, decay, step),
            output=Tensor("ssm.scan", value.axes),
            heads_axis=n,
            groups_axis=k,
            chunk=spec.chunk,
        )
    )
    y = ops.elementwise("ssm.skip", y, value, weight("w_ssm.d", n), output="ssm.skip", flops=2)
    y = ops.elementwise("ssm.gate", y, gate, output="ssm.gate", flops=ACT_FLOPS)
    if spec.norm:
        y = _norm_of_groups(spec, y, ops)
    return _out("ssm.o", y, ops, spec.bias_out)


def _norm_of_groups(spec: StateSpace, y: Tensor, ops: Ops) -> Tensor:
    """An RMS norm over the heads of each group.

    A device holds whole groups unless there is only one; the exchange within a group of several is not told apart.
    """
    if (spec.norm_groups or spec.groups) == 1:
        return _norm_of_all_heads("norm.ssm", y, ops)
    return ops.norm("norm.ssm", y, Norm(), "ssm.norm", over=y.axes[3:], own=y.axes[2:])


def _gated_delta(spec: GatedDelta, x: Tensor, axes: Axes, ops: Ops) -> Tensor:
    n, h = axes("Nr", spec.heads), axes("Hr", spec.head_dim)
    k, s, taps = axes("Kr", spec.key_heads), axes("Sr", spec.key_dim), axes("W", spec.taps)

    def convolved(name: str, *own: str) -> Tensor:
        return _convolve(f"delta.conv.{name}", _into(f"delta.{name}", x, own, ops), taps, False, ops)

    query, key, value = convolved("q", k, s), convolved("k", k, s), convolved("v", n, h)
    gate = _into("delta.z", x, (n, h), ops)
    write = ops.elementwise("delta.sigmoid", _into("delta.write", x, (n,), ops), output="delta.beta", flops=4)
    step = _into("delta.step", x, (n,), ops)
    step = ops.elementwise("delta.softplus", step, weight("b_delta.dt", n), output="delta.dt", flops=ACT_FLOPS)
    decay = ops.elementwise("delta.decay", step, weight("w_delta.a", n), output="delta.decay", flops=2)
    y = ops.add(
        Scan(
            name="delta.scan",
            inputs=(value, key, query, decay, write),
            output=Tensor("delta.scan", value.axes),
            heads_axis=n,
            groups_axis=k,
            chunk=spec.chunk,
            delta=True,
        )
    )
    y = ops.norm("norm.delta", y, Norm(), "delta.norm", over=(h,), own=(h,))
    y = ops.elementwise("delta.gate", y, gate, output="delta.gate", flops=ACT_FLOPS)
    return _out("delta.o", y, ops)


def _lightning(spec: LightningAttention, x: Tensor, axes: Axes, ops: Ops) -> Tensor:
    n, h, s = axes("Nr", spec.heads), axes("Hr", spec.head_dim), axes("Sr", spec.head_dim)

    def activated(name: str, width: str) -> Tensor:
        t = _into(f"linear.{name}", x, (n, width), ops)
        return ops.elementwise(f"linear.act.{name}", t, output=f"linear.act.{name}", flops=ACT_FLOPS)

    query, key, value = activated("q", s), activated("k", s), activated("v", h)
    y = ops.add(
        Scan(
            name="linear.scan",
            inputs=(value, key, query),
            output=Tensor("linear.scan", value.axes),
            heads_axis=n,
            groups_axis=n,
            chunk=spec.chunk,
        )
    )
    y = _norm_of_all_heads("norm.linear", y, ops)
    gate = _into("linear.z", x, (n, h), ops)
    y = ops.elementwise("linear.gate", y, gate, output="linear.gate", flops=ACT_FLOPS)
    return _out("linear.o", y, ops)
