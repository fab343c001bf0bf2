"""Functions with gradients of our own; and weights whose gradients are wider than what they are multiplied in.

Beside such a weight stands a sink of zeros in the wider format: nothing reads it, and its gradient is the weight's. Not
here: formats of accumulators (`gradients`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@partial(jax.tree_util.register_dataclass, data_fields=("value", "sink"), meta_fields=())
@dataclass(frozen=True)
class Watched:
    """A weight and the sink of its gradient.

    Args:
        value: the weight.
        sink: zeros of its shape.
    """

    value: jax.Array
    sink: jax.Array

    def map(self, change: Callable[[jax.Array], jax.Array]) -> Watched:
        """Change both alike."""
        return Watched(change(self.value), change(self.sink))


def watch(weights: Any, dtype: Any) -> Any:
    """Put sinks of this format beside all weights of a tree that are held in another."""
    return jax.tree.map(lambda w: w if w.dtype == dtype else Watched(w, jnp.zeros(w.shape, dtype)), weights)


def sunk(gradients: Any) -> Any:
    """Take the gradients out of the sinks."""

    def sink(w: Any) -> Any:
        return w.sink if isinstance(w, Watched) else w

    return jax.tree.map(sink, gradients, is_leaf=lambda w: isinstance(w, Watched))


def plain(w: Any) -> Any:
    """A watched weight as one array in the wider format; anything else unchanged."""
    return jax.lax.stop_gradient(w.value).astype(w.sink.dtype) + w.sink if isinstance(w, Watched) else w


def linear(apply: Callable[[Any], Any], transpose: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A linear function of one value, whose gradient is `transpose` of its result's."""
    function = jax.custom_vjp(apply)
    function.defvjp(lambda x: (apply(x), None), lambda _, gradient: (transpose(gradient),))
    return function


def product(
    letters: tuple[str, str, str],
    x: jax.Array,
    w: jax.Array | Watched,
    weight_gradient: Callable[[jax.Array, jax.Array, Any], jax.Array] | None = None,
) -> jax.Array:
    """Einsum of an array and a weight.

    Args:
        letters: of `x`, of `w` and of the result.
        x, w: operands.
        weight_gradient: from `x`, the result's gradient and a format to the gradient of `w`; unless given, an einsum.
    """
    left, right, out = letters
    value, sink = (w.value, w.sink) if isinstance(w, Watched) else (w, None)
    watched, dtype = sink is not None, value.dtype if sink is None else sink.dtype

    def multiply(x: jax.Array, value: jax.Array, sink: jax.Array | None) -> jax.Array:  # noqa: ARG001
        return jnp.einsum(f"{left},{right}->{out}", x, value)

    def backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[Any, ...]:
        x, value = kept
        d_x = jnp.einsum(f"{out},{right}->{left}", gradient, value).astype(x.dtype)
        if weight_gradient is None:
            d_w = jnp.einsum(f"{left},{out}->{right}", x, gradient, preferred_element_type=dtype)
        else:
            d_w = weight_gradient(x, gradient, dtype)
        return (d_x, jnp.zeros_like(value), d_w) if watched else (d_x, d_w, None)

    function = jax.custom_vjp(multiply)
    function.defvjp(lambda x, value, sink: (multiply(x, value, sink), (x, value)), backward)
    return function(x, value, sink)
