"""A training state that begins with published weights. Not here: reading them (`loading`), saved steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshwise.runtime.layer_order import layer_order
from meshwise.runtime.train import State, TrainStep
from meshwise.runtime.weights.loading import Weights


def starting_state(step: TrainStep, published: Weights) -> State:
    """Give the state before the first step: weights and their master copy from the file, moments of zero.

    Args:
        step: the program.
        published: weights of its model.
    """
    abstract, order = step.abstract_state, layer_order(step)
    held = {
        part: published.load(step.parameters, order, abstract[part])
        for part in ("weights", "master")
        if part in abstract
    }
    rest = {name: abstract[name] for name in ("step", "moments")}
    shardings = jax.tree.map(lambda a: a.sharding, rest)
    zeros: Any = jax.jit(lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), rest), out_shardings=shardings)
    return {**zeros(), **held}
