"""Gradients of a microbatch, added up where they are made: no second copy of all weights' gradients is ever held.

Beside the stream the layers are handed the accumulators, which nothing reads: `onto` gives weight and accumulator
unchanged, and on the way back adds the weight's gradient to what comes back for the accumulator. So the accumulators of
all microbatches go through the backward pass of each, layer by layer. Not here: microbatches (`gradients`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshwise.runtime.layers import Layer, Stack, add_at, run_segment, without_turn
from meshwise.runtime.params import Run, Segment, Tree
from meshwise.runtime.watched import apart, sunk, together

#: Numbers of a layer in the leading dimensions of its accumulators.
_Place = tuple[jax.Array, ...]


@jax.custom_vjp
def onto(weights: Any, totals: Any, place: _Place) -> tuple[Any, Any]:
    """Weights and accumulators unchanged; their gradient adds those of the weights to the accumulators.

    Args:
        weights: of one layer, by name, arrays or `Watched`.
        totals: accumulators of all layers of its run, by name.
        place: of the layer in their leading dimensions.
    """
    del place
    return weights, totals


def _forward(weights: Any, totals: Any, place: _Place) -> tuple[tuple[Any, Any], _Place]:
    return (weights, totals), place


def _backward(place: _Place, gradients: tuple[Any, Any]) -> tuple[None, Any, None]:
    found, totals = gradients
    return None, jax.tree.map(lambda total, more: add_at(total, more, place), totals, sunk(found)), None


onto.defvjp(_forward, _backward)


def losses_onto(stack: Stack, weights: Tree, totals: Tree, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Tree]:
    """Cross-entropy of every token [B, T] in fp32, as `Stack.losses`; and accumulators, as in `onto`.

    Args:
        stack: the model.
        weights: by run and name, as stored.
        totals: accumulators of those that are trained, likewise.
        batch: as there.
    """
    layered = {run.key for segment in stack.segments for run in segment.runs}
    own, frozen = apart({key: own for key, own in weights.items() if key not in layered})
    passed = {key: onto(own, totals[key], ()) for key, own in own.items()}
    ends = together({key: own for key, (own, _) in passed.items()}, frozen)
    carry: Any = stack.embed(ends, batch["tokens"]), {key: total for key, total in totals.items() if key in layered}
    for segment in stack.segments:
        carry = _segment(stack.of(batch), segment, weights, carry)
    stream, given = carry
    return stack.head(ends, stream, batch["labels"])["loss"], given | {key: total for key, (_, total) in passed.items()}


def _segment(stack: Stack, segment: Segment, weights: Tree, carry: Any) -> Any:
    """Run the layers of a segment: residual stream and accumulators before and after."""

    def layer(run: Run) -> Layer:
        forward, sizes = stack.layer(segment, run), segment.stack(run)

        def one(carry: Any, own: tuple[Any, jax.Array]) -> tuple[Any, None]:
            (x, totals), (weights, number) = (carry[0], dict(carry[1])), own
            place = jnp.unravel_index(number, sizes) if sizes else ()
            trained, frozen = apart({run.key: weights})
            for key in trained:
                trained[key], totals[key] = onto(trained[key], totals[key], place)
            return (forward(x, together(trained, frozen)[run.key]), totals), None

        return one

    own: Mapping[str, Any] = {run.key: (weights[run.key], segment.numbers(run)) for run in segment.runs}
    x, totals = run_segment(segment, carry, own, layer, unroll=stack.unroll)[0]
    return without_turn(x), totals
