"""Attention to a paged cache: flat tokens of many sequences, whose keys and values lie in pages of one pool.

The pool holds the pages of all layers one after another, so that a loop over layers can carry it and never copies it.
Keys are read by blocks of pages with an online softmax: nothing as large as the cache is made. Not here: which pages
a sequence has (`scheduling`), the step around it (`steps`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshwise.core.tensors import Attention, Tensor
from meshwise.runtime.kernels.masks import Masks
from meshwise.runtime.shardings import Placement, part_index
from meshwise.sharding import Sharding

#: Keys that are read at a time.
SPAN = 128

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
        layer_pages: pages of one layer in the pool of a rank; others number theirs likewise.
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
) -> tuple[jax.Array, jax.Array | None, list[jax.Array]]:
    """Write new keys and values to the pool, and attend to all that their sequences have there.

    Args:
        op: of the program.
        inputs: q, k and v of one flat row of tokens [1, tokens, heads, width], where `splits` has them; new keys on
            all devices that have some positions of each page.
        pools: of keys and of values [layers x pages, page, heads, width], heads split as those of k, and positions of a
            page as the operation's keys; or heads side by side in rows [..., heads x width], which may be longer than
            that; or one of both.
        masks: what is seen, by position.
        step: where everything is.
        layer: number of the layer that runs, among those of the pool.
        placement: of the layout.
        splits: of the operation's iteration space; heads may be split, and keys, whose parts are added up.

    Returns: as `attend`, without denominators where the pool is one of both; and the pools; heads where the output
    lives.
    """
    spread, count = placement.split(splits.get(op.key_axis, ())), len(pools)

    def local(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        q, k, v, *rest = arrays
        held, (positions, pages, first, *tables) = rest[:count], rest[count:]
        part = Part(part_index(spread, placement), placement.ways(spread))
        new: tuple[jax.Array, ...] = (k[0], v[0]) if count == 2 else (_joined(k[0], v[0]),)
        place = positions, pages
        if placement.platform == "cpu" and len(positions) == 1:
            # One token alone XLA writes as a slice, which it fuses with what the attention reads: the pool is copied.
            new = tuple(jnp.pad(x, ((0, 1), *[(0, 0)] * (x.ndim - 1))) for x in new)
            place = jnp.append(positions, 0), jnp.append(pages, -1)
        held = [_write(*pair, *place, first, part) for pair in zip(held, new, strict=True)]
        shapes = k.shape[2:], v.shape[2:]
        parts, at = [], 0
        for rows, table in zip(step.rows, tables, strict=True):
            own = slice(at, at + rows.queries * table.shape[0])
            shape = (table.shape[0], rows.queries)
            grouped = q[0, own].reshape(*shape, *q.shape[2:])
            there = (positions[own].reshape(shape), pages[own].reshape(shape) >= 0)
            parts.append(_attend(grouped, held, table + first, masks, there, shapes, part, placement.is_nvidia))
            at = own.stop
        flat = [tuple(x.reshape(1, -1, *x.shape[2:]) for x in part) for part in parts]
        made = tuple(jnp.concatenate(x, axis=1) for x in zip(*flat, strict=True))
        return (*(_added_up(made[0], made[1], spread, part) if spread else made), *held)

    first = jnp.asarray(layer, jnp.int32) * step.layer_pages
    tables = tuple(rows.tables for rows in step.rows)
    arrays = (*inputs, *pools, step.positions, step.pages, first, *tables)
    run: Callable[..., tuple[jax.Array, ...]] = local
    if placement.mesh.size > 1 or count == 1:  # kernels of TPUs ask the mesh for which chip they are compiled
        q, k, v = (placement.spec(Sharding.of(t.axes, new_tokens(op, splits))) for t in op.inputs)
        out, total = (placement.spec(placement.strategy.home(axes)) for axes in (op.output.axes, op.output.axes[:-1]))
        specs = zip(pools, op.inputs[1:], strict=False)
        held = tuple(PartitionSpec(*pool_spec(op, t, placement)[: a.ndim]) for a, t in specs)
        of_rank = PartitionSpec(held[0][0])
        reads = (q, k, v, *held, of_rank, of_rank, PartitionSpec(), *[of_rank] * len(tables))
        run = placement.local(local, reads, (*(out, total)[:count], *held))
    made = run(*arrays)
    return made[0], made[1] if count == 2 else None, list(made[-count:])


def pool_spec(op: Attention, t: Tensor, placement: Placement) -> PartitionSpec:
    """How a pool of keys, or of values, is split: pages as tokens are, what is in them as the operation reads it."""
    splits = placement.splits(op)
    ranks, inside = placement.split(splits.get(op.query_axis, ())), placement.spec(Sharding.of(t.axes, splits))
    return PartitionSpec(ranks or None, *inside[1:])


def _joined(keys: jax.Array, values: jax.Array) -> jax.Array:
    from meshwise.runtime.kernels import tpu_paged  # noqa: PLC0415  (loads Pallas)

    return tpu_paged.joined(keys, values)


def new_tokens(op: Attention, splits: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Splits of an attention's iteration space for keys that are new: they are where their tokens are."""
    return {**splits, op.key_axis: splits.get(op.query_axis, ())}


