"""The workings add up to the estimate, for anything that can be estimated."""

import math
import re
from dataclasses import replace

import pytest

import meshwise
from meshwise.costs.calibration import CALIBRATIONS, IDENTITY
from meshwise.costs.estimate import estimate_training, evaluate_layout
from meshwise.costs.explain import collectives_of, paddings, work_out
from meshwise.costs.fabric import Fabric
from meshwise.costs.memory import MEMORY_CLASSES
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.step import Ledger
from meshwise.costs.traffic import Pass
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.sharding import parse_tensor
from meshwise.sharding.layout import Layout
from tests.costs.corpus import every_case
from tests.costs.small_problems import Case, tiny

EXACTLY = {"rel": 1e-9, "abs": 1e-15}
COMPUTE = ("forward", "backward", "recompute")
NETWORKS = ("tensor", "context", "fsdp", "data")


def case(on="v5p:4x4x4", model=None, calibration=IDENTITY, seq_len=4096, **layout) -> Case:
    """A layout along the dimensions of a network: `tensor=(1, 1, 4)` gives the extents."""
    wires = tuple((axis, value) for axis, value in layout.items() if isinstance(value, tuple))
    sizes = {axis: math.prod(extents) for axis, extents in wires}
    choices = {name: value for name, value in layout.items() if not isinstance(value, tuple)}
    whole = Layout(**sizes, **choices, wires=wires)
    job = TrainingJob(batch_tokens=str(whole.sequences * seq_len), seq_len=str(seq_len), precision="book")
    cluster = parse_cluster(on)
    return Case(TrainingProblem(model or tiny(), job, cluster, calibration), Fabric.of(cluster), whole)


PIPELINED = {
    "fsdp": (2, 1, 1), "data": (2, 1, 1), "stage": (1, 4, 1), "tensor": (1, 1, 4),
    "zero": 1, "num_microbatches": 8, "remat": "attention",
}  # fmt: skip


@every_case()
def test_terms_are_the_sums_of_their_workings(drawn):
    w, estimate = work_out(*drawn), estimate_training(*drawn)
    for term in COMPUTE:
        assert sum(b.seconds(term) for b in w.blocks) == pytest.approx(estimate.terms[term], **EXACTLY)
        one_by_one = (
            b.copies * b.num_microbatches * o.seconds for b in w.blocks for o in b.operations if o.when == term
        )
        assert sum(one_by_one) == pytest.approx(estimate.terms[term], **EXACTLY)
    for term in NETWORKS:
        rows = [c for c in w.collectives if c.term == term]
        assert sum(c.exposed for c in rows) == pytest.approx(estimate.terms[term], **EXACTLY)
        assert sum(c.hidden for c in rows) == pytest.approx(estimate.hidden[term], **EXACTLY)
    waits = w.pipeline.schedule.idle(w.pipeline.shape, w.times)
    assert waits == pytest.approx(estimate.terms["pipeline_bubble"], **EXACTLY)
    late, compiled = drawn.problem.calibration.late_sends, drawn.problem.calibration.compiled
    works = w.pipeline.schedule.works(w.pipeline.shape, w.times)
    assert w.pipeline.waited_sends(late, works, w.send, in_step=compiled) == pytest.approx(
        estimate.terms["pipeline_send"], **EXACTLY
    )
    rate = drawn.problem.cluster.chip.hbm_bandwidth * drawn.problem.calibration.hbm_efficiency
    assert w.optimizer_bytes / rate == pytest.approx(estimate.terms["optimizer"], **EXACTLY)


@every_case()
def test_memory_classes_are_made_of_their_holdings(drawn):
    w, estimate = work_out(*drawn), estimate_training(*drawn)
    by_name = {c.name: c.total for c in w.memory}
    by_name["reserve"] = w.reserve_share * estimate.hbm_capacity
    for name in MEMORY_CLASSES:
        assert by_name.get(name, 0.0) == pytest.approx(estimate.memory[name], **EXACTLY), name


