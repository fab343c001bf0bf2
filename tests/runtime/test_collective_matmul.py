"""Collective matmuls are einsums of whole arrays, and each other's transposes, whatever shapes and sizes of rings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from meshwise.runtime.circle import Circle
from meshwise.runtime.collective_matmul import Equation, gathered_products, scattered_products

FEW = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
UP, ALSO, DOWN = (Equation.read(text) for text in ("btd,df->btf", "btd,dgh->btgh", "btf,fd->btd"))
SUMMED = Equation.read("btd,btf->df")


@st.composite
def cases(draw):
    size, both_ways = draw(st.integers(1, 8)), draw(st.booleans())
    shape = {"b": draw(st.integers(1, 2)), "rows": draw(st.integers(1, 3)), "d": draw(st.integers(1, 5))}
    return size, both_ways, shape, draw(st.sampled_from([np.float32, np.float64])), draw(st.integers(0, 2**16))


def arrays(seed, dtype, *shapes):
    drawn = np.random.default_rng(seed)
    return [drawn.normal(size=shape).astype(dtype) for shape in shapes]


def placed(size, function, inputs, outputs):
    mesh = Mesh(np.array(jax.devices()[:size]), ("x",))
    return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def compare(function, plain, inputs, dtype):
    """The same values in the format of the operands."""
    tolerance = 1e-5 if dtype == np.float32 else 1e-13
    found, wanted = jax.jit(function)(*inputs), jax.jit(plain)(*inputs)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * max(np.abs(other).max(), 1))


@pytest.mark.slow  # many sizes are many programs; it proves every ring, shape and format
@FEW
@given(cases())
def test_gathered_products_are_einsums(case):
    size, both_ways, s, dtype, seed = case
    circle = Circle("x", size, both_ways)
    with jax.enable_x64(dtype == np.float64):
        inputs = arrays(seed, dtype, (s["b"], s["rows"] * size, s["d"]), (s["d"], 2 * size), (s["d"], size, 3))

        def ring(x, w, v):
            return gathered_products(x, (w, v), (UP, ALSO), "t", circle)

        specs = (P(None, "x"), P(None, "x"), P(None, "x"))
        function = placed(size, ring, specs, ((P(None, None, "x"), P(None, None, "x")), P()))
        compare(function, lambda x, w, v: ((x @ w, jnp.einsum("btd,dgh->btgh", x, v)), x), inputs, dtype)


@pytest.mark.slow  # many sizes are many programs; it proves every ring, shape and format
@FEW
@given(cases())
def test_gathered_products_sum_over_the_letter_that_both_have(case):
    size, both_ways, s, dtype, seed = case
    circle = Circle("x", size, both_ways)
    with jax.enable_x64(dtype == np.float64):
        length = s["rows"] * size
        inputs = arrays(seed, dtype, (s["b"], length, s["d"]), (s["b"], length, 2 * size))

        def ring(x, y):
            return gathered_products(x, (y,), (SUMMED,), "t", circle)[0][0]

        function = placed(size, ring, (P(None, "x"), P(None, None, "x")), P(None, "x"))
        compare(function, lambda x, y: jnp.einsum("btd,btf->df", x, y), inputs, dtype)


@pytest.mark.slow  # likewise
@FEW
@given(cases())
def test_sums_over_devices_are_einsums(case):
    size, both_ways, s, dtype, seed = case
    circle = Circle("x", size, both_ways)
    with jax.enable_x64(dtype == np.float64):
        length = s["rows"] * size
        one, other = (s["b"], length, 2 * size), (s["b"], length, size)
        inputs = arrays(seed, dtype, one, (2 * size, s["d"]), other, (size, s["d"]))

        def ring(h, w, g, v):
            return scattered_products((h, g), (w, v), (DOWN, DOWN), "t", circle, dtype=dtype)

        specs = (P(None, None, "x"), P("x"), P(None, None, "x"), P("x"))
        function = placed(size, ring, specs, P(None, "x"))
        compare(function, lambda h, w, g, v: h @ w + g @ v, inputs, dtype)


def permutes(jaxpr):
    """(pairs, shape) of every permutation in a jaxpr, those in inner ones too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "ppermute":
            yield equation.params["perm"], equation.invars[0].aval.shape
        assert equation.primitive.name not in ("all_gather", "reduce_scatter", "psum")
        for inner in jaxprs_in_params(equation.params):
            yield from permutes(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize(("size", "both_ways"), [(2, False), (3, True), (5, False), (5, True), (6, True), (8, True)])
@pytest.mark.parametrize("scatters", [False, True])
def test_each_device_is_sent_every_other_shard_once_and_both_ways_are_equally_busy(size, both_ways, scatters):
    circle, rows = Circle("x", size, both_ways), 4

    def gather(x, w):
        return gathered_products(x, (w,), (UP,), "t", circle)[0][0]

    def scatter(h, w):
        return scattered_products((h,), (w,), (DOWN,), "t", circle, dtype=h.dtype)

    made = jnp.ones((1, rows * size, 4)), jnp.ones((4, size))
    function = placed(size, gather, (P(None, "x"), P(None, "x")), P(None, None, "x"))
    if scatters:
        made = jnp.ones((1, rows * size, size)), jnp.ones((size, 4))
        function = placed(size, scatter, (P(None, None, "x"), P("x")), P(None, "x"))
    sent = {1: 0, size - 1: 0}
    for pairs, shape in permutes(jax.make_jaxpr(function)(*made).jaxpr):
        (by,) = {(target - source) % size for source, target in pairs}
        sent[by] += shape[1]
    assert sum(sent.values()) == (size - 1) * rows
    assert both_ways == (sent[1] == sent[size - 1]) or size == 2


#: Odd and even, one way and both, in both formats.
QUICK = [
    (4, True, np.float32),
    *(pytest.param(*case, marks=pytest.mark.jax) for case in ((5, True, np.float32), (3, False, np.float64))),
]


@pytest.mark.parametrize(("size", "both_ways", "dtype"), QUICK)
def test_products_in_pieces_and_their_gradients(size, both_ways, dtype):
    """A feed-forward part: gathered rows are multiplied, sums are scattered; one row is not halved evenly."""
    circle = Circle("x", size, both_ways)
    with jax.enable_x64(dtype == np.float64):
        inputs = arrays(0, dtype, (2, 3 * size, 4), (4, 2 * size), (2 * size, 4), (2, 3 * size, 4))

        def ring(x, w, v, d_y):
            (up,), whole = gathered_products(x, (w,), (UP,), "t", circle)
            y = scattered_products((up * up,), (v,), (DOWN,), "t", circle, dtype=dtype)
            both = DOWN.transposed_left, DOWN.transposed_right.swapped
            (d_square, d_v), _ = gathered_products(d_y, (v, up * up), both, "t", circle)
            d_up = 2 * up * d_square
            d_x = scattered_products((d_up,), (w,), (UP.transposed_left,), "t", circle, dtype=dtype)
            return y, d_x, UP.transposed_right.multiply(whole, d_up), d_v

        def plain(x, w, v, d_y):
            y, backward = jax.vjp(lambda x, w, v: ((x @ w) ** 2) @ v, x, w, v)
            return y, *backward(d_y)

        rows, columns = P(None, "x"), P("x")
        function = placed(size, ring, (rows, rows, columns, rows), (rows, rows, rows, columns))
        compare(function, plain, inputs, dtype)
