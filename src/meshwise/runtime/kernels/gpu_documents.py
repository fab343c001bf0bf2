"""What fused attention on NVIDIA GPUs reads of documents that share a sequence, and which blocks it skips for them.

Not here: the kernels (`gpu`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from meshwise.runtime.kernels.masks import Documents

#: Arrays that say which documents queries and keys are of, and which part of each a program of a kernel reads.
Apart = tuple[tuple[jax.Array, Any], ...]


def of_rows(documents: Documents | None, rows: int) -> Apart:
    """Where the documents of a block of queries begin."""
    if documents is None:
        return ()
    return ((documents.queries, pl.BlockSpec((None, rows), lambda i, b, _: (b, i))),)


def of_keys(documents: Documents | None, starts: tuple[jax.Array, jax.Array], length: int, keys: int) -> Apart:
    """Where the documents of all queries begin, and of each run how many see any, and all, of a block of keys.

    Documents follow each other: of a run, those that begin at a key or before it are of its first queries.
    """
    if documents is None:
        return ()
    begins, runs = documents.queries, len(starts[0])
    each = length // len(starts[1]) // keys
    first = (starts[1][:, None] + jnp.arange(each) * keys).reshape(-1)
    ends = jnp.stack([first + keys - 1, first], axis=1)  # [blocks, 2]
    apart = begins.reshape(begins.shape[0], 1, runs, 1, -1)
    counts = jnp.sum(apart <= ends[:, None, :, None], axis=-1, dtype=jnp.int32)  # [B, blocks, runs, 2]
    whole = pl.BlockSpec((None, begins.shape[1]), lambda _, b, __: (b, 0))
    return (begins, whole), (counts, pl.BlockSpec((None, None, runs, 2), lambda i, b, _: (b, i, 0, 0)))


def after_beginning(begins: Any, run: int) -> Callable[..., Any]:
    """Of keys, those from where the documents of a block of queries begin."""
    ends = jnp.min(begins), jnp.max(begins)

    def within(_: int, start: Any, *bounds: tuple[Any, Any]) -> list[tuple[Any, Any]]:
        lows = (jnp.clip(end - start, 0, run) for end in ends)
        return [(jnp.maximum(low, own), high) for low, (own, high) in zip(lows, bounds, strict=True)]

    return within
