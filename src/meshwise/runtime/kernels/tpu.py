"""Splash attention, the fused kernel for TPUs that comes with JAX, on blocks that hold pairs.

The kernel skips blocks by tables that say which blocks of keys each block of queries reads. They are made here, so that
a device may choose its own as it runs: that of its part of the sequence, or of the keys that have come to it. Its parts
are called one by one, for denominators that rings and sinks need; this is the only place that does. Not here: masks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_info
from numpy.typing import NDArray

from meshwise.hardware.kernels import ATTENTION
from meshwise.runtime.kernels.counted import counted
from meshwise.runtime.kernels.masks import Documents, Masks, Pairs

_kernel: Any = splash
_MaskInfo: Any = mask_info.MaskInfo

_TAKES = ATTENTION["google"]

#: Rows of a block, the most that fits on the chip first.
_SIZES = _TAKES.sizes

#: Of queries and keys, multiples of it.
LEAST = _TAKES.least

#: Below it a logarithm is that of no pair: the kernel's stand-in for minus infinity.
_NOTHING = -1e30


def refusal(q: jax.Array, k: jax.Array, pairs: Pairs) -> str:
    """Say why the kernel cannot attend, "" where it can."""
    if not pairs.offsets:
        return "positions are known only as the program runs"
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
    size = _sizes(q, k, pairs)
    own = _tables(pairs, q, k, size, by_key=False)
    attend = partial(
        _kernel._splash_attention_forward,
        own,
        sinks=None,
        mask_value=_kernel.DEFAULT_MASK_VALUE,
        is_mqa=False,
        block_sizes=_kernel.BlockSizes(block_q=size[0], block_kv=size[1], block_kv_compute=size[1]),
        residual_checkpoint_name=None,
        save_residuals=True,
        mask_function=_function(pairs, k),
        attn_logits_soft_cap=pairs.masks.cap,
        interpret=interpret,
    )
    with counted(q, k, v, pairs, products=2, size=size):
        out, (total,) = jax.vmap(attend)(_scaled(q, pairs), _by_head(k), _by_head(v), _segments(documents))
    out, total = jnp.swapaxes(out, 1, 2), jnp.swapaxes(total, 1, 2)
    some = total > _NOTHING
    return jnp.where(some[..., None], out, 0).astype(v.dtype), jnp.where(some, total, -jnp.inf)


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
    size = _sizes(q, k, pairs)
    total, d_out, shift = (jnp.swapaxes(x, 1, 2) for x in kept)
    total = jnp.where(jnp.isfinite(total), total, 0.0)
    common = {
        "bq": size[0],
        "bkv": size[1],
        "is_mqa": False,
        "mask_value": _kernel.DEFAULT_MASK_VALUE,
        "attn_logits_soft_cap": pairs.masks.cap,
        "q_layout": _kernel.QKVLayout.HEAD_DIM_MINOR,
        "k_layout": _kernel.QKVLayout.HEAD_DIM_MINOR,
        "v_layout": _kernel.QKVLayout.HEAD_DIM_MINOR,
        "mask_function": _function(pairs, k),
        "interpret": interpret,
    }
    keys = _tables(pairs, q, k, size, by_key=True)
    queries = _tables(pairs, q, k, size, by_key=False)

    def of_keys(q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, *kept: jax.Array) -> tuple[jax.Array, ...]:
        made: tuple[jax.Array, ...] = _kernel._splash_attention_bwd_dkv(
            q, k, v, segments, None, *kept, mask_info=keys, bkv_compute=size[1], use_fused_bwd_kernel=False, **common
        )
        return made[1:]

    def of_queries(q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, *kept: jax.Array) -> jax.Array:
        made: jax.Array = _kernel._splash_attention_bwd_dq(q, k, v, segments, None, *kept, mask_info=queries, **common)
        return made

    arrays = (_scaled(q, pairs), _by_head(k), _by_head(v), _segments(documents), total, d_out, -shift)
    with counted(q, k, v, pairs, products=4, size=size):
        d_k, d_v = jax.vmap(of_keys)(*arrays)
    with counted(q, k, v, pairs, products=3, size=size):
        d_q = jax.vmap(of_queries)(*arrays)
    d_q, d_k, d_v = (jnp.swapaxes(x, 1, 2) for x in (d_q, d_k, d_v))
    return (d_q * pairs.masks.scale).astype(dtype), d_k.astype(dtype), d_v.astype(dtype)


def _segments(documents: Documents | None) -> Any:
    """What tells documents apart: where each begins. The kernel reads blocks that hold no pair of one, too."""
    return None if documents is None else _kernel.SegmentIds(q=documents.queries, kv=documents.keys)


def _by_head(x: jax.Array) -> jax.Array:
    """[B, T, N, H] -> [B, N, T, H]."""
    return jnp.swapaxes(x, 1, 2)


def _scaled(q: jax.Array, pairs: Pairs) -> jax.Array:
    """The kernel scales nothing itself: queries come scaled, by head."""
    return _by_head((q.astype(jnp.float32) * pairs.masks.scale).astype(q.dtype))


def _sizes(q: jax.Array, k: jax.Array, pairs: Pairs) -> tuple[int, int]:
    """Rows of queries and of keys in a block: no more than a window, of which a larger one would hold little."""
    window = pairs.masks.window
    most = _SIZES[0] if window is None else max(LEAST, window)
    rows, keys = (next(s for s in _SIZES if s <= most and n % s == 0) for n in pairs.runs(q, k))
    return rows, keys


def _function(pairs: Pairs, k: jax.Array) -> Any:
    """Whether queries, as `_tables` numbers them, see keys, which the kernel numbers by their place."""
    masks, bits, run = pairs.masks, _bits(pairs, k), k.shape[1] // len(pairs.keys)
    if masks.everything:
        return None
    if not bits:
        return masks.sees

    def sees(q: jax.Array, k: jax.Array) -> jax.Array:
        gap = (q & ((1 << bits) - 1)) * run
        return jnp.asarray(masks.sees(q >> bits, jnp.where(k < run, k, k + gap)))

    return sees


def _bits(pairs: Pairs, k: jax.Array) -> int:
    """Bits that hold how many runs of keys are missing between two that a device has; none where it has one."""
    return int(_gaps(pairs, k).max()).bit_length()


def _gaps(pairs: Pairs, k: jax.Array) -> NDArray[np.int32]:
    """Runs missing between the two that a device has, for each offset."""
    assert len(pairs.keys) <= 2, "of keys, a device has two runs at most"
    if len(pairs.keys) == 1:
        return np.zeros(len(pairs.offsets), np.int32)
    return np.asarray([(first - second) // (k.shape[1] // 2) - 1 for first, second, *_ in pairs.offsets], np.int32)


def _tables(pairs: Pairs, q: jax.Array, k: jax.Array, size: tuple[int, int], *, by_key: bool) -> Any:
    """Which blocks are read: for each block of queries those of keys, or the other way round."""
    masks = pairs.masks
    if masks.everything:
        return _MaskInfo(None, None, None, None, None)
    runs, several = pairs.runs(q, k), len(pairs.keys)
    held = [
        np.block(
            [[_held(masks, n, runs, size) for n in offsets[i : i + several]] for i in range(0, len(offsets), several)]
        )
        for offsets in pairs.offsets
    ]
    packed = [_packed(h.T if by_key else h, max(_width(h, by_key) for h in held)) for h in held]
    blocks, valid = (np.stack(x) for x in zip(*packed, strict=True))
    if by_key:
        blocks, valid = blocks.swapaxes(1, 2), valid.swapaxes(1, 2)
    chosen = partial(jax.lax.dynamic_slice_in_dim, start_index=pairs.number, slice_size=1, axis=0)
    first = jnp.asarray([offsets[::several] for offsets in pairs.offsets], jnp.int32)[pairs.number]
    bits, gap = _bits(pairs, k), jnp.asarray(_gaps(pairs, k))[pairs.number]
    queries = (first[:, None] + jnp.arange(runs[0], dtype=jnp.int32)).reshape(-1)
    return _MaskInfo(
        data_next=chosen(jnp.asarray(blocks)),
        mask_next=None,
        block_mask=chosen(jnp.asarray(valid)),
        partial_mask_blocks=None,
        q_sequence=(queries << bits) + gap,
    )


def _width(held: NDArray[np.bool_], by_key: bool) -> int:
    return max(1, int(held.sum(axis=0 if by_key else 1).max()))


def _held(masks: Masks, offset: int, lengths: Sequence[int], size: Sequence[int]) -> NDArray[np.bool_]:
    """Which blocks hold a pair that is seen: [blocks of queries, blocks of keys]."""
    rows, columns = (math.ceil(n / s) for n, s in zip(lengths, size, strict=True))
    held = np.zeros((rows, columns), bool)
    for row in range(rows):
        first = offset + row * size[0]
        low, high = masks.key_range(first, first + size[0] - 1, 0, lengths[1])
        if high > low:
            held[row, low // size[1] : math.ceil(high / size[1])] = True
    return held


def _packed(held: NDArray[np.bool_], width: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Numbers of the blocks that each row reads, and which of these count: what fills up a row is its last again."""
    blocks, valid = np.zeros((held.shape[0], width), np.int32), np.zeros((held.shape[0], width), np.int32)
    for row, marks in enumerate(held):
        numbers = np.flatnonzero(marks)
        blocks[row, : len(numbers)], valid[row, : len(numbers)] = numbers, 1
        blocks[row, len(numbers) :] = numbers[-1] if len(numbers) else 0
    return blocks, valid
