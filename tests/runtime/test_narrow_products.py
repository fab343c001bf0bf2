"""Training in 8 bits: products against NumPy, layouts against one device, what is stored and kept, and losses."""

from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.flax import load_file

import meshwise
from meshwise.core.errors import ConfigError, LayoutError, MeshwiseError
from meshwise.core.tensors import Einsum
from meshwise.models import load_model
from meshwise.runtime.checkpoints import Checkpoints
from meshwise.runtime.narrow_products import multiply_narrow, narrow_operand
from meshwise.runtime.saved import find_weights
from meshwise.runtime.scaled import LARGEST, Narrowing, Scaled, scale_for, scaled_weight
from meshwise.runtime.states import rearranged, starting_state
from meshwise.runtime.watched import Watched
from meshwise.sharding import Sharding
from meshwise.sharding.layout import Layout
from tests.runtime.steps import batch_of, by_path, dense, make

SMALL = "D=32 F=64 L=2 N=8 K=4 H=8 V=64"
FP8 = "fp8-current"


@cache
def step_of(layout, precision=FP8, text=SMALL):
    return make(dense(text), layout, precision=precision)


# Against NumPy --------------------------------------------------------------------------------------------------------


def scale_of(x, largest, axis=None):
    """The next number of 8 significant bits, written another way than the program does."""
    exact = np.float32(np.max(np.abs(x.astype(np.float32)), axis=axis, keepdims=True)) / np.float32(largest)
    mantissa, exponent = np.frexp(exact)
    return np.ldexp(np.ceil(mantissa * 256 * (1 - 2**-20)) / 256, exponent).astype(np.float32)


def in_format(x, dtype, largest, axis=None):
    """Numbers of a format as fp32, and their scale."""
    scale = scale_of(x, largest, axis)
    divided = x.astype(np.float32) / scale
    return (np.rint(divided) if dtype == np.int8 else divided).astype(dtype).astype(np.float32), scale


def expected_of(x, w, g, *, fp8):
    """A product of one device's [rows, D] and [D, F], and its gradients: each operand with the scale of all of it,
    but int8 weights with one for each number of the result."""
    e4m3, e5m2 = (ml_dtypes.float8_e4m3fn, 448), (ml_dtypes.float8_e5m2, 57344)
    forward, backward = (e4m3, e5m2) if fp8 else ((np.int8, 127),) * 2
    (qx, sx), (qg, sg) = in_format(x, *forward), in_format(g, *backward)
    (qw, sw), (qb, sb) = (in_format(w, *forward, axis=None if fp8 else axis) for axis in (0, 1))
    return qx @ qw * (sx * sw), qg @ qb.T * (sg * sb.T), qx.T @ qg * (sx * sg)


def product_of(precision, layout, x, w, g):
    """The same by the program: the product and both gradients, x [B, T, D] and w [D, F] as wide as the program's."""
    op = Einsum.parse("up", "x[B, T, D] * w_up[D, F] -> up[B, T, F]", weights=("w_up",))
    step = step_of(layout, precision)
    placement, formats = step.stack.placement, step.stack.around.narrowing
    splits = placement.splits(op)
    held, at = placement.strategy.home(op.inputs[0].axes), Sharding.of(op.inputs[0].axes, splits)

    def run(x, sink):
        wide = jnp.asarray(w)
        value = scaled_weight(wide, 0, formats.operands) if formats.weights else wide.astype(jnp.bfloat16)
        operand = narrow_operand(x, held, at, placement, dtype=formats.operands, name="x")
        return multiply_narrow(op, operand, Watched(value, sink), placement, splits, formats=formats)

    def all_of(x, sink, g):
        made, back = jax.vjp(run, x, sink)
        return made, *back(g)

    given = jnp.asarray(x, jnp.bfloat16), jnp.zeros(w.shape, jnp.float32), jnp.asarray(g, jnp.bfloat16)
    return [np.asarray(a, np.float32) for a in jax.jit(all_of)(*given)]


def drawn(*shape, seed, scale=1.0):
    values = np.random.default_rng(seed).normal(size=shape) * scale
    return values.astype(ml_dtypes.bfloat16)


