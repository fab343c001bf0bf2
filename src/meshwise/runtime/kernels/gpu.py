"""Fused attention for NVIDIA GPUs, in Pallas: one kernel forward, two backward, on blocks that hold pairs.

Each program of a kernel holds one block of queries (or of keys) on the chip, and goes over the blocks of keys (or of
queries) that any of its pairs is seen in; bounds are worked out as it runs, so that positions may be known only then.
Source: Dao 2023, FlashAttention-2. Not here: masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as triton_module

from meshwise.hardware.kernels import ATTENTION
from meshwise.runtime.kernels.counted import counted
from meshwise.runtime.kernels.gpu_documents import Apart, after_beginning, of_keys, of_rows
from meshwise.runtime.kernels.masks import Documents, Masks, Pairs

_triton: Any = triton_module

_TAKES = ATTENTION["nvidia"]

#: Rows of a block that are tried, the largest first, and the least.
_SIZES = _TAKES.sizes

#: Of queries and keys, multiples of it.
LEAST = _TAKES.least

#: Logits that are not seen, and what the largest of some begins with: the difference of the two has no weight.
_UNSEEN, _LEAST = -1e30, -5e29

#: Powers of two are taken faster than of e.
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program of a kernel works on, and with.

    Args:
        rows: queries at a time; keys: keys at a time.
        warps: of a program.
        stages: blocks that are on their way.
    """

    rows: int
    keys: int
    warps: int
    stages: int


#: By kernel, for heads of up to 64, 128 and 256: the fastest on an H100 (benchmarks/kernels.py --tiles), but that of
#: queries of 256: 128 rows were, which take more memory on the chip than A100 (204,800 of 166,912 bytes) and B200 have.
_TILES = {
    "forward": (Tile(64, 64, 4, 3), Tile(128, 64, 4, 2), Tile(128, 64, 8, 2)),
    "of_queries": (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 32, 8, 3)),
    "of_keys": (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(32, 32, 4, 2)),
}


def refusal(q: jax.Array, k: jax.Array, pairs: Pairs) -> str:
    """Say why the kernel cannot attend, "" where it can."""
    return _TAKES.refusal(*pairs.runs(q, k), q.shape[3], chunked=pairs.masks.chunk is not None)


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pairs: Pairs,
    documents: Documents | None = None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attend; arguments and result as of `blocks.forward`."""
    tile = _tile("forward", q, k, pairs)
    rows, keys = tile.rows, tile.keys
    how: dict[str, Any] = {"runs": pairs.runs(q, k), "masks": pairs.masks, "width": q.shape[3], "value": v.shape[3]}
    kernel = partial(_forward, keys=keys, **how)
    shapes = (
        jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), v.dtype),
        jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32),
    )
    group = q.shape[2] // k.shape[2]
    specs = (_rows(q, rows), _all_of(k, group), _all_of(v, group))
    outputs = (_rows(v, rows), _row_numbers(rows))
    grid = (q.shape[1] // rows, q.shape[0], q.shape[2])
    apart = of_rows(documents, rows)
    with counted(q, k, v, pairs, products=2, size=(rows, keys), gpu=True):
        call = _call(kernel, tile, grid, (specs, outputs), shapes, apart, interpret=interpret)
        out, total = call(*_starts(pairs), q, k, v)
    return out, jnp.swapaxes(total, 1, 2)


def backward(  # noqa: PLR0917 -- arrays of one call
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kept: tuple[jax.Array, jax.Array, jax.Array],
    pairs: Pairs,
    documents: Documents | None = None,
    *,
    dtype: Any = jnp.float32,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients; arguments and result as of `blocks.backward`."""
    total, d_out, shift = jnp.swapaxes(kept[0], 1, 2), kept[1], jnp.swapaxes(kept[2], 1, 2)
    total = jnp.where(jnp.isfinite(total), total, 0.0)
    group = q.shape[2] // k.shape[2]
    how: dict[str, Any] = {"runs": pairs.runs(q, k), "masks": pairs.masks, "width": q.shape[3], "value": v.shape[3]}
    starts = _starts(pairs)

    tile = _tile("of_queries", q, k, pairs)
    rows, keys = tile.rows, tile.keys
    specs: tuple[Any, ...] = (_rows(q, rows), _all_of(k, group), _all_of(v, group))
    specs += (_row_numbers(rows), _rows(v, rows), _row_numbers(rows))
    grid = (q.shape[1] // rows, q.shape[0], q.shape[2])
    shape, both = (jax.ShapeDtypeStruct(q.shape, dtype),), (specs, (_rows(q, rows),))
    kernel, apart = partial(_of_queries, keys=keys, **how), of_rows(documents, rows)
    with counted(q, k, v, pairs, products=3, size=(rows, keys), gpu=True):
        call = _call(kernel, tile, grid, both, shape, apart, interpret=interpret)
        (d_q,) = call(*starts, q, k, v, total, d_out, shift)

    tile = _tile("of_keys", q, k, pairs)
    rows, keys = tile.rows, tile.keys
    specs = (_group_of(q, group), _rows(k, keys), _rows(v, keys))
    specs += (_group_numbers(q, group), _group_of(d_out, group), _group_numbers(q, group))
    grid = (k.shape[1] // keys, k.shape[0], k.shape[2])
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, dtype) for x in (k, v))
    outputs = (_rows(k, keys), _rows(v, keys))
    grouped = _by_group(total, group, 1), _by_group(d_out, group), _by_group(shift, group, 1)
    kernel, apart = partial(_of_keys, rows=rows, **how), of_keys(documents, starts, k.shape[1], keys)
    with counted(q, k, v, pairs, products=4, size=(rows, keys), gpu=True):
        call = _call(kernel, tile, grid, (specs, outputs), shapes, apart, interpret=interpret)
        d_k, d_v = call(*starts, _by_group(q, group), k, v, *grouped)
    return d_q, d_k, d_v


