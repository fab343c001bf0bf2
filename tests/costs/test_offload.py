"""What lives in the host's memory: bytes on both sides, what compute hides of the streams, and that terms add up."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from meshwise.core.errors import LayoutError
from meshwise.costs.calibration import IDENTITY
from meshwise.costs.estimate import estimate_training, evaluate_layout, layout_candidate, layout_wires
from meshwise.costs.evaluate import evaluate, offloaded
from meshwise.costs.explain import work_out
from meshwise.costs.fabric import Fabric
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.sharding.layout import OFFLOADABLE, Layout
from tests.costs.corpus import assume, every_case, one_of
from tests.costs.small_problems import tiny
from tests.each import each

SUBSETS = [s for n in range(4) for s in itertools.combinations(OFFLOADABLE, n)]
offloads = one_of(*SUBSETS)

D, F, NH, KH, V, L, T = 4096, 14336, 4096, 1024, 128256, 32, 4096  # LLaMA-3-8B
LAYER = 2 * D * NH + 2 * D * KH + 3 * D * F + 2 * D
PARAMETERS = L * LAYER + 2 * V * D + D
PCIE = 64e9


def costed(**given):
    return estimate_training(*stated(**given))


def worked_out(**given):
    return work_out(*stated(**given))


def stated(*, sequences=8, precision="bf16", on="h100:8", model="llama-3-8b", **layout):
    cluster = parse_cluster(on)
    job = TrainingJob(batch_tokens=str(sequences * T), seq_len=str(T), precision=precision)
    problem = TrainingProblem(load_model(model), job, cluster, IDENTITY)
    wires = tuple((a, (n,)) for a, n in layout.items() if a in ("data", "fsdp", "tensor", "stage", "context"))
    return problem, Fabric.of(cluster), Layout(**layout, wires=wires)


def test_optimizer_by_hand():
    """Adam's two moments in fp32 and an fp32 master copy, over eight GPUs: two layers' worth stays."""
    kept, away = (costed(fsdp=8, remat="full", precision="mixed", offload=o) for o in ((), ("optimizer",)))
    assert kept.host_memory == {}
    assert kept.terms["offload"] == 0
    assert away.host_memory == {
        "master_copies": PARAMETERS * 4 / 8,
        "optimizer": PARAMETERS * 8 / 8,
        "total": PARAMETERS * 12 / 8,
    }
    assert away.memory["optimizer"] == 2 * LAYER * 8 / 8
    assert away.memory["master_copies"] == 2 * LAYER * 4 / 8
    same = [name for name in kept.memory if name not in ("optimizer", "master_copies", "total")]
    assert [away.memory[n] for n in same] == [kept.memory[n] for n in same]
    # In and out at once, behind the backward pass of 31 of 32 layers.
    stream = PARAMETERS * 12 / 8 / PCIE
    cover = (kept.terms["backward"] + kept.terms["recompute"]) * 31 / 32  # of which the head's is no part
    assert away.terms["offload"] >= max(0.0, stream - cover)
    assert away.terms["offload"] + away.hidden["offload"] == pytest.approx(stream, rel=1e-12)
    assert away.resources["host"] == pytest.approx(stream, rel=1e-12)
    assert away.step_time.upper == pytest.approx(kept.step_time.upper + 2 * stream, rel=1e-12)


def test_our_own_programs_hide_no_stream_of_an_update():
    """They update when all gradients are made, and one layer's state is in before it goes out."""
    problem, fabric, layout = stated(fsdp=8, remat="full", precision="mixed", offload=("optimizer",))
    own = replace(problem, calibration=replace(IDENTITY, compiled=True), in_step=True)
    assert own.own_program
    found = estimate_training(own, fabric, layout)
    assert found.terms["offload"] == pytest.approx(2 * PARAMETERS * 12 / 8 / PCIE, rel=1e-12)
    assert found.hidden["offload"] == 0
    assert (
        found.resources["host"]
        == costed(fsdp=8, remat="full", precision="mixed", offload=("optimizer",)).resources["host"]
    )
    assert found.step_time.lower <= found.step_time.expected <= found.step_time.upper


