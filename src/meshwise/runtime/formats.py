"""Number formats as JAX holds them. Not here: which format plays which role (`jobs.precision`)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from meshwise.dtypes import DType

__all__ = ["HELD", "dtype_of"]

#: Formats in which arrays are held and multiplied here.
HELD: dict[DType, Any] = {DType.FP32: jnp.float32, DType.BF16: jnp.bfloat16}


def dtype_of(format_: DType) -> Any:
    """Give JAX's dtype."""
    return HELD[format_]
