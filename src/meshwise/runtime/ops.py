"""What each kind of elementwise operation computes, by the name that the program gives it.

One function an operation, on whole arrays; norms and losses compute in fp32. Not here: matmuls, attention and routing,
or where anything is (`forward`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshwise.models.numerics import Numerics, Rotary
from meshwise.runtime.named import align
from meshwise.runtime.rotary import rotate
from meshwise.tensors import Elementwise

__all__ = ["Surroundings", "elementwise", "is_known"]

Arrays = Sequence[jax.Array]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What operations of a block read besides their inputs.

    Args:
        numerics: of the model.
        block: its name.
        positions: of the tokens, [T].
        activations: format of activations, to which weights are brought as they are read.
    """

    numerics: Numerics
    block: str
    positions: jax.Array
    activations: Any

    @property
    def rotary(self) -> Rotary:
        """Rotation of this block."""
        return self.numerics.rotary[self.block]


def elementwise(op: Elementwise, inputs: Arrays, around: Surroundings) -> jax.Array:
    """Compute an elementwise operation.

    Args:
        op: of the program.
        inputs: whole arrays, in its order.
        around: what else is read.
    """
    function = _find(op.name)
    assert function is not None, f"refused before: {op.name}"
    return function(op, inputs, around)


def is_known(op: Elementwise) -> bool:
    """Whether an operation can be executed."""
    return _find(op.name) is not None


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


def _rope(op: Elementwise, inputs: Arrays, around: Surroundings) -> jax.Array:  # noqa: ARG001
    return rotate(inputs[0], around.rotary, around.positions)


_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def _act(op: Elementwise, inputs: Arrays, around: Surroundings) -> jax.Array:  # noqa: ARG001
    first, *rest = inputs
    active = _ACTIVATIONS[around.numerics.activation](first)
    return active * rest[0] if rest else active


def _add(op: Elementwise, inputs: Arrays, around: Surroundings) -> jax.Array:  # noqa: ARG001
    total = inputs[0]
    for t, x in zip(op.inputs[1:], inputs[1:], strict=True):
        total = total + align(x, t.axes, op.output.axes).astype(total.dtype)
    return total


def _embedding_scale(op: Elementwise, inputs: Arrays, around: Surroundings) -> jax.Array:  # noqa: ARG001
    return inputs[0] * jnp.asarray(around.numerics.embedding_scale, inputs[0].dtype)


def _logits_scale(op: Elementwise, inputs: Arrays, around: Surroundings) -> jax.Array:  # noqa: ARG001
    x = inputs[0].astype(jnp.float32) * around.numerics.logits_scale
    cap = around.numerics.logits_cap
    return (x if cap is None else cap * jnp.tanh(x / cap)).astype(inputs[0].dtype)


def _loss(op: Elementwise, inputs: Arrays, around: Surroundings) -> jax.Array:  # noqa: ARG001
    """Cross-entropy of every token [B, T] from logits [B, T, V], without an index into an axis that may be split."""
    logits, labels = inputs[0].astype(jnp.float32), inputs[1]
    largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    denominator = jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1)) + largest[..., 0]
    own = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]
    return denominator - jnp.sum(jnp.where(own, logits, 0.0), axis=-1)


_EXACT: dict[str, Callable[[Elementwise, Arrays, Surroundings], jax.Array]] = {
    "act": _act,
    "rope.q": _rope,
    "rope.k": _rope,
    "residual": _add,
    "residual.attn": _add,
    "residual.mlp": _add,
    "add.positions": _add,
    "scale": _embedding_scale,
    "scale.logits": _logits_scale,
    "loss": _loss,
}
_BEGINNING: dict[str, Callable[[Elementwise, Arrays, Surroundings], jax.Array]] = {"norm.": _norm, "bias.": _add}


def _find(name: str) -> Callable[[Elementwise, Arrays, Surroundings], jax.Array] | None:
    if name in _EXACT:
        return _EXACT[name]
    return next((f for start, f in _BEGINNING.items() if name.startswith(start)), None)