@dataclass(frozen=True)
class Part:
    """The positions of each page that a device holds: the `number`-th of `ways` equal stretches."""

    number: jax.Array | int = 0
    ways: int = 1

    def positions(self, pages: int, tokens: int) -> jax.Array:
        """Of what it has of so many pages that follow one another, so many tokens of each."""
        whole = jnp.arange(pages)[:, None] * tokens * self.ways
        return (whole + self.number * tokens + jnp.arange(tokens)).reshape(-1)


def _added_up(out: jax.Array, total: jax.Array, axes: tuple[str, ...], part: Part) -> tuple[jax.Array, jax.Array]:
    """Add up what devices made of their keys, by the softmaxes' denominators; each has its part of the heads then.

    Args:
        out, total: of all heads, [1, tokens, N, H] and [1, tokens, N].
        axes: of the mesh.
        part: of this device.
    """
    most = jax.lax.pmax(total, axes)
    finite = jnp.where(jnp.isfinite(most), most, 0.0)
    all_keys = jnp.log(jax.lax.psum(jnp.exp(total - finite), axes)) + finite  # -inf: nobody saw any
    share = jnp.exp(total - jnp.where(jnp.isfinite(all_keys), all_keys, 0.0))
    out = (out.astype(jnp.float32) * share[..., None]).astype(out.dtype)
    out = jax.lax.psum_scatter(out, axes, scatter_dimension=2, tiled=True)
    heads = out.shape[2]
    return out, jax.lax.dynamic_slice_in_dim(all_keys, part.number * heads, heads, axis=2)