@every_case()
def test_each_collective_takes_its_latency_or_its_bytes_on_the_slowest_leg(drawn):
    links, alone = drawn.problem.calibration.links, drawn.problem.calibration.sums_alone
    for c in collectives_of(*drawn):
        critical = c.purpose == "activations" or (alone and c.purpose == "gradients")
        assert c.path.size == math.prod(drawn.layout.sizes[a] for a in c.mesh_axes) > 1
        on_the_wire = c.num_bytes * c.path.slowest.seconds_per_byte
        seconds = links.seconds(c.latency - links.startup, on_the_wire, True, c.fill)
        assert c.seconds == pytest.approx(seconds, **EXACTLY)
        assert c.latency <= c.seconds * (1 + 1e-12)
        assert 0 <= c.exposed_share <= 1
        assert c.exposed + c.hidden == pytest.approx(c.seconds_per_step, **EXACTLY)
        assert c.rule == (4 if c.when is Pass.STEP else 2 if critical else 3)


@every_case(count=50)
def test_the_notation_of_workings_reads_back(drawn):
    w = work_out(*drawn)
    for c in w.collectives:
        for move in c.moves:
            before, after = (parse_tensor(part.replace(".", "_")) for part in move.split(" -> "))
            assert before.axes == after.axes
            assert before.sharding != after.sharding
    signatures = {o.signature for b in w.blocks for o in b.operations}
    assert any(" * " in s for s in signatures)
    for signature in signatures:
        tensors = [part for side in signature.split(" -> ") for part in re.split(r" [*+] |(?<=\]), ", side)]
        assert len(tensors) >= 2
        for text in tensors:
            assert str(parse_tensor(text.replace(".", "_"))) == text.replace(".", "_")


@every_case(count=50)
def test_keeping_a_ledger_changes_nothing(drawn):
    assert evaluate_layout(*drawn, Ledger()) == evaluate_layout(*drawn)


def test_sums_over_a_whole_slice_are_explained_as_they_run():
    """In our own programs as AllReduces, in the bound, too; on other slices of two dimensions as ReduceScatters."""
    alone = replace(IDENTITY, compiled=True, sums_alone=True)
    slices = (("v5e:4x4", "all-reduce"), ("v5e:2x8", "reduce-scatter"), ("v5p:2x2x4", "all-reduce"))
    for on, kind in slices:
        extents = tuple(map(int, on.partition(":")[2].split("x")))
        drawn = case(on, calibration=alone, fsdp=extents, remat="none")
        drawn = drawn._replace(problem=replace(drawn.problem, in_step=True))
        w, estimate = work_out(*drawn), estimate_training(*drawn)
        assert {c.kind.value for c in w.collectives if c.purpose == "gradients"} == {kind}
        assert sum(c.exposed for c in w.collectives) == pytest.approx(estimate.terms["fsdp"], **EXACTLY)
        bounds = sum(c.bound * c.count_per_pass * c.copies * (c.runs + c.waited_for) for c in w.collectives)
        assert bounds == pytest.approx(estimate.resources["fsdp"], **EXACTLY)


def test_operations_add_up_to_their_pass():
    w = work_out(*case(**PIPELINED))
    for block in w.blocks:
        for name, total in block.passes.items():
            rows = [o for o in block.operations if o.when == name]
            assert sum(o.flops for o in rows) == pytest.approx(total.flops, **EXACTLY)
            assert sum(o.compute + o.memory for o in rows) == pytest.approx(total.serial_seconds, **EXACTLY)
    layer = next(b for b in w.blocks if b.name == "layer")
    gate = next(o for o in layer.operations if (o.name, o.when) == ("gate", "forward"))
    assert gate.signature == "x.mlp[B_(fsdp,data), T, D] * w_gate[D, F_tensor] -> gate[B_(fsdp,data), T, F_tensor]"
    assert gate.flops == 2 * 4096 * 256 * 512 / 4
    assert gate.num_bytes == 2 * (4096 * 256 + 256 * 128 + 4096 * 128)
    assert gate.binds == "hbm"
    assert (layer.copies, layer.num_microbatches) == (1, 8)


