"""Ragged experts: their bookkeeping in NumPy, and that they are the experts with a slot for every token."""

from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from meshwise.core.errors import LayoutError
from meshwise.runtime import forward, grouped, ragged, refusals, shardings
from meshwise.runtime.kernels import gpu_grouped, gpu_rows, tpu_grouped
from meshwise.sharding.layout import Layout
from tests.runtime import emulated
from tests.runtime.steps import alone, dense, loss_and_gradients, make, worst

MIXTURE = "D=32 L=2 N=4 K=4 H=8 V=64 E=8 top_k=2 Fe=32 Fs=32"
BIASED = "D=32 L=2 N=4 K=4 H=8 V=64 E=8 top_k=2 Fe=32 bias=yes"


@pytest.fixture
def emulated_exchange(monkeypatch):
    """CPU devices exchange by gathers, and are let through."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated.ragged_all_to_all)
    monkeypatch.setattr(ragged.RaggedExperts, "_assembled", ())
    monkeypatch.setattr(
        "meshwise.runtime.train.check_dispatch", lambda layout, job, _: refusals.check_dispatch(layout, job, {"tpu"})
    )


@pytest.mark.parametrize(
    ("layout", "weights", "gradients"),
    [
        ({"fsdp": 4}, {1, 2}, {1, 2}),
        ({"data": 4, "zero": 2}, {0}, {1, 2}),
        ({"data": 4, "zero": 0}, {0}, {0}),
    ],
)
def test_experts_weights_lie_in_memory_as_they_were_gathered(monkeypatch, layout, weights, gradients):
    """XLA brings what is declared to lie otherwise into that layout: a copy of all experts' weights."""
    seen, product = [], ragged.grouped_product

    def watched(rows, matrices, groups, **how):
        seen.append(groups)
        return product(rows, matrices, groups, **how)

    monkeypatch.setattr(ragged, "grouped_product", watched)
    step = make(dense(MIXTURE), Layout(**layout, expert_dispatch="ragged"))
    step.jitted.trace(step.abstract_state, step.abstract_batch)
    assert {groups.major for groups in seen} == weights
    assert {groups.summed_major for groups in seen} == gradients


