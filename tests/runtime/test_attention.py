"""Attention by blocks of queries, and its backward pass from a given denominator, against attention at once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwise.runtime import attention
from meshwise.runtime.attention import Masks, attend, weigh_scores

MASKS = Masks(causal=True, window=7, chunk=None, scale=0.3, cap=5.0)


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


@pytest.fixture
def given():
    q, k, v = drawn(2, 16, 4, 8), drawn(2, 16, 2, 8), drawn(2, 16, 2, 6)
    return q, k, v, (jnp.arange(16), jnp.arange(16))


def objective(q, k, v, positions):
    out, total = attend(q, k, v, MASKS, positions)
    return jnp.sum(out * drawn(*out.shape)) + jnp.sum(total * drawn(*total.shape))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("chunk", [None, 4])
def test_a_query_sees_keys_of_its_window_and_of_its_own_chunk(causal, window, chunk):
    found = Masks(causal, window, chunk, scale=1.0).seen(np.arange(10), np.arange(10))
    for q, k in np.ndindex(10, 10):
        near, own = window is None or q - k < window, chunk is None or q // chunk == k // chunk
        assert found[q, k] == ((k <= q or not causal) and near and own)


@pytest.mark.jax
def test_blocks_of_queries_change_nothing(given, monkeypatch):
    expected = jax.value_and_grad(objective, argnums=(0, 1, 2))(*given)
    monkeypatch.setattr(attention, "_BLOCK", 4)
    found = jax.value_and_grad(objective, argnums=(0, 1, 2))(*given)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [pytest.param(512, marks=pytest.mark.jax), 4])
def test_gradients_from_a_given_denominator_are_those_of_attention(given, monkeypatch, block):
    *arrays, positions = given
    expected = jax.jit(jax.grad(objective, argnums=(0, 1, 2)))(*given)
    out, total = jax.jit(attend, static_argnums=3)(*arrays, MASKS, positions)
    monkeypatch.setattr(attention, "_BLOCK", block)
    d_out = drawn(*out.shape)
    shift = drawn(*total.shape) - jnp.sum(d_out * out, axis=-1)
    weighed = partial(weigh_scores, masks=MASKS, positions=positions, total=total, d_out=d_out, shift=shift)
    found = jax.jit(jax.grad(weighed, argnums=(0, 1, 2)))(*arrays)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_query_that_sees_nothing_here_gets_zeros_and_no_weight():
    q, k, v = drawn(1, 4, 2, 8), drawn(1, 4, 2, 8), drawn(1, 4, 2, 8)
    out, total = jax.jit(attend, static_argnums=3)(q, k, v, MASKS, (jnp.arange(4), 4 + jnp.arange(4)))
    assert not np.asarray(out).any()
    assert np.isneginf(total).all()