def test_activations_by_hand():
    """A layer that keeps all sends out what it keeps while it computes forward, and takes it back during backward."""
    kept, away = (costed(fsdp=8, remat="none", offload=o) for o in ((), ("activations",)))
    elements = 4 * D + 2 * NH + 2 * KH + 3 * F
    one = elements * T * 2  # one sequence a GPU, bf16
    assert kept.memory["activations"] == L * one
    assert away.memory["activations"] == 2 * one
    assert away.host_memory == {"activations": L * one, "total": L * one}
    assert away.resources["host"] == pytest.approx(L * one / PCIE, rel=1e-12)
    assert away.terms["offload"] + away.hidden["offload"] == pytest.approx(2 * L * one / PCIE, rel=1e-12)
    # PCIe is slower than a layer of this model in either pass: what compute does not cover shows.
    layer = next(b for b in worked_out(fsdp=8, remat="none").blocks if b.name == "layer")
    compute = layer.seconds("forward") + layer.seconds("backward")
    assert away.terms["offload"] == pytest.approx(2 * L * one / PCIE - compute, rel=1e-12)


def test_activations_of_some_layers_by_hand():
    """The stream of every fourth layer has the compute of four layers to itself."""
    kept, away = (costed(fsdp=8, remat="none", **o) for o in ({}, {"offload": ("activations",), "offload_layers": 8}))
    one = kept.memory["activations"] / L
    assert away.host_memory["activations"] == 8 * one
    assert away.memory["activations"] == (24 + 2) * one
    layer = next(b for b in worked_out(fsdp=8, remat="none").blocks if b.name == "layer")
    forward, backward = (layer.seconds(name) / L for name in ("forward", "backward"))
    stream = one / 4 / PCIE
    assert away.terms["offload"] == pytest.approx(
        L * (max(0.0, stream - forward) + max(0.0, stream - backward)), rel=1e-12, abs=1e-15
    )
    assert away.terms["offload"] + away.hidden["offload"] == pytest.approx(2 * L * stream, rel=1e-12)
    with pytest.raises(LayoutError, match="offload_layers=33 is more than the 32 layers of llama-3-8b"):
        costed(fsdp=8, remat="none", offload=("activations",), offload_layers=33)


def test_parameters_by_hand():
    """Each pass of each microbatch takes the chip's shard of a layer's weights in; new ones go out once a step."""
    kept, away = (
        costed(fsdp=8, remat="none", offload=o, sequences=16, num_microbatches=2) for o in ((), ("parameters",))
    )
    shard = LAYER * 2 / 8
    assert away.host_memory == {"parameters": L * shard, "total": L * shard}
    assert away.memory["parameters"] == pytest.approx(kept.memory["parameters"] - (L - 2) * shard, rel=1e-12)
    assert away.resources["host"] == pytest.approx(2 * 2 * L * shard / PCIE, rel=1e-12)
    assert away.terms["offload"] == 0  # far less than the compute of a layer
    assert away.hidden["offload"] == pytest.approx((2 * 2 + 1) * L * shard / PCIE, rel=1e-12)


def test_chip_to_chip_hides_what_pcie_exposes():
    """The same die with 225 GB/s of NVLink-C2C, half a Grace's, in place of 64 GB/s of PCIe."""
    away = {"model": "llama-3-70b", "remat": "attention", "offload": ("activations",), "micro_batch": 1}
    pcie = costed(on="b200:8", fsdp=8, sequences=8, **away)
    c2c = costed(on="gb200-nvl72:72", fsdp=72, sequences=72, **away)
    assert pcie.terms["offload"] > 0
    assert c2c.terms["offload"] == 0
    assert c2c.resources["host"] == pytest.approx(pcie.resources["host"] * 64 / 225, rel=1e-12)


