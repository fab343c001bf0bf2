"""Says in the program itself what a kernel multiplies: a compiled kernel is a box to those who read it.

Named scopes survive every compiler, so they carry it: `kernel.flops.N`, and `.bytes.N` behind it where a kernel leaves
parts of its arrays alone; others move each once. Not here: who reads them (`compiler.hlo`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from meshwise.runtime.kernels.masks import Pairs

#: FLOP/s and bytes/s of the GPU (H100 SXM, data sheet) by which XLA's scheduler is told how long kernels take: a hint
#: on others, where products and collectives are slower or faster together.
RATES = 989e12, 3.35e12


def says(flops: int, num_bytes: int) -> AbstractContextManager[None]:
    """A scope that says what a kernel of a GPU multiplies, and what it reads and writes."""
    return _timed(f"kernel.flops.{flops}.bytes.{num_bytes}", flops, num_bytes)


def timed(subscripts: str, *operands: jax.Array) -> AbstractContextManager[None]:
    """A context in which XLA's scheduler for GPUs knows how long an einsum takes.

    It takes bf16 operands with results in fp32, as gradients of weights are made, for products in fp32: for 80 times as
    long as on an H100.
    """
    letters = subscripts.partition("->")[0].split(",")
    sizes = {a: n for own, x in zip(letters, operands, strict=True) for a, n in zip(own, x.shape, strict=True)}
    return _lasting(2 * math.prod(sizes.values()))


def _lasting(flops: int, num_bytes: int = 0) -> AbstractContextManager[None]:
    seconds = max(flops / RATES[0], num_bytes / RATES[1])
    known: AbstractContextManager[None] = set_xla_metadata(latency_metadata=str(round(1e9 * seconds)))
    return known


@contextmanager
def _timed(name: str, flops: int, num_bytes: int = 0) -> Iterator[None]:
    """A scope in which XLA's scheduler for GPUs knows the nanoseconds of a kernel; it takes all of them to be short."""
    with jax.named_scope(name), _lasting(flops, num_bytes):
        yield


def counted(
    q: jax.Array, k: jax.Array, v: jax.Array, pairs: Pairs, *, products: int, size: tuple[int, int], gpu: bool = False
) -> AbstractContextManager[None]:
    """A scope that says what a kernel of attention does: all pairs of the blocks that it works on, where they are most.

    Args:
        q, k, v, pairs: as of `blocks.forward`.
        products: matrix products of pairs that it computes: two forward, of which one is as wide as keys and the other
            as values; three for queries; four for keys and values.
        size: queries and keys of a block.
        gpu: whether the kernel is one of a GPU, whose scheduler is to know how long it takes.
    """
    runs = pairs.runs(q, k)
    every = set(pairs.offsets) or {(k.shape[1] - 1,) * len(pairs.queries) * len(pairs.keys)}
    number = max(sum(pairs.masks.num_pairs(offset, *runs, size) for offset in offsets) for offsets in every)
    widths = {2: q.shape[3] + v.shape[3], 3: 2 * q.shape[3] + v.shape[3], 4: 2 * (q.shape[3] + v.shape[3])}
    flops = 2 * number * q.shape[0] * q.shape[2] * widths[products]
    name = f"kernel.flops.{flops}"
    return _timed(name, flops) if gpu else jax.named_scope(name)
