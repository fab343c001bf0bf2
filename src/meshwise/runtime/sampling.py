"""Next tokens from logits, on the device: temperature, top-k, top-p, min-p, penalties, a seed for each request.

Nothing is sorted: the logit that a filter cuts at is found bit by bit, exactly. A token depends on its own row alone,
so that a request's answer is the same whoever shares its batch. Not here: stop words, limits of length (`engine`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshwise.runtime.limits import MOST_LOGPROBS


class SamplingArrays(NamedTuple):
    """How each row is sampled; a value a row.

    Args:
        temperature: 0: the most likely token.
        top_p, top_k, min_p: 1, 0 and 0 filter nothing.
        presence, frequency, repetition: penalties; 0, 0 and 1 change nothing.
        seed: uint32.
        drawn: number of the token in its output.
    """

    temperature: Any
    top_p: Any
    top_k: Any
    min_p: Any
    presence: Any
    frequency: Any
    repetition: Any
    seed: Any
    drawn: Any

    @classmethod
    def abstract(cls, rows: int) -> SamplingArrays:
        """Shapes and formats."""
        kinds = (jnp.float32, jnp.float32, jnp.int32, *[jnp.float32] * 4, jnp.uint32, jnp.int32)
        return cls(*(jax.ShapeDtypeStruct((rows,), kind) for kind in kinds))


class Sampled(NamedTuple):
    """What was sampled.

    Args:
        tokens: int32 [rows].
        logprob: of each under the model itself, before temperature and filters [rows].
        likely, likely_logprob: the most likely tokens and theirs [rows, MOST_LOGPROBS].
    """

    tokens: jax.Array
    logprob: jax.Array
    likely: jax.Array
    likely_logprob: jax.Array


def greedy(logits: jax.Array) -> jax.Array:
    """The most likely token of each row: int32."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sample(
    logits: jax.Array, how: SamplingArrays, seen: jax.Array, produced: jax.Array, allowed: jax.Array | None = None
) -> Sampled:
    """Sample a token for each row.

    Args:
        logits: [rows, V] in fp32.
        how: see there.
        seen: tokens of the row's prompt and output; below 0: none [rows, length].
        produced: which of them are its output [rows, length].
        allowed: a bit a token, set where it may be sampled: uint32 [rows, V / 32, rounded up]; None: all may.

    Returns: tokens and logprobs.
    """
    plain = jax.nn.log_softmax(logits, axis=-1)
    scores = _penalised(logits, how, seen, produced)
    if allowed is not None:
        places = jnp.arange(logits.shape[-1])
        bits = allowed[:, places // 32] >> (places % 32).astype(jnp.uint32)
        scores = jnp.where(bits & 1 == 1, scores, -jnp.inf)
    warm = scores / jnp.where(how.temperature > 0, how.temperature, 1.0)[:, None]
    drawn = _draw(jnp.where(_allowed(warm, how), warm, -jnp.inf), how)
    tokens = jnp.where(how.temperature > 0, drawn, greedy(scores))
    likely_logprob, likely = jax.lax.top_k(plain, min(MOST_LOGPROBS, logits.shape[-1]))
    own = jnp.take_along_axis(plain, tokens[:, None], axis=-1)[:, 0]
    return Sampled(tokens, own, likely.astype(jnp.int32), likely_logprob)


def _penalised(logits: jax.Array, how: SamplingArrays, seen: jax.Array, produced: jax.Array) -> jax.Array:
    """Take off what was seen: presence and frequency of the output (OpenAI), repetition of all (Keskar et al. 2019)."""
    rows = jnp.arange(logits.shape[0])[:, None]
    where = jnp.where(seen < 0, logits.shape[-1], seen)

    def count(which: jax.Array) -> jax.Array:
        return jnp.zeros(logits.shape, jnp.float32).at[rows, where].add(which.astype(jnp.float32), mode="drop")

    own, any_ = count(produced), count(jnp.ones_like(produced))
    factor = jnp.where(any_ > 0, how.repetition[:, None], 1.0)
    scores = jnp.where(logits > 0, logits / factor, logits * factor)
    return scores - how.frequency[:, None] * own - how.presence[:, None] * (own > 0)


def _allowed(scores: jax.Array, how: SamplingArrays) -> jax.Array:
    """Which tokens the filters leave: the k largest, of these the fewest that have top_p, and those near the first."""
    keys = _ordered(scores)
    size = scores.shape[-1]
    k = jnp.where(how.top_k > 0, jnp.minimum(how.top_k, size), size)[:, None]
    first = keys >= _cut(lambda cut: jnp.sum(keys >= cut, axis=-1, keepdims=True) >= k, scores.shape[0])
    shares = jax.nn.softmax(jnp.where(first, scores, -jnp.inf), axis=-1)
    enough = jnp.minimum(how.top_p, 1.0)[:, None]

    def reaches(cut: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(keys >= cut, shares, 0.0), axis=-1, keepdims=True) >= enough

    nucleus = (keys >= _cut(reaches, scores.shape[0])) | (enough >= 1.0)
    near = shares >= how.min_p[:, None] * jnp.max(shares, axis=-1, keepdims=True)
    return first & nucleus & near


def _ordered(x: jax.Array) -> jax.Array:
    """Numbers as uint32 in the same order."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _cut(enough: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """The largest uint32 for which `enough` still holds, bit by bit from the highest [rows, 1]."""

    def bit(number: jax.Array, cut: jax.Array) -> jax.Array:
        higher = cut | (jnp.uint32(1 << 31) >> number.astype(jnp.uint32))
        return jnp.where(enough(higher), higher, cut)

    return jax.lax.fori_loop(0, 32, bit, jnp.zeros((rows, 1), jnp.uint32))


def _draw(scores: jax.Array, how: SamplingArrays) -> jax.Array:
    """Draw a token of each row by its softmax: where one uniform number falls among the sums of shares."""

    def uniform(seed: jax.Array, drawn: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), drawn), (), jnp.float32)

    sums = jnp.cumsum(jax.nn.softmax(scores, axis=-1), axis=-1)
    mark = jax.vmap(uniform)(how.seed, how.drawn)[:, None] * sums[:, -1:]
    return jnp.sum(sums <= mark, axis=-1).astype(jnp.int32).clip(0, scores.shape[-1] - 1)


@partial(jax.jit, static_argnums=0)
def compiled(  # noqa: PLR0917 -- as `sample`
    length: int,
    logits: jax.Array,
    how: SamplingArrays,
    seen: jax.Array,
    produced: jax.Array,
    allowed: jax.Array | None = None,
) -> Sampled:
    """`sample`, jitted; `length` is that of `seen`."""
    assert seen.shape[1] == length, "one program a length"
    return sample(logits, how, seen, produced, allowed)