def _tile(kernel: str, q: jax.Array, k: jax.Array, pairs: Pairs) -> Tile:
    """The tile of a kernel, smaller where queries or keys are not so many times as many."""
    tile = _TILES[kernel][sum(q.shape[3] > width for width in (64, 128))]
    queries, keys = pairs.runs(q, k)
    return replace(tile, rows=_size(queries, tile.rows), keys=_size(keys, tile.keys))


def _call(  # noqa: PLR0917
    kernel: Callable[..., None],
    tile: Tile,
    grid: tuple[int, ...],
    specs: tuple[Any, Any],
    shapes: Any,
    apart: Apart,
    *,
    interpret: bool,
) -> Callable[..., Any]:
    """A kernel of where queries and keys begin and its arrays, beside what `apart` says of documents."""
    count = 2 + len(apart)

    def with_documents(*refs: Any) -> None:
        kernel(*refs[:2], refs[2:count], *refs[count:])

    called = pl.pallas_call(
        with_documents,
        grid=grid,
        in_specs=(pl.BlockSpec(), pl.BlockSpec(), *(spec for _, spec in apart), *specs[0]),
        out_specs=specs[1],
        out_shape=shapes,
        compiler_params=_triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name=kernel.func.__name__.strip("_"),  # type: ignore[attr-defined]  # (a partial)
    )
    return lambda *arrays: called(*arrays[:2], *(array for array, _ in apart), *arrays[2:])


def _starts(pairs: Pairs) -> tuple[jax.Array, jax.Array]:
    """Position of the first query of each run, and of the first key."""
    queries, keys = (jnp.stack([jnp.asarray(x, jnp.int32) for x in each]) for each in (pairs.queries, pairs.keys))
    return queries, keys


