"""Sampling on the device against plain NumPy: filters, penalties, seeds and frequencies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwise.runtime.sampling import SamplingArrays, _allowed, compiled, greedy

pytestmark = pytest.mark.jax
NONE = (np.full((1, 1), -1, np.int32), np.zeros((1, 1), bool))


def how(rows=1, **given):
    plain = dict.fromkeys(SamplingArrays._fields, 0) | {"temperature": 1.0, "top_p": 1.0, "repetition": 1.0}
    kinds = SamplingArrays.abstract(rows)
    values = {**plain, **given}
    return SamplingArrays(
        **{
            name: np.broadcast_to(np.asarray(values[name]), (rows,)).astype(getattr(kinds, name).dtype)
            for name in values
        }
    )


def kept(scores, top_p, top_k, min_p):
    """Tokens that filters leave, by sorting: top-k, then the fewest that reach top-p, then min-p."""
    order = np.argsort(-scores, kind="stable")
    left = order[: top_k or len(scores)]
    shares = np.exp(scores[left] - scores.max())
    shares /= shares.sum()
    count = len(left) if top_p >= 1 else int(np.searchsorted(np.cumsum(shares), top_p)) + 1
    return {int(t) for t, s in zip(left[:count], shares, strict=False) if s >= min_p * shares[0]}


@pytest.mark.parametrize(
    ("top_p", "top_k", "min_p"), [(1.0, 0, 0.0), (0.8, 0, 0), (1, 7, 0), (0.5, 20, 0), (0.9, 0, 0.1)]
)
def test_filters_leave_what_sorting_leaves(top_p, top_k, min_p):
    scores = np.random.default_rng(3).normal(size=(6, 97)).astype(np.float32) * 2
    found = np.asarray(jax.jit(_allowed)(jnp.asarray(scores), how(6, top_p=top_p, top_k=top_k, min_p=min_p)))
    for row, left in zip(scores, found, strict=True):
        assert set(np.flatnonzero(left)) == kept(row, top_p, top_k, min_p)


def test_tokens_are_as_frequent_as_their_shares():
    logits = np.log(np.asarray([[0.5, 0.25, 0.125, 0.125]], np.float32))
    rows = 4000
    made = compiled(
        1,
        np.tile(logits, (rows, 1)),
        how(rows, drawn=np.arange(rows)),
        np.full((rows, 1), -1),
        np.zeros((rows, 1), bool),
    )
    counts = np.bincount(np.asarray(made.tokens), minlength=4) / rows
    np.testing.assert_allclose(counts, [0.5, 0.25, 0.125, 0.125], atol=0.03)


def test_a_row_depends_on_its_own_seed_and_place_alone():
    logits = np.random.default_rng(0).normal(size=(8, 33)).astype(np.float32)
    seeds = np.arange(8)
    one = compiled(1, logits, how(8, seed=seeds), np.full((8, 1), -1), np.zeros((8, 1), bool))
    other = compiled(1, logits[::-1], how(8, seed=seeds[::-1]), np.full((8, 1), -1), np.zeros((8, 1), bool))
    assert np.asarray(one.tokens).tolist() == np.asarray(other.tokens)[::-1].tolist()
    again = compiled(
        1, np.tile(logits[:1], (8, 1)), how(8, seed=5, drawn=np.arange(8)), *[np.tile(x, (8, 1)) for x in NONE]
    )
    assert len(set(np.asarray(again.tokens).tolist())) > 1


def test_penalties_and_logprobs():
    logits = np.asarray([[2.0, 1.5, -1.0, 0.0]], np.float32)
    seen, produced = np.asarray([[0, 0, 2, -1]]), np.asarray([[True, True, False, False]])
    made = compiled(4, logits, how(temperature=0.0, frequency=0.4), seen, produced)
    assert made.tokens.tolist() == [1]  # 2.0 - 2 x 0.4
    made = compiled(4, logits, how(temperature=0.0, repetition=1.5), seen, produced)
    assert made.tokens.tolist() == [1]  # 2.0 / 1.5
    made = compiled(4, logits, how(temperature=0.0, presence=0.4), seen, produced)
    assert made.tokens.tolist() == greedy(jnp.asarray(logits)).tolist() == [0]
    plain = logits[0] - np.log(np.exp(logits[0]).sum())
    assert float(made.logprob[0]) == pytest.approx(plain[0], rel=1e-6)
    assert made.likely[0].tolist() == [0, 1, 3, 2]
    np.testing.assert_allclose(made.likely_logprob[0], plain[[0, 1, 3, 2]], rtol=1e-6)
