"""Optimizers that keep their state as the layout's tables say: moments and master weights, by role of the precision.

Written here and not taken from a library, so that every role has the format that the planner counts (first and second
moments may differ, a master copy is state) and every array has one sharding. Not here: gradients (`train`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshwise.runtime.learning_rate import LearningRate

#: Optimizers that run -> names of the moments that they keep.
RUNNABLE: dict[str, tuple[str, ...]] = {
    "adamw": ("mean", "variance"),
    "lion": ("mean",),
    "momentum": ("mean",),
    "sgd": (),
}


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """An optimizer and its constants.

    Args:
        name: of `RUNNABLE`.
        learning_rate: of each step; a number is that of every step.
        beta1, beta2: decay of the averages of gradients and of their squares.
        epsilon: added to the root of the latter.
        weight_decay: decoupled, times the learning rate (Loshchilov & Hutter 2019).
    """

    name: str = "adamw"
    learning_rate: float | LearningRate = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1

    def rate(self, step: Any) -> Any:
        """Learning rate of a step, whose number may be traced."""
        given = self.learning_rate
        return given.at(step) if isinstance(given, LearningRate) else given


def update(
    constants: Hyperparameters, weight: jax.Array, gradient: jax.Array, state: dict[str, jax.Array], step: Any
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute one update in fp32.

    Args:
        constants: see there.
        weight: master weight.
        gradient: mean over the batch.
        state: moments by name.
        step: number of this step, from 1.

    Returns: the new weight in fp32, and the new moments in fp32.
    """
    w, g = weight.astype(jnp.float32), gradient.astype(jnp.float32)
    old = {k: v.astype(jnp.float32) for k, v in state.items()}
    rate, decay = constants.rate(step), constants.weight_decay
    if constants.name == "sgd":
        return w - rate * g, {}
    if constants.name == "momentum":
        mean = constants.beta1 * old["mean"] + g
        return w - rate * mean, {"mean": mean}
    if constants.name == "lion":  # Chen et al. 2023, algorithm 2
        direction = jnp.sign(constants.beta1 * old["mean"] + (1 - constants.beta1) * g)
        mean = constants.beta2 * old["mean"] + (1 - constants.beta2) * g
        return w - rate * (direction + decay * w), {"mean": mean}
    mean = constants.beta1 * old["mean"] + (1 - constants.beta1) * g
    variance = constants.beta2 * old["variance"] + (1 - constants.beta2) * g * g
    count = step.astype(jnp.float32)
    scaled_mean = mean / (1 - constants.beta1**count)
    scaled_variance = variance / (1 - constants.beta2**count)
    change = scaled_mean / (jnp.sqrt(scaled_variance) + constants.epsilon) + decay * w
    return w - rate * change, {"mean": mean, "variance": variance}
