"""What is in the host's memory: the same losses and states, to the last bit, as where all is on the chip."""

import platform
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from meshwise.runtime.params import HOST
from meshwise.sharding.layout import Layout
from tests.runtime.steps import batch_of, dense, make, state_of

MODEL = "D=32 F=64 L=4 N=8 K=4 H=8 V=60"
LAYOUTS = {
    "data": Layout(data=2, fsdp=2, zero=0, micro_batch=3),  # gradients are divided by no power of two
    "zero": Layout(data=2, tensor=2, zero=1, num_microbatches=2),
    "fsdp": Layout(fsdp=4, remat="full", remat_layers=3),  # a stack of layers, and one that is none
    "pipeline": Layout(stage=2, data=2, zero=2, num_microbatches=2, schedule="1f1b"),
}
STEPS = 2

#: Else a compiler joins products and sums, and rounds once for both, in some of the places where it fuses them.
APART = {"xla_cpu_max_isa": "AVX"}


def kinds(tree):
    return {a.sharding.memory_kind for a in jax.tree.leaves(tree)}


@cache
def trained(name, offload=()):
    """Losses of a few steps, the state after them, and the program."""
    given = {"optimizer": "lion"} if name == "zero" else {}
    step = make(dense(MODEL), replace(LAYOUTS[name], offload=offload), precision="mixed", **given)
    traced = step.jitted.trace(step.abstract_state, step.abstract_batch)
    run, state, losses = traced.lower().compile(APART), state_of(step), []
    for number in range(STEPS):
        state, metrics = run(state, batch_of(step, number))
        losses.append(float(metrics["loss"]))
    return losses, state, str(traced.jaxpr)


apart = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="products and sums are joined there")


@pytest.mark.jax
@apart
@pytest.mark.parametrize("name", LAYOUTS)
def test_an_optimizer_state_in_the_hosts_memory_is_updated_to_the_same_bits(name):
    losses, state, _ = trained(name)
    losses_away, away, _ = trained(name, ("optimizer",))
    assert losses_away == losses
    jax.tree.map(np.testing.assert_array_equal, away, state)
    assert kinds((away["master"], away["moments"])) == {HOST}
    assert HOST not in kinds((away["weights"], away["step"], state))


@pytest.mark.jax
@apart
@pytest.mark.parametrize("name", ["zero", "fsdp"])
def test_activations_come_back_from_the_hosts_memory_as_they_went(name):
    losses, state, program = trained(name)
    losses_away, away, program_away = trained(name, ("activations",))
    assert losses_away == losses
    jax.tree.map(np.testing.assert_array_equal, away, state)
    assert "<host>" in program_away
    assert "<host>" not in program
