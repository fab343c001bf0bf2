"""Options of the compiler are those of the platform, and a step is compiled with them."""

from dataclasses import replace

import jax
import pytest

from meshwise.runtime.overlap import overlap_options
from meshwise.sharding.layout import Layout
from tests.runtime.steps import dense, make


def test_only_platforms_whose_schedulers_are_told_have_options():
    layout = Layout(fsdp=4)
    assert overlap_options("cpu", layout) == {}
    assert all(value is True for value in overlap_options("tpu", layout).values())
    assert overlap_options("cuda", layout) == overlap_options("gpu", layout) != {}


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(fsdp=8), {4}),
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
    assert of_exchanged == ({1} if layout.zero else expected)


def test_a_step_is_compiled_with_the_options_of_its_devices(monkeypatch):
    step = make(dense(), Layout())
    assert step.compiler_options == {}
    monkeypatch.setattr("meshwise.runtime.overlap._OPTIONS", {"cpu": {"no_such_option": True}})
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        step.jitted.lower(step.abstract_state, step.abstract_batch).compile(step.compiler_options)
