"""Attention in blocks of queries and keys, in plain JAX: no matrix of scores is whole, masked blocks are skipped.

Skipping makes loops whose rounds depend on positions; it may be left out, so that a reader can count the rounds of a
compiled program. Not here: kernels for one kind of chip.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meshwise.runtime.kernels.masks import Documents, Masks, Pairs

#: Queries and keys of a block, where there are several: their fp32 scores stay small beside what a layer holds.
_QUERIES, _KEYS = 128, 512

#: Keys of a block for one query: what is generated fills a cache slowly, and the rest of it is not to be read.
FEW_KEYS = 64

Arrays = tuple[jax.Array, ...]


def _size(length: int, most: int) -> int:
    """Rows of a block: `most`, or less where that divides the length; all where nothing of use does."""
    if length <= 2 * most:
        return length
    common = math.gcd(length, most)
    return common if common >= min(most, 64) else length


def _sizes(q: jax.Array, k: jax.Array, pairs: Pairs) -> tuple[int, int]:
    queries, keys = pairs.runs(q, k)
    return _size(queries, _QUERIES), _size(keys, _KEYS if queries > 1 else FEW_KEYS)


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, pairs: Pairs, documents: Documents | None = None, *, skip: bool
) -> tuple[jax.Array, jax.Array]:
    """Attend.

    Args:
        q: [B, T, N, H]; N = K x G, heads of a group together.
        k: [B, S, K, H].
        v: [B, S, K, Hv].
        pairs: what is seen.
        documents: that keep it apart, None where a sequence is one.
        skip: whether to skip blocks that hold no pair that is seen.

    Returns: the output [B, T, N, Hv] in the format of v, and the logarithm of each softmax's denominator [B, T, N] in
        fp32 (minus infinity where a query sees no key, and the output is zero).
    """
    rows, keys = _sizes(q, k, pairs)

    def one(_: None, block: Arrays) -> tuple[None, Arrays]:
        own, start, begins = block
        score = partial(_scores, own, masks=pairs.masks, start=start, begins=begins)

        def more(number: Any, first: Any, carry: Arrays) -> Arrays:
            out, total, largest = carry
            logits, seen, _ = score(_cut(k, number, keys), first=first)
            logits = jnp.where(seen, logits, -jnp.inf)
            top = jnp.maximum(largest, jnp.max(logits, axis=-1))
            finite = jnp.where(jnp.isfinite(top), top, 0.0)  # a query may have seen nothing yet
            weights = jnp.exp(logits - finite[..., None])
            fade = jnp.exp(largest - finite)
            made = jnp.einsum(
                "bkgts,bskh->bkgth", weights.astype(v.dtype), _cut(v, number, keys), preferred_element_type=jnp.float32
            )
            return out * fade[..., None] + made, total * fade + jnp.sum(weights, axis=-1), top

        shape = own.shape[0], own.shape[2], own.shape[3], rows  # [B, K, G, T]
        empty = jnp.zeros((*shape, v.shape[-1]), jnp.float32), jnp.zeros(shape), jnp.full(shape, -jnp.inf)
        out, total, largest = _over(more, empty, (start, start + rows - 1, begins), pairs, k, keys, skip)
        some = total > 0
        share = out / jnp.where(some, total, 1.0)[..., None]
        denominator = jnp.where(some, jnp.log(jnp.where(some, total, 1.0)) + largest, -jnp.inf)
        return None, (jnp.moveaxis(share, 3, 1).astype(v.dtype), jnp.moveaxis(denominator, 3, 1))

    _, (out, total) = _each(one, None, (_queries(q, k, rows), _starts(q, rows, pairs), _begins(documents, rows)))
    return _whole(out, q, v.shape[-1]), _whole(total, q)


def backward(  # noqa: PLR0917 -- arrays of one call
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kept: tuple[jax.Array, jax.Array, jax.Array],
    pairs: Pairs,
    documents: Documents | None = None,
    *,
    skip: bool,
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of queries, keys and values.

    Args:
        q, k, v, pairs, documents, skip: as in `forward`.
        kept: the logarithm of the denominator over all keys, of this device or not [B, T, N]; the gradient of the
            output [B, T, N, Hv]; and what is added to it . v in the gradient of scores [B, T, N].
        dtype: of the result; sums are in fp32.
    """
    rows, keys = _sizes(q, k, pairs)
    total, d_out, shift = (_queries(x, k, rows) for x in kept)

    def one(sums: Arrays, block: Arrays) -> tuple[Arrays, jax.Array]:
        own, own_total, own_d, own_shift, start, begins = block
        finite = jnp.where(jnp.isfinite(own_total), own_total, 0.0)
        finite, moved = (
            jnp.moveaxis(x, 1, 3)[..., None] for x in (finite, own_shift)
        )  # [B, T, K, G] -> [B, K, G, T, 1]

        def more(number: Any, first: Any, carry: Arrays) -> Arrays:
            d_q, d_k, d_v = carry
            some_k, some_v = _cut(k, number, keys), _cut(v, number, keys)
            logits, seen, slope = _scores(own, some_k, masks=pairs.masks, start=start, begins=begins, first=first)
            weights = jnp.where(seen, jnp.exp(jnp.where(seen, logits, 0.0) - finite), 0.0)
            along = jnp.einsum("btkgh,bskh->bkgts", own_d, some_v, preferred_element_type=jnp.float32)
            d_scores = weights * (along + moved) * pairs.masks.scale
            d_scores = (d_scores if slope is None else d_scores * slope).astype(q.dtype)
            product = partial(jnp.einsum, preferred_element_type=jnp.float32)
            d_q += product("bkgts,bskh->btkgh", d_scores, some_k)
            d_k = _add(d_k, product("bkgts,btkgh->bskh", d_scores, own), number)
            return d_q, d_k, _add(d_v, product("bkgts,btkgh->bskh", weights.astype(v.dtype), own_d), number)

        begun = jnp.zeros(own.shape, jnp.float32), *sums
        d_q, *sums_after = _over(more, begun, (start, start + rows - 1, begins), pairs, k, keys, skip)
        return tuple(sums_after), d_q

    start = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    blocks = (_queries(q, k, rows), total, d_out, shift, _starts(q, rows, pairs), _begins(documents, rows))
    (d_k, d_v), d_q = _each(one, start, blocks)
    return _whole(d_q, q, q.shape[-1]).astype(dtype), d_k.astype(dtype), d_v.astype(dtype)


