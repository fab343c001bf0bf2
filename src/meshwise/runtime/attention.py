"""Attention on one device's queries, keys and values: grouped heads, masks by position, caps, blocks of queries.

Positions are absolute, so that a device may hold any part of a sequence. Not here: who holds what (`attention_placed`).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

#: Queries that are worked on at a time, where there are more than twice as many: their fp32 scores against 4,096 keys
#: take four times the bytes of all queries, and stay small beside what a layer holds.
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Masks:
    """Which keys a query sees, and what happens to its logits.

    Args:
        causal, window, chunk: as in `tensors.Attention`.
        scale: factor of q . k.
        cap: c of c tanh(x / c), or None.
    """

    causal: bool
    window: int | None
    chunk: int | None
    scale: float
    cap: float | None = None

    def seen(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """Whether each query position [T] sees each key position [S]: [T, S]."""
        q, k = queries[:, None], keys[None, :]
        seen = k <= q if self.causal else jnp.ones((q.shape[0], k.shape[1]), bool)
        if self.window is not None:
            seen &= k > q - self.window
        if self.chunk is not None:
            seen &= k // self.chunk == q // self.chunk
        return seen


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, masks: Masks, positions: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Attend to keys by blocks of queries, whose scores are computed again in the backward pass.

    Args:
        q: [B, T, N, H]; N = K x G, heads of a group together.
        k: [B, S, K, H].
        v: [B, S, K, Hv].
        masks: what is seen.
        positions: of queries [T] and of keys [S].

    Returns: the output [B, T, N, Hv] in the format of v, and the logarithm of each softmax's denominator [B, T, N] in
        fp32 (minus infinity where a query sees no key, and the output is zero).
    """
    length, (queries, keys) = q.shape[1], positions
    if length <= 2 * _BLOCK or length % _BLOCK:
        return _attend(q, k, v, masks, positions)
    blocks = length // _BLOCK

    @jax.checkpoint
    def one(_: None, block: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        return None, _attend(block[0], k, v, masks, (block[1], keys))

    parts = jnp.moveaxis(q.reshape(q.shape[0], blocks, _BLOCK, *q.shape[2:]), 1, 0)
    _, (out, total) = jax.lax.scan(one, None, (parts, queries.reshape(blocks, _BLOCK)))
    whole = jnp.moveaxis(out, 0, 1).reshape(*q.shape[:3], v.shape[-1])
    return whole, jnp.moveaxis(total, 0, 1).reshape(q.shape[:3])


def weigh_scores(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    masks: Masks,
    positions: tuple[jax.Array, jax.Array],
    total: jax.Array,
    d_out: jax.Array,
    shift: jax.Array,
) -> jax.Array:
    """Sum p (d_out . v + shift) over queries and keys, p being weights of a softmax whose denominator is given.

    Its gradients are those of attention to a part of the keys, in the backward pass.

    Args:
        q, k, v, masks, positions: as in `attend`.
        total: logarithm of the denominator over all keys [B, T, N].
        d_out: gradient of the output [B, T, N, Hv].
        shift: what is added [B, T, N].
    """
    groups = q.shape[2] // k.shape[2]

    @jax.checkpoint
    def one(start: jax.Array, block: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        own_q, own_total, own_d, own_shift, queries = block
        logits, seen = _logits(own_q, k, masks, (queries, positions[1]))
        finite = jnp.where(jnp.isfinite(own_total), own_total, 0.0)
        weights = jnp.where(seen, jnp.exp(jnp.where(seen, logits, 0.0) - _by_group(finite, groups)), 0.0)
        grouped = own_d.reshape(*own_d.shape[:2], k.shape[2], groups, own_d.shape[3])
        along = jnp.einsum("btkgh,bskh->bkgts", grouped, v, preferred_element_type=jnp.float32)
        return start + jnp.sum(weights * (along + _by_group(own_shift, groups))), None

    length = q.shape[1]
    blocks = 1 if length <= 2 * _BLOCK or length % _BLOCK else length // _BLOCK

    def cut(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0], blocks, length // blocks, *x.shape[2:]), 1, 0)

    parts = (cut(q), cut(total), cut(d_out), cut(shift), positions[0].reshape(blocks, length // blocks))
    return jax.lax.scan(one, jnp.zeros((), jnp.float32), parts)[0]


def _by_group(x: jax.Array, groups: int) -> jax.Array:
    """[B, T, N] -> [B, K, G, T, 1]."""
    apart = x.reshape(*x.shape[:2], x.shape[2] // groups, groups)
    return jnp.moveaxis(apart, 1, 3)[..., None]


def _logits(
    q: jax.Array, k: jax.Array, masks: Masks, positions: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Scaled and capped logits [B, K, G, T, S], and which of them are seen [T, S]."""
    groups = q.shape[2] // k.shape[2]
    grouped = q.reshape(*q.shape[:2], k.shape[2], groups, q.shape[3])
    logits = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32) * masks.scale
    if masks.cap is not None:
        logits = masks.cap * jnp.tanh(logits / masks.cap)
    return logits, masks.seen(*positions)


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, masks: Masks, positions: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    logits, seen = _logits(q, k, masks, positions)
    logits = jnp.where(seen, logits, -jnp.inf)
    # A query that sees nothing here (possible in a ring) has no largest logit.
    largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    weights = jnp.where(seen, jnp.exp(logits - largest), 0.0)
    total = jnp.sum(weights, axis=-1)
    some = total > 0
    share = weights / jnp.where(some, total, 1.0)[..., None]
    out = jnp.einsum("bkgts,bskh->btkgh", share.astype(v.dtype), v)
    denominator = jnp.where(some, jnp.log(jnp.where(some, total, 1.0)) + largest[..., 0], -jnp.inf)
    denominator = jnp.moveaxis(denominator, 3, 1)  # [B, K, G, T] -> [B, T, K, G]
    return out.reshape(*q.shape[:3], v.shape[-1]), denominator.reshape(q.shape[:3])
