"""The step as a compiler and a training loop meet it: abstract state, donated buffers, the optimizer's arithmetic."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshwise.core.errors import ConfigError, LayoutError, MeshwiseError
from meshwise.models import load_model
from meshwise.runtime.optimizer import Hyperparameters, update
from meshwise.sharding.layout import Layout
from tests.runtime.steps import DENSE, alone, batch_of, dense, loss_and_gradients, make, state_of, weights_of


@cache
def planned():
    return make(dense("D=32 F=64 L=2 N=4 K=2 H=8 V=64"), Layout(data=2, fsdp=2, tensor=2, zero=1), precision="mixed")


@cache
def compiled():
    step = planned()
    return step.jitted.lower(step.abstract_state, step.abstract_batch).compile()


@pytest.mark.jax
def test_a_step_compiles_from_its_abstract_state_and_holds_what_the_tables_say():
    step = planned()
    held = compiled().memory_analysis().argument_size_in_bytes
    arrays = jax.tree.leaves((step.abstract_state, step.abstract_batch))
    assert held == sum(np.prod(a.sharding.shard_shape(a.shape), dtype=int) * a.dtype.itemsize for a in arrays)
    gate = step.abstract_state["weights"]["layer"]["w_gate"]
    assert gate.sharding.shard_shape(gate.shape) == (2, 16, 32)  # D over fsdp, F over tensor
    mean = step.abstract_state["moments"]["mean"]["layer"]["w_gate"]
    assert mean.sharding.shard_shape(mean.shape) == (2, 8, 32)  # D over the replicas too
    assert (gate.dtype, mean.dtype) == ("bfloat16", "float32")


def test_layers_go_back_only_after_the_head_has_the_gradients_of_its_weights():
    """Else a compiler may hold the gradient of the logits meanwhile, for a product that only the update reads."""
    step = planned()
    text = step.jitted.lower(step.abstract_state, step.abstract_batch).as_text()
    held = [line for line in text.splitlines() if "optimization_barrier" in line]
    stream, table = "x16x32xbf16>", "tensor<32x64xf32>"  # [B, T, D]; [D, V], as wide as gradients are reduced
    assert any(stream in line and table in line for line in held), held


@pytest.mark.parametrize(("layout", "first"), [({"data": 2, "fsdp": 4}, True), ({"fsdp": 4, "tensor": 2}, False)])
def test_gradients_of_a_weight_are_made_before_those_of_its_input_where_no_activations_travel(layout, first):
    """So that they travel while all others are made: a compiler makes them last, since only the update reads them."""
    step = make(dense("D=32 F=64 L=2 N=4 K=2 H=8 V=64"), Layout(**layout), precision="mixed")
    text = step.jitted.lower(step.abstract_state, step.abstract_batch).as_text()
    held = [line for line in text.splitlines() if "optimization_barrier" in line]
    made, gradient = (
        ("tensor<32x64xf32>", "x16x64xbf16>"),
        ("tensor<32x32xf32>", "x16x32xbf16>"),
    )  # of w_gate, F by tensor
    assert any(all(words in line for words in (made if first else gradient)) for line in held) is first, held


def test_gradients_of_vectors_along_the_stream_are_added_up_whole():
    """A compiler sums them once a microbatch, and nothing waits for small ReduceScatters in every layer."""
    step = make(dense("D=32 F=64 L=2 N=4 K=2 H=8 V=64"), Layout(fsdp=8, num_microbatches=2))
    norm, gate = (step.parameters["layer"][name] for name in ("norm.mlp", "w_gate"))
    assert [p.sum_spec(step.stack.placement) for p in (norm, gate)] == [P(None, None), P(None, "fsdp", None)]


def test_microbatches_each_gather_what_they_read():
    """Else a compiler gathers embedding and head before the loop over microbatches, and holds both all the while."""
    step = make(dense("D=32 F=64 L=2 N=4 K=2 H=8 V=64"), Layout(fsdp=8, num_microbatches=2))
    weights, batch = step.abstract_state["weights"], step.abstract_batch
    program = jax.make_jaxpr(step.gradients)(weights, batch).jaxpr.eqns[0].params["jaxpr"]
    (loop,) = [e for e in program.eqns if e.primitive.name == "scan" and e.params["length"] == 2]
    body = loop.params["jaxpr"].jaxpr
    held = next(e for e in body.eqns if e.primitive.name == "optimization_barrier")
    assert len(held.invars) == len(jax.tree.leaves((weights, batch)))
    past = [e for e in body.eqns if e is not held and any(v is given for v in e.invars for given in held.invars)]
    assert not past, "what is read without the barrier"


@pytest.mark.jax
def test_gradients_of_a_microbatch_are_added_up_where_they_are_made():
    """No copy of all of them stands beside the accumulators: what a program needs besides is less than that."""
    step = make(dense("D=64 F=256 L=8 N=4 K=4 H=16 V=64"), Layout(num_microbatches=4))
    weights = step.abstract_state["weights"]
    needs = step.gradients.lower(weights, step.abstract_batch).compile().memory_analysis()
    assert needs.temp_size_in_bytes < 0.6 * sum(4 * w.size for w in jax.tree.leaves(weights))  # 1.19 with a copy


@pytest.mark.jax
def test_steps_lower_the_loss_and_keep_their_shardings():
    step = planned()
    state, batch = state_of(step), batch_of(step)
    losses = []
    for _ in range(4):
        state, metrics = compiled()(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True)
    assert losses[0] - losses[-1] > 0.05
    assert int(state["step"]) == 4
    assert jax.tree.map(lambda a: a.sharding, state) == jax.tree.map(lambda a: a.sharding, step.abstract_state)


@pytest.mark.jax
def test_scales_and_biases_decay_only_where_all_does():
    """One step each: matrices end where decay of all brings them, the others where none does."""

    def after(**constants):
        step = replace(
            make(dense("D=32 F=64 L=2 N=4 K=2 H=8 V=64 bias=yes"), Layout()),
            constants=Hyperparameters(learning_rate=0.1, **constants),
        )
        return step.jitted(state_of(step), batch_of(step))[0]["weights"]

    none, all_of, some = after(weight_decay=0.0), after(weight_decay=0.5), after(weight_decay=0.5, decayed="matrices")
    for run, name, expected, other in (
        ("layer", "w_up", all_of, none),
        ("embed", "w_embed", all_of, none),
        ("layer", "norm.mlp", none, all_of),
        ("head", "norm.final", none, all_of),
    ):
        found = np.asarray(some[run][name])
        np.testing.assert_array_equal(found, expected[run][name])
        assert np.all(found != other[run][name])


@pytest.mark.jax
@pytest.mark.parametrize(
    ("choices", "config"),
    [
        ({"fsdp": 2, "tensor": 2, "num_microbatches": 2}, "D=32 F=64 L=2 N=4 K=2 H=8 V=64 bias=yes"),
        pytest.param(  # slow: one more compiled program each, of experts and of stages
            {"expert": 2, "tensor": 2}, "D=32 L=2 N=4 K=2 H=8 V=64 E=4 top_k=2 Fe=32", marks=pytest.mark.slow
        ),
        pytest.param(
            {"stage": 2, "tensor": 2, "num_microbatches": 2},
            "D=32 F=64 L=2 N=4 K=2 H=8 V=64 tied=yes",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_gradients_are_as_wide_as_the_precision_says(choices, config):
    """What bf16 products leave is no bf16 number: it was never rounded on its way; and it is near the exact one."""
    step = make(dense(config), Layout(**choices), precision="mixed")
    _, found = loss_and_gradients(step, state_of(step)["weights"])
    _, exact = alone(dense(config), step.layout.sequences)
    for path, gradient in found.items():
        assert gradient.dtype == np.float32
        rounded = gradient.astype(jnp.bfloat16).astype(np.float32)
        least = 0.05 if path == "embed/w_embed" else 0.3  # of an embedding only tokens that came twice are sums
        assert (gradient != rounded).mean() > least, path
    wide = np.concatenate([g.ravel() for g in exact.values()])
    near = np.concatenate([found[path].ravel() for path in exact])
    assert np.linalg.norm(near - wide) < 0.03 * np.linalg.norm(wide)


@pytest.mark.slow  # two more compiled programs: the whole update against its formula, in fp32
def test_one_step_of_adamw_is_its_formula():
    step = make(dense(), Layout(fsdp=2, tensor=2))
    weights, batch = weights_of(step), batch_of(step)
    _, gradients = step.gradients(weights, batch)
    before, g = np.asarray(weights["layer"]["w_up"]), np.asarray(gradients["layer"]["w_up"])
    after, _ = step.jitted(state_of(step), batch)
    # After one step both averages, corrected for their start at zero, are the gradient and its square.
    expected = before - 1e-3 * (g / (np.abs(g) + 1e-8) + 0.1 * before)
    np.testing.assert_allclose(np.asarray(after["weights"]["layer"]["w_up"]), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow  # threefry takes long to compile: initial values are drawn, each where it is stored
def test_initial_values_do_not_depend_on_the_layout():
    model = dense("D=16 F=32 L=2 N=2 V=32")
    split = make(model, Layout(fsdp=4, tensor=2)).initial_state(3)
    alone = make(model, Layout(micro_batch=4)).initial_state(3)
    other = make(model, Layout(micro_batch=4)).initial_state(4)
    for one, same in zip(jax.tree.leaves(split), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(same))
    dealt = make(
        dense("D=16 F=32 L=4 N=2 V=32"), Layout(stage=2, virtual_stages=2, num_microbatches=2, schedule="interleaved")
    )
    four = make(dense("D=16 F=32 L=4 N=2 V=32"), Layout(micro_batch=4))
    held, whole = (step.initial_state(3)["weights"]["layer"]["w_gate"] for step in (dealt, four))
    order = dealt.layer_order["layer"]["layers"]
    assert order == [0, 2, 1, 3]
    np.testing.assert_array_equal(np.asarray(held).reshape(whole.shape), np.asarray(whole)[order])
    gate = [np.asarray(s["weights"]["layer"]["w_gate"]) for s in (alone, other)]
    assert np.abs(gate[0] - gate[1]).max() > 0.1
    assert gate[0].std() == pytest.approx(16**-0.5, rel=0.1)
    assert (np.asarray(alone["weights"]["layer"]["norm.mlp"]) == 1).all()


@pytest.mark.parametrize(
    ("name", "expected"), [("sgd", 0.998), ("momentum", 0.9962), ("lion", 1 - 1e-3 * (1 + 0.1)), ("adamw", 0.9989)]
)
def test_optimizers_step_against_the_gradient(name, expected):
    one = np.float32(1.0)
    state = {"mean": 2 * one, "variance": 0 * one} if name == "momentum" else {"mean": 0 * one, "variance": 0 * one}
    weight, _ = update(Hyperparameters(name), one, 2 * one, state, np.int32(1))
    assert float(weight) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("layout", "job", "error", "words"),
    [
        ({"offload": ("optimizer", "parameters")}, {}, LayoutError, "offload=parameters"),
        ({"offload": ("activations",), "offload_layers": 1}, {}, LayoutError, "offload=activations:1"),
        ({"offload": ("activations",), "stage": 2}, {}, LayoutError, "offload=activations with stage=2"),
        ({"tensor": 8}, {}, LayoutError, "tensor=8 splits K = 4 of w_k into 8 parts that are not equal"),
        ({}, {"precision": "fp8"}, MeshwiseError, "precision 'fp8': this narrow recipe"),
        ({}, {"precision": "fp16"}, MeshwiseError, "weights run in fp32, bf16, found fp16"),
        ({}, {"optimizer": "muon"}, MeshwiseError, "optimizer 'muon'"),
        ({}, {"fine_tune": "qlora:rank=4", "precision": "bf16"}, MeshwiseError, "frozen weights in nf4"),
    ],
)
def test_what_is_not_executed_is_refused_by_name(layout, job, error, words):
    with pytest.raises(error, match=words):
        make(dense(DENSE), Layout(**layout), **job)


@pytest.mark.parametrize(("name", "word"), [("mamba2-2.7b", "mamba2"), ("t5-11b", "encoder"), ("bloom-560m", "bloom")])
def test_models_that_are_not_executed_are_refused_by_name(name, word):
    with pytest.raises(ConfigError, match=word):
        make(load_model(name), Layout())


def test_another_number_of_devices_is_refused():
    from meshwise.runtime.devices import make_mesh  # noqa: PLC0415

    with pytest.raises(LayoutError, match="fsdp=4 runs on 4 devices, found 8"):
        make_mesh({"fsdp": 4}, jax.devices())