def _queries(x: jax.Array, k: jax.Array, rows: int) -> jax.Array:
    """In blocks, heads by group: [B, T, N, ...] -> [blocks, B, rows, K, G, ...]."""
    grouped = x.reshape(x.shape[0], x.shape[1] // rows, rows, k.shape[2], x.shape[2] // k.shape[2], *x.shape[3:])
    return jnp.moveaxis(grouped, 1, 0)


def _starts(q: jax.Array, rows: int, pairs: Pairs) -> jax.Array:
    """Position of the first query of each block."""
    inside = rows * jnp.arange(q.shape[1] // len(pairs.queries) // rows)
    return jnp.concatenate([first + inside for first in pairs.queries])


def _begins(documents: Documents | None, rows: int) -> jax.Array | None:
    """Where the documents of queries begin, in blocks: [blocks, B, rows]."""
    if documents is None:
        return None
    x = documents.queries
    return jnp.moveaxis(x.reshape(x.shape[0], -1, rows), 1, 0)


def _whole(blocks: jax.Array, q: jax.Array, *width: int) -> jax.Array:
    """[blocks, B, rows, K, G, ...] -> [B, T, N, ...]."""
    return jnp.moveaxis(blocks, 0, 1).reshape(*q.shape[:3], *width)


def _each(
    body: Callable[[Any, Any], tuple[Any, Any]], start: Any, blocks: tuple[jax.Array | None, ...]
) -> tuple[Any, Any]:
    """Go over blocks; a loop that runs once is none."""
    if jax.tree.leaves(blocks)[0].shape[0] > 1:
        return jax.lax.scan(body, start, blocks)
    carry, made = body(start, jax.tree.map(lambda x: x[0], blocks))
    return carry, jax.tree.map(lambda x: x[None], made)


def _over(  # noqa: PLR0917
    body: Callable[[Any, Any, Arrays], Arrays],
    carry: Arrays,
    queries: tuple[Any, Any, jax.Array | None],
    pairs: Pairs,
    k: jax.Array,
    size: int,
    skip: bool,
) -> Arrays:
    """Go over the blocks of all runs of keys.

    Args:
        body: of a block's number, the position of its first key, and the carry.
        carry: to begin with.
        queries: positions of the first and the last, and where the documents of all begin.
        pairs, k, skip: as of `forward`.
        size: of a block.
    """
    run = k.shape[1] // len(pairs.keys)
    blocks = run // size
    first, last, begins = queries
    for number, start in enumerate(pairs.keys):
        low, high = (0, blocks) if not skip or blocks == 1 else pairs.masks.key_range(first, last, start, run)
        if skip and blocks > 1:
            low = low if begins is None else jnp.maximum(low, jnp.clip(jnp.min(begins) - start, 0, run))
            low, high = low // size, (high + size - 1) // size

        def one(place: Any, carry: Arrays, begun: int = number * blocks, start: Any = start) -> Arrays:
            return body(begun + place, start + place * size, carry)

        carry = one(low, carry) if blocks == 1 else jax.lax.fori_loop(low, high, one, carry)
    return carry


def _cut(x: jax.Array, number: Any, size: int) -> jax.Array:
    """One block of keys."""
    return x if x.shape[1] == size else jax.lax.dynamic_slice_in_dim(x, number * size, size, axis=1)


def _add(x: jax.Array, more: jax.Array, number: Any) -> jax.Array:
    """Add to one block of keys."""
    size = more.shape[1]
    if x.shape[1] == size:
        return x + more
    return jax.lax.dynamic_update_slice_in_dim(x, _cut(x, number, size) + more, number * size, axis=1)


def _scores(
    q: jax.Array, k: jax.Array, *, masks: Masks, start: Any, begins: jax.Array | None, first: Any
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Logits [B, K, G, T, S] of a block, which of them are seen [T, S] or [B, 1, 1, T, S], and the slope of the cap."""
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    logits, slope = masks.logits(scores)
    keys = first + jnp.arange(k.shape[1])
    seen = masks.seen(start + jnp.arange(q.shape[1]), keys)
    return logits, seen if begins is None else seen & (keys >= begins[:, None, None, :, None]), slope
