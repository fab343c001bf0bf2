"""The kernel that attends to pages on NVIDIA GPUs, interpreted: what plain JAX computes, whatever the pages hold."""

import jax.numpy as jnp
import numpy as np
import pytest

from meshwise.runtime.kernels import gpu_paged
from meshwise.runtime.kernels.masks import Masks
from meshwise.runtime.paged import attend_rows, seen_by_rows

POOL = 48
CASES = {
    "decoding, grouped": ((5, 1, 8, 2, 32), 16, Masks(True, None, None, 0.2)),
    "one head of keys for each of queries": ((2, 1, 4, 4, 16), 8, Masks(True, None, None, 0.2)),
    "prefill, window, cap": ((3, 16, 8, 2, 16), 4, Masks(True, 7, None, 0.2, 30.0)),
    "prefill of many heads, chunks": ((2, 16, 24, 2, 16), 16, Masks(True, None, 32, 0.2)),
    "one long row": ((1, 1, 4, 1, 64), 16, Masks(True, None, None, 0.1)),
}


@pytest.mark.jax
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_plain_jax(case):
    (rows, queries, heads, kv_heads, width), page, masks = CASES[case]
    draw = np.random.default_rng(sum(map(ord, case)))
    each = POOL // rows
    tables = draw.permutation(POOL)[: rows * each].reshape(rows, each).astype(np.int32)
    first = draw.integers(0, each * page - queries, rows)
    positions = (first[:, None] + np.arange(queries)).astype(np.int32)
    real = np.ones(positions.shape, bool)
    real[0, queries // 3 + 1 :] = False
    if rows > 4:
        real[2] = False  # a row that is filling
    pools = [draw.normal(size=(POOL, page, kv_heads, width)) for _ in range(2)]
    for row in range(rows):  # nobody wrote beyond a row's last query
        for place in range(positions[row][real[row]].max(initial=-1) + 1, each * page):
            for pool in pools:
                pool[tables[row, place // page], place % page] = np.nan
    q = jnp.asarray(draw.normal(size=(rows, queries, heads, width)), jnp.bfloat16)
    keys, values = (jnp.asarray(pool, jnp.bfloat16) for pool in pools)
    there = jnp.asarray(positions), jnp.asarray(real)
    given = (q, (keys, values), jnp.asarray(tables), masks, there)
    made = gpu_paged.attend_rows(*given, seen_by_rows(there, masks), interpret=True)
    for x, y, tolerance in zip(made, attend_rows(*given), (8e-3, 1e-5), strict=True):
        assert x.dtype == y.dtype
        own, other = (np.asarray(one, np.float32)[real] for one in (x, y))
        assert np.isfinite(own).all()
        np.testing.assert_allclose(own, other, atol=tolerance)


@pytest.mark.jax
def test_what_the_kernel_refuses_is_said():
    def refusal(width=64, page=16, dtype=jnp.bfloat16, value=None):
        pools = (jnp.zeros((2, page, 1, width), dtype), jnp.zeros((2, page, 1, value or width), dtype))
        return gpu_paged.refusal(jnp.zeros((1, 1, 2, width), dtype), pools)

    assert refusal() == ""
    assert refusal(width=192, value=128) == "heads of 128 and 192 are no power of two from 16 to 256"
    assert refusal(page=24) == "pages of 24 tokens are no power of two"
    assert refusal(dtype=jnp.float32) == "fp32 is multiplied in fewer bits"