def test_rows_of_a_small_layout_by_hand():
    """Llama's layer, 4-way tensor parallel with sequences split, FSDP over 16: the book's collectives."""
    rows = collectives_of(*case(fsdp=(4, 4, 1), tensor=(1, 1, 4)))
    layer = [c for c in rows if c.block == "layer"]
    activations = 2 * 4096 * 256  # bf16[1, T, D]
    weights = (
        2 * (256 * (256 + 128 + 128) + 256 * 256 + 3 * 256 * 512) / 4 + 2 * 2 * 256
    )  # of one layer, a quarter of them
    found = {(c.when, c.kind, c.mesh_axes): (c.num_bytes, c.count_per_step) for c in layer}
    assert found[Pass.FORWARD, "all-gather", ("tensor",)] == (activations, 4 * 2)  # into attention and the MLP
    assert found[Pass.FORWARD, "reduce-scatter", ("tensor",)] == (activations, 4 * 2)
    assert found[Pass.FORWARD, "all-gather", ("fsdp",)] == (weights, 4)
    assert found[Pass.BACKWARD, "all-gather", ("fsdp",)] == (weights, 4)
    assert found[Pass.BACKWARD, "reduce-scatter", ("fsdp",)] == (weights, 4)
    gathered = next(c for c in layer if c.mesh_axes == ("fsdp",) and c.when is Pass.FORWARD)
    assert "w_gate[D_fsdp, F_tensor] -> w_gate[D, F_tensor]" in gathered.moves
    assert [(lane.name, lane.extent, lane.links) for lane in gathered.path.slowest.lanes] == [("x", 4, 2), ("y", 4, 2)]


def test_collective_matmuls_hide_behind_their_block_on_tpus():
    sizes = {"fsdp": (4, 4, 1), "tensor": (1, 1, 4)}
    exposed = collectives_of(*case(**sizes))
    hidden = collectives_of(*case(**sizes, calibration=CALIBRATIONS["tpu"]))
    layer = [(a, b) for a, b in zip(exposed, hidden, strict=True) if a.block == "layer" and a.mesh_axes == ("tensor",)]
    assert layer
    for before, after in layer:
        if after.when is not Pass.STEP:
            assert (before.cover, before.exposed_share) == (0, 1)
            assert after.cover > 0
            assert after.exposed_share < 1


def test_levels_of_switches_are_legs():
    rows = collectives_of(*case(on="h100:64", tensor=(4, 2), fsdp=(2, 4)))
    legs = next(c for c in rows if c.mesh_axes == ("tensor",) and c.kind == "all-gather").path.legs
    assert [(leg.extent, leg.below) for leg in legs] == [(4, 1), (2, 4)]
    assert legs[0].name == "nvlink"
    assert legs[0].seconds_per_byte == pytest.approx(3 / 4 / legs[0].bandwidth_one_way)
    assert legs[1].seconds_per_byte == pytest.approx(1 / 2 / (4 * legs[1].bandwidth_one_way))


def test_kept_activations_add_up_to_what_a_layer_keeps():
    w = work_out(*case(**PIPELINED))
    activations = next(c for c in w.memory if c.name == "activations")
    layer = next(h for h in activations.holdings if h.block == "layer")
    assert sum(size for _, size in w.kept["layer"]) == layer.num_bytes
    assert layer.copies == 1 * 4  # of four layers one on each stage, four microbatches in flight


def test_rows_of_experts_are_kept_with_the_space_that_they_have():
    """A compiled program for GPUs drops none."""
    plan = meshwise.estimate_train(
        "D=256 L=2 N=2 K=2 V=512 E=16 top_k=2 Fe=512", on="h100:8", batch_tokens="64Ki", seq_len=4096, tool="meshwise",
        layout="expert=8,remat=matmuls",
    ).plans[0]  # fmt: skip
    w = work_out(plan.problem, Fabric.of(plan.problem.cluster), plan.layout)
    (layer,) = (h for c in w.memory if c.name == "activations" for h in c.holdings if h.block == "layer")
    assert sum(size for _, size in w.kept["layer"]) == layer.num_bytes
    assert layer.num_bytes > 2 * 8 * 2 * 4096 * 512 * 2  # gate and up, of all tokens
    # They are copied into stacks and out of them whole: the program of four layers of gpt-oss-20b with
    # `expert=8,remat=none` moves 105 GB so, 103 by this count; rows expected on average are 19.
    (block,) = (b for b in w.blocks if b.name == "layer")
    copied = {o.when: o.num_bytes for o in block.operations if o.name == "kept"}
    assert copied == {"forward": 2 * layer.num_bytes, "backward": 2 * layer.num_bytes}
    for when, num_bytes in copied.items():
        others = sum(o.num_bytes for o in block.operations if o.when == when and o.name != "kept")
        assert block.passes[when].least_bytes == pytest.approx(others + num_bytes, rel=1e-9)


