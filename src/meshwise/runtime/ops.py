"""What each elementwise operation computes, by the name that the program gives it.

One function an operation, on whole arrays; norms, losses and rotations compute in fp32. Not here: matmuls, attention
and routing, or where anything is (`forward`).
"""

# ruff: noqa: ARG001 -- all functions of the table take the same arguments

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from meshwise.core.tensors import Elementwise
from meshwise.models.numerics import Numerics, Rotary, Scaling
from meshwise.runtime.paged import PagedStep
from meshwise.runtime.products import align
from meshwise.runtime.refusals import elementwise_of
from meshwise.runtime.scaled import Narrowing
from meshwise.runtime.zigzag import Zigzag

Arrays = Sequence[jax.Array]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What operations of a block read besides their inputs.

    Args:
        numerics: of the model.
        activations: format of activations, to which weights are brought as they are read.
        sizes: of the program's axes.
        capacity: slots of an expert over the mean, or None where none may be dropped.
        collective_matmul, expert_dispatch, loss: as in `Layout`.
        block, positions: the block that is run, and the positions of its tokens [T].
        latent_rope: width of the part that latent attention rotates, or None.
        recomputed: names of the operations that the backward pass runs again.
        paged: where the tokens' sequences have their cache, if it is paged.
        layer: number of the layer that runs among those of its cache, if it has one.
        zigzag: the order of positions, if they are not in their own.
        documents: position with which the document of each token begins [B, T], where it is not its whole sequence.
        adapter_scale: by which what an adapter gives is multiplied.
        narrowing: what the precision's recipe makes of the program, if it has one.
    """

    numerics: Numerics
    activations: Any
    sizes: Mapping[str, float]
    capacity: float | None = None
    collective_matmul: str = "compiler"
    expert_dispatch: str = "slots"
    loss: str = "whole"
    block: str = ""
    positions: Any = None
    latent_rope: int | None = None
    recomputed: frozenset[str] = frozenset()
    paged: PagedStep | None = None
    layer: Any = 0
    zigzag: Zigzag | None = None
    documents: jax.Array | None = None
    adapter_scale: float = 1.0
    narrowing: Narrowing | None = None

    @property
    def rotary(self) -> Rotary:
        """Rotation of this block."""
        return self.numerics.rotary[self.block]


Function = Callable[[Elementwise, Arrays, Surroundings], jax.Array]


def elementwise(op: Elementwise, inputs: Arrays, around: Surroundings) -> jax.Array:
    """Compute an elementwise operation.

    Args:
        op: of the program.
        inputs: whole arrays, in its order.
        around: what else is read.
    """
    name = elementwise_of(op.name)
    assert name is not None, f"refused before: {op.name}"
    return _FUNCTIONS[name](op, inputs, around)


def _norm(op: Elementwise, inputs: Arrays, around: Surroundings) -> jax.Array:
    """Divide by the root mean square over the reduced axes, or by the standard deviation after taking the mean off."""
    x = inputs[0].astype(jnp.float32)
    numerics = around.numerics
    over = tuple(op.output.axes.index(a) for a in op.reduced)
    latent = op.name in ("norm.q_a", "norm.kv_a")
    epsilon = numerics.latent_epsilon if latent else numerics.norm_epsilon
    if numerics.norm_centred:
        x = x - jnp.mean(x, axis=over, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=over, keepdims=True) + epsilon)
    for t, w in zip(op.inputs[1:], inputs[1:], strict=True):
        own = align(w.astype(jnp.float32), t.axes, op.output.axes)
        x = x + own if t.name.endswith(".bias") else x * (own + numerics.norm_offset)
    return x.astype(inputs[0].dtype)


def _rope(op: Elementwise, inputs: Arrays, around: Surroundings) -> jax.Array:
    """Rotate; of latent attention only the last part of a head, and in keys the part that all heads share."""
    if around.latent_rope is None:
        return rotate(inputs[0], around.rotary, around.positions)
    if len(inputs) == 1:
        still = inputs[0].shape[-1] - around.latent_rope
        turned = rotate(inputs[0][..., still:], around.rotary, around.positions)
        return jnp.concatenate([inputs[0][..., :still], turned], axis=-1)
    own, shared = inputs
    turned = rotate(shared, around.rotary, around.positions)[:, :, None, :]  # [B, T, Hr] -> [B, T, 1, Hr]
    turned = jnp.broadcast_to(turned, (*own.shape[:3], turned.shape[-1])).astype(own.dtype)
    return jnp.concatenate([own, turned], axis=-1)


def _sinks(op: Elementwise, inputs: Arrays, around: Surroundings) -> jax.Array:
    """Rescale what a softmax gave as if it had one more logit: by t / (t + e^sink), t being its denominator."""
    out, sink, denominator = inputs
    share = jax.nn.sigmoid(denominator - align(sink.astype(jnp.float32), op.inputs[1].axes, op.output.axes[:-1]))
    return (out.astype(jnp.float32) * share[..., None]).astype(out.dtype)


_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def _act(op: Elementwise, inputs: Arrays, around: Surroundings) -> jax.Array:
    """Activate, and weigh slots of experts by their gates where these are among the inputs."""
    whole = [x for t, x in zip(op.inputs, inputs, strict=True) if t.axes == op.output.axes]
    first, *rest = whole
    if around.numerics.activation == "swiglu_oai":
        active = _swiglu_oai(first, rest[0], around.numerics.clamp or jnp.inf)
    else:
        active = _ACTIVATIONS[around.numerics.activation](first)
        active = active * rest[0] if rest else active
    for t, gates in zip(op.inputs[len(whole) :], inputs[len(whole) :], strict=True):
        active = (active.astype(jnp.float32) * align(gates, t.axes, op.output.axes)).astype(first.dtype)
    return active


def _swiglu_oai(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def _add(op: Elementwise, inputs: Arrays, around: Surroundings) -> jax.Array:
    total = inputs[0]
    for t, x in zip(op.inputs[1:], inputs[1:], strict=True):
        total = (total + align(x, t.axes, op.output.axes)).astype(total.dtype)  # in the wider of both formats
    return total


def _join(op: Elementwise, inputs: Arrays, around: Surroundings) -> jax.Array:
    """What a frozen weight gives, and its adapter: scaled in fp32, so that no format rounds the factor."""
    base, adapter = inputs
    if around.adapter_scale == 1.0:
        return base + adapter
    return (base.astype(jnp.float32) + around.adapter_scale * adapter.astype(jnp.float32)).astype(base.dtype)


def _product(op: Elementwise, inputs: Arrays, around: Surroundings) -> jax.Array:
    """Weigh tokens, slots or biases by gates; a token has one."""
    total: jax.Array = jnp.ones((), jnp.float32)
    for t, x in zip(op.inputs, inputs, strict=True):
        one = x[..., 0] if "top_k" in t.axes else x
        total = total * align(one, tuple(a for a in t.axes if a != "top_k"), op.output.axes)
    return total.astype(around.activations)


def _embedding_scale(op: Elementwise, inputs: Arrays, around: Surroundings) -> jax.Array:
    return inputs[0] * jnp.asarray(around.numerics.embedding_scale, inputs[0].dtype)


def _logits_scale(op: Elementwise, inputs: Arrays, around: Surroundings) -> jax.Array:
    return _scaled(inputs[0], around.numerics.logits_scale, around.numerics.logits_cap)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _scaled(logits: jax.Array, scale: float, cap: float | None) -> jax.Array:
    """Scale logits, then bend them to c tanh(x / c), whose gradient follows from what it gives: no other is kept.

    The loss reads bent ones as they are kept: a compiler would hold them in fp32, too, rather than bend them twice.
    """
    x = logits.astype(jnp.float32) * scale
    if cap is None:
        return x.astype(logits.dtype)
    bent: jax.Array = jax.lax.optimization_barrier((cap * jnp.tanh(x / cap)).astype(logits.dtype))
    return bent


def _scaled_forward(logits: jax.Array, scale: float, cap: float | None) -> tuple[jax.Array, jax.Array | None]:
    made = _scaled(logits, scale, cap)
    return made, None if cap is None else made


def _scaled_backward(scale: float, cap: float | None, made: jax.Array | None, gradient: jax.Array) -> tuple[jax.Array]:
    slope = scale if cap is None or made is None else scale * (1 - jnp.square(made.astype(jnp.float32) / cap))
    return (jax.lax.optimization_barrier((gradient.astype(jnp.float32) * slope).astype(gradient.dtype)),)


_scaled.defvjp(_scaled_forward, _scaled_backward)


def _loss(op: Elementwise, inputs: Arrays, around: Surroundings) -> jax.Array:
    """Cross-entropy of every token [B, T] from logits [B, T, V], without an index into an axis that may be split."""
    return _cross_entropy(inputs[0], inputs[1], op.inputs[0].name != "logits.scaled")


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _cross_entropy(logits: jax.Array, labels: jax.Array, multiplied: bool) -> jax.Array:
    """`multiplied`: whether products read the gradient of the logits as it is, not what is made of it next."""
    return _cross_entropy_forward(logits, labels, multiplied)[0]


def _cross_entropy_forward(
    logits: jax.Array, labels: jax.Array, multiplied: bool
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    del multiplied
    wide = logits.astype(jnp.float32)
    largest = jnp.max(wide, axis=-1, keepdims=True)
    denominator = jnp.log(jnp.sum(jnp.exp(wide - largest), axis=-1)) + largest[..., 0]
    own = jnp.sum(jnp.where(_is_label(logits, labels), wide, 0.0), axis=-1)
    return denominator - own, (logits, labels, denominator)


def _cross_entropy_backward(
    multiplied: bool, kept: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, None]:
    """Logits, element by element, become their gradient, which may take their place.

    It is made once: a compiler that made it again for each product that reads it would hold logits and copies of it.
    Of capped ones the gradient before the cap is made of it at once, and it is nowhere itself.
    """
    logits, labels, denominator = kept
    share = jnp.exp(logits.astype(jnp.float32) - denominator[..., None])
    wide = gradient[..., None] * (share - _is_label(logits, labels))
    narrow = wide.astype(logits.dtype)
    return jax.lax.optimization_barrier(narrow) if multiplied else narrow, None


def _is_label(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _weigh(op: Elementwise, inputs: Arrays, around: Surroundings) -> jax.Array:
    """Weigh by a gate of one column a token, opened by a sigmoid."""
    gate = jax.nn.sigmoid(inputs[1].astype(jnp.float32)).astype(inputs[0].dtype)
    return inputs[0] * align(gate, op.inputs[1].axes, op.output.axes)


_FUNCTIONS: dict[str, Function] = {
    "act": _act,
    "add": _add,
    "join": _join,
    "product": _product,
    "norm": _norm,
    "rope": _rope,
    "weigh": _weigh,
    "sinks": _sinks,
    "embedding_scale": _embedding_scale,
    "logits_scale": _logits_scale,
    "loss": _loss,
}


def frequencies(rotary: Rotary, width: int) -> NDArray[np.float64]:
    """Angle per position of each pair of the `width` dimensions that are rotated: theta ** (-2 i / width).

    Source: Su et al. 2021, RoFormer; stretched as `Scaling` says.
    """
    plain: NDArray[np.float64] = rotary.theta ** (-np.arange(0, width, 2) / width)
    scaling = rotary.scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        rotations = scaling.original * plain / (2 * math.pi)
        smooth = np.clip((rotations - scaling.low) / (scaling.high - scaling.low), 0, 1)
        return plain * (smooth + (1 - smooth) / scaling.factor)
    return _yarn(plain, scaling, rotary.theta, width)


def _yarn(plain: NDArray[np.float64], scaling: Scaling, theta: float, width: int) -> NDArray[np.float64]:
    """Keep dimensions that rotate often, divide those that rotate seldom, pass linearly between (Peng et al. 2023)."""

    def dimension(rotations: float) -> float:
        """The dimension that makes this many rotations within the original positions."""
        return width * math.log(scaling.original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.high), dimension(scaling.low)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0, 1)
    return plain * (1 - ramp) + plain / scaling.factor * ramp


def rotate(x: jax.Array, rotary: Rotary, positions: jax.Array) -> jax.Array:
    """Rotate the first `share` of the last dimension by position.

    Args:
        x: [B, T, ..., H].
        rotary: see there.
        positions: [T].
    """
    width = int(x.shape[-1] * rotary.share)
    angles = positions[:, None].astype(jnp.float32) * jnp.asarray(frequencies(rotary, width), jnp.float32)
    angles = angles.reshape(1, positions.shape[0], *[1] * (x.ndim - 3), width // 2)
    temperature = 1.0 if rotary.scaling is None else rotary.scaling.attention
    cos, sin = jnp.cos(angles) * temperature, jnp.sin(angles) * temperature
    rotated, rest = x[..., :width].astype(jnp.float32), x[..., width:]
    if rotary.interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = jnp.split(rotated, 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = (
        jnp.stack(turned, axis=-1).reshape(rotated.shape) if rotary.interleaved else jnp.concatenate(turned, axis=-1)
    )
    return jnp.concatenate([joined.astype(x.dtype), rest], axis=-1)