def _write(  # noqa: PLR0917 -- arrays of one call
    pool: jax.Array, new: jax.Array, positions: jax.Array, pages: jax.Array, first: jax.Array, part: Part
) -> jax.Array:
    """Put new keys, or values [tokens, heads, width], where they belong; tokens that are none go nowhere."""
    own = pool.shape[1]
    place = positions % (own * part.ways)
    page = jnp.where((pages < 0) | (place // own != part.number), pool.shape[0], pages + first)
    if pool.ndim == 3:
        flat = new.reshape(len(new), -1)
        new = jnp.pad(flat, ((0, 0), (0, pool.shape[2] - flat.shape[1])))
    return pool.at[page, place % own].set(new.astype(pool.dtype), mode="drop")


def _read(pool: jax.Array, pages: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Some pages of each row: [rows, positions, heads, width]."""
    held = pool[pages]
    return (held[..., : math.prod(shape)] if pool.ndim == 3 else held).reshape(len(pages), -1, *shape)


def _attend(  # noqa: PLR0917 -- arrays of one call
    q: jax.Array,
    pools: Sequence[jax.Array],
    tables: jax.Array,
    masks: Masks,
    there: tuple[jax.Array, jax.Array],
    shapes: Sequence[tuple[int, ...]],
    part: Part,
    is_nvidia: bool,
) -> tuple[jax.Array, ...]:
    """As `attend_rows`, by a kernel where there is one for what is asked; that for one pool gives no denominators."""
    if len(pools) == 1:
        from meshwise.runtime.kernels import tpu_paged  # noqa: PLC0415  (loads Pallas)

        with jax.named_scope("fused"):
            return (tpu_paged.attend_rows(q, pools[0], tables, masks, there, seen_by_rows(there, masks)),)
    both = pools[0], pools[1]
    if not q.shape[0] or not is_nvidia:
        return attend_rows(q, both, tables, masks, there, part, shapes)
    from meshwise.runtime.kernels import gpu_paged  # noqa: PLC0415

    refused = "positions of a page are on several devices" if part.ways > 1 else gpu_paged.refusal(q, both)
    with jax.named_scope(f"blocks, since {refused}" if refused else "fused"):
        if refused:
            return attend_rows(q, both, tables, masks, there, part, shapes)
        return gpu_paged.attend_rows(q, both, tables, masks, there, seen_by_rows(there, masks))


def seen_by_rows(there: tuple[jax.Array, jax.Array], masks: Masks) -> tuple[jax.Array, jax.Array]:
    """Of each row the first position that a query of it sees, and its last query's; none: the last is below the first.

    Args:
        there: positions of queries, and whether they are any [rows, queries].
        masks: what is seen.
    """
    positions, real = there
    low = jnp.min(jnp.where(real, _least_seen(positions, masks), _FAR), axis=1)
    return low, jnp.max(jnp.where(real, positions, -1), axis=1)


def attend_rows(  # noqa: PLR0917 -- arrays of one call
    q: jax.Array,
    pools: tuple[jax.Array, jax.Array],
    tables: jax.Array,
    masks: Masks,
    there: tuple[jax.Array, jax.Array],
    part: Part = Part(),
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend to pages, some at a time, from the first that any query sees to the last.

    Args:
        q: [rows, queries, N, H].
        pools: of keys and values.
        tables: pages in the pools [rows, pages].
        masks: what is seen.
        there: positions of queries, and whether they are any [rows, queries].
        part: of each page that is here.
        shapes: heads and width of keys and of values, where the pools do not say it.

    Returns: output [rows, queries, N, Hv] in the format of q, and the logarithm of each denominator in fp32.
    """
    (keys, values), positions, of_rows = pools, there[0], seen_by_rows(there, masks)
    of_keys, of_values = shapes or (keys.shape[2:], values.shape[2:])
    (rows, queries, heads, _), page, kv_heads = q.shape, keys.shape[1], of_keys[0]
    each = max(min(SPAN // page, tables.shape[1]), 1)  # pages at a time
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % each)), mode="edge")
    span = each * page * part.ways  # positions, some of whose keys are here
    grouped = q.reshape(rows, queries, kv_heads, heads // kv_heads, -1)

    def block(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, total, out = carry
        some = jax.lax.dynamic_slice_in_dim(tables, number * each, each, axis=1)
        k, v = _read(keys, some, of_keys), _read(values, some, of_values)
        logits = jnp.einsum("rqkgh,rskh->rkgqs", grouped, k.astype(q.dtype), preferred_element_type=jnp.float32)
        logits = logits * masks.scale
        if masks.cap is not None:
            logits = masks.cap * jnp.tanh(logits / masks.cap)
        places = number * span + part.positions(each, page)
        seen = jax.vmap(masks.seen, (0, None))(positions, places)[:, None, None]
        # What nobody wrote yet may be of a request before, and no number: 0 x NaN would be seen after all.
        v = jnp.where((places > of_rows[1][:, None])[..., None, None], 0, v)
        logits = jnp.where(seen, logits, -jnp.inf)
        more = jnp.maximum(largest, jnp.max(logits, axis=-1))
        finite = jnp.where(jnp.isfinite(more), more, 0.0)
        weights = jnp.exp(logits - finite[..., None])
        before = jnp.exp(largest - finite)
        more_out = jnp.einsum(
            "rkgqs,rskh->rkgqh", weights.astype(q.dtype), v.astype(q.dtype), preferred_element_type=jnp.float32
        )
        return more, total * before + jnp.sum(weights, axis=-1), out * before[..., None] + more_out

    low, high = jnp.min(of_rows[0]), jnp.max(of_rows[1])
    shape = (rows, kv_heads, heads // kv_heads, queries)
    start = (
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, of_values[1]), jnp.float32),
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
