"""Which experts a token visits, and how their outputs are weighed, from the router's logits.

Not here: how tokens get there (`mixture`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshwise.models.spec import Router


def choose(logits: jax.Array, correction: jax.Array | None, router: Router, top_k: int) -> tuple[jax.Array, jax.Array]:
    """Choose experts.

    Args:
        logits: [B, T, E].
        correction: added to scores where experts are chosen, not where they are weighed: [E], or None.
        router: how.
        top_k: experts a token visits.

    Returns: weights [B, T, top_k] in fp32, and the experts' numbers [B, T, top_k].
    """
    scores = _scores(logits.astype(jnp.float32), router)
    steered = scores if correction is None else scores + jax.lax.stop_gradient(correction.astype(jnp.float32))
    _, chosen = jax.lax.top_k(jax.lax.stop_gradient(_within_groups(steered, router)), top_k)
    # A sum over all experts instead of an index: one-hot rows are cheap here, and split as the tokens are.
    own = jax.nn.one_hot(chosen, scores.shape[-1], dtype=jnp.float32)
    weights = jnp.einsum("bte,btke->btk", scores, own)
    if router.normalised:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return weights * router.scale, chosen


def _scores(logits: jax.Array, router: Router) -> jax.Array:
    return jax.nn.sigmoid(logits) if router.scores == "sigmoid" else jax.nn.softmax(logits, axis=-1)


def _within_groups(scores: jax.Array, router: Router) -> jax.Array:
    """Leave only experts of the best groups, judged by the sum of their two best (DeepSeek-V3, section 2.1.2)."""
    if router.groups == 1:
        return scores
    grouped = scores.reshape(*scores.shape[:-1], router.groups, -1)
    best = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
    _, kept = jax.lax.top_k(best, router.groups_limit)
    open_ = jnp.sum(jax.nn.one_hot(kept, router.groups, dtype=jnp.int32), axis=-2) > 0
    return jnp.where(open_[..., None], grouped, -jnp.inf).reshape(scores.shape)
