"""Stages that work in step give the loss and the gradients of one device, whatever the schedule."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from meshwise.core.errors import LayoutError
from meshwise.costs.schedules import Rounds
from meshwise.runtime.layers import add_at, at_place
from meshwise.sharding.layout import Layout
from tests.runtime.steps import alone, configured, dense, loss_and_gradients, make, worst
from tests.runtime.test_models import MODELS

FOUR = "D=32 F=64 L=4 N=4 K=2 H=8 V=64"
LAYOUTS = {
    "gpipe": {"stage": 4, "tensor": 2, "schedule": "gpipe", "num_microbatches": 4, "remat": "none"},
    "1f1b": {"stage": 2, "data": 2, "tensor": 2, "num_microbatches": 4},
    "1f1b-fsdp": {"stage": 4, "fsdp": 2, "num_microbatches": 4, "remat": "matmuls"},
    "1f1b-ring": {"stage": 2, "context": 2, "data": 2, "zero": 2, "context_method": "ring", "num_microbatches": 2},
    "interleaved": {
        "stage": 4, "fsdp": 2, "schedule": "interleaved", "virtual_stages": 2, "num_microbatches": 12,
        "remat": "matmuls",
    },
    "three-pieces": {
        "stage": 2, "fsdp": 2, "tensor": 2, "schedule": "interleaved", "virtual_stages": 3, "num_microbatches": 4,
    },
    "interleaved-replicas": {
        "stage": 2, "data": 2, "zero": 1, "schedule": "interleaved", "virtual_stages": 2, "num_microbatches": 4,
        "remat_layers": 4,
    },
    "interleaved-whole-ring": {
        "stage": 2, "context": 2, "tensor": 2, "zero": 1, "fully_sharded": False, "context_method": "ring",
        "schedule": "interleaved", "virtual_stages": 2, "num_microbatches": 4,
    },
    "gpipe-whole": {
        "stage": 2, "ulysses": 2, "data": 2, "zero": 1, "fully_sharded": False, "schedule": "gpipe",
        "num_microbatches": 4, "remat": "none",
    },
    "fewer-microbatches-than-stages": {"stage": 4, "data": 2, "num_microbatches": 2, "micro_batch": 2},
    "positions-that-do-not-divide": {"stage": 3, "data": 2, "num_microbatches": 3, "remat": "none"},
}  # fmt: skip


def test_one_place_of_many_arrays_is_written_at_once():
    """`vmap` makes a scatter of `dynamic_update_slice`, which XLA takes apart with an array in between."""

    def written(x, value, place):
        return add_at(x, value, place), at_place(x, place)

    x, value = jnp.arange(48.0).reshape(2, 3, 2, 4), jnp.arange(8.0).reshape(2, 4)
    place = jnp.int32(1), jnp.int32(0)
    alike = jax.vmap(written, in_axes=(0, 0, None))
    assert "scatter" not in jax.jit(alike).lower(x, value, place).as_text()
    added, held = alike(x, value, place)
    assert (added == x.at[:, 1, 0].add(value)).all()
    assert (held == x[:, 1, 0]).all()
    apart = jnp.array([1, 2]), jnp.array([0, 1])  # of each array another place
    assert "scatter" in jax.jit(jax.vmap(written)).lower(x, value, apart).as_text()
    added, held = jax.vmap(written)(x, value, apart)
    assert (held == jnp.stack([x[0, 1, 0], x[1, 2, 1]])).all()
    assert (added == x.at[jnp.arange(2), apart[0], apart[1]].add(value)).all()


@pytest.mark.jax
@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_and_gradients_are_those_of_one_device(name):
    layout = Layout(**LAYOUTS[name])
    pieces = layout.stage * layout.virtual_stages
    model = dense(FOUR.replace("L=4", f"L={4 if 4 % pieces == 0 else pieces}"))
    expected_loss, expected = alone(model, layout.sequences)
    loss, found = loss_and_gradients(make(model, layout))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert worst(found, expected) < 1e-5


@pytest.mark.jax  # three more compiled programs: stages of two kinds of layers, and of experts
@pytest.mark.parametrize(("name", "remat"), [("gemma3", "full"), ("gpt_oss", "full"), ("gpt_oss", "none")])
def test_stages_of_several_kinds_of_layers(name, remat):
    model = configured(name, MODELS[name])
    layout = Layout(stage=2, expert=2 if name == "gpt_oss" else 1, tensor=2, num_microbatches=2, remat=remat)
    expected_loss, expected = alone(model, layout.sequences)
    loss, found = loss_and_gradients(make(model, layout))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert worst(found, expected) < 1e-5


def test_stages_hold_their_own_layers():
    step = make(dense(FOUR), Layout(stage=2, tensor=2, schedule="interleaved", virtual_stages=2, num_microbatches=2))
    up = step.abstract_state["weights"]["layer"]["w_up"]
    assert up.shape == (2, 2, 32, 64)  # stages, pieces of each, D, F: one layer a piece
    assert up.sharding.shard_shape(up.shape) == (1, 2, 32, 32)


def loops(jaxpr):
    """All scans of a program, those within others too."""
    for e in jaxpr.eqns:
        if e.primitive.name == "scan":
            yield e
        for inner in jaxprs_in_params(e.params):
            yield from loops(inner)


@pytest.mark.jax
@pytest.mark.parametrize(
    "layout",
    [
        Layout(stage=2, fsdp=4, schedule="gpipe", num_microbatches=4, remat="full", micro_batch=1),
        Layout(stage=2, fsdp=4, schedule="interleaved", virtual_stages=2, num_microbatches=32, micro_batch=1),
    ],
)
def test_stages_keep_activations_of_the_pieces_in_flight_and_no_weights(layout):
    """However many microbatches there are under 1F1B; weights are read again where they are stored."""
    step = make(dense("D=32 F=64 L=8 N=4 K=2 H=8 V=64"), layout)
    program = jax.make_jaxpr(step.gradients)(step.abstract_state["weights"], step.abstract_batch).jaxpr
    found = [v.aval.shape for e in loops(program) for v in e.outvars[: e.params["num_carry"]]]
    places, layers = sum(Rounds.of(layout).kept), 8 // (2 * layout.virtual_stages)
    assert {s[:-3] for s in found if s[-2:] == (16, 32) and len(s) > 5} == {(2, places, layers)}, "streams [T, D]"
    assert not [s for s in found if s[-2:] in ((32, 64), (64, 32)) and places in s]


@pytest.mark.parametrize(
    ("config", "layout", "words"),
    [
        (FOUR, {"stage": 2, "schedule": "zb-h1", "num_microbatches": 2}, "schedule=zb-h1 is planned"),
        ("D=32 F=64 L=3 N=4 K=2 V=64", {"stage": 2, "num_microbatches": 2}, "3 layers do not divide"),
        ("deepseek_v3", {"stage": 2, "num_microbatches": 2}, "different kinds of layers"),
        (FOUR, {"stage": 2, "num_microbatches": 2, "remat_layers": 3}, "remat_layers=3 of 2 pieces"),
        (
            FOUR,
            {"stage": 2, "num_microbatches": 3, "schedule": "interleaved", "virtual_stages": 2},
            "in groups of stage=2, found num_microbatches=3",
        ),
    ],
)
def test_pipelines_that_do_not_run_in_step_are_refused(config, layout, words):
    model = configured(config, MODELS[config]) if config in MODELS else dense(config)
    with pytest.raises(LayoutError, match=words):
        make(model, Layout(**layout))
