"""Gradients of the matrices of groups on TPUs: Megablox, the kernel for rows by group that comes with JAX.

XLA's own ragged products multiply each row by the matrix of its group alone, but where both sides are rows, those of
each group by all. Not here: products that XLA multiplies well (`ragged`).
"""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp

from meshwise.runtime.kernels.counted import says

# The package gives the function the name of the module.
_megablox: Any = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")

#: Rows of a block, the most first. A block that several groups share is multiplied once for each of them.
_ROWS = (512, 256, 128)

#: Rows of a group over those of a block, at least, where groups are that large.
_WHOLE_BLOCKS = 8

#: Columns of a block of the result, by rows of a block: as many as fit on the chip beside their sum in fp32.
_COLUMNS = {512: (1024, 512), 256: (1024, 1024), 128: (1024, 1024)}


def multiply_rows(
    rows: jax.Array, others: jax.Array, groups: tuple[jax.Array, int], *, dtype: Any, interpret: bool = False
) -> jax.Array:
    """Multiply rows of each group with one another.

    Args:
        rows, others: [n, D] and [n, F], by group; what is in empty rows, the last, counts for nothing.
        groups: rows of each of them, and rows of all that are expected.
        dtype: of the result; it is added up in fp32.
        interpret: whether to run without a TPU.

    Returns: [groups, D, F].
    """
    sizes, mean = groups
    block = _block(mean, len(sizes))
    rows, others = (jnp.pad(x, ((0, -len(x) % block), (0, 0))) for x in (rows, others))
    (d, f), columns = (rows.shape[1], others.shape[1]), _COLUMNS[block]
    blocks = -(-mean // block) + len(sizes) - 1
    read = mean * rows.dtype.itemsize * (d * -(-f // columns[1]) + f * -(-d // columns[0]))
    written = len(sizes) * d * f * jnp.dtype(dtype).itemsize
    with says(2 * blocks * block * d * f, read + written, gpu=False):
        made: jax.Array = _megablox.tgmm(
            rows.swapaxes(0, 1), others, sizes.astype(jnp.int32), jnp.dtype(dtype), (block, *columns),
            interpret=interpret,
        )  # fmt: skip
    return made


def _block(mean: int, groups: int) -> int:
    """Rows of a block, for so many rows in all."""
    return next((size for size in _ROWS if mean >= _WHOLE_BLOCKS * size * groups), _ROWS[-1])
