"""The JAX program of a plan: the model's own `Program`, executed on a mesh with the shardings of a layout.

The only home of executed JAX beside `compiler`; loaded when first used. Not here: what a step should cost (`costs`), or
which plan is best.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from meshwise.runtime.devices import load_jax, require_jax

if TYPE_CHECKING:
    from meshwise.runtime.generate import Generator, generator
    from meshwise.runtime.train import TrainStep, train_step

__all__ = ["Generator", "TrainStep", "generator", "require_jax", "train_step"]

#: Public name -> the module that it is loaded from.
_HOMES = {
    **dict.fromkeys(("Generator", "generator"), "meshwise.runtime.generate"),
    **dict.fromkeys(("TrainStep", "train_step"), "meshwise.runtime.train"),
}


def __getattr__(name: str) -> Any:
    """Load a public name, and JAX with it, when it is first used.

    Raises:
        MissingDependencyError: JAX is missing.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwise.runtime' has no attribute {name!r}")
    load_jax()
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