def llama_70b_on_64_gb200(**layout):
    """NVIDIA's Megatron Bridge row: fp8, FSDP over 64, 256 sequences of 8,192 tokens, two at a time, v26.04.01."""
    cluster = parse_cluster("gb200-nvl72:64")
    job = TrainingJob(batch_tokens=str(256 * 8192), seq_len="8192", precision="fp8")
    problem = TrainingProblem(load_model("llama-3-70b"), job, cluster, IDENTITY)
    fabric = Fabric.of(cluster)
    return estimate_training(
        problem, fabric, Layout(fsdp=64, micro_batch=2, num_microbatches=2, wires=(("fsdp", fabric.sizes),), **layout)
    )


def test_llama_70b_on_gb200_has_activations_of_40_layers_on_the_host():
    """Without it does not fit; with it nothing is recomputed but elementwise work, and NVLink-C2C hides the streams."""
    away = {"offload": ("activations",)}
    plain = llama_70b_on_64_gb200(remat="matmuls")
    half = llama_70b_on_64_gb200(remat="matmuls", **away, offload_layers=40)
    assert (plain.fits, half.fits) == (False, True)
    assert half.step_time.expected == plain.step_time.expected
    assert half.terms["offload"] == 0
    assert half.host_memory["total"] == plain.memory["activations"] / 2 < half.host_capacity
    assert half.step_time.expected < 0.9 * llama_70b_on_64_gb200(remat="full").step_time.expected
    # All layers with all that they keep: the host is too small, and the link too slow.
    every = llama_70b_on_64_gb200(remat="none", **away)
    assert every.memory["total"] < every.hbm_capacity
    assert every.host_memory["total"] > every.host_capacity
    assert not every.fits
    assert every.terms["offload"] > 0.2 * every.step_time.expected


def test_a_host_that_is_not_known_is_refused_by_name():
    words = r"offload=optimizer\+activations needs the host's memory, which is not known for h800-sxm"
    with pytest.raises(LayoutError, match=words):
        costed(on="h800:8", fsdp=8, offload=("optimizer", "activations"))


@every_case(offloads)
def test_terms_and_classes_add_up(drawn, offload):
    problem, fabric, layout = drawn
    assume(problem.cluster.chip.host_memory)
    e = estimate_training(problem, fabric, layout.replace(offload=offload))
    assert sum(e.terms.values()) == e.step_time.expected
    assert e.step_time.lower <= e.step_time.expected * (1 + 1e-9)
    assert e.step_time.expected <= e.step_time.upper * (1 + 1e-9)
    assert sum(v for k, v in e.memory.items() if k != "total") == pytest.approx(e.memory["total"], rel=1e-15)
    assert sum(v for k, v in e.host_memory.items() if k != "total") == pytest.approx(
        e.host_memory.get("total", 0.0), rel=1e-15
    )


@every_case(offloads, one_of(*OFFLOADABLE))
def test_more_on_the_host_never_needs_more_of_the_chip_nor_less_time(drawn, offload, more):
    problem, fabric, layout = drawn
    assume(problem.cluster.chip.host_memory)
    fewer, some = (
        estimate_training(problem, fabric, layout.replace(offload=o))
        for o in (tuple(p for p in offload if p != more), (*(p for p in offload if p != more), more))
    )
    assert some.memory["total"] <= fewer.memory["total"]
    assert some.step_time.expected >= fewer.step_time.expected
    assert some.step_time.upper >= fewer.step_time.upper
    assert some.step_time.lower >= fewer.step_time.lower
    assert some.host_memory["total"] >= fewer.host_memory.get("total", 0.0)


@every_case(offloads, count=50)
def test_a_faster_link_never_takes_longer(drawn, offload):
    problem, fabric, layout = drawn
    assume(problem.cluster.chip.host_memory)
    layout, chip = layout.replace(offload=offload), problem.cluster.chip
    times = []
    for factor in (0.5, 1.0, 4.0, 1e6):
        cluster = problem.cluster.replace(chip=chip.replace(host_link_bandwidth=chip.host_link_bandwidth * factor))
        faster = TrainingProblem(problem.model, problem.job, cluster, problem.calibration)
        times.append(estimate_training(faster, fabric, layout).step_time.expected)
    assert times == sorted(times, reverse=True)
    plain = estimate_training(problem, fabric, layout.replace(offload=())).step_time.expected
    assert times[-1] == pytest.approx(plain, rel=1e-3)


