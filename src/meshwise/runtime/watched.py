"""Functions with gradients of our own; and weights whose gradients are wider than what they are multiplied in.

Beside such a weight stands a sink of zeros in the wider format: nothing reads it, and its gradient is the weight's.
Frozen weights are marked, so that no gradient of theirs is made. Not here: formats of accumulators (`gradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwise.runtime.scaled import Scaled

#: Columns of the tiles in which TPUs lay arrays out.
_LANES = 128


@partial(jax.tree_util.register_dataclass, data_fields=("value", "sink"), meta_fields=())
@dataclass(frozen=True)
class Watched:
    """A weight and the sink of its gradient.

    Args:
        value: the weight, perhaps in a narrow format.
        sink: zeros of its shape; with a dimension in front where devices add up gradients of their own.
    """

    value: Any
    sink: jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=("value",), meta_fields=())
@dataclass(frozen=True)
class Frozen:
    """A weight that is not trained: it has no gradient, and none is made."""

    value: jax.Array


#: Run -> name of a weight -> what is held for it.
_Tree = Mapping[str, Mapping[str, Any]]


def apart(weights: _Tree) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Weights that are trained, and frozen ones; runs that have none of a kind are left out there."""
    found: tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]] = ({}, {})
    for key, run in weights.items():
        for name, w in run.items():
            found[isinstance(w, Frozen)].setdefault(key, {})[name] = w
    return found


def together(one: _Tree, other: _Tree) -> dict[str, dict[str, Any]]:
    """The way back."""
    return {key: {**one.get(key, {}), **other.get(key, {})} for key in {**one, **other}}


def mapped(w: Any, change: Callable[[jax.Array], Any], of_sink: Callable[[jax.Array], Any] | None = None) -> Any:
    """Change a weight; of a watched one the sink, too: alike, unless another function is given."""
    if isinstance(w, Frozen):
        return Frozen(change(w.value))
    if isinstance(w, Scaled):
        return Scaled(change(jax.lax.stop_gradient(w.value)), w.scale)
    if isinstance(w, Watched) and isinstance(w.value, Scaled):
        return Watched(mapped(w.value, change), (of_sink or change)(w.sink))
    return Watched(change(w.value), (of_sink or change)(w.sink)) if isinstance(w, Watched) else change(w)


def sunk(gradients: Any) -> Any:
    """Take the gradients out of the sinks."""

    def sink(w: Any) -> Any:
        return w.sink if isinstance(w, Watched) else w

    return jax.tree.map(sink, gradients, is_leaf=lambda w: isinstance(w, Watched))


def plain(w: Any) -> Any:
    """A watched weight as one array in the wider format, a frozen one without gradient; anything else unchanged."""
    if isinstance(w, Frozen):
        return jax.lax.stop_gradient(w.value)
    return jax.lax.stop_gradient(w.value).astype(w.sink.dtype) + w.sink if isinstance(w, Watched) else w


