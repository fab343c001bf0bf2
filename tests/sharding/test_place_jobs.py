"""Placed blocks as jobs train them, run on devices: with conversions to narrow formats, with adapters, widened weights.

Numbers have one format here: what is proved is that conversions and frozen weights move and add up the right things.
"""

import numpy as np
import pytest
from placed_cases import random_case
from programs import differences
from tiny_models import BLOCKS, LAYERS, MIXTURES

from meshwise.core.tensors import Kind, Program
from meshwise.jobs import narrowed, parse_fine_tuning, parse_precision, with_adapters
from meshwise.sharding.placed import LocalOp, Transfer

SEEDS = 4


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
    wrong = differences(case.run(), case.run_on_one_device())
    assert not wrong, f"{wrong} on {case.mesh}, remat {case.policy}"


@pytest.mark.parametrize("precision", ["fp8-block", "mxfp8"])
@pytest.mark.parametrize("name", LAYERS)
def test_conversions_compute_what_one_device_computes(name, precision):
    for seed in range(SEEDS):
        prove(random_case(name, seed, trained(precision)))


@pytest.mark.parametrize("name", [n for n in BLOCKS if n in LAYERS])
def test_conversions_change_no_number(name):
    for seed in range(SEEDS):
        narrow, wide = (random_case(name, seed, trained(p)).run() for p in ("fp8-block", "bf16"))
        assert not differences(narrow, wide)


@pytest.mark.parametrize("tuning", ["lora:rank=3", "qlora:rank=2", "lora:rank=2,targets=q+down"])
@pytest.mark.parametrize("name", LAYERS)
def test_adapters_compute_what_one_device_computes(name, tuning):
    if name not in ("llama", "gemma-2", *MIXTURES) and "targets" in tuning:
        tuning = f"qlora:rank=2,targets={'mlp' if name.endswith(' mlp') else 'attention'},storage=int4"
    for seed in range(SEEDS):
        case = random_case(name, seed, trained(tuning=tuning))
        prove(case)
        results = case.run()
        adapters = {t.name for t in case.block.weights if not t.frozen}
        assert set(results.gradients) == {f"d_{n}" for n in adapters} or set(results.gradients) == adapters
        frozen = {t.name for t in case.block.weights if t.frozen}
        assert frozen
        assert all(np.array_equal(results.weights[n], case.weights[n]) for n in frozen)
        assert not any(np.array_equal(results.weights[n], case.weights[n]) for n in adapters)


def test_nothing_of_a_frozen_weight_is_reduced():
    for seed in range(SEEDS):
        placed = random_case("llama", seed, trained(tuning="qlora")).placed()
        items = (*placed.forward, *placed.backward, *placed.step)
        reduced = {i.tensor.name for i in items if isinstance(i, Transfer) and i.tensor.kind is Kind.GRADIENT}
        assert all(name.split(".")[-1] in ("a", "b") for name in reduced)
        made = {i.op.output.name for i in items if isinstance(i, LocalOp)}
        assert not any(name.startswith("d_w") and name.split(".")[-1] not in ("a", "b") for name in made)