@pytest.mark.jax
@pytest.mark.parametrize("precision", [FP8, "int8"])
@pytest.mark.parametrize("layout", [Layout(micro_batch=4), Layout(fsdp=2, tensor=2, micro_batch=2)], ids=str)
def test_a_product_and_both_gradients_are_those_of_numpy(precision, layout):
    x, w, g = drawn(4, 16, 32, seed=0), drawn(32, 64, seed=1, scale=0.2), drawn(4, 16, 64, seed=2, scale=1e-4)
    x, g = (np.where(np.arange(4)[:, None, None] < 2, a, 3 * a).astype(a.dtype) for a in (x, g))  # devices differ
    found = product_of(precision, layout, x, w.astype(np.float32), g)
    fp8, data, tensor = precision == FP8, layout.fsdp, layout.tensor
    made, d_x, d_w = np.zeros(g.shape, np.float32), np.zeros(x.shape, np.float32), np.zeros(w.shape, np.float32)
    whole, by = in_format(w, ml_dtypes.float8_e4m3fn, 448)
    for rows in np.split(np.arange(4), data):
        for columns in np.split(np.arange(64), tensor):
            own = (x[rows].reshape(-1, 32), g[rows][..., columns].reshape(-1, len(columns)))
            y, dx, dw = expected_of(own[0], w[:, columns], own[1], fp8=fp8)
            if fp8:  # a stored weight has one scale, whatever splits it
                (qx, sx), (qg, sg) = (in_format(a, f, n) for a, f, n in zip(
                    own, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2), (448, 57344), strict=True
                ))  # fmt: skip
                y, dx = qx @ whole[:, columns] * (sx * by), qg @ whole[:, columns].T * (sg * by)
            made[np.ix_(rows, range(16), columns)] = y.reshape(len(rows), 16, -1)
            d_x[rows] += dx.reshape(len(rows), 16, 32)
            d_w[:, columns] += dw
    added = 2**-7 * np.abs(d_x).max() * (tensor > 1)  # parts are rounded to bf16 before they are added
    np.testing.assert_allclose(found[0], made, rtol=2**-8)
    np.testing.assert_allclose(found[1], d_x, rtol=2**-8, atol=added)
    np.testing.assert_allclose(found[2], d_w, rtol=1e-5, atol=1e-6 * np.abs(d_w).max())


@pytest.mark.parametrize("dtype", list(LARGEST), ids=str)
def test_scales_are_exact_in_bf16_and_no_number_overflows(dtype):
    largest = np.float32([0, 1e-42, 1e-30, 0.1, 447.9, 448, 448.1, 3e38])
    scales = np.asarray(scale_for(jnp.asarray(largest), dtype))
    assert (scales == scales.astype(ml_dtypes.bfloat16).astype(np.float32)).all()
    assert (largest <= scales * LARGEST[dtype] * (1 + 1e-6)).all()
    assert (scales[2:] <= largest[2:] / np.float32(LARGEST[dtype]) * (1 + 2**-7)).all()
    assert scales[0] == 1
    assert np.isnan(np.asarray(scale_for(jnp.float32(np.nan), dtype)))  # so that the loss tells


# Layouts --------------------------------------------------------------------------------------------------------------

LAYOUTS = (
    Layout(fsdp=8),
    Layout(data=2, fsdp=2, tensor=2, zero=1, micro_batch=2, remat="none"),
    Layout(data=2, tensor=2, sequence_parallel=False, num_microbatches=2, micro_batch=2, remat="matmuls"),
    Layout(fsdp=2, context=2, ulysses=2, micro_batch=4),
    Layout(stage=2, data=2, fsdp=2, num_microbatches=2, schedule="1f1b"),
)


def gradients_of(step, weights):
    loss, found = step.gradients(weights, batch_of(step))
    return float(loss), by_path(step, found)


@cache
def reference(precision, text=SMALL):
    """Loss and gradients of one device."""
    step = step_of(Layout(micro_batch=8), precision, text)
    return gradients_of(step, step.initial_state(0)["weights"])


@pytest.mark.jax
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_are_as_near_to_wide_gradients_as_one_device_is(layout):
    """Scales are local, so that narrow gradients differ; a part that is lost or counted twice is far off."""
    (wide_loss, wide), (one_loss, one) = reference("mixed"), reference(FP8)
    step = step_of(layout)
    weights = step.initial_state(0)["weights"]
    loss, found = gradients_of(step, weights)
    assert loss == pytest.approx(one_loss, rel=5e-3)
    assert one_loss == pytest.approx(wide_loss, rel=2e-2)
    for name, exact in wide.items():
        error, alone = (np.linalg.norm(g[name] - exact) / np.linalg.norm(exact) for g in (found, one))
        assert alone < 0.3, name
        assert error < 1.3 * alone + 0.01, name


# What is stored and kept ----------------------------------------------------------------------------------------------


def same(one, other):
    def equal(a, b):
        return np.array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))

    return jax.tree.all(jax.tree.map(equal, one, other))


@pytest.mark.jax
def test_narrow_weights_are_those_of_the_master_copy_and_move_to_other_layouts():
    old, new = step_of(LAYOUTS[1]), step_of(LAYOUTS[4])
    state, metrics = old.jitted(old.initial_state(0), batch_of(old))
    assert np.isfinite(float(metrics["loss"]))
    gate, norm = state["weights"]["layer"]["w_gate"], state["weights"]["layer"]["norm.mlp"]
    assert (gate.value.dtype, gate.scale.shape, norm.dtype) == (jnp.float8_e4m3fn, (2,), jnp.bfloat16)
    assert gate.value.sharding.spec == P(None, "fsdp", "tensor")
    assert same(gate, scaled_weight(state["master"]["layer"]["w_gate"], 1, jnp.float8_e4m3fn))
    host = jax.tree.map(np.asarray, state)
    moved = rearranged(host, old.layer_order, new)
    assert same(moved["weights"]["layer"]["w_gate"].scale.reshape(-1), host["weights"]["layer"]["w_gate"].scale)
    assert same(rearranged(moved, new.layer_order, old), host)