def _first(starts: Any, run: int, size: int) -> Any:
    """Position with which a program's block begins, of runs that begin so."""
    number, each = pl.program_id(0), jnp.int32(run // size)
    if starts.shape[0] == 1:
        return starts[0] + number * size
    return starts[jax.lax.div(number, each)] + jax.lax.rem(number, each) * size


def _size(length: int, most: int) -> int:
    return next(s for s in _SIZES if s <= most and length % s == 0)


def _padded(width: int) -> int:
    """Registers hold powers of two."""
    return max(16, 1 << (width - 1).bit_length())


def _by_group(x: jax.Array, group: int, heads: int = 2) -> jax.Array:
    """Heads of a group apart: [B, T, N, ...] -> [B, T, K, G, ...]; `heads` is their dimension."""
    return x.reshape(*x.shape[:heads], x.shape[heads] // group, group, *x.shape[heads + 1 :])


def _rows(x: jax.Array, rows: int) -> Any:
    """One block of rows of one head."""
    return pl.BlockSpec((None, rows, None, _padded(x.shape[3])), lambda i, b, n: (b, i, n, 0))


def _row_numbers(rows: int) -> Any:
    """What one block of rows of one head has one number of: [B, N, T]."""
    return pl.BlockSpec((None, None, rows), lambda i, b, n: (b, n, i))


def _all_of(x: jax.Array, group: int) -> Any:
    """All keys of the head that a query's head reads."""
    return pl.BlockSpec((None, x.shape[1], None, _padded(x.shape[3])), lambda _, b, n: (b, 0, n // group, 0))


def _group_of(x: jax.Array, group: int) -> Any:
    """All queries of a group of heads."""
    return pl.BlockSpec((None, x.shape[1], None, group, _padded(x.shape[3])), lambda _, b, n: (b, 0, n, 0, 0))


def _group_numbers(x: jax.Array, group: int) -> Any:
    return pl.BlockSpec((None, None, group, x.shape[1]), lambda _, b, n: (b, n, 0, 0))


def _load(ref: Any, width: int) -> jax.Array:
    """Rows of a head, zeros beyond its width."""
    padded = ref.shape[-1]
    if padded == width:
        return ref[...]
    return _triton.load(ref, mask=(jnp.arange(padded) < width)[None, :], other=0.0)


def _store(ref: Any, x: jax.Array, width: int) -> None:
    padded = ref.shape[-1]
    mask = None if padded == width else (jnp.arange(padded) < width)[None, :]
    _triton.store(ref, x.astype(ref.dtype), mask=mask)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return _triton.dot(a, b)


def _scores(  # noqa: PLR0917
    q: jax.Array, k: jax.Array, first_query: Any, first_key: Any, masks: Masks, begins: Any, whole: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Logits of a block [rows, keys], in units of powers of two, and the slope of the cap; `whole`: all are seen."""
    logits, slope = masks.logits(_dot(q, k.T), _LOG2_E)
    if whole:
        return logits, slope
    queries = first_query + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    keys = first_key + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    seen = masks.sees(queries, keys)
    seen = seen if begins is None else seen & (keys >= begins[:, None])
    return jnp.where(seen, logits, _UNSEEN), slope


def _over(  # noqa: PLR0917
    ranges: tuple[Callable[..., Any], Callable[..., Any]],
    block: tuple[Any, Any],
    starts: Any,
    lengths: tuple[int, int],
    masks: Masks,
    within: Callable[..., Any] | None,
    more: Callable[..., Any],
    carry: Any,
) -> Any:
    """Go over blocks that hold pairs, run by run, without a look at their positions where all their pairs are seen.

    Args:
        ranges: bounds of what some, and of what all of a block see.
        block: positions of its first and its last.
        starts: position with which each run of the others begins.
        lengths: of a run, and of a block of the others.
        masks: see there.
        within: of a run's number and start, and of both bounds: those within documents, if there are several.
        more: of where a block of the others begins, by place and by position, the carry, and whether all are seen.
        carry: to begin with.
    """
    run, size = lengths
    for number in range(starts.shape[0]):
        start = starts[number]
        some, whole = (bounds(*block, start, run) for bounds in ranges)
        some, whole = (some, whole) if within is None else within(number, start, some, whole)

        def one(place: Any, carry: Any, *, whole: bool, begun: int = number * run, start: Any = start) -> Any:
            return more(begun + place * size, start + place * size, carry, whole=whole)

        low, high = jnp.int32(some[0]), jnp.int32(some[1])
        first, end = jax.lax.div(low, jnp.int32(size)), jax.lax.div(high + (size - 1), jnp.int32(size))
        if masks.everything:
            carry = jax.lax.fori_loop(first, end, partial(one, whole=True), carry)
            continue
        low, high = jnp.int32(whole[0]), jnp.int32(whole[1])
        begin = jnp.clip(jax.lax.div(low + (size - 1), jnp.int32(size)), first, end)
        until = jnp.clip(jax.lax.div(high, jnp.int32(size)), begin, end)
        carry = jax.lax.fori_loop(first, begin, partial(one, whole=False), carry)
        carry = jax.lax.fori_loop(begin, until, partial(one, whole=True), carry)
        carry = jax.lax.fori_loop(until, end, partial(one, whole=False), carry)
    return carry


def _forward(  # noqa: PLR0917  (a kernel gets its arrays one by one)
    queries: Any,
    starts: Any,
    documents: tuple[Any, ...],
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out: Any,
    total_ref: Any,
    *,
    runs: tuple[int, int],
    masks: Masks,
    keys: int,
    width: int,
    value: int,
) -> None:
    rows = q_ref.shape[0]
    first = _first(queries, runs[0], rows)
    q, begins = _load(q_ref, width), documents[0][...] if documents else None

    def more(place: Any, start: Any, carry: tuple[jax.Array, ...], *, whole: bool) -> tuple[jax.Array, ...]:
        made, total, largest = carry
        here = pl.ds(place, keys)
        logits, _ = _scores(q, _load(k_ref.at[here], width), first, start, masks, begins, whole)
        top = jnp.maximum(largest, jnp.max(logits, axis=1))
        weights = jnp.exp2(logits - top[:, None])
        fade = jnp.exp2(largest - top)
        v = _load(v_ref.at[here], value)
        return made * fade[:, None] + _dot(weights.astype(v.dtype), v), total * fade + jnp.sum(weights, axis=1), top

    empty = jnp.zeros((rows, v_ref.shape[1]), jnp.float32), jnp.zeros(rows), jnp.full(rows, _LEAST, jnp.float32)
    ranges, block = (masks.key_range, masks.whole_key_range), (first, first + rows - 1)
    within = after_beginning(begins, runs[1]) if documents else None
    made, total, largest = _over(ranges, block, starts, (runs[1], keys), masks, within, more, empty)
    some = total > 0
    whole = jnp.where(some, total, 1.0)
    _store(out, made / whole[:, None], value)
    total_ref[...] = jnp.where(some, (jnp.log2(whole) + largest) / _LOG2_E, -math.inf)


def _gradients(  # noqa: PLR0917  (a kernel gets its arrays one by one)
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kept: tuple[jax.Array, ...],
    first_query: Any,
    first_key: Any,
    masks: Masks,
    begins: Any,
    whole: bool,
) -> tuple[jax.Array, jax.Array]:
    """Weights of a block of pairs, and gradients of its scores: [rows, keys]."""
    total, d_out, shift = kept
    logits, slope = _scores(q, k, first_query, first_key, masks, begins, whole)
    weights = jnp.exp2(logits - (total * _LOG2_E)[:, None])
    d_scores = weights * (_dot(d_out, v.T) + shift[:, None]) * masks.scale
    return weights, d_scores if slope is None else d_scores * slope


def _of_queries(  # noqa: PLR0917  (a kernel gets its arrays one by one)
    queries: Any,
    starts: Any,
    documents: tuple[Any, ...],
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    total_ref: Any,
    d_out_ref: Any,
    shift_ref: Any,
    d_q: Any,
    *,
    runs: tuple[int, int],
    masks: Masks,
    keys: int,
    width: int,
    value: int,
) -> None:
    rows = q_ref.shape[0]
    first = _first(queries, runs[0], rows)
    q, kept = _load(q_ref, width), (total_ref[...], _load(d_out_ref, value), shift_ref[...])
    begins = documents[0][...] if documents else None

    def more(place: Any, start: Any, total: jax.Array, *, whole: bool) -> jax.Array:
        here = pl.ds(place, keys)
        k, v = _load(k_ref.at[here], width), _load(v_ref.at[here], value)
        _, d_scores = _gradients(q, k, v, kept, first, start, masks, begins, whole)
        return total + _dot(d_scores.astype(k.dtype), k)

    ranges, block = (masks.key_range, masks.whole_key_range), (first, first + rows - 1)
    begun, within = jnp.zeros(q.shape, jnp.float32), after_beginning(begins, runs[1]) if documents else None
    _store(d_q, _over(ranges, block, starts, (runs[1], keys), masks, within, more, begun), width)


def _of_keys(  # noqa: PLR0917  (a kernel gets its arrays one by one)
    queries: Any,
    starts: Any,
    documents: tuple[Any, ...],
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    total_ref: Any,
    d_out_ref: Any,
    shift_ref: Any,
    d_k: Any,
    d_v: Any,
    *,
    runs: tuple[int, int],
    masks: Masks,
    rows: int,
    width: int,
    value: int,
) -> None:
    keys = k_ref.shape[0]
    first = _first(starts, runs[1], keys)
    k, v = _load(k_ref, width), _load(v_ref, value)
    ranges, block = (masks.query_range, masks.whole_query_range), (first, first + keys - 1)

    def before_end(number: int, _: Any, *bounds: tuple[Any, Any]) -> list[tuple[Any, Any]]:
        return [(low, jnp.minimum(high, documents[1][number, n])) for n, (low, high) in enumerate(bounds)]

    def of_head(head: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def more(
            place: Any, start: Any, sums: tuple[jax.Array, jax.Array], *, whole: bool
        ) -> tuple[jax.Array, jax.Array]:
            here = pl.ds(place, rows)
            q, d_out = _load(q_ref.at[here, head], width), _load(d_out_ref.at[here, head], value)
            kept = total_ref[head, here], d_out, shift_ref[head, here]
            begins = documents[0][here] if documents else None
            weights, d_scores = _gradients(q, k, v, kept, start, first, masks, begins, whole)
            return sums[0] + _dot(d_scores.astype(q.dtype).T, q), sums[1] + _dot(weights.astype(v.dtype).T, d_out)

        made: tuple[jax.Array, jax.Array] = _over(
            ranges, block, queries, (runs[0], rows), masks, before_end if documents else None, more, sums
        )
        return made

    start_sums = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    made = jax.lax.fori_loop(0, q_ref.shape[1], of_head, start_sums)
    _store(d_k, made[0], width)
    _store(d_v, made[1], value)