@every_case(offloads, count=50)
def test_trying_parts_afterwards_is_what_pricing_them_says(drawn, offload):
    problem, fabric, layout = drawn
    assume(problem.cluster.chip.host_memory)
    plain = evaluate_layout(problem, fabric, layout)
    if offload:
        at_once = evaluate_layout(problem, fabric, layout.replace(offload=offload))
        assert offloaded(plain, offload).step == at_once.step
        assert offloaded(plain, offload).memory == at_once.memory
        assert offloaded(plain, offload).host_memory == at_once.host_memory
    assert offloaded(plain, ()).step.expected == plain.step.expected


def test_arrays_are_what_each_of_their_entries_is():
    cluster = parse_cluster("h100:8")
    layout = Layout(fsdp=4, tensor=2, num_microbatches=2, remat="none", offload=("optimizer", "activations"))
    layout = layout.replace(wires=(("tensor", (2,)), ("fsdp", (4,))))
    job = TrainingJob(batch_tokens=str(layout.sequences * T), seq_len=str(T))
    problem, fabric = TrainingProblem(tiny(layers=8), job, cluster, IDENTITY), Fabric.of(cluster)
    structure, candidate = layout_candidate(problem.model, layout)
    micro_batch = np.array([1.0, 2.0, 8.0])
    sizes = {n: np.full(3, getattr(candidate, n)) for n in ("data", "fsdp", "tensor", "stage", "num_microbatches")}
    many = type(candidate)(**sizes, context=1.0, micro_batch=micro_batch)
    costs = evaluate(problem, structure, many, layout_wires(problem, fabric, layout))
    for i, size in enumerate(micro_batch):
        one = evaluate_layout(problem, fabric, layout.replace(micro_batch=int(size)))
        assert costs.step.expected[i] == pytest.approx(one.step.expected, rel=1e-14)
        assert costs.step.terms["offload"][i] == pytest.approx(one.step.terms["offload"], rel=1e-12)
        assert costs.memory["total"][i] == pytest.approx(one.memory["total"], rel=1e-14)
        for name, value in one.host_memory.items():
            assert np.broadcast_to(costs.host_memory[name], 3)[i] == pytest.approx(value, rel=1e-14)


def test_pipelines_fill_and_drain_with_their_streams():
    """1F1B: stages - 1 microbatches more, each with what its streams expose."""
    alone = costed(fsdp=8, remat="none", offload=("activations",), num_microbatches=4, sequences=32)
    staged = costed(fsdp=4, stage=2, remat="none", offload=("activations",), num_microbatches=8, sequences=32)
    assert staged.terms["offload"] == pytest.approx(alone.terms["offload"] / 4 / 2 * (8 + 1), rel=1e-12)
    assert math.isclose(staged.host_memory["activations"], alone.host_memory["activations"])  # two in flight of half


@each(
    "schedule, virtual_stages",
    [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 1), ("dualpipe", 1), ("dualpipe-v", 1)],
)
@each("offload", SUBSETS)
def test_every_schedule_streams(schedule, virtual_stages, offload):
    sizes = {"fsdp": 4, "stage": 2, "num_microbatches": 8, "sequences": 32, "remat": "none"}
    at_home, away = (
        costed(**sizes, schedule=schedule, virtual_stages=virtual_stages, offload=o) for o in ((), offload)
    )
    assert sum(away.terms.values()) == away.step_time.expected
    assert away.step_time.lower <= away.step_time.expected <= away.step_time.upper
    assert away.step_time.expected >= at_home.step_time.expected
    assert away.memory["total"] <= at_home.memory["total"]
    if "activations" in offload:
        assert away.host_memory["activations"] == pytest.approx(at_home.memory["activations"], rel=1e-12)
        # Every microbatch of every layer of the device goes out and comes back; fills and drains add to it.
        assert away.resources["host"] * PCIE >= 8 * 16 * (4 * D + 2 * NH + 2 * KH + 3 * F) * T * 2 * (1 - 1e-12)