def test_rows_go_to_the_devices_of_their_groups_and_come_back(monkeypatch):
    """4 devices with 2 groups each; rows say where they come from and what they are."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated.ragged_all_to_all)
    ways, groups, count, room = 4, 8, 6, 24
    drawn = np.random.default_rng(1)
    group = np.sort(drawn.integers(0, groups, (ways, count)), axis=1)
    rows = np.stack([np.arange(ways * count), group.reshape(-1)], axis=1)

    def walk(group, rows):
        sizes = jax.lax.all_gather(jax.numpy.bincount(group[0], length=groups), "x")
        exchange = ragged.RaggedExchange(sizes, "x", room)
        came = exchange.leave(rows)
        return came, ragged.by_group(exchange.own[None], room)[1], exchange.come_back(came, count)

    mesh = Mesh(np.array(jax.devices()[:ways]), ("x",))
    walked = jax.shard_map(walk, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    came, number, back = jax.jit(walked)(group, rows)
    np.testing.assert_array_equal(back, rows)
    for device in range(ways):
        here = slice(device * room, (device + 1) * room)
        mine = [row for own in (2 * device, 2 * device + 1) for row in rows if row[1] == own]
        np.testing.assert_array_equal(np.asarray(came)[here][: len(mine)], mine)
        np.testing.assert_array_equal(
            np.asarray(number)[here], [row[1] - 2 * device for row in mine] + [2] * (room - len(mine))
        )


@pytest.mark.jax
@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 2**16), st.integers(1, 3), st.integers(1, 4))
def test_rows_are_ordered_by_group_empty_ones_last(seed, stretches, groups):
    sizes = np.random.default_rng(seed).integers(0, 4, (stretches, groups))
    room = int(sizes.sum(axis=1).max()) + 1
    expected = []
    for stretch in range(stretches):
        own = [g for g in range(groups) for _ in range(sizes[stretch, g])]
        expected += own + [groups] * (room - len(own))
    order, group = ragged.by_group(jax.numpy.asarray(sizes), room)
    np.testing.assert_array_equal(group, np.sort(expected))
    np.testing.assert_array_equal(order, np.argsort(expected, kind="stable"))


#: Slow because each is a compiled program.
LAYOUTS = {
    "alone": (BIASED, {"micro_batch": 2}),
    "partial-sums": (BIASED, {"fsdp": 2, "tensor": 2, "sequence_parallel": False, "remat": "none"}),
    "exchange": (MIXTURE, {"expert": 4, "num_microbatches": 2}),
    "exchange-tensor": (MIXTURE, {"expert": 2, "tensor": 2, "fsdp": 2}),
    "exchange-biased": (BIASED, {"expert": 4, "fsdp": 2}),
    "exchange-partial-sums": (BIASED, {"expert": 2, "tensor": 2}),
    "experts-on-tensor": (MIXTURE, {"tensor": 4, "expert_tensor_parallel": False}),
}


@pytest.mark.jax
@pytest.mark.usefixtures("emulated_exchange")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "alone" else pytest.mark.slow) for n in LAYOUTS])
def test_ragged_experts_give_the_gradients_of_experts_with_slots(name):
    proved(name)


@pytest.mark.jax
@pytest.mark.slow
@pytest.mark.usefixtures("emulated_exchange")
def test_so_do_those_whose_weights_are_waited_for_early(monkeypatch):
    """As on GPUs; slow because it is a compiled program."""
    waited = []

    def all_early(ops, gathers, *_, **__):
        experts = [gather for gather in gathers if gather[0].name.startswith("w_expert")]
        waited.append([t.name for t, _ in experts])
        return {"residual.attn": experts[:1], ops[-1].name: experts[1:]}

    monkeypatch.setattr(shardings.Placement, "waits_early", property(lambda self: self.mesh.size > 1))
    monkeypatch.setattr(forward, "waited_for", all_early)
    proved("exchange-biased")
    assert {*map(tuple, waited)} == {("w_expert.gate", "w_expert.up", "w_expert.down")}


@pytest.mark.jax
@pytest.mark.slow
@pytest.mark.usefixtures("emulated_exchange")
@pytest.mark.parametrize("name", ["alone", "exchange-tensor", "exchange-biased", "experts-on-tensor"])
def test_so_do_those_that_a_gpu_multiplies(name, monkeypatch):
    """Slow because kernels are interpreted; proves that what is gathered first is multiplied as it lies in memory."""
    own = {
        what: partial(getattr(gpu_grouped, what), interpret=True) for what in ("multiply", "multiply_rows", "unwritten")
    }
    for module in (ragged, grouped):
        monkeypatch.setattr(module, "kernel_for", lambda platform: SimpleNamespace(**own))  # noqa: ARG005
    rows = {what: partial(getattr(gpu_rows, what), interpret=True) for what in ("apply", "gradients", "sums")}
    monkeypatch.setattr(grouped, "gpu_rows", lambda: SimpleNamespace(**rows))
    proved(name)


@pytest.mark.jax
@pytest.mark.slow
@pytest.mark.usefixtures("emulated_exchange")
@pytest.mark.parametrize("name", ["alone", "exchange-tensor", "exchange-biased"])
def test_so_do_those_whose_gradients_a_tpu_sums(name, monkeypatch):
    """Slow because the kernel is interpreted; proves that rows which no device was sent count for nothing."""
    own = SimpleNamespace(multiply_rows=partial(tpu_grouped.multiply_rows, interpret=True))
    monkeypatch.setattr(grouped, "_kernel_of_sums", lambda platform: own)  # noqa: ARG005
    proved(name)


def proved(name):
    """Losses and gradients are those of one device whose experts have a slot for every token."""
    text, choices = LAYOUTS[name]
    layout = Layout(**choices, expert_dispatch="ragged")
    expected_loss, expected = alone(dense(text), layout.sequences)
    loss, found = loss_and_gradients(make(dense(text), layout))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert worst(found, expected) < 1e-5


def test_a_platform_without_the_exchange_is_named():
    with pytest.raises(LayoutError, match=r"expert=4 needs the ragged AllToAll, which this platform \(cpu\) lacks"):
        make(dense(MIXTURE), Layout(expert=4, expert_dispatch="ragged"))


def test_capacity_and_ragged_contradict_each_other():
    with pytest.raises(LayoutError, match="drops no tokens, and capacity_factor=1 does"):
        make(dense(MIXTURE), Layout(expert_dispatch="ragged"), capacity_factor=1.0)


def test_experts_on_two_axes_are_refused():
    with pytest.raises(LayoutError, match="expert=2 and tensor=2; write expert_tensor_parallel=on"):
        make(dense(MIXTURE), Layout(expert=2, tensor=2, expert_tensor_parallel=False, expert_dispatch="ragged"))
