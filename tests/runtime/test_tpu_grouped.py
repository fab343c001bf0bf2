"""The kernel that multiplies rows of groups with one another on TPUs, interpreted: those of each alone, in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwise
from meshwise.compiler.hlo.bytes_moved import matmuls
from meshwise.runtime.grouped import Groups
from meshwise.runtime.kernels import tpu_grouped


@pytest.mark.jax
@pytest.mark.parametrize(
    ("sizes", "empty", "mean"),
    [([128, 256], 0, 384), ([1, 0, 300, 84], 127, 512), ([64, 64, 65], 5, 100), ([700, 20], 0, 100_000)],
)
@pytest.mark.parametrize("widths", [(128, 256), (200, 1100)])
def test_rows_of_each_group_are_multiplied_with_one_another(sizes, empty, mean, widths):
    """Also where blocks hold rows of several groups, where a group has none, and what is no row's is no number."""
    draw, count = np.random.default_rng(sum(sizes)), sum(sizes)
    rows, others = (draw.normal(size=(count + empty, width)) for width in widths)
    rows[count:], others[count:] = np.nan, np.nan
    given = (jnp.asarray(x, jnp.float32) for x in (rows, others))
    made = tpu_grouped.multiply_rows(*given, (jnp.asarray(sizes), mean), dtype=jnp.float32, interpret=True)
    assert made.shape == (len(sizes), *widths)
    for group, end in enumerate(np.cumsum(sizes)):
        own = slice(end - sizes[group], end)
        np.testing.assert_allclose(made[group], rows[own].T @ others[own], rtol=1e-4, atol=1e-3)


@pytest.mark.jax
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e"])
@pytest.mark.parametrize(("experts", "depth", "width"), [(8, 4096, 14336), (128, 2048, 768)])
def test_products_of_experts_compile_for_tpus_that_are_absent(chip, experts, depth, width):
    """Slow because XLA compiles; proves that blocks fit on the chip, and that no row meets another expert's matrix."""
    count = 16384

    def products(rows, others, matrices, sizes):
        groups = Groups(sizes, count, platform="tpu")
        return (
            groups.multiply(rows, matrices),
            groups.multiply(others, matrices, transposed=True),
            groups.multiply_rows(rows, others, jnp.float32),
        )

    shapes = ((count, depth), (count, width), (experts, depth, width))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    program = meshwise.explain(jax.jit(products), *arrays, jax.ShapeDtypeStruct((experts,), jnp.int32), on=f"{chip}:1")
    needed = 2 * count * depth * width
    found = [product.flops for product in matmuls(program.module)]
    assert len(found) == 3
    assert all(needed < flops <= (1 + 256 * experts / count) * needed for flops in found)


def test_blocks_are_few_beside_the_rows_of_a_group():
    assert [tpu_grouped._block(8 * rows, 8) for rows in (0, 512, 2047, 2048, 4096)] == [128, 128, 128, 256, 512]
