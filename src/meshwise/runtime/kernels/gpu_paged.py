"""Attention to pages for NVIDIA GPUs, in Pallas: each page is read once, where it lies, and copied nowhere.

A program of the kernel holds the queries of one row that read one head of keys, and goes over a share of the row's
pages; shares are added up by their softmaxes' denominators, so that few long sequences use the whole chip, too.
Source: Dao et al. 2023, Flash-Decoding; Kwon et al. 2023, PagedAttention. Not here: which pages a row has (`paged`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as triton_module

from meshwise.runtime.kernels.masks import Masks

_triton: Any = triton_module

#: Keys that are read at a time, and queries (of all heads that read the same keys) that a program holds. On an H100 128
#: keys were 3 % faster over few and many rows, and prompts; 64 were 10 % slower. These fit on smaller GPUs, too.
_KEYS, _QUERIES = 32, 64

#: Programs that keep a chip busy: about two for each of its processors.
_PROGRAMS = 256

#: Logits that are not seen: the difference of two of them is finite.
_UNSEEN = -1e30


def refusal(q: jax.Array, pools: tuple[jax.Array, jax.Array]) -> str:
    """Say why the kernel cannot attend, "" where it can."""
    widths = {q.shape[-1], pools[1].shape[-1]}
    if any(width & (width - 1) or not 16 <= width <= 256 for width in widths):
        return f"heads of {' and '.join(map(str, sorted(widths)))} are no power of two from 16 to 256"
    if pools[0].shape[1] & (pools[0].shape[1] - 1):
        return f"pages of {pools[0].shape[1]} tokens are no power of two"
    if q.dtype == jnp.float32:
        return "fp32 is multiplied in fewer bits"
    return ""


def attend_rows(  # noqa: PLR0917 -- as of `paged.attend_rows`, and bounds
    q: jax.Array,
    pools: tuple[jax.Array, jax.Array],
    tables: jax.Array,
    masks: Masks,
    there: tuple[jax.Array, jax.Array],
    bounds: tuple[jax.Array, jax.Array],
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attend to pages.

    Args:
        q, pools, tables, masks, there: as of `paged.attend_rows`.
        bounds: as of `paged.seen_by_rows`.
        interpret: run without a GPU.

    Returns: as `paged.attend_rows`.
    """
    keys, values = pools
    rows, queries, heads, width = q.shape
    page, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    each = max(_KEYS // page, 1)
    held = min(max(1 << (queries * group - 1).bit_length(), 16), _QUERIES)
    blocks = -(-queries * group // held)
    more = blocks * held - queries * group
    splits = min(max(_PROGRAMS // (rows * kv_heads * blocks), 1), -(-tables.shape[1] // each))
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % each)), mode="edge")
    own, places = _by_head(q, there, kv_heads, more)
    span = each * page
    first, end = bounds[0] // span, jnp.where(bounds[1] < bounds[0], 0, bounds[1] // span + 1)
    shares = -(-jnp.maximum(end - first, 0) // splits)
    numbers = jnp.stack([first, end, shares, bounds[1]], axis=1).astype(jnp.int32)

    value, shape = values.shape[-1], (splits, rows, kv_heads, blocks * held)
    made, total, largest = pl.pallas_call(
        partial(_attend, masks=masks, each=each),
        grid=(rows, kv_heads * blocks, splits),
        in_specs=(
            pl.BlockSpec((None, 4), lambda r, _h, _s: (r, 0)),
            pl.BlockSpec((None, held), lambda r, h, _s: (r, h % blocks)),
            pl.BlockSpec((None, tables.shape[1]), lambda r, _h, _s: (r, 0)),
            pl.BlockSpec((None, None, held, width), lambda r, h, _s: (r, h // blocks, h % blocks, 0)),
            _of_head(keys, blocks),
            _of_head(values, blocks),
        ),
        out_specs=tuple(_of_queries(held, blocks, more) for more in ((value,), (), ())),
        out_shape=tuple(jax.ShapeDtypeStruct((*shape, *more), jnp.float32) for more in ((value,), (), ())),
        compiler_params=_triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="attend_pages",
    )(numbers, places, tables, own, keys, values)
    out, denominators = _added_up(made, total, largest)

    def apart(x: jax.Array) -> jax.Array:
        """[rows, K, queries x group, ...] -> [rows, queries, heads, ...]."""
        kept = x[:, :, : queries * group].reshape(rows, kv_heads, queries, group, *x.shape[3:])
        return jnp.moveaxis(kept, 1, 2).reshape(rows, queries, heads, *x.shape[3:])

    return apart(out).astype(q.dtype), apart(denominators)


def _of_head(pool: jax.Array, blocks: int) -> Any:
    """All pages of a head."""
    return pl.BlockSpec((*pool.shape[:2], None, pool.shape[3]), lambda _r, h, _s: (0, 0, h // blocks, 0))


def _of_queries(held: int, blocks: int, more: tuple[int, ...]) -> Any:
    """What is made of the queries that a program holds, `more` numbers each."""
    zeros = (0,) * len(more)
    return pl.BlockSpec((None, None, None, held, *more), lambda r, h, s: (s, r, h // blocks, h % blocks, *zeros))


def _by_head(q: jax.Array, there: tuple[jax.Array, jax.Array], kv_heads: int, more: int) -> tuple[jax.Array, jax.Array]:
    """Queries by the head of keys that they read [rows, K, queries x group, H], and their positions; -1: of none.

    Args:
        q, there: as of `attend_rows`.
        kv_heads: K.
        more: queries that fill a block up.
    """
    rows, queries, heads, width = q.shape
    group = heads // kv_heads
    own = jnp.moveaxis(q.reshape(rows, queries, kv_heads, group, width), 2, 1).reshape(rows, kv_heads, -1, width)
    places = jnp.repeat(jnp.where(there[1], there[0], -1), group, axis=1)
    filled = jnp.pad(own, ((0, 0), (0, 0), (0, more), (0, 0)))
    return filled, jnp.pad(places, ((0, 0), (0, more)), constant_values=-1)


def _added_up(made: jax.Array, total: jax.Array, largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Outputs of all shares [shares, ..., H] as one, and logarithms of the denominators."""
    top = jnp.max(largest, axis=0)
    share = jnp.exp(largest - top)
    whole = jnp.sum(total * share, axis=0)
    some = whole > 0
    safe = jnp.where(some, whole, 1.0)
    return jnp.sum(made * share[..., None], axis=0) / safe[..., None], jnp.where(some, jnp.log(safe) + top, -jnp.inf)


def _attend(  # noqa: PLR0917  (a kernel gets its arrays one by one)
    numbers: Any,
    places_ref: Any,
    tables: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    made_ref: Any,
    total_ref: Any,
    largest_ref: Any,
    *,
    masks: Masks,
    each: int,
) -> None:
    first, end, share, last = (numbers[place] for place in range(4))
    low = first + pl.program_id(2) * share
    queries, q = places_ref[...], q_ref[...]
    span = each * k_ref.shape[1]

    def more(number: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        made, total, largest = carry
        pages = tables[pl.ds(number * each, each)]
        k, v = (ref[pages].reshape(span, ref.shape[2]) for ref in (k_ref, v_ref))
        logits, _ = masks.logits(_triton.dot(q, k.astype(q.dtype).T))
        keys = number * span + jnp.arange(span)
        seen = masks.sees(queries[:, None], keys[None, :]) & (keys <= last)[None, :]
        logits = jnp.where(seen, logits, _UNSEEN)
        top = jnp.maximum(largest, jnp.max(logits, axis=1))
        weights = jnp.where(seen, jnp.exp(logits - top[:, None]), 0.0)
        fade = jnp.exp(largest - top)
        # What nobody wrote yet may be no number: 0 x NaN would be seen after all.
        v = jnp.where((keys <= last)[:, None], v, 0).astype(q.dtype)
        made = made * fade[:, None] + _triton.dot(weights.astype(q.dtype), v)
        return made, total * fade + jnp.sum(weights, axis=1), top

    rows = q.shape[0]
    empty = jnp.zeros((rows, v_ref.shape[2]), jnp.float32), jnp.zeros(rows), jnp.full(rows, _UNSEEN, jnp.float32)
    made, total, largest = jax.lax.fori_loop(low, jnp.minimum(low + share, end), more, empty)
    made_ref[...], total_ref[...], largest_ref[...] = made, total, largest
