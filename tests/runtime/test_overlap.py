"""Options of the compiler are those of the platform, and a step is compiled with them."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from meshwise.core.tensors import Kind, Route
from meshwise.costs.layout_choices import LayoutChoices
from meshwise.hardware import parse_cluster
from meshwise.runtime import early, forward, products, shardings, watched
from meshwise.runtime.overlap import network_flag, overlap_options, profiled_options, step_options, tell_network
from meshwise.sharding.layout import Layout
from tests.runtime.steps import DENSE, alone, configured, dense, loss_and_gradients, make, worst
from tests.runtime.test_models import MODELS
from tests.runtime.test_ragged import MIXTURE


def test_only_platforms_whose_schedulers_are_told_have_options():
    layout = Layout(fsdp=4)
    assert overlap_options("cpu", layout) == {}
    assert all(value is True for value in overlap_options("tpu", layout).values())
    assert overlap_options("cuda", layout) == overlap_options("gpu", layout) != {}


def test_products_of_our_own_steps_stay_whole_beside_what_tpus_send_over_tensor():
    for platform, layout in (("tpu", Layout(fsdp=4)), ("gpu", Layout(tensor=4))):
        assert step_options(platform, layout) == overlap_options(platform, layout)
    layout = Layout(fsdp=2, tensor=4)
    (name,) = step_options("tpu", layout).keys() - overlap_options("tpu", layout)
    assert "windowed_einsum" in name


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(fsdp=8), {2}),
        (Layout(fsdp=4, stage=2, num_microbatches=2), {4}),
        (Layout(fsdp=4, ulysses=2), {8}),
        (Layout(fsdp=4, tensor=2), {8}),
        (Layout(data=2, fsdp=4, zero=1), {8}),
        (Layout(data=2, tensor=4, zero=1), {1}),
    ],
)
def test_how_many_collectives_are_in_flight_follows_from_the_layout(layout, expected):
    found = overlap_options("gpu", layout)
    assert {many for name, many in found.items() if name.endswith("overlap_limit")} == expected
    ragged = overlap_options("gpu", layout, ragged=True)
    fewer = {many for name, many in ragged.items() if name.endswith("overlap_limit")}
    assert fewer == {min(many, 2) for many in expected}
    exchanged = overlap_options("gpu", replace(layout, expert=2), ragged=True)
    of_exchanged = {many for name, many in exchanged.items() if name.endswith("overlap_limit")}
    assert of_exchanged == ({1} if layout.zero else {max(many, 4) for many in expected})
    assert exchanged.keys() - ragged.keys() == {"xla_gpu_enable_pipelined_reduce_scatter"}


def test_collectives_of_loops_are_pipelined_where_rows_are_exchanged_and_seconds_are_known():
    layout = Layout(fsdp=4, expert=2)
    found, own = profiled_options("gpu", layout, ragged=True), overlap_options("gpu", layout, ragged=True)
    assert {name for name in found if found[name] != own.get(name)} == {
        "xla_gpu_enable_pipelined_all_gather",
        "xla_gpu_enable_pipelined_reduce_scatter",
        "xla_gpu_experimental_parallel_collective_overlap_limit",
    }
    assert profiled_options("gpu", layout) == profiled_options("tpu", layout, ragged=True) == {}
    assert profiled_options("gpu", Layout(fsdp=8), ragged=True) == {}


def test_xla_is_told_of_the_network_unless_it_has_been():
    environment = {"XLA_FLAGS": "--xla_dump_to=x"}
    tell_network(parse_cluster("h100:64"), environment)
    assert environment["XLA_FLAGS"] == f"--xla_dump_to=x {network_flag(parse_cluster('h100:64'))}"
    tell_network(parse_cluster("a100:64"), environment)
    assert environment["XLA_FLAGS"].endswith("nic_speed_gbps=50")
    assert tell_network(parse_cluster("v5e:4x4"), nothing := {}) is None
    assert nothing == {}


def test_a_step_is_compiled_with_the_options_of_its_devices(monkeypatch):
    step = make(dense(), Layout())
    assert step.compiler_options == {}
    monkeypatch.setattr("meshwise.runtime.overlap._OPTIONS", {"cpu": {"no_such_option": True}})
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        step.jitted.lower(step.abstract_state, step.abstract_batch).compile(step.compiler_options)


_EXPERTS = "q k v o router expert.gate expert.up expert.down shared.gate shared.up shared.down"

#: Layout -> the weights whose gradients are reduced one after the other, in the order in which they are read.
IN_TURN = {
    "dense": (DENSE, {"data": 2, "fsdp": 2, "zero": 2, "num_microbatches": 2}, "q k v o gate up down"),
    "pending": (DENSE, {"data": 2, "fsdp": 2, "zero": 1, "num_microbatches": 2}, "q k v o gate up down"),
    "exchange": (MIXTURE, {"expert": 2, "fsdp": 2}, _EXPERTS),
    "ragged": (MIXTURE, {"fsdp": 4, "expert_dispatch": "ragged"}, _EXPERTS),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "ragged" else [pytest.mark.slow, pytest.mark.jax]) for n in IN_TURN]
)
def test_gradients_that_are_reduced_in_turn_are_those_of_one_device(name, monkeypatch):
    """As on GPUs; slow because each is a compiled program."""
    text, layout, names = IN_TURN[name]
    turns = []

    def reduced(weights, turn, placement):
        turns.append([name.removeprefix("w_") for name in weights])
        return products.reduced_in_turn(weights, turn, placement)

    monkeypatch.setattr(shardings.Placement, "in_turn", property(lambda self: self.mesh.size > 1))
    monkeypatch.setattr(forward, "reduced_in_turn", reduced)
    layout = Layout(**layout)
    loss, found = loss_and_gradients(make(dense(text), layout))
    monkeypatch.undo()
    expected_loss, expected = alone(dense(text), layout.sequences)
    assert {" ".join(turn) for turn in turns} == {names}
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert worst(found, expected) < 1e-5


@pytest.mark.slow
@pytest.mark.jax
@pytest.mark.parametrize(("remat", "runs"), [("none", [[1, 1, 1], [2]]), ("full", [[2, 1], [2]])])
@pytest.mark.parametrize(("told", "unroll"), [(False, True), (True, True), (True, False)])
def test_layers_written_out_in_one_round_pass_a_turn_on(remat, runs, told, unroll, monkeypatch):
    """Each adds 1 to what comes back of it where `told`: the stream's gradient has them of what is written out."""
    config = {**MODELS["gemma3"], "num_hidden_layers": 8, "sliding_window_pattern": 3}
    model, layout = configured("period", config), Layout(data=2, fsdp=2, zero=2, num_microbatches=2, remat=remat)
    expected_loss, expected = alone(model, layout.sequences)

    def reduced(weights, turn, placement):
        sinks, after = products.reduced_in_turn(weights, turn, placement)
        return sinks, watched.linear(lambda turn: turn, lambda turn: turn + 1)(after) if told else after

    monkeypatch.setattr(shardings.Placement, "in_turn", property(lambda self: self.mesh.size > 1))
    monkeypatch.setattr(forward, "reduced_in_turn", reduced)
    step = make(model, layout)
    assert [[run.count for run in s.runs] for s in step.stack.segments] == runs
    step = replace(step, stack=replace(step.stack, unroll=unroll))
    loss, found = loss_and_gradients(step)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert (worst(found, expected) < 1e-5) == (not told or (remat == "full" and not unroll))


