"""Weights whose gradients are made and reduced in a wider format than they are multiplied in.

Beside the weight stands a sink of zeros in the wider format: nothing reads it, and its gradient is the weight's. Not
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
    return jax.tree.map(_sink, gradients, is_leaf=lambda w: isinstance(w, Watched))


def _sink(w: Any) -> Any:
    return w.sink if isinstance(w, Watched) else w


def plain(w: Any) -> Any:
    """Give a watched weight as one array in the wider format; anything else as it is."""
    return jax.lax.stop_gradient(w.value).astype(w.sink.dtype) + w.sink if isinstance(w, Watched) else w


def product(equation: str, x: jax.Array, w: Watched) -> jax.Array:
    """Einsum of an array and a watched weight."""
    return _product(equation, x, w.value, w.sink)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(equation: str, x: jax.Array, value: jax.Array, sink: jax.Array) -> jax.Array:  # noqa: ARG001
    return jnp.einsum(equation, x, value)


def _product_forward(equation: str, x: jax.Array, value: jax.Array, sink: jax.Array) -> tuple[jax.Array, Any]:
    return jnp.einsum(equation, x, value), (x, value, jnp.zeros((), sink.dtype))


def _product_backward(equation: str, kept: Any, gradient: jax.Array) -> tuple[Any, ...]:
    x, value, like = kept
    read, out = equation.split("->")
    left, right = read.split(",")
    d_x = jnp.einsum(f"{out},{right}->{left}", gradient, value)
    d_w = jnp.einsum(f"{left},{out}->{right}", x, gradient, preferred_element_type=like.dtype)
    return d_x.astype(x.dtype), jnp.zeros_like(value), d_w


_product.defvjp(_product_forward, _product_backward)
