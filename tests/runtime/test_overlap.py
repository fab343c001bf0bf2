"""Options of the compiler are those of the platform, and a step is compiled with them."""

from dataclasses import replace

import jax
import pytest

from meshwise.runtime import forward, products, shardings
from meshwise.runtime.overlap import overlap_options
from meshwise.sharding.layout import Layout
from tests.runtime.steps import DENSE, alone, dense, loss_and_gradients, make, worst
from tests.runtime.test_ragged import MIXTURE


def test_only_platforms_whose_schedulers_are_told_have_options():
    layout = Layout(fsdp=4)
    assert overlap_options("cpu", layout) == {}
    assert all(value is True for value in overlap_options("tpu", layout).values())
    assert overlap_options("cuda", layout) == overlap_options("gpu", layout) != {}


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

    def reduced(weights, placement):
        turns.append([name.removeprefix("w_") for name in weights])
        return products.reduced_in_turn(weights, placement)

    monkeypatch.setattr(shardings.Placement, "in_turn", property(lambda self: self.mesh.size > 1))
    monkeypatch.setattr(forward, "reduced_in_turn", reduced)
    layout = Layout(**layout)
    loss, found = loss_and_gradients(make(dense(text), layout))
    monkeypatch.undo()
    expected_loss, expected = alone(dense(text), layout.sequences)
    assert {" ".join(turn) for turn in turns} == {names}
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert worst(found, expected) < 1e-5