def test_an_axis_that_does_not_divide_is_named():
    """The book's 8,960 chips: D = 8,192 over 2,240 is padded to 8,960."""
    shape = {"fsdp": (16, 20, 7), "tensor": (1, 1, 4)}
    found = paddings(*case("v5p:16x20x28", load_model("llama-3-70b"), **shape)[::2])
    assert [p.axis for p in found] == ["D"]
    assert (found[0].size, found[0].ways, found[0].local, found[0].padded) == (8192, 2240, 4, 8960)
    assert found[0].waste == pytest.approx(8960 / 8192 - 1)
    assert not found[0].repeated
    assert {"w_q", "w_gate", "w_embed"} < set(found[0].tensors)


def test_key_value_heads_fewer_than_tensor_ways_are_named():
    found = paddings(*case("v5p:4x4x4", tiny(kv_heads=2), fsdp=(4, 4, 1), tensor=(1, 1, 4))[::2])
    (heads,) = [p for p in found if p.repeated]
    assert (heads.axis, heads.size, heads.ways, heads.local) == ("K", 2, 4, 1)
    assert heads.waste == 1
    assert "w_k" in heads.tensors


def test_nothing_is_padded_where_everything_divides():
    assert paddings(*case(fsdp=(4, 4, 1), tensor=(1, 1, 4))[::2]) == ()


def test_a_conversion_is_not_priced_as_an_elementwise_operation_of_the_same_sizes():
    """Software that fuses less moves elementwise operands several times; a conversion counts its own passes."""
    plan = meshwise.estimate_train(
        "D=256 F=512 L=4 N=8 K=1 V=1024",
        on="h100:8",
        batch_tokens=1920,
        seq_len=1920,
        precision="fp8",
        calibration="fitted+eager-2023",
        layout="ulysses=2,tensor=4,sequence_parallel=off,micro_batch=1,remat=none",
    ).plans[0]
    for block in work_out(plan.problem, plan.fabric, plan.layout).blocks:
        for name, sums in block.passes.items():
            own = [o.seconds for o in block.operations if o.when == name]
            assert sum(own) == pytest.approx(float(sums.seconds), rel=1e-9)


@pytest.mark.parametrize(
    ("on", "layers", "layout", "stacked"),
    [
        ("h100:8", 36, "data=8,remat=none", False),
        ("h100:8", 36, "data=8,remat=matmuls", False),
        ("h100:8", 36, "data=8,remat=full", True),
        ("h100:8", 36, "data=8,remat=full,remat_layers=12", True),
        ("h100:8", 37, "data=8,remat=none", True),
        ("h100:8", 36, "stage=2,data=4,micro_batch=2,num_microbatches=2,schedule=1f1b,remat=none", True),
        ("v5e:2x4", 37, "data=8,remat=none", False),
    ],
)
def test_what_loops_over_layers_keep_is_copied_and_what_others_keep_is_not(on, layers, layout, stacked):
    plan = meshwise.estimate_train(
        f"D=256 F=512 L={layers} N=2 K=2 V=512", on=on, batch_tokens="64Ki", seq_len=4096, tool="meshwise",
        layout=layout,
    ).plans[0]  # fmt: skip
    w = work_out(plan.problem, Fabric.of(plan.problem.cluster), plan.layout)
    (block, *_) = (b for b in w.blocks if b.name == "layer")
    copied = sum(o.seconds for o in block.operations if o.name == "kept")
    assert (copied > 0) is stacked
    for when in ("forward", "backward"):
        seconds = sum(o.seconds for o in block.operations if o.when == when)
        assert float(block.passes[when].seconds) == pytest.approx(seconds, rel=1e-9)
