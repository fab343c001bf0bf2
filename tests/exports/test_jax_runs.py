"""The emitted JAX code runs on 8 devices, and every device holds the blocks that the plan says."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from meshwise.costs.layout_choices import LayoutChoices
from meshwise.exports import hand_over
from meshwise.sharding import Mesh
from meshwise.sharding.layout import MESH_AXES
from tests.exports.plans import TINY, TINY_MIXTURE, make_plan, tiny
from tests.exports.run_jax import run_module

pytestmark = pytest.mark.jax

#: Layouts of 8 chips: each table of storage, each way to split positions and heads, an axis on two network dimensions.
LAYOUTS = {
    "fsdp-tensor": (TINY, {"fsdp": 4, "tensor": 2, "remat": "matmuls", "micro_batch": 2, "num_microbatches": 2}),
    "data-zero-1": (TINY, {"data": 4, "tensor": 2, "zero": 1, "remat": "full"}),
    "data-zero-2": (TINY, {"data": 2, "fsdp": 2, "tensor": 2, "zero": 2, "remat": "full", "remat_layers": 1}),
    "context-ulysses": (TINY, {"context": 2, "ulysses": 2, "data": 2, "fully_sharded": False, "zero": 1}),
    "unsplit-stream": (TINY, {"fsdp": 2, "tensor": 4, "sequence_parallel": False, "remat": "none"}),
    "offloaded": (TINY, {"fsdp": 8, "remat": "none", "offload": ("optimizer",)}),
    "experts": (TINY_MIXTURE, {"expert": 2, "fsdp": 2, "tensor": 2, "remat": "full", "num_microbatches": 3}),
    "whole-experts": (TINY_MIXTURE, {"expert": 4, "tensor": 2, "expert_tensor_parallel": False, "remat": "full"}),
}
CROSSED = (("tensor", (1, 2, 1)), ("fsdp", (2, 1, 2)))


@cache
def plan_of(name):
    if name == "crossed-wires":
        plan = make_plan(tiny(), "v5p:2x2x2", seq_len=32, fsdp=4, tensor=2)
        return replace(plan, layout=plan.layout.replace(wires=CROSSED))
    config, layout = LAYOUTS[name]
    return make_plan(tiny(config), "v5p:2x2x2", seq_len=32, precision="mixed", **layout)


@cache
def ran(name):
    return run_module(hand_over(plan_of(name), "jax").text)


ALL = (*LAYOUTS, "crossed-wires")


def coordinates(plan):
    """Chip -> its place on every mesh axis, from the wires: within a dimension axes nest as in MESH_AXES."""
    wires = dict(plan.layout.wires)
    sizes = [d.size for d in plan.fabric.dimensions]
    places = {}
    for position in product(*(range(n) for n in reversed(sizes))):
        chip, stride = 0, 1
        for p, n in zip(reversed(position), sizes, strict=True):
            chip, stride = chip + p * stride, stride * n
        place = dict.fromkeys(MESH_AXES, 0)
        scale = dict.fromkeys(MESH_AXES, 1)
        for dimension, p in enumerate(reversed(position)):
            for axis in MESH_AXES:
                extent = wires.get(axis, (1,) * len(sizes))[dimension]
                place[axis] += (p % extent) * scale[axis]
                scale[axis] *= extent
                p //= extent  # noqa: PLW2901
        places[chip] = place
    return places


@pytest.mark.parametrize("name", ALL)
def test_the_mesh_lies_as_the_wires_say(name):
    plan, found = plan_of(name), ran(name)
    assert found["axes"] == list(plan.layout.used_axes)
    for chip, place in coordinates(plan).items():
        there = found["mesh"]
        for axis in found["axes"]:
            there = there[place[axis]]
        assert there == chip


def expected_blocks(plan, tensor_axes, part):
    """Block of every chip, from the rule tables and nothing else."""
    program = plan.problem.model.train_program()
    mesh = Mesh.of(plan.layout.sizes)
    sharding = LayoutChoices.of(plan.layout).strategy.stored(tensor_axes, part)
    spans = {}
    for chip, place in coordinates(plan).items():
        block = []
        for axis, split in zip(tensor_axes, sharding.splits, strict=True):
            size, index = int(program.sizes[axis]), 0
            for mesh_axis in split:
                index = index * mesh.size(mesh_axis) + place[mesh_axis]
            each = size // mesh.size(*split)
            block.append([index * each, (index + 1) * each])
        spans[chip] = block
    return spans


@pytest.mark.parametrize("name", ALL)
def test_parameters_gradients_and_moments_are_held_as_planned(name):
    plan, found = plan_of(name), ran(name)
    seen = 0
    for block in plan.problem.model.train_program():
        for weight in block.weights:
            key = f"{block.name}/{weight.name}"
            stacked = block.repeat > 1
            parts = [("weights", found["parameters"][key]), ("gradients", found["gradients"][key])]
            parts += [("optimizer", moment) for moment in found["moments"][key]]
            assert len(parts) == 4
            for part, (shape, blocks) in parts:
                wanted = expected_blocks(plan, weight.axes, part)
                if stacked:
                    wanted = {chip: [[0, block.repeat], *spans] for chip, spans in wanted.items()}
                assert blocks == wanted, (key, part)
                assert shape == [stop - start for start, stop in wanted[0]]
            seen += 1
    assert seen == len(found["parameters"])


@pytest.mark.parametrize("name", ALL)
def test_gradients_over_microbatches_are_those_of_one_device(name):
    found = ran(name)
    sharded, alone = found["loss"]
    assert sharded == pytest.approx(alone, rel=1e-5)
    assert found["error"] < 1e-2  # gradients of one microbatch are bf16


def test_devices_of_a_chip_are_neighbours_and_share_its_sequences():
    plan = make_plan(tiny(), "tpu7x:2x2x1", seq_len=32, precision="mixed", fsdp=2, tensor=2, micro_batch=2)
    found = run_module(hand_over(plan, "jax").text)
    assert found["axes"] == ["fsdp", "tensor"]
    chips = [[0, 1], [2, 3]]
    assert found["mesh"] == [[2 * chips[f // 2][t] + f % 2 for t in range(2)] for f in range(4)]
    assert found["error"] < 1e-2
