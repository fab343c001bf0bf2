"""The JAX program of a plan: the model's own `Program`, executed on a mesh with the shardings of a layout.

The only home of executed JAX beside `compiler`. Not here: what a step should cost (`costs`), or which plan is best.
"""

from __future__ import annotations

from meshwise.runtime.backend import require_jax

require_jax()

from meshwise.runtime.generate import Generator, generator  # noqa: E402 -- JAX is needed from here on
from meshwise.runtime.train import TrainStep, train_step  # noqa: E402

__all__ = ["Generator", "TrainStep", "generator", "require_jax", "train_step"]
