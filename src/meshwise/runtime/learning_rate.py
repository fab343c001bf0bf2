"""The learning rate of each step: a rise to its peak, then constant or a fall. A function of the step's number alone.

So a run that goes on from a saved step has the rates of one that was never stopped. Not here: the update (`optimizer`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

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
        """Give the rate of a step.

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