def linear(apply: Callable[[Any], Any], transpose: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A linear function of one value, whose gradient is `transpose` of its result's."""
    function = jax.custom_vjp(apply)
    function.defvjp(lambda x: (apply(x), None), lambda _, gradient: (transpose(gradient),))
    return function


def values_together(weights: Any) -> Any:
    """A tree of weights, none of whose values is read before all are there; gradients pass."""

    def is_marked(w: Any) -> bool:
        return isinstance(w, Watched | Frozen)

    def again(w: Any, value: jax.Array) -> Any:
        if isinstance(w, Frozen):
            return Frozen(jax.lax.stop_gradient(value))
        return Watched(value, w.sink) if isinstance(w, Watched) else value

    values = jax.tree.map(lambda w: w.value if is_marked(w) else w, weights, is_leaf=is_marked)
    values = linear(jax.lax.optimization_barrier, lambda gradient: gradient)(values)
    return jax.tree.map(again, weights, values, is_leaf=is_marked)


def with_gradient(
    forward: Callable[..., tuple[Any, Any]],
    backward: Callable[..., tuple[Any, ...]],
    x: Any,
    *weights: Any,
    alone: Callable[..., Any] | None = None,
) -> Any:
    """Apply a function of activations and weights with gradients of our own; watched weights get theirs in sinks.

    Frozen weights have no gradient: their format is None, and so is what `backward` gives for them.

    Args:
        forward: (activations, *values of weights) -> (result, what the backward pass reads).
        backward: (what it reads, gradient of the result, *formats of the weights' gradients) -> gradients of the
            activations and of each weight.
        x: activations, a tree of arrays.
        weights: each an array, `Watched` or `Frozen`.
        alone: (activations, *values of weights) -> result, where no gradient is asked for; else `forward` makes it.

    Returns: the result.
    """
    values = tuple(w.value if isinstance(w, Watched) else plain(w) for w in weights)
    sinks = tuple(w.sink if isinstance(w, Watched) else None for w in weights)
    formats = [gradient_format(w) for w in weights]

    def back(kept: Any, gradient: Any) -> tuple[Any, ...]:
        d_x, *found = backward(kept, gradient, *formats)
        watched = list(zip(values, sinks, found, strict=True))
        d_values = tuple(d if s is None else jax.tree.map(jnp.zeros_like, v) for v, s, d in watched)
        return d_x, d_values, tuple(None if s is None else d for _, s, d in watched)

    function = jax.custom_vjp(lambda x, values, _: forward(x, *values)[0] if alone is None else alone(x, *values))
    function.defvjp(lambda x, values, _: forward(x, *values), back)
    return function(x, values, sinks)


def gradient_format(w: Any) -> Any:
    """Format in which the gradient of a weight is made; None where it has none."""
    if isinstance(w, Frozen | Scaled):
        return None
    return w.sink.dtype if isinstance(w, Watched) else w.dtype


def product(
    letters: tuple[str, str, str],
    x: jax.Array,
    w: jax.Array | Watched | Frozen,
    weight_gradient: Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, jax.Array]] | None = None,
    *,
    first: bool = False,
    after: bool = False,
) -> jax.Array:
    """Einsum of an array and a weight.

    Args:
        letters: of `x`, of `w` and of the result.
        x, w: operands.
        weight_gradient: from `x`, the result's gradient and a format to the gradient of `w`, and the result's gradient
            again, there no sooner than the other may be made; unless given, an einsum.
        first: whether the gradient of `x` is made from that.
        after: whether the gradient of `w` is made after that of `x`, which alone reads `w`: both are never held.
    """
    left, right, out = letters
    if isinstance(w, Frozen):  # nothing but `w` is kept for the backward pass
        return jnp.einsum(f"{left},{right}->{out}", x, plain(w))

    def forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return jnp.einsum(f"{left},{right}->{out}", x, w), (x, w)

    def backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        def of_input(gradient: jax.Array) -> jax.Array:
            return jnp.einsum(f"{out},{right}->{left}", gradient, w).astype(x.dtype)

        def of_weight(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
            if weight_gradient is not None:
                return weight_gradient(x, gradient, dtype)
            return jnp.einsum(f"{left},{out}->{right}", x, gradient, preferred_element_type=dtype), gradient

        x, w = kept
        if first and not after:
            d_w, gradient = of_weight(x, gradient)
            return of_input(gradient), d_w
        d_x = of_input(gradient)
        if after:
            d_x, x, gradient = jax.lax.optimization_barrier((d_x, x, gradient))
        return d_x, of_weight(x, gradient)[0]

    return with_gradient(forward, backward, x, w)


def kept(x: jax.Array, name: str, platform: str) -> jax.Array:
    """Name an array by which a policy keeps it for the backward pass.

    On TPUs heads [B, T, heads, width] that fill no whole tiles are kept side by side: each for itself, those of 64
    columns would take twice the memory.
    """
    if platform == "tpu" and x.ndim > 3 and x.shape[-1] % _LANES:
        return checkpoint_name(x.reshape(*x.shape[:-2], -1), name).reshape(x.shape)
    return checkpoint_name(x, name)
