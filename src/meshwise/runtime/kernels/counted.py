"""Says in the program itself what a kernel multiplies: a compiled kernel is a box to those who read it.

Named scopes survive every compiler, so they carry it: `kernel.flops.N`, and `.bytes.N` behind it where a kernel leaves
parts of its arrays alone; others move each once. Not here: who reads them (`compiler.hlo`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax

from meshwise.runtime.kernels.masks import Pairs


def says(flops: int, num_bytes: int) -> AbstractContextManager[None]:
    """A scope that says what a kernel multiplies, and what it reads and writes."""
    return jax.named_scope(f"kernel.flops.{flops}.bytes.{num_bytes}")


def counted(
    q: jax.Array, k: jax.Array, v: jax.Array, pairs: Pairs, *, products: int, size: tuple[int, int]
) -> AbstractContextManager[None]:
    """A scope that says what a kernel of attention does: all pairs of the blocks that it works on, where they are most.

    Args:
        q, k, v, pairs: as of `blocks.forward`.
        products: matrix products of pairs that it computes: two forward, of which one is as wide as keys and the other
            as values; three for queries; four for keys and values.
        size: queries and keys of a block.
    """
    number = max(
        pairs.masks.num_pairs(offset, q.shape[1], k.shape[1], size) for offset in pairs.offsets or (k.shape[1] - 1,)
    )
    widths = {2: q.shape[3] + v.shape[3], 3: 2 * q.shape[3] + v.shape[3], 4: 2 * (q.shape[3] + v.shape[3])}
    flops = 2 * number * q.shape[0] * q.shape[2] * widths[products]
    return jax.named_scope(f"kernel.flops.{flops}")
