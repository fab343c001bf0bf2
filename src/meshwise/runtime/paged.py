"""Attention to a paged cache: flat tokens of many sequences, whose keys and values lie in pages of one pool.

The pool holds the pages of all layers one after another, so that a loop over layers can carry it and never copies it.
Keys are read by blocks of pages with an online softmax: nothing as large as the cache is made. Not here: which pages
a sequence has (`scheduling`), the step around it (`steps`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshwise.core.tensors import Attention
from meshwise.runtime.kernels.masks import Masks
from meshwise.runtime.shardings import Placement
from meshwise.sharding import Sharding

#: Keys that are read at a time.
_SPAN = 128

#: A position beyond all others.
_FAR = 2**31 - 1


@dataclass(frozen=True)
class Rows:
    """Tokens of a step that attend together: rows of as many queries of one sequence each.

    Args:
        queries: tokens of a row.
        tables: pages of each row's sequence, in the order of positions: int32 [rows, pages].
    """

    queries: int
    tables: jax.Array

    @property
    def tokens(self) -> int:
        """Of all rows."""
        return self.queries * self.tables.shape[0]


@dataclass(frozen=True)
class PagedStep:
    """Where the tokens of a step are, and read and write the cache.

    Args:
        positions: of the tokens in their sequences: int32 [tokens].
        pages: where each token is written: int32 [tokens]; below 0 where a token is none, but filling.
        rows: the tokens in groups, in order.
        layer_pages: pages of one layer in the pool.
    """

    positions: jax.Array
    pages: jax.Array
    rows: tuple[Rows, ...]
    layer_pages: int


def attend_paged(
    op: Attention,
    inputs: Sequence[jax.Array],
    pools: Sequence[jax.Array],
    masks: Masks,
    *,
    step: PagedStep,
    layer: jax.Array | int,
    placement: Placement,
    splits: Mapping[str, tuple[str, ...]],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Write new keys and values to the pool, and attend to all that their sequences have there.

    Args:
        op: of the program.
        inputs: q, k and v of one flat row of tokens [1, tokens, heads, width], where `splits` has them.
        pools: of keys and of values [layers x pages, page, heads, width], heads split as those of k.
        masks: what is seen, by position.
        step: where everything is.
        layer: number of the layer that runs, among those of the pool.
        placement: of the layout.
        splits: of the operation's iteration space; only heads may be split.

    Returns: as `attend`, and both pools.
    """

    def local(*arrays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        q, k, v, keys, values, positions, pages, first, *tables = arrays
        keys, values = (_write(pool, new[0], positions, pages, first) for pool, new in ((keys, k), (values, v)))
        parts, at = [], 0
        for rows, table in zip(step.rows, tables, strict=True):
            own = slice(at, at + rows.tokens)
            shape = (table.shape[0], rows.queries)
            grouped = q[0, own].reshape(*shape, *q.shape[2:])
            there = (positions[own].reshape(shape), pages[own].reshape(shape) >= 0)
            parts.append(_attend(grouped, (keys, values), table + first, masks, there, placement.is_nvidia))
            at += rows.tokens
        flat = [tuple(x.reshape(1, -1, *x.shape[2:]) for x in part) for part in parts]
        out, total = (jnp.concatenate(x, axis=1) for x in zip(*flat, strict=True))
        return out, total, keys, values

    first = jnp.asarray(layer, jnp.int32) * step.layer_pages
    tables = tuple(rows.tables for rows in step.rows)
    arrays = (*inputs, *pools, step.positions, step.pages, first, *tables)
    if placement.mesh.size == 1:
        return local(*arrays)
    q, k, v = (placement.spec(Sharding.of(t.axes, splits)) for t in op.inputs)
    out = placement.spec(Sharding.of(op.output.axes, splits))
    total = placement.spec(Sharding.of(op.output.axes[:-1], splits))
    held = tuple(PartitionSpec(None, None, *spec[2:]) for spec in (k, v))
    whole = (PartitionSpec(),) * (3 + len(tables))
    return placement.local(local, (q, k, v, *held, *whole), (out, total, *held))(*arrays)


def _write(pool: jax.Array, new: jax.Array, positions: jax.Array, pages: jax.Array, first: jax.Array) -> jax.Array:
    """Put new keys, or values [tokens, heads, width], where they belong; tokens that are none go nowhere."""
    page = jnp.where(pages < 0, pool.shape[0], pages + first)
    return pool.at[page, positions % pool.shape[1]].set(new.astype(pool.dtype), mode="drop")


def _attend(  # noqa: PLR0917 -- arrays of one call
    q: jax.Array,
    pools: tuple[jax.Array, jax.Array],
    tables: jax.Array,
    masks: Masks,
    there: tuple[jax.Array, jax.Array],
    is_nvidia: bool,
) -> tuple[jax.Array, jax.Array]:
    """As `attend_rows`, by a kernel where there is one for what is asked."""
    if not q.shape[0] or not is_nvidia:
        return attend_rows(q, pools, tables, masks, there)
    from meshwise.runtime.kernels import gpu_paged  # noqa: PLC0415  (loads Pallas)

    refused = gpu_paged.refusal(q, pools)
    with jax.named_scope(f"blocks, since {refused}" if refused else "fused"):
        if refused:
            return attend_rows(q, pools, tables, masks, there)
        return gpu_paged.attend_rows(q, pools, tables, masks, there, seen_by_rows(there, masks))


def seen_by_rows(there: tuple[jax.Array, jax.Array], masks: Masks) -> tuple[jax.Array, jax.Array]:
    """Of each row the first position that a query of it sees, and its last query's; none: the last is below the first.

    Args:
        there: positions of queries, and whether they are any [rows, queries].
        masks: what is seen.
    """
    positions, real = there
    low = jnp.min(jnp.where(real, _least_seen(positions, masks), _FAR), axis=1)
    return low, jnp.max(jnp.where(real, positions, -1), axis=1)


def attend_rows(
    q: jax.Array,
    pools: tuple[jax.Array, jax.Array],
    tables: jax.Array,
    masks: Masks,
    there: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Attend to pages, some at a time, from the first that any query sees to the last.

    Args:
        q: [rows, queries, N, H].
        pools: of keys and values.
        tables: pages in the pools [rows, pages].
        masks: what is seen.
        there: positions of queries, and whether they are any [rows, queries].

    Returns: output [rows, queries, N, Hv] in the format of q, and the logarithm of each denominator in fp32.
    """
    (keys, values), positions, of_rows = pools, there[0], seen_by_rows(there, masks)
    rows, queries, heads, _ = q.shape
    page, kv_heads = keys.shape[1], keys.shape[2]
    each = max(min(_SPAN // page, tables.shape[1]), 1)  # pages at a time
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % each)), mode="edge")
    span = each * page
    grouped = q.reshape(rows, queries, kv_heads, heads // kv_heads, -1)

    def block(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, total, out = carry
        some = jax.lax.dynamic_slice_in_dim(tables, number * each, each, axis=1)
        k, v = (pool[some].reshape(rows, span, *pool.shape[2:]) for pool in (keys, values))
        logits = jnp.einsum("rqkgh,rskh->rkgqs", grouped, k.astype(q.dtype), preferred_element_type=jnp.float32)
        logits = logits * masks.scale
        if masks.cap is not None:
            logits = masks.cap * jnp.tanh(logits / masks.cap)
        places = number * span + jnp.arange(span)
        seen = jax.vmap(masks.seen, (0, None))(positions, places)[:, None, None]
        # What nobody wrote yet may be of a request before, and no number: 0 x NaN would be seen after all.
        v = jnp.where((places > last_of_row)[..., None, None], 0, v)
        logits = jnp.where(seen, logits, -jnp.inf)
        more = jnp.maximum(largest, jnp.max(logits, axis=-1))
        finite = jnp.where(jnp.isfinite(more), more, 0.0)
        weights = jnp.exp(logits - finite[..., None])
        before = jnp.exp(largest - finite)
        part = jnp.einsum(
            "rkgqs,rskh->rkgqh", weights.astype(q.dtype), v.astype(q.dtype), preferred_element_type=jnp.float32
        )
        return more, total * before + jnp.sum(weights, axis=-1), out * before[..., None] + part

    last_of_row = of_rows[1][:, None]
    low, high = jnp.min(of_rows[0]), jnp.max(of_rows[1])
    shape = (rows, kv_heads, heads // kv_heads, queries)
    start = (
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, values.shape[-1]), jnp.float32),
    )
    last = (high + span) // span
    largest, total, out = jax.lax.fori_loop(jnp.minimum(low // span, last), last, block, start)
    some = total > 0
    out = jnp.where(some[..., None], out / jnp.where(some, total, 1.0)[..., None], 0.0)
    denominator = jnp.where(some, jnp.log(jnp.where(some, total, 1.0)) + largest, -jnp.inf)
    out = jnp.moveaxis(out, 3, 1).reshape(rows, queries, heads, -1)  # [r, K, G, q, H] -> [r, q, N, H]
    return out.astype(q.dtype), jnp.moveaxis(denominator, 3, 1).reshape(rows, queries, heads)


def _least_seen(positions: jax.Array, masks: Masks) -> jax.Array:
    """First position that each query sees."""
    least = jnp.zeros_like(positions)
    if masks.window is not None:
        least = jnp.maximum(positions - masks.window + 1, least)
    if masks.chunk is not None:
        least = jnp.maximum(positions // masks.chunk * masks.chunk, least)
    return least