def _waited_for(kind="NVIDIA H100 80GB HBM3", **sizes):
    """Which gathers of a mixture's layer are waited for, by operation, on two hosts of four GPUs."""
    model = dense(MIXTURE)
    (block,) = (b for b in model.train_program() if b.role == "layer")
    layout = Layout(expert=2, fsdp=4)
    devices = np.array([SimpleNamespace(platform="cuda", device_kind=kind, process_index=n // 4) for n in range(8)])
    mesh = SimpleNamespace(devices=devices.reshape(4, 2), axis_names=("fsdp", "expert"), size=8)
    mesh.shape = {"fsdp": 4, "expert": 2}
    placement = shardings.Placement(mesh, LayoutChoices.of(layout).strategy)
    route = next(n for n, op in enumerate(block.ops) if isinstance(op, Route))
    read = {t: placement.at(op, t) for op in block.ops for t in op.inputs if t.kind is Kind.WEIGHT}
    held = {t.name: placement.strategy.stored(t.axes, "weights") for t in read}
    gathers = [(t, at) for t, at in read.items() if placement.spec(at) != placement.spec(held[t.name])]
    known = model.train_program().bind(batch=8, queries=4096) | {"S": 4096} | sizes
    found = early.waited_for(block.ops[: route + 1], gathers, held, placement, sizes=known, width=2)
    return {name: [t.name for t, _ in waiting] for name, waiting in found.items()}


def test_long_gathers_of_experts_weights_are_waited_for_where_they_have_come():
    sizes = {"D": 2048, "N": 32, "H": 128, "E": 16, "top_k": 8}
    assert _waited_for(**sizes, Fe=768) == {"residual.attn": ["w_expert.gate"]}
    assert _waited_for(**sizes, Fe=384) == {"o": ["w_expert.gate"], "residual.attn": ["w_expert.up"]}
    assert _waited_for("NVIDIA B200", **sizes, Fe=384) == {}, "it computes faster, and has links as slow between hosts"
    assert _waited_for(**sizes, Fe=16) == {}, "shorter than the exchange of rows"
    assert _waited_for(**sizes, Fe=8192) == {}, "longer than all that runs before it"


@pytest.mark.parametrize(
    ("text", "layout", "nvidia", "unroll"),
    [
        (DENSE, {"data": 2, "remat": "none"}, True, True),
        (DENSE, {"data": 2, "remat": "matmuls"}, True, True),
        (DENSE, {"data": 2, "remat": "attention"}, True, False),
        (DENSE, {"data": 2, "remat": "full"}, True, False),
        (DENSE.replace("L=3", "L=36"), {"data": 2, "remat": "none"}, True, True),
        (DENSE.replace("L=3", "L=37"), {"data": 2, "remat": "none"}, True, False),
        (DENSE.replace("L=3", "L=4"), {"stage": 2, "num_microbatches": 2, "remat": "none"}, True, False),
        (DENSE, {"data": 2, "remat": "none", "num_microbatches": 2}, True, False),
        (DENSE, {"fsdp": 2, "tensor": 2, "remat": "none"}, True, False),
        (DENSE, {"fsdp": 2, "ulysses": 2, "remat": "none"}, True, False),
        (DENSE, {"fsdp": 2, "context": 2, "remat": "none"}, True, False),
        (MIXTURE, {"data": 2, "remat": "none"}, True, False),
        (DENSE, {"data": 2, "remat": "none"}, False, False),
    ],
)
def test_loops_over_few_layers_are_written_out_where_much_is_kept(text, layout, nvidia, unroll, monkeypatch):
    monkeypatch.setattr(shardings.Placement, "is_nvidia", nvidia)
    assert make(dense(text), Layout(**layout)).stack.unroll is unroll
