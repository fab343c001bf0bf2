"""Ragged paged attention, the kernel for TPUs that comes with JAX, on the rows of a step.

Its pool holds keys and values together, head by head, and its sequences stand one after the other without gaps: rows
that go on from each other are one of them, so that a prompt's pages are read once for many queries. Not here: which
pages a row has (`paged`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as module

from meshwise.core.tensors import Attention, Block
from meshwise.runtime.kernels.masks import Masks

_kernel: Any = module

#: Keys that are read at a time; and queries of a block: of rows of one query, and of more. Those of JAX's own table for
#: pages of 16 tokens on v5 and v6e, but for few queries, where a block is multiplied by the keys of one row at a time.
_KEYS, _ROWS, _QUERIES = 256, 8, 32

#: Bytes of page tables of a call: they lie in memory for scalars, of which there is 1 MiB.
_TABLES = 2**19


def refusal(block: Block, keys: Any, values: Any) -> str:
    """Say why the kernel cannot attend, "" where it can.

    Args:
        block: that attends.
        keys, values: shape and format of what a device holds of them [..., heads, width].
    """
    (heads, width), (_, value) = keys.shape[-2:], values.shape[-2:]
    tile = heads * keys.dtype.itemsize // 2  # 32 bits of keys and values each
    reasons = {
        f"keys of {width} and values of {value} are held together": width != value,
        f"heads of {width} are no multiple of 128": width % 128,
        f"{heads} heads of keys on a device fill no tiles": tile not in {1, 2, 4} and tile % 8,
        f"{heads} heads of {width} in {keys.dtype} are read in strides, which are of 128 alone": width > 128
        and tile > 1,
        "it does not attend within chunks": any(isinstance(op, Attention) and op.chunk is not None for op in block.ops),
        "it does not give the denominators that sinks read": any(op.name == "sinks" for op in block.ops),
    }
    return next((words for words, holds in reasons.items() if holds), "")


def joined(keys: jax.Array, values: jax.Array) -> jax.Array:
    """Keys and values as the pool holds them: [tokens, K, H] each -> [tokens, 2 K, H]."""
    return jnp.stack([keys, values], axis=2).reshape(keys.shape[0], -1, keys.shape[-1])


def attend_rows(  # noqa: PLR0917 -- as of `paged.attend_rows`, and bounds
    q: jax.Array,
    pool: jax.Array,
    tables: jax.Array,
    masks: Masks,
    there: tuple[jax.Array, jax.Array],
    bounds: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """Attend to pages.

    Args:
        q, tables, masks, there: as of `paged.attend_rows`; the queries of a row are at successive positions, and those
            that are none come last.
        pool: of keys and values together [pages, page, 2 K, H].
        bounds: as of `paged.seen_by_rows`.

    Returns: output [rows, queries, N, H] in the format of q.
    """
    rows, queries = q.shape[:2]
    page, low = pool.shape[1], jnp.zeros_like(bounds[1])
    if masks.window is not None and (seen := (masks.window + queries - 2) // page + 2) < tables.shape[1]:
        low = jnp.where(bounds[1] < bounds[0], 0, bounds[0]) // page
        tables = jnp.take_along_axis(tables, jnp.minimum(low[:, None] + jnp.arange(seen), tables.shape[1] - 1), axis=1)
    last, first = bounds[1] - low * page, there[0][:, 0] - low * page
    given = (q, tables, there[1], first, last)
    each = max(_TABLES // (4 * tables.shape[1]), 1)  # rows of a call
    if rows <= each:
        return _attend(pool, masks, *given)

    def apart(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, -rows % each), *[(0, 0)] * (x.ndim - 1))).reshape(-1, each, *x.shape[1:])

    made = jax.lax.map(lambda some: _attend(pool, masks, *some), tuple(map(apart, given)))
    return made.reshape(-1, *q.shape[1:])[:rows]


def _attend(  # noqa: PLR0917 -- arrays of one call
    pool: jax.Array,
    masks: Masks,
    q: jax.Array,
    tables: jax.Array,
    real: jax.Array,
    first: jax.Array,
    last: jax.Array,
) -> jax.Array:
    """Attend with one call, to the last position of each row; positions count from the first page of its table."""
    rows, queries, page = *q.shape[:2], pool.shape[1]
    starts = _starts(tables, real, first)
    counts = jnp.sum(real, axis=1, dtype=jnp.int32)
    number = jnp.where(counts > 0, jnp.cumsum(starts) - 1, rows)
    none = jnp.zeros(rows, jnp.int32)
    own = none.at[number].add(counts, mode="drop").at[0].max(1)  # one query at least, or it never ends
    lengths = (none + 1).at[number].max(last + 1, mode="drop")
    sequences = jnp.zeros_like(tables).at[jnp.where(starts, number, rows)].set(tables, mode="drop")
    ends = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(own, dtype=jnp.int32)])
    # Queries without those that are none between them, and back.
    flat = q.reshape(-1, *q.shape[2:])
    place = jnp.where(real, jnp.cumsum(real.reshape(-1)).reshape(real.shape) - 1, len(flat)).reshape(-1)
    order = jnp.zeros(len(flat), jnp.int32).at[place].set(jnp.arange(len(flat)), mode="drop")
    made = _kernel.ragged_paged_attention(
        flat[order],
        pool,
        lengths,
        sequences,
        ends,
        jnp.maximum(jnp.sum(starts, dtype=jnp.int32), 1)[None],
        sm_scale=masks.scale,
        sliding_window=masks.window,
        soft_cap=masks.cap,
        num_kv_pages_per_block=min(max(_KEYS // page, 1), tables.shape[1]),
        num_queries_per_block=min(_ROWS if queries == 1 else _QUERIES, len(flat)),
    )
    return jnp.where(real[..., None, None], made[place].reshape(q.shape), 0)


def _starts(tables: jax.Array, real: jax.Array, first: jax.Array) -> jax.Array:
    """Whether a sequence of queries begins with each row, rather than going on from the row before."""
    goes_on = real[:-1, -1] & (first[1:] == first[:-1] + real.shape[1]) & jnp.all(tables[1:] == tables[:-1], axis=1)
    return real[:, 0] & ~jnp.concatenate([jnp.zeros(1, bool), goes_on])
