"""What a program is blamed for stands beside the numbers that the plan's own bounds are sums of."""

import math

import pytest

import meshwise
from meshwise.compiler.expected import expect
from meshwise.compiler.step_floor import _planned
from meshwise.core.dtypes import DType
from meshwise.costs.explain import work_out

SMALL = "D=1024 F=4096 L=4 N=8 K=8 V=32768"
MIXTURE = "D=256 L=2 N=2 K=2 V=512 E=16 top_k=2 Fe=512"


def plan_of(model, on, layout, **job):
    job = {"batch_tokens": "64Ki", "seq_len": 2048, "tool": "meshwise"} | job
    return meshwise.estimate_train(model, on=on, layout=layout, **job).plans[0]


def planned(plan):
    return _planned(plan.problem, plan.fabric, plan.layout)


@pytest.mark.parametrize(
    ("model", "on", "layout", "tool"),
    [
        (SMALL, "h100:8", "fsdp=8,remat=full", "meshwise"),
        (SMALL, "h100:8", "fsdp=8,remat=full", "megatron"),
        (SMALL, "h100:8", "fsdp=4,tensor=2,remat=none", "meshwise"),
        (SMALL, "v5e:2x4", "fsdp=4,tensor=2,remat=attention", "meshwise"),
        ("llama-3.2-1b", "v5e:2x4", "fsdp=8,remat=full", "maxtext"),
        (MIXTURE, "h100:8", "expert=8,remat=matmuls", "meshwise"),
    ],
)
def test_operations_add_up_to_what_bounds_count(model, on, layout, tool):
    plan = plan_of(model, on, layout, tool=tool)
    w = work_out(plan.problem, plan.fabric, plan.layout)
    for block in w.blocks:
        for when, sums in block.passes.items():
            own = [o for o in block.operations if o.when == when]
            assert math.fsum(o.busy for o in own) == pytest.approx(float(sums.busy), rel=1e-12), (block.name, when)
            found = math.fsum(o.least_bytes for o in own)
            assert found == pytest.approx(float(sums.least_bytes), rel=1e-12), (block.name, when)


def test_attention_is_planned_with_the_products_that_its_kernels_have():
    """Two forward; seven backward, where five would do: nine for seven without recomputation."""
    plan = plan_of(SMALL, "h100:8", "fsdp=8,remat=none", seq_len=8192)
    peak = plan.problem.cluster.chip.peak(DType.BF16)
    product = 2 * 8 * 128 * 8192 * 8193 / 2 * 4  # eight heads of 128, causal pairs of a sequence, four layers
    assert planned(plan)["layer", "attention"] == pytest.approx((2 + 7) * product / peak)


def test_what_stays_in_vmem_is_not_planned_to_move():
    """Of 4 sequences a chip, the stream is 16 MiB and stays in the 128 MiB of a v5e; all is moved on GPUs."""
    norms = {on: planned(plan_of(SMALL, on, "fsdp=8,remat=full"))["layer", "norm.mlp"] for on in ("h100:8", "v5e:2x4")}
    assert norms["h100:8"] > 0
    assert norms["v5e:2x4"] < 0.01 * norms["h100:8"]


def test_copies_of_what_is_kept_stand_where_the_program_has_them():
    """Between layers, in the loop over them, whose scope belongs to no block."""
    plan = plan_of(SMALL, "h100:8", "fsdp=8,remat=attention")
    found, w = planned(plan), work_out(plan.problem, plan.fabric, plan.layout)
    assert not any(operation == "kept" for _, operation in found)
    copied = sum(o.num_bytes for b in w.blocks for o in b.operations if o.name == "kept") * 4
    bandwidth = plan.problem.cluster.chip.hbm_bandwidth
    assert found["", ""] == pytest.approx((w.optimizer_bytes + copied) / bandwidth)
    assert copied > w.optimizer_bytes
    moved = expect(plan.problem, plan.fabric, plan.layout, plan.estimate.memory).moved
    assert moved[""] == pytest.approx(w.optimizer_bytes + copied)
    (layer,) = (b for b in w.blocks if b.name == "layer")
    passes = sum(float(sums.least_bytes) for sums in layer.passes.values())
    assert moved["layer"] == pytest.approx(passes * 4 - copied)
