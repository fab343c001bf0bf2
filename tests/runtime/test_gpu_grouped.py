"""The kernels that multiply groups of rows on NVIDIA GPUs, interpreted: the products of each group alone, in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwise
from meshwise.compiler.hlo.bytes_moved import matmuls
from meshwise.runtime.kernels import gpu_grouped

#: Few widths, since each is traced: what blocks go over, and what they do not.
WIDTHS = (16, 136, 192)

groups = st.lists(st.sampled_from([0, 1, 64, 129]), min_size=1, max_size=4)
cases = st.tuples(
    groups.filter(any), st.sampled_from([0, 5]), st.sampled_from(WIDTHS), st.sampled_from(WIDTHS), st.integers(0, 2)
)


def drawn(case, dtype=jnp.float32):
    """Rows of both widths, matrices, and sizes; what is no row's is no number."""
    sizes, empty, depth, width, _ = case
    draw = np.random.default_rng(sum(sizes) + depth)
    count = sum(sizes)
    rows, others = (draw.normal(size=(count + empty, w)) for w in (depth, width))
    rows[count:], others[count:] = np.nan, np.nan
    return (*(jnp.asarray(x, dtype) for x in (rows, others, draw.normal(size=(len(sizes), depth, width)))), sizes)


@pytest.mark.jax
@settings(max_examples=6, deadline=None, derandomize=True)
@given(cases, st.sampled_from([1, 1000, 10_000]))
def test_each_group_is_multiplied_with_its_own_matrix(case, mean):
    rows, others, matrices, sizes = drawn(case)
    known, major = (jnp.asarray(sizes, jnp.int32), mean), case[-1]
    ends = np.cumsum(sizes)
    forward = gpu_grouped.multiply(rows, matrices, known, major=major, interpret=True)
    back = gpu_grouped.multiply(others, matrices, known, transposed=True, major=major, interpret=True)
    summed = gpu_grouped.multiply_rows(rows, others, known, dtype=jnp.float32, major=major, interpret=True)
    for group, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        own, matrix = slice(end - size, end), np.asarray(matrices[group])
        x, y = np.asarray(rows)[own], np.asarray(others)[own]
        np.testing.assert_allclose(forward[own], x @ matrix, atol=1e-4)
        np.testing.assert_allclose(back[own], y @ matrix.T, atol=1e-4)
        np.testing.assert_allclose(summed[group], x.T @ y, atol=1e-4)
    assert not np.asarray(forward)[ends[-1] :].any()
    assert not np.asarray(back)[ends[-1] :].any()


@pytest.mark.jax
def test_sums_are_wider_than_what_is_multiplied():
    case = ([300, 0, 41], 3, 192, 64, 1)
    rows, others, matrices, sizes = drawn(case, jnp.bfloat16)
    known = jnp.asarray(sizes, jnp.int32), 344
    made = gpu_grouped.multiply(rows, matrices, known, major=1, interpret=True)
    assert made.dtype == jnp.bfloat16
    exact = np.asarray(rows[:300], np.float64) @ np.asarray(matrices[0], np.float64)
    np.testing.assert_allclose(np.asarray(made[:300], np.float64), exact, rtol=2**-8, atol=1e-4)  # rounded once
    summed = gpu_grouped.multiply_rows(rows, others, known, dtype=jnp.float32, interpret=True)
    x, y = (np.asarray(one[:300], np.float64) for one in (rows, others))
    np.testing.assert_allclose(summed[0], x.T @ y, rtol=1e-4, atol=1e-4)


def test_blocks_are_few_beside_the_rows_of_a_group():
    assert [gpu_grouped._block(8 * rows, 8) for rows in (0, 40, 64, 1000, 1024)] == [16, 32, 64, 64, 128]
    assert [gpu_grouped._columns(width, (128, 64)) for width in (64, 96, 128, 192, 2880)] == [64, 64, 128, 128, 128]
    assert [gpu_grouped._made(width, 256) for width in (200, 256, 264, 2880, 2944)] == [256, 256, 272, 2880, 2944]


@pytest.mark.jax
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["h100", "b200"])
def test_they_compile_for_gpus_that_are_absent(chip):
    """Slow because XLA and ptxas compile; proves that widths of real models are taken, and what is said is read."""

    def products(rows, others, matrices, sizes):
        known = sizes, 4096
        made = gpu_grouped.multiply(rows, matrices, known, major=1)
        back = gpu_grouped.multiply(others, matrices, known, transposed=True, major=2)
        return made, back, gpu_grouped.multiply_rows(rows, others, known, dtype=jnp.float32, major=2)

    shapes = ((4096, 2880), (4096, 768), (8, 2880, 768))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    program = meshwise.explain(jax.jit(products), *arrays, jax.ShapeDtypeStruct((8,), jnp.int32), on=f"{chip}:1")
    needed = 3 * 2 * 4096 * 2880 * 768
    assert needed < sum(product.flops for product in matmuls(program.module)) < 1.1 * needed
