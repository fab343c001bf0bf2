"""Number formats as JAX holds them. Not here: which format plays which role (`jobs.precision`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwise.core.dtypes import DType

#: Formats in which arrays are held and multiplied here.
HELD: dict[DType, Any] = {DType.FP32: jnp.float32, DType.BF16: jnp.bfloat16}


def dtype_of(format_: DType) -> Any:
    """Give JAX's dtype."""
    return HELD[format_]


def added_up(x: jax.Array) -> jax.Array:
    """Sum over the first dimension in the array's own format; `jnp.sum` would add, and send, bf16 in fp32."""
    total: jax.Array = jax.lax.reduce(x, np.zeros((), x.dtype), jax.lax.add, (0,))
    return total
