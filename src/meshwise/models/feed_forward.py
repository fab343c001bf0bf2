"""Feed-forward parts: networks, mixtures of routed and shared experts.

Not here: the layers around them (`build`).
"""

from __future__ import annotations

from meshwise.core.tensors import Kind, Tensor
from meshwise.models.operations import ACT_FLOPS, SOFTMAX_FLOPS, TOKENS, Axes, Ops, weight
from meshwise.models.spec import Mixture, Mlp, Norm


def _mlp(spec: Mlp, x: Tensor, axes: Axes, ops: Ops, *, letter: str = "F", prefix: str = "") -> Tensor:
    """A feed-forward network; `prefix` is "shared." for the experts that every token visits."""
    f = axes(letter, spec.hidden)

    def into(name: str) -> Tensor:
        t = ops.einsum(prefix + name, x, weight(f"w_{prefix}{name}", "D", f), (*TOKENS, f))
        return ops.bias(prefix + name, t, spec.bias)

    parts = [into("gate"), into("up")] if spec.gated else [into("up")]
    act = ops.elementwise(f"{prefix}act", *parts, output=f"{prefix}act", flops=ACT_FLOPS)
    down = ops.einsum(f"{prefix}down", act, weight(f"w_{prefix}down", f, "D"), (*TOKENS, "D"))
    return ops.bias(f"{prefix}down", down, spec.bias_out)


def _mixture(spec: Mixture, x: Tensor, axes: Axes, ops: Ops, routed_by: Tensor | None = None) -> Tensor:
    """Routed and shared experts; the router reads `routed_by` if it has an input of its own."""
    e, f, chosen = axes("E", spec.experts), axes("Fe", spec.hidden), axes("top_k", spec.top_k)
    # The router's logits have an axis of their own: every device scores all experts for its tokens, wherever they live.
    scored = axes("Er", spec.experts)
    logits = ops.einsum("router", routed_by or x, weight("w_router", "D", scored), (*TOKENS, scored))
    logits = ops.bias("router", logits, spec.router_bias)
    correction = [weight("b_router.correction", scored)] if spec.correction_bias else []
    correction += [weight("w_router.scale", scored)] if spec.beside else []
    gates = ops.elementwise(
        "top_k",
        logits,
        *correction,
        output="gates",
        flops=SOFTMAX_FLOPS,
        reduced=(scored,),
        axes=(*TOKENS, chosen),
        counted=(*TOKENS, scored),
    )
    choice = Tensor(gates.name, gates.axes, Kind.INDEX)
    source, width = x, "D"
    if spec.latent is not None:
        width = axes("Dl", spec.latent)
        source = ops.einsum("latent.in", x, weight("w_latent.in", "D", width), (*TOKENS, width))
        source = ops.bias("latent.in", source, spec.shared_bias)
    down = _routed_experts(spec, (source, gates, choice), (e, f), ops)
    out = ops.route("combine", (down, choice), Tensor("combine", (*TOKENS, width)), combine=True)
    if spec.latent is not None:
        out = ops.einsum("latent.out", out, weight("w_latent.out", width, "D"), (*TOKENS, "D"))
        out = ops.bias("latent.out", out, spec.shared_bias)
    return _shared_experts(spec, x, out, axes, ops) if spec.shared else out


def _routed_experts(spec: Mixture, routed: tuple[Tensor, Tensor, Tensor], widths: tuple[str, str], ops: Ops) -> Tensor:
    """Send tokens to their experts, and give what these make of them: slots, weighed by their tokens' gates.

    Experts are linear in what they multiply by their last matrix, so that a gate may weigh that: the backward pass then
    reads nothing as wide as the stream, and bringing slots back only adds. The gates travel with the tokens. Where they
    weigh what experts read, and a token has one, the token is weighed before it leaves.

    Args:
        spec: the mixture.
        routed: the tokens, their gates, and the experts that they chose.
        widths: axes of experts, and of the width of one.
    """
    x, gates, choice = routed
    e, f = widths
    early = spec.weighs_inputs and spec.top_k == 1
    if early:
        x = ops.elementwise("weigh", x, gates, output="weighed")
    slots = ops.route("dispatch", (x, choice), Tensor("slots", (e, "C", x.axes[-1])), combine=False)
    weights: tuple[Tensor, ...] = ()
    if not early:
        weights = (ops.route("dispatch.gates", (gates, choice), Tensor("slot_gates", (e, "C")), combine=False),)
    if spec.weighs_inputs and not early:
        slots, weights = ops.elementwise("expert.weigh", slots, *weights, output="slots.weighed"), ()

    def into(name: str) -> Tensor:
        t = ops.einsum(f"expert.{name}", slots, weight(f"w_expert.{name}", e, slots.axes[-1], f), (e, "C", f))
        return ops.bias(f"expert.{name}", t, spec.expert_bias)

    parts = [into("gate"), into("up")] if spec.gated else [into("up")]
    flops = ACT_FLOPS + len(weights)
    act = ops.elementwise("expert.act", *parts, *weights, output="expert.act", flops=flops)
    down = ops.einsum("expert.down", act, weight("w_expert.down", e, f, slots.axes[-1]), slots.axes)
    return ops.bias("expert.down", down, spec.expert_bias, weighed_by=weights)


def _shared_experts(spec: Mixture, x: Tensor, routed: Tensor, axes: Axes, ops: Ops) -> Tensor:
    """Experts that every token visits, beside the routed ones."""
    mlp = Mlp(spec.shared, gated=spec.gated, bias=spec.shared_bias, bias_out=spec.shared_bias)
    shared = _mlp(mlp, x, axes, ops, letter="Fs", prefix="shared.")
    if spec.shared_gate:
        gate = ops.einsum("shared.weigh", x, weight("w_shared.weigh", "D"), TOKENS)
        shared = ops.elementwise("shared.scale", shared, gate, output="shared.scale", flops=2)
    return ops.elementwise("shared.add", routed, shared, output="mixture", linear=True)


def dense_beside_mixture(spec: Mixture, dense: Mlp, stream: Tensor, axes: Axes, ops: Ops) -> Tensor:
    """A feed-forward and a mixture that both read the residual stream, each between norms of its own (Gemma 4)."""
    first = _mlp(dense, ops.residual_norm("norm.mlp", stream, Norm(), "x.mlp"), axes, ops)
    first = ops.residual_norm("norm.dense_out", first, Norm(), "dense_out.norm")
    routed_by = ops.norm("router.norm", stream, Norm(), "x.router", over=("D",), own=("D",))
    second = ops.residual_norm("norm.experts", stream, Norm(), "x.experts")
    second = _mixture(spec, second, axes, ops, routed_by)
    second = ops.residual_norm("norm.experts_out", second, Norm(), "experts_out.norm")
    return ops.elementwise("add.experts", first, second, output="ffn", linear=True)


def feed_forward(spec: Mlp | Mixture, x: Tensor, axes: Axes, ops: Ops) -> Tensor:
    """Transform each position on its own."""
    return _mlp(spec, x, axes, ops) if isinstance(spec, Mlp) else _mixture(spec, x, axes, ops)