@pytest.mark.jax
def test_what_products_read_is_kept_in_eight_bits():
    step = step_of(Layout(micro_batch=8, remat="none"))
    (segment,) = step.stack.segments
    layer = step.stack.layer(segment, segment.runs[0])
    own = {
        name: Watched(Scaled(jnp.zeros(p.shape[1:], jnp.float8_e4m3fn), jnp.float32(1)), jnp.zeros(p.shape[1:]))
        if p.tensor.dtype is not None
        else jnp.zeros(p.shape[1:], jnp.bfloat16)
        for name, p in step.parameters["layer"].items()
    }
    x = jnp.zeros((8, 16, 32), jnp.bfloat16)
    kept = jax.eval_shape(lambda x: jax.tree.leaves(jax.vjp(lambda x: layer(x, own), x)[1]), x)
    wide, narrow = (sum(a.shape == (8, 16, 64) and a.dtype == d for a in kept) for d in (jnp.bfloat16, jnp.int8))
    assert (wide, narrow) == (2, 1)  # gate and up, which the activation reads; what it makes, which down reads
    assert sum(a.shape == (8, 16, 32) and a.dtype == jnp.int8 for a in kept) == 2  # what both norms make


@pytest.mark.jax
def test_what_is_kept_goes_to_the_hosts_memory_and_back_as_it_is():
    here, away = (
        step_of(Layout(fsdp=2, tensor=2, micro_batch=4, remat="none", offload=offload))
        for offload in ((), ("activations",))
    )
    weights = here.initial_state(0)["weights"]
    one, other = (step.gradients(weights, batch_of(step)) for step in (here, away))
    assert same(one, other)


@pytest.mark.jax
def test_saved_steps_go_on_bit_equal_and_leave_as_their_master_copies(tmp_path):
    model, step = dense(SMALL), step_of(LAYOUTS[1])
    state, _ = step.jitted(step.initial_state(0), batch_of(step))
    identity = {"model": {"name": "small", **model.config}, "job": {"seq_len": 16.0}, "run": {}}
    steps = Checkpoints.open(tmp_path / "steps", identity, 1, step, told=lambda _: None)
    steps.save(1, state)
    number, read = steps.load(step)
    steps.close()
    assert number == 1
    assert same(read, state)
    begun = starting_state(step, find_weights(tmp_path / "steps", model))
    assert all(same(begun[part], state[part]) for part in ("weights", "master"))
    meshwise.export_weights(tmp_path / "steps", output=tmp_path / "model")
    left = load_file(tmp_path / "model" / "model.safetensors")["model.layers.1.mlp.gate_proj.weight"]
    assert same(left, np.asarray(state["master"]["layer"]["w_gate"])[1].T.astype(ml_dtypes.bfloat16))


# Training -------------------------------------------------------------------------------------------------------------


@pytest.mark.jax
@pytest.mark.parametrize("precision", [FP8, "int8"])
def test_losses_fall_as_those_of_wide_products_do(precision):
    def losses(precision):
        step = step_of(Layout(fsdp=2, tensor=2, micro_batch=4), precision)
        state, batch, found = step.initial_state(0), batch_of(step), []
        for _ in range(15):
            state, metrics = step.jitted(state, batch)
            found.append(float(metrics["loss"]))
        return found

    wide, narrow = losses("mixed"), losses(precision)
    assert narrow[-1] < 0.6 * narrow[0]
    assert narrow == pytest.approx(wide, rel=0.05)


@pytest.mark.parametrize(
    ("model", "layout", "precision", "error", "words"),
    [
        ("mixtral-8x7b", {}, FP8, ConfigError, "experts in the narrow formats of precision fp8-current"),
        ("llama-3.2-1b", {}, "fp8", MeshwiseError, "precision 'fp8': this narrow recipe .* use one of fp8-current"),
        ("llama-3.2-1b", {}, "mxfp8", MeshwiseError, "precision 'mxfp8': this narrow recipe"),
        ("llama-3.2-1b", {}, f"{FP8},master=none", MeshwiseError, "stored in fp8 are updated by a master copy"),
        (
            "llama-3.2-1b", {"tensor": 2, "collective_matmul": "bidirectional"}, FP8, LayoutError,
            "collective_matmul=bidirectional with precision fp8-current",
        ),
        (
            "llama-3.2-1b", {"offload": ("optimizer",)}, FP8, LayoutError,
            "offload=optimizer with precision fp8-current .* one scale, and is updated in pieces",
        ),
    ],
)  # fmt: skip
def test_what_is_not_trained_in_eight_bits_is_refused_by_name(model, layout, precision, error, words):
    with pytest.raises(error, match=words):
        make(load_model(model), Layout(**layout), precision=precision)


def test_the_recipe_says_which_products_are_narrow():
    step = step_of(Layout())
    formats = Narrowing.of(step.stack.program, step.job.formats)
    assert dict(formats.products("layer")) == {
        "q": "fp8.x.attn", "k": "fp8.x.attn", "v": "fp8.x.attn", "o": "fp8.attention",
        "gate": "fp8.x.mlp", "up": "fp8.x.mlp", "down": "fp8.act",
    }  # fmt: skip
    assert not formats.products("head")
