"""The kernels that apply elementwise functions to rows of groups on NVIDIA GPUs, interpreted: as JAX does it."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwise
from meshwise.runtime.kernels import gpu, gpu_grouped, gpu_rows, tpu
from meshwise.runtime.kernels.counted import lowered_for
from meshwise.runtime.kernels.masks import Masks, Pairs

groups = st.lists(st.sampled_from([0, 1, 16, 35]), min_size=1, max_size=4).filter(any)


def gated(gate, up, weights, bias):
    return jax.nn.silu(gate) * up * weights[:, None] + bias


def drawn(sizes, empty, width):
    """Operands of `gated`, and a gradient of its result; what is no row's is no number."""
    draw, count = np.random.default_rng(sum(sizes) + width), sum(sizes) + empty
    rows = [draw.normal(size=(count, width)) for _ in range(3)]
    weights = draw.normal(size=count)
    for x in (*rows, weights):
        x[sum(sizes) :] = np.nan
    bias = draw.normal(size=(len(sizes), width))
    operands = [("rows", rows[0]), ("rows", rows[1]), ("numbers", weights), ("vectors", bias)]
    return [(form, jnp.asarray(x, jnp.float32)) for form, x in operands], jnp.asarray(rows[2], jnp.float32)


@pytest.mark.jax
@settings(max_examples=8, deadline=None, derandomize=True)
@given(groups, st.sampled_from([0, 20]), st.sampled_from([24, 256]))
def test_rows_of_a_group_are_gone_over_and_no_others(sizes, empty, width):
    operands, gradient = drawn(sizes, empty, width)
    known, number = (jnp.asarray(sizes, jnp.int32), sum(sizes)), np.repeat(np.arange(len(sizes)), sizes)
    shape = jax.ShapeDtypeStruct(gradient.shape, gradient.dtype)
    found = [gpu_rows.apply(gated, operands, known, shape, interpret=True)]
    found += gpu_rows.gradients(gated, operands, known, gradient, interpret=True)
    (of_bias,) = gpu_rows.sums(gated, operands, known, gradient, [jnp.float32], interpret=True)

    own = [x if form == "vectors" else x[: sum(sizes)] for form, x in operands]
    expected, back = jax.vjp(lambda *x: gated(*x[:3], x[3][number]), *own)
    *gradients, expected_bias = back(gradient[: sum(sizes)])
    for one, other in zip(found, [expected, *gradients], strict=True):
        np.testing.assert_allclose(one[: sum(sizes)], other, atol=1e-4)
        assert not np.asarray(one)[sum(sizes) :].any()
    np.testing.assert_allclose(of_bias, expected_bias, atol=1e-4)


def nanoseconds(platform, function, *shapes):
    """Of each kernel in a lowered program the nanoseconds that XLA's scheduler reads; None: none are said."""
    program = jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
    calls = [line for line in program.splitlines() if re.search(r"@(__gpu\$xla\.gpu\.triton|tpu_custom_call)\(", line)]
    said = [re.search(r'mhlo\.frontend_attributes = \{latency_metadata = "(\d+)"\}', call) for call in calls]
    return [found and int(found[1]) for found in said]


@pytest.mark.jax
def test_the_scheduler_knows_how_long_kernels_of_gpus_take():
    """Under the name that XLA's latency estimator for GPUs reads; as long as the GPU takes, or an H100."""
    rows, sizes = jax.ShapeDtypeStruct((4096, 2880), jnp.bfloat16), jax.ShapeDtypeStruct((8,), jnp.int32)
    matrices = jax.ShapeDtypeStruct((8, 2880, 2880), jnp.bfloat16)

    def experts(gate, up, matrices, sizes):
        operands, known = [("rows", gate), ("rows", up)], (sizes, 4096)
        made = gpu_rows.apply(jnp.multiply, operands, known, rows, rest=False)
        slopes = gpu_rows.gradients(jnp.multiply, operands, known, made, rest=False)
        return slopes, gpu_grouped.multiply(made, matrices, known, rest=False)

    read, product = 4096 * 2880 * 2 / 3.35, 2 * 4096 * 2880**2 / 989
    *elementwise, multiplied = nanoseconds("cuda", experts, rows, rows, matrices, sizes)
    assert elementwise == pytest.approx([3e-3 * read, 5e-3 * read], rel=1e-3)
    assert product < 1e3 * multiplied < 1.1 * product  # the last block of each expert is full by half
    with lowered_for("NVIDIA B200"):
        *faster, _ = nanoseconds("cuda", partial(experts), rows, rows, matrices, sizes)  # traced anew
    assert faster == pytest.approx([3.35 / 8 * one for one in elementwise], rel=1e-3)


@pytest.mark.jax
@pytest.mark.parametrize(("platform", "kernel", "products"), [("cuda", gpu, (2, 3, 4)), ("tpu", tpu, None)])
def test_attention_says_how_long_it_takes_on_gpus_alone(platform, kernel, products):
    heads, pairs = jax.ShapeDtypeStruct((2, 1024, 4, 128), jnp.bfloat16), Pairs(Masks(False, None, None, 0.1))

    def attention(q, k, v):
        out, total = kernel.forward(q, k, v, pairs)
        return kernel.backward(q, k, v, (total, out, jnp.zeros_like(total)), pairs)

    one = 2 * 1024**2 * 2 * 4 * 128 / 989e3  # ns
    expected = [None] * 3 if products is None else pytest.approx([n * one for n in products], rel=1e-3)
    assert nanoseconds(platform, attention, heads, heads, heads) == expected


@pytest.mark.jax
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["h100", "b200"])
def test_they_compile_for_gpus_that_are_absent(chip):
    """Slow because XLA and ptxas compile; proves that such kernels can be made, and that what they say is read."""

    def passes(gate, up, weights, bias, sizes):
        operands = [("rows", gate), ("rows", up), ("numbers", weights), ("vectors", bias)]
        known, shape = (sizes, 4096), jax.ShapeDtypeStruct(gate.shape, gate.dtype)
        made = gpu_rows.apply(gated, operands, known, shape, rest=False)
        of_rows = gpu_rows.gradients(gated, operands, known, made, rest=False)
        return of_rows, gpu_rows.sums(gated, operands, known, made, [jnp.float32])

    kinds = {"bf16": jnp.bfloat16, "fp32": jnp.float32, "int32": jnp.int32}
    shapes = [
        ((32_768, 2880), "bf16"),
        ((32_768, 2880), "bf16"),
        ((32_768,), "fp32"),
        ((8, 2880), "bf16"),
        ((8,), "int32"),
    ]
    program = meshwise.explain(
        jax.jit(passes), *(jax.ShapeDtypeStruct(shape, kinds[kind]) for shape, kind in shapes), on=f"{chip}:1"
    )
    rows = 4096 * 2880 * 2
    assert program.floor.memory * program.cluster.chip.hbm_bandwidth == pytest.approx((3 + 5 + 3) * rows, rel=0.02)
