"""Optimizers and learning rates; state is kept as the layout's tables say, each role in its own format.

Written here and not taken from a library, so that every role has the format that the planner counts (first and second
moments may differ, a master copy is state) and every array has one sharding. The learning rate depends on the step's
number alone, so a resumed run has the rates of one that was never stopped. Not here: gradients (`train`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from meshwise.core.units import format_count


@dataclass(frozen=True, slots=True)
class LearningRate:
    """The rate of each step.

    >>> rate = LearningRate(1e-3, warmup_steps=10, decay="cosine", decay_steps=110)
    >>> [float(f"{float(rate.at(step)):.3g}") for step in (1, 10, 60, 110)]
    [0.0001, 0.001, 0.0005, 0.0]

    Args:
        peak: after warming up.
        warmup_steps: in which it rises from peak / warmup_steps to the peak, in equal steps (Goyal et al. 2017, 2.2).
        decay: how it falls from there: not at all, in equal steps, or as half a cosine (Loshchilov & Hutter 2017, 3).
        decay_steps: number of the step that has the final rate, as all after it; of no meaning without decay.
        final: rate at that step.
    """

    peak: float
    warmup_steps: int = 0
    decay: Literal["none", "linear", "cosine"] = "none"
    decay_steps: int = 0
    final: float = 0.0

    def at(self, step: Any) -> Any:
        """The rate of a step.

        Args:
            step: its number, from 1; may be traced.

        Returns: fp32; the peak itself where every step has it.
        """
        rate: Any = self.peak
        number = jnp.asarray(step, jnp.float32)
        if self.decay != "none":
            share = jnp.clip((number - self.warmup_steps) / (self.decay_steps - self.warmup_steps), 0.0, 1.0)
            left = 1 - share if self.decay == "linear" else (1 + jnp.cos(math.pi * share)) / 2
            rate = self.final + (self.peak - self.final) * left
        return rate if self.warmup_steps == 0 else rate * jnp.minimum(number / self.warmup_steps, 1.0)

    def __str__(self) -> str:
        rise = f"{self.peak:g}" if self.warmup_steps == 0 else f"up to {self.peak:g} in {_steps(self.warmup_steps)}"
        fall = {"none": "", "linear": ", then in equal steps", "cosine": ", then as half a cosine"}[self.decay]
        return rise + (f"{fall} to {self.final:g} at step {format_count(self.decay_steps)}" if fall else "")


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{format_count(number)} steps"


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """An optimizer and its constants.

    Args:
        name: of `refusals.RUNNABLE`.
        learning_rate: of each step; a number is that of every step.
        beta1, beta2: decay of the averages of gradients and of their squares.
        epsilon: added to the root of the latter.
        weight_decay: decoupled, times the learning rate (Loshchilov & Hutter 2019).
        decayed: what decays: all, or matrices and tables alone, without scales of norms and biases.
        clip: gradients whose norm, all of them together, is larger are scaled down to it (Pascanu et al. 2013); None
            for never.
    """

    name: str = "adamw"
    learning_rate: float | LearningRate = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    decayed: Literal["all", "matrices"] = "all"
    clip: float | None = None

    def rate(self, step: Any) -> Any:
        """Learning rate of a step, whose number may be traced."""
        given = self.learning_rate
        return given.at(step) if isinstance(given, LearningRate) else given

    def of(self, *, is_matrix: bool) -> Hyperparameters:
        """The constants of one weight."""
        return self if is_matrix or self.decayed == "all" else replace(self, weight_decay=0.0)


def clipped(gradients: Any, most: float) -> tuple[Any, jax.Array]:
    """Scale gradients down to a norm, all of them together.

    Returns: them, and their norm before, fp32.
    """
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(gradients)]
    norm = jnp.sqrt(jnp.sum(jnp.stack(squares)))
    share = jnp.minimum(1.0, most / jnp.maximum(norm, 1e-30))
    return jax.tree.map(lambda g: (g.astype(jnp.float32) * share).astype(g.dtype), gradients), norm


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
    # Not divided: of divisions by one number compilers make products or not, and round as they do.
    scaled_mean = mean * (1 / (1 - constants.beta1**count))
    scaled_variance = variance * (1 / (1 - constants.beta2**count))
    change = scaled_mean / (jnp.sqrt(scaled_variance) + constants.epsilon) + decay * w
    return w - rate * change, {"mean": mean, "variance": variance}
