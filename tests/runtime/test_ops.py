"""Single operations against their formulas, values and gradients."""

import math
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwise.core.tensors import Elementwise, Kind, Tensor
from meshwise.runtime.ops import elementwise
from meshwise.runtime.watched import kept

LOSS = Elementwise(
    name="loss",
    inputs=(Tensor("logits", ("B", "T", "V")), Tensor("labels", ("B", "T"), kind=Kind.INDEX)),
    output=Tensor("loss", ("B", "T")),
    reduced=("V",),
)


@pytest.mark.jax
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_loss_is_minus_the_log_of_the_labels_probability_and_its_gradient_takes_the_logits_place(dtype):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 7)) * 5, dtype)
    labels = jnp.asarray([[0, 6, 3], [2, 2, 5]])

    def own(x):
        return elementwise(LOSS, [x, labels], None)

    def formula(x):
        return -jnp.take_along_axis(jax.nn.log_softmax(x.astype(jnp.float32)), labels[..., None], axis=-1)[..., 0]

    weights = jnp.arange(1.0, 7.0).reshape(2, 3)
    np.testing.assert_allclose(own(logits), formula(logits), rtol=1e-6, atol=1e-6)
    found, expected = (jax.grad(lambda x, f=f: jnp.sum(weights * f(x)))(logits) for f in (own, formula))
    assert found.dtype == dtype  # as wide as the logits, so that it may lie where they lay
    wide = found.astype(jnp.float32), expected.astype(jnp.float32)
    np.testing.assert_allclose(*wide, rtol=1e-2 if dtype == jnp.bfloat16 else 1e-5, atol=1e-6)
    kept = [a for a in jax.tree.leaves(jax.vjp(own, logits)[1]) if a.shape == logits.shape]
    assert [a.dtype for a in kept] == [dtype]  # the logits alone: no softmax in fp32 beside them


@pytest.mark.jax
@pytest.mark.parametrize(("scale", "cap"), [(1.0, 30.0), (0.25, None), (0.5, 20.0)])
def test_logits_are_scaled_and_bent_and_keep_nothing_but_what_is_made(scale, cap):
    op = Elementwise(name="scale.logits", inputs=LOSS.inputs[:1], output=Tensor("logits.scaled", ("B", "T", "V")))
    around = SimpleNamespace(numerics=SimpleNamespace(logits_scale=scale, logits_cap=cap))
    logits = jnp.linspace(-80, 80, 60, dtype=jnp.float32).reshape(2, 3, 10)

    def own(x):
        return elementwise(op, [x], around)

    def formula(x):
        return scale * x if cap is None else cap * jnp.tanh(scale * x / cap)

    made, backward = jax.vjp(own, logits)
    expected, reference = jax.vjp(formula, logits)
    np.testing.assert_allclose(made, expected, rtol=1e-6)
    np.testing.assert_allclose(backward(made)[0], reference(made)[0], rtol=1e-5, atol=1e-5)
    kept = jax.tree.leaves(jax.vjp(own, logits.astype(jnp.bfloat16))[1])
    assert all(array.dtype == jnp.bfloat16 for array in kept if np.ndim(array))


@pytest.mark.parametrize(
    ("platform", "shape", "held"),
    [
        ("tpu", (2, 16, 4, 64), (2, 16, 256)),
        ("tpu", (2, 16, 4, 128), (2, 16, 4, 128)),
        ("tpu", (2, 16, 100), (2, 16, 100)),
        ("gpu", (2, 16, 4, 64), (2, 16, 4, 64)),
    ],
)
def test_heads_that_fill_no_tiles_of_a_tpu_are_kept_side_by_side(platform, shape, held):
    """What the backward pass is handed are the named arrays alone, and of a named one what follows is the same."""
    policy = jax.checkpoint_policies.save_only_these_names("heads")

    @partial(jax.checkpoint, policy=policy)
    def squares(x):
        heads = kept(jnp.sin(x), "heads", platform)
        assert heads.shape == shape
        return jnp.sum(heads * heads)

    x = jnp.linspace(0, 1, math.prod(shape)).reshape(shape)
    _, backward = jax.vjp(squares, x)
    assert held in [leaf.shape for leaf in jax.tree.leaves(backward)]
    np.testing.assert_allclose(backward(1.0)[0], 2 * jnp.sin(x) * jnp.cos(x), rtol=1e-5)
