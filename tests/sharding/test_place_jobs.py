"""Placed blocks as jobs train them, run on devices: with conversions to narrow formats, with adapters, widened weights.

Numbers have one format here: what is proved is that conversions and frozen weights move and add up the right things.
"""

import numpy as np
import pytest

from meshwise.core.tensors import Kind, Program
from meshwise.jobs import narrowed, parse_fine_tuning, parse_precision, with_adapters
from meshwise.sharding.placed import LocalOp, Transfer
from tests.sharding.placed_cases import random_case
from tests.sharding.programs import differences
from tests.sharding.tiny_models import LAYERS, MIXTURES

#: Of the random meshes and strategies that each block is tried on, those of the default run, and the others.
SEEDS, MORE_SEEDS = range(1), range(1, 4)


def trained(precision="bf16", tuning="full"):
    """As a job with these trains a block."""

    def change(block, sizes):
        program = narrowed(Program("train", (block,), sizes), parse_precision(precision))
        if block.role == "layer":
            program = with_adapters(program, parse_fine_tuning(tuning))
        (changed,) = program.blocks
        return changed, {axis: int(size) for axis, size in program.sizes.items()}

    return change


def prove(case):
    found = case.run()
    wrong = differences(found, case.run_on_one_device())
    assert not wrong, f"{wrong} on {case.mesh}, remat {case.policy}"
    return found


def prove_conversions(name, precision, seeds):
    for seed in seeds:
        found = prove(random_case(name, seed, trained(precision)))
        assert not differences(found, random_case(name, seed, trained("bf16")).run_on_one_device())


def prove_adapters(name, tuning, seeds):
    if name not in ("llama", "gemma-2", *MIXTURES) and "targets" in tuning:
        tuning = f"qlora:rank=2,targets={'mlp' if name.endswith(' mlp') else 'attention'},storage=int4"
    for seed in seeds:
        case = random_case(name, seed, trained(tuning=tuning))
        results = prove(case)
        adapters = {t.name for t in case.block.weights if not t.frozen}
        assert set(results.gradients) == {f"d_{n}" for n in adapters} or set(results.gradients) == adapters
        frozen = {t.name for t in case.block.weights if t.frozen}
        assert frozen
        assert all(np.array_equal(results.weights[n], case.weights[n]) for n in frozen)
        assert not any(np.array_equal(results.weights[n], case.weights[n]) for n in adapters)


PRECISIONS = ("fp8-block", "mxfp8")
TUNINGS = ("lora:rank=3", "qlora:rank=2", "lora:rank=2,targets=q+down")

each_layer = pytest.mark.parametrize("name", LAYERS)


def turn(name, of):
    """One of these for each layer, in turn; the slow proofs try all on all."""
    return of[list(LAYERS).index(name) // 2 % len(of)]


@pytest.mark.parametrize("name", list(LAYERS)[::2])
def test_conversions_compute_what_one_device_computes(name):
    prove_conversions(name, turn(name, PRECISIONS), SEEDS)


@pytest.mark.parametrize("name", list(LAYERS)[1::2])
def test_adapters_compute_what_one_device_computes(name):
    prove_adapters(name, turn(name, TUNINGS), SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@each_layer
def test_conversions_compute_what_one_device_computes_on_more_meshes(name, precision):
    """Slow because each block runs four times: rarer meetings of meshes, strategies and conversions."""
    prove_conversions(name, precision, (*SEEDS, *MORE_SEEDS))


@pytest.mark.slow
@pytest.mark.parametrize("tuning", TUNINGS)
@each_layer
def test_adapters_compute_what_one_device_computes_on_more_meshes(name, tuning):
    """Slow because each block runs four times: rarer meetings of meshes, strategies and adapters."""
    prove_adapters(name, tuning, (*SEEDS, *MORE_SEEDS))


def test_nothing_of_a_frozen_weight_is_reduced():
    for seed in (*SEEDS, *MORE_SEEDS):
        placed = random_case("llama", seed, trained(tuning="qlora")).placed()
        items = (*placed.forward, *placed.backward, *placed.step)
        reduced = {i.tensor.name for i in items if isinstance(i, Transfer) and i.tensor.kind is Kind.GRADIENT}
        assert all(name.split(".")[-1] in ("a", "b") for name in reduced)
        made = {i.op.output.name for i in items if isinstance(i, LocalOp)}
        assert not any(name.startswith("d_w") and name.split(".")[-1] not in ("a", "b") for name in made)
