"""The fitted calibration: what its constants do to one operation and to a step, each alone, and its names."""

import math
from dataclasses import replace

import pytest

import meshwise
from meshwise.core.dtypes import DType
from meshwise.core.errors import UnknownNameError
from meshwise.costs.calibration import CALIBRATIONS, IDENTITY, default_calibration
from meshwise.costs.estimate import evaluate_layout, layout_candidate
from meshwise.costs.fitted import BEST_MATMULS, SOFTWARE, find_calibration, fitted_calibration
from meshwise.costs.hidden import hidden
from meshwise.costs.local import evaluate_local, local_prices
from meshwise.hardware import chips, load_chip, parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.sharding.layout import Layout
from tests.costs.small_problems import MIXTURE, case, tiny

PLAIN = case("8 H100", "none", Layout(fsdp=8, micro_batch=2, remat="none", wires=(("fsdp", (8,)),)), width=1024)


def seconds(*, model=None, **changes):
    """Expected terms of PLAIN under the identity with some constants changed."""
    problem = replace(PLAIN.problem, calibration=replace(IDENTITY, **changes), model=model or PLAIN.problem.model)
    return evaluate_layout(problem, PLAIN.fabric, PLAIN.layout).step


BASE = seconds()


@pytest.mark.parametrize(
    "changes",
    [
        {"half_depth": 100.0},
        {"compute_units": 132.0},
        {"half_attention": 1000.0},
        {"attention_backward": 0.5},
        {"unfused_attention": True},
        {"elementwise_passes": 2.0},
        {"gap": 10e-6},
        {"interference": 0.3},
        {"late_exchange": True},
        {"adds_gradients": True},
    ],
    ids=lambda c: next(iter(c)),
)
def test_each_constant_only_costs_time(changes):
    one = case("8 H100", "none", Layout(data=8, micro_batch=2, remat="none", wires=(("data", (8,)),)), width=1024)
    for own in (PLAIN, one):
        plain = evaluate_layout(own.problem, own.fabric, own.layout).step
        found = evaluate_layout(
            replace(own.problem, calibration=replace(IDENTITY, **changes)), own.fabric, own.layout
        ).step
        assert found.lower == plain.lower, "the bound is the data sheet's"
        assert found.expected >= plain.expected
        assert found.upper >= found.expected * (1 - 1e-12)
    if "late_exchange" not in changes:
        assert seconds(**changes).expected > BASE.expected
    else:
        assert found.expected > plain.expected


def test_a_gap_is_added_to_every_operation():
    one, two = (seconds(gap=n * 1e-3).terms["forward"] for n in (1, 2))
    operations = (two - one) / 1e-3
    assert operations == pytest.approx(round(operations), abs=1e-6)
    assert one - BASE.terms["forward"] == pytest.approx(two - one)


def test_kernels_without_fusion_wait_for_each_of_their_launches():
    """Two products, softmax and dropout forward; of each product two gradients backward, one of each of the others."""
    for fused, forward, backward in ((False, 4, 6), (True, 1, 1)):
        plain, found = (seconds(unfused_attention=not fused, gap=gap) for gap in (0.0, 1e-3))
        # Embedding, layers and head. What passes gradients on, and second outputs of a kernel, are launched by nobody.
        others = {"forward": 1 + 4 * 14 + 3, "backward": 1 + 4 * (16 + 9) + 5}
        for name, own in (("forward", forward), ("backward", backward)):
            launched = (found.terms[name] - plain.terms[name]) / 1e-3
            assert launched == pytest.approx(others[name] + 4 * own), (fused, name)


def test_interference_is_a_share_of_what_is_hidden():
    found = seconds(interference=0.25)
    assert found.hidden["fsdp"] == pytest.approx(0.75 * BASE.hidden["fsdp"])
    lost = found.terms["fsdp"] - BASE.terms["fsdp"]
    assert lost == pytest.approx(0.25 * BASE.hidden["fsdp"])


def test_late_exchanges_hide_behind_nothing():
    one = case("8 H100", "none", Layout(data=8, micro_batch=2, remat="none", wires=(("data", (8,)),)), width=1024)
    late = replace(one.problem, calibration=replace(IDENTITY, late_exchange=True))
    step = evaluate_layout(late, one.fabric, one.layout).step
    assert step.hidden["data"] == 0
    plain = evaluate_layout(one.problem, one.fabric, one.layout).step
    assert step.terms["data"] == pytest.approx(plain.terms["data"] + plain.hidden["data"])


@pytest.mark.parametrize(("microbatches", "late"), [(1, False), (2, True)])
def test_sums_of_accumulated_gradients_wait_for_the_last_microbatch(microbatches, late):
    layout = Layout(data=8, zero=1, num_microbatches=microbatches, remat="none", wires=(("data", (8,)),))
    one = case("8 H100", "none", layout, width=1024)
    software = replace(IDENTITY, late_once=("accumulated",))
    step = evaluate_layout(replace(one.problem, calibration=software), one.fabric, layout).step
    plain = evaluate_layout(one.problem, one.fabric, layout).step
    assert (step.hidden["data"] < plain.hidden["data"]) is late
    assert step.terms["data"] + step.hidden["data"] == pytest.approx(plain.terms["data"] + plain.hidden["data"])
    assert step.hidden["data"] > 0  # new weights hide behind the next forward pass
    assert bool(hidden(software, layout)["gradients"]) is not late


def test_unfused_attention_by_hand():
    """8 heads of 32 over 1,920 positions, 2 sequences a chip, 4 layers: every pair is a score of 13 bytes forward."""
    found = seconds(unfused_attention=True)
    pairs = 2 * 8 * 1920**2
    chip = PLAIN.problem.cluster.chip
    width = PLAIN.problem.model.sizes["H"]
    products = 4 * width * pairs / chip.peak(DType.BF16)
    qkvo = 2 * 1920 * (2 * 8 + 2 * 4) * width * 2
    memory = (13 * pairs + qkvo) / chip.hbm_bandwidth
    fused = max(products * 1921 / 3840, qkvo / chip.hbm_bandwidth)
    assert found.terms["forward"] - BASE.terms["forward"] == pytest.approx(4 * (products + memory - fused), rel=1e-6)


def memory(layout=PLAIN.layout, **changes):
    """Memory by class of PLAIN, or of another layout, under the identity with some constants changed."""
    problem = replace(PLAIN.problem, calibration=replace(IDENTITY, **changes))
    return evaluate_layout(problem, PLAIN.fabric, layout).memory


def test_scores_that_wait_take_five_bytes_each_and_masks_one():
    """As in `test_unfused_attention_by_hand`: kept by 4 layers, or made again by one; a mask of what each half adds."""
    masks = 2 * 2 * 1920 * PLAIN.problem.model.sizes["D"]
    waiting = 5 * 2 * 8 * 1920**2 + masks
    more = memory(unfused_attention=True)["activations"] - memory()["activations"]
    assert more == pytest.approx(4 * waiting)
    full = replace(PLAIN.layout, remat="full")
    assert memory(full, unfused_attention=True)["activations"] == memory(full)["activations"]
    more = memory(full, unfused_attention=True)["workspace"] - memory(full)["workspace"]
    assert more == pytest.approx(waiting)


def test_a_compiler_gathers_weight_by_weight_and_holds_no_activation_functions():
    full = replace(PLAIN.layout, remat="full")
    structure, candidates = layout_candidate(PLAIN.problem.model, full)

    def blocks(*, compiled, cluster="v5e:2x4"):
        calibration = replace(IDENTITY, compiled=compiled)
        problem = replace(PLAIN.problem, cluster=parse_cluster(cluster), calibration=calibration)
        return [
            block.memory
            for block in evaluate_local(problem, structure, local_prices(problem, structure, candidates.local))[1:]
        ]

    (eager, head), (compiled, own) = blocks(compiled=False), blocks(compiled=True)
    assert own.workspace == head.workspace > 0  # logits are there in any case
    made = [block.beside + block.unreduced + block.at_once * block.gathered for block in (head, own)]
    assert (head.at_once, own.at_once) == (1, 0)  # the head's weights are gone when their gradient is made
    assert made[0] - made[1] == pytest.approx(head.unreduced, rel=0.01)
    sizes = PLAIN.problem.model.sizes
    query = sizes["N"] * sizes["H"]  # columns of the largest matrix
    columns = 2 * query + 2 * sizes["K"] * sizes["H"] + 3 * sizes["F"] + 2  # two norms
    assert eager.at_once == 1
    assert compiled.at_once == pytest.approx(2 * query / columns)  # the largest, and the next on its way
    assert compiled.workspace < eager.workspace
    assert (compiled.kept, compiled.gathered) == (eager.kept, eager.gathered)
    layer, own_there = blocks(compiled=True, cluster="h100:8")  # where a layer's gradients wait for each other
    assert layer == blocks(compiled=False, cluster="h100:8")[0]
    assert own_there == own


def test_waves_by_hand():
    """Each product of a layer and the head takes as many times as long as its whole waves are over its tiles."""
    sizes = PLAIN.problem.model.sizes
    width, heads, units = sizes["D"], sizes["N"] * sizes["H"], 26.0
    plain, waves = (seconds(compute_units=u).terms["forward"] for u in (0.0, units))
    rows = PLAIN.problem.job.batch_tokens / 8
    added = 0.0
    for depth, columns, often in (
        (width, heads, sizes["L"]), (width, sizes["K"] * sizes["H"], 2 * sizes["L"]), (heads, width, sizes["L"]),
        (width, sizes["F"], 2 * sizes["L"]), (sizes["F"], width, sizes["L"]), (width, sizes["V"], 1),
    ):  # fmt: skip
        high, wide = math.ceil(rows / 128), math.ceil(columns / 128)
        large = min(math.ceil(high / 2) * wide, high * math.ceil(wide / 2))
        tiles = min(2 * math.ceil(large / units), math.ceil(high * wide / units) / 0.97) * units
        longer = min(tiles * 128**2 / (rows * columns), 2.0)
        added += often * 2 * rows * depth * columns * (longer - 1)
    assert added > 0
    assert waves - plain == pytest.approx(added / PLAIN.problem.cluster.chip.peak(DType.BF16), rel=1e-6)


def test_software_that_repeats_whole_layers_takes_a_forward_pass_again():
    full = replace(PLAIN.layout, remat="full")

    def step(*, whole):
        problem = replace(PLAIN.problem, calibration=replace(IDENTITY, repeats_whole=whole))
        return evaluate_layout(problem, PLAIN.fabric, full).step

    plain, whole = step(whole=False), step(whole=True)
    layers = seconds().terms["forward"]
    assert plain.terms["recompute"] < whole.terms["recompute"] <= layers
    assert whole.lower == plain.lower
    assert seconds(repeats_whole=True) == BASE, "nothing is recomputed"


def test_inputs_gathered_once_more_come_beside_other_gradients():
    layout = Layout(tensor=8, micro_batch=2, remat="none", wires=(("tensor", (8,)),))
    own = case("8 H100", "none", layout, width=1024)

    def step(*, late):
        problem = replace(own.problem, calibration=replace(IDENTITY, late_gathers=late))
        return evaluate_layout(problem, own.fabric, layout).step

    plain, late = step(late=False), step(late=True)
    assert plain.hidden["tensor"] == 0
    gather = 2 * 1920 * 1024 * 2 * 7 / 8 / 450e9  # the input of attention, and of the feed-forward part: two a layer
    assert late.hidden["tensor"] == pytest.approx(4 * 2 * gather, rel=0.05), "hops besides"
    assert late.expected == pytest.approx(plain.expected - late.hidden["tensor"], rel=1e-9)


def test_sums_of_gradients_of_inputs_run_beside_gradients_of_weights():
    """Two of a layer's four AllReduces, as far as products that follow inputs take."""
    layout = Layout(tensor=8, micro_batch=2, remat="none", sequence_parallel=False, wires=(("tensor", (8,)),))

    def step(width, **changes):
        own = case("8 H100", "none", layout, width=width)
        problem = replace(own.problem, calibration=replace(IDENTITY, **changes))
        return evaluate_layout(problem, own.fabric, layout).step

    plain, beside = (step(1024, beside_sums=b) for b in (False, True))
    assert plain.hidden["tensor"] == 0 < beside.hidden["tensor"] < plain.terms["tensor"] / 2
    assert beside.expected == pytest.approx(plain.expected - beside.hidden["tensor"], rel=1e-9)
    wide = [step(16384, beside_sums=b) for b in (False, True)]
    narrow, more = (b.hidden["tensor"] / a.terms["tensor"] for a, b in ((plain, beside), wide))
    assert narrow < more < 0.5, "longer products hide more of them"
    assert step(1024, beside_sums=True, collective_matmul=True) == step(1024, collective_matmul=True)


def test_a_layer_repeated_to_its_end_sends_its_last_sum_again():
    layout = Layout(tensor=8, micro_batch=2, remat="full", sequence_parallel=False, wires=(("tensor", (8,)),))
    own = case("8 H100", "none", layout, width=1024)
    plain, whole = (
        evaluate_layout(replace(own.problem, calibration=replace(IDENTITY, repeats_whole=r)), own.fabric, layout).step
        for r in (False, True)
    )
    assert whole.terms["tensor"] / plain.terms["tensor"] == pytest.approx(6 / 5, rel=0.1), "six a layer, not five"
    assert whole.lower == plain.lower


def test_the_host_launches_what_routing_decides():
    cluster = parse_cluster("h100:8")
    job = TrainingJob(batch_tokens=str(8 * 1024), seq_len="1024", batch_slack=0)
    layout = Layout(expert=8, remat="none", wires=(("expert", (8,)),))
    own = case("8 H100", "none", layout)
    plain = replace(own.problem, model=MIXTURE, job=job, cluster=cluster)
    host = replace(plain, calibration=replace(IDENTITY, mixture_launch=1.0))
    step = evaluate_layout(host, own.fabric, layout).step
    assert step.terms["forward"] > MIXTURE.num_layers * 10, "seconds, one an operation"
    dense = replace(host, model=tiny(), job=job)
    layout = Layout(fsdp=8, remat="none", wires=(("fsdp", (8,)),))
    assert evaluate_layout(dense, own.fabric, layout).step.terms["forward"] < 1


def staged(own_layout, **changes):
    """A step of two stages under the identity with some constants changed."""
    own = case("8 H100", "none", own_layout, width=1024)
    problem = replace(own.problem, calibration=replace(IDENTITY, **changes))
    return evaluate_layout(problem, own.fabric, own_layout).step


#: Two stages of four devices, one pass of 8 microbatches each.
STAGED = Layout(stage=2, tensor=4, num_microbatches=8, remat="none", sequence_parallel=False,
                wires=(("stage", (2,)), ("tensor", (4,))))  # fmt: skip


@pytest.mark.parametrize(("late", "waited"), [(0, 2), (1, 2 + 7), (2, 2 + 14)])
def test_late_sends_are_waited_for_at_every_exchange(late, waited):
    """A send each way on the first microbatch's way; then one for each of seven microbatches, or two."""
    step = staged(STAGED, late_sends=late)
    send = 1920 * 1024 * 2 / 450e9
    assert step.terms["pipeline_send"] == pytest.approx(waited * send, rel=0.05), "hops besides"
    assert step.lower <= step.expected <= step.upper


def test_scattered_sends_carry_a_part_each_and_are_gathered():
    """A quarter of the residual stream from each of four chips, and three quarters gathered beside them."""
    plain, parts = staged(STAGED), staged(STAGED, scattered_sends=True)
    whole = 1920 * 1024 * 2 / 450e9
    assert parts.terms["pipeline_send"] == pytest.approx(2 * (whole / 4 + whole * 3 / 4), rel=0.15)
    assert plain.terms["pipeline_send"] == pytest.approx(2 * whole, rel=0.05)
    split = STAGED.replace(sequence_parallel=True)
    assert staged(split, scattered_sends=True) == staged(split), "each chip has its own part"


def test_adding_gradients_moves_them_three_times():
    """Of every matrix: the new gradient is read in 2 bytes, the sum read and written in the gradients' own."""
    plain, added = seconds(), seconds(adds_gradients=True)
    sizes, formats = PLAIN.problem.model.sizes, PLAIN.problem.job.formats
    width, heads = sizes["D"], sizes["N"] * sizes["H"]
    matrices = sizes["L"] * (2 * width * heads + 2 * width * sizes["K"] * sizes["H"] + 3 * width * sizes["F"])
    moved = (matrices + width * sizes["V"]) * (2 + 2 * formats.gradients.bytes)
    spent = added.terms["backward"] - plain.terms["backward"]
    assert spent == pytest.approx(moved / PLAIN.problem.cluster.chip.hbm_bandwidth, rel=1e-6)
    assert added.terms["forward"] == plain.terms["forward"]


def test_sums_on_all_replicas_are_twice_a_scatter():
    """ZeRO in DeepSpeed: an AllReduce of gradients and an AllGather of weights, where others scatter and gather."""
    layout = Layout(data=8, zero=1, micro_batch=2, remat="none", wires=(("data", (8,)),))
    scattered, whole = (staged(layout, late_exchange=True, whole_sums=w) for w in (0, 1))
    gradients, weights = PLAIN.problem.job.formats.gradients.bytes, 2
    sums = gradients / (gradients + weights) * scattered.terms["data"]
    assert whole.terms["data"] - scattered.terms["data"] == pytest.approx(sums, rel=0.02)
    assert whole.lower == scattered.lower
    other = layout.replace(zero=2)
    assert staged(other, whole_sums=1) == staged(other), "gradients that replicas share out are scattered"
    whole, scattered = (staged(other, whole_sums=w, overlap=0.0) for w in (2, 1))
    twice = whole.terms["fsdp"] - scattered.terms["fsdp"]
    assert twice == pytest.approx(sums, rel=0.02)
    sharded = Layout(fsdp=8, micro_batch=2, remat="none", wires=(("fsdp", (8,)),))
    assert staged(sharded, whole_sums=2) == staged(sharded), "ZeRO-3 scatters"


def test_exchanges_beside_compute_cost_what_compute_loses():
    job = TrainingJob(batch_tokens=str(16 * 8 * 1024), seq_len="1024", batch_slack=0)
    layout = Layout(expert=4, stage=2, virtual_stages=2, schedule="interleaved", num_microbatches=8, remat="none",
                    wires=(("expert", (4,)), ("stage", (2,))))  # fmt: skip
    own = case("8 H100", "none", layout)

    def step(layout=layout, **changes):
        problem = replace(own.problem, model=MIXTURE, job=job, cluster=parse_cluster("h100:8"))
        problem = replace(problem, calibration=replace(IDENTITY, **changes))
        return evaluate_layout(problem, own.fabric, layout).step

    plain, free, dear = step(), step(beside_exchanges=True), step(beside_exchanges=True, interference=0.4)
    assert dear.expected < step(interference=0.4).expected
    # Six of eight microbatches run while the pipeline is full.
    assert free.terms["expert"] == pytest.approx(plain.terms["expert"] * 2 / 8)
    assert free.hidden["expert"] == pytest.approx(plain.terms["expert"] * 6 / 8)
    assert dear.terms["expert"] == pytest.approx(plain.terms["expert"] * (2 + 0.4 * 6) / 8)
    assert sum(free.terms.values()) == pytest.approx(free.expected)
    assert free.lower <= free.expected < plain.expected
    whole = layout.replace(virtual_stages=1, schedule="1f1b")
    assert step(whole, beside_exchanges=True) == step(whole), "the passes of one microbatch follow each other"
    single = layout.replace(stage=1, virtual_stages=1, schedule="1f1b", wires=(("expert", (4,)),))
    plain, free = step(single), step(single, beside_exchanges=True)
    # One forward pass at first, one backward pass at last; seven pairs between.
    beside = replace(IDENTITY, beside_exchanges=True)
    assert hidden(beside, single)["expert"]
    assert not hidden(beside, single.replace(num_microbatches=1))["expert"]
    assert free.terms["expert"] == pytest.approx(plain.terms["expert"] / 8)
    assert free.expected == pytest.approx(plain.expected - plain.terms["expert"] * 7 / 8)


@pytest.mark.parametrize(
    ("size", "busbw"), [(2**13, 0.29), (2**20, 22.4), (2**24, 171.5), (2**26, 266.3), (2**30, 313.9), (2**33, 316.8)]
)
def test_all_reduces_on_amd_take_what_rccl_was_measured_to_take(size, busbw):
    """GB/s on 8 MI300X, Azure AI-benchmarking-guide (2025)."""
    found = meshwise.collective("all-reduce", f"bf16[{size // 2}]", on="mi300x:8", mesh="X=8", calibration="operations")
    assert found.time == pytest.approx(7 / 4 * size / (busbw * 1e9), rel=0.1)


def test_every_chip_has_a_fitted_calibration_that_no_family_beats():
    for name in chips():
        chip = load_chip(name)
        family = default_calibration(chip)
        for software in SOFTWARE:
            found = fitted_calibration(chip, software)
            assert found.matmul_efficiency <= BEST_MATMULS.get(name, family.matmul_efficiency)
            assert family.source in found.source
            assert find_calibration(found.name, chip) == found


def test_attention_of_kernels_that_are_made_for_the_chip():
    """cuDNN 9.19, TFLOP/s of H200, ten per cent less for minutes; on GB200 power limits it as it does matmuls."""
    found = fitted_calibration(load_chip("h200-sxm"), "megatron")
    for keys, measured in ((2048, 484), (4096, 591), (8192, 644), (16384, 673)):
        rate = found.attention(DType.BF16) * 989 / (1 + found.half_attention / keys)
        assert rate == pytest.approx(0.9 * measured, rel=0.06)
    limited = fitted_calibration(load_chip("gb200-nvl72"), "megatron")
    assert limited.attention(DType.BF16) == limited.matmul_efficiency
    h100, a100 = (
        [fitted_calibration(load_chip(name), s).attention(DType.BF16) for s in ("megatron", "pytorch")]
        for name in ("h100-sxm", "a100-sxm-80gb")
    )
    assert h100[1] < 0.6 * h100[0]
    assert a100[1] == a100[0]


@pytest.mark.parametrize("software", ["pytorch", "pytorch-compiled", "torchtitan", "deepspeed"])
def test_attention_of_kernels_that_are_made_for_ampere(software):
    """FlashAttention 2, causal, heads of 128: Shah et al. 2024, figure 5 (H100); B200 has as many FLOP/s."""
    found, later = (fitted_calibration(load_chip(name), software) for name in ("h100-sxm", "b200-sxm"))
    for keys, measured in ((2048, 298), (4096, 319), (8192, 333), (16384, 335)):
        rate = found.attention(DType.BF16) * 989 / (1 + found.half_attention / keys)
        assert rate == pytest.approx(measured, rel=0.05)
    assert later.attention(DType.BF16) * 2250 == pytest.approx(found.attention(DType.BF16) * 989, rel=0.01)
    assert later.half_attention == found.half_attention


def test_names():
    chip = load_chip("h100-sxm")
    assert fitted_calibration(chip).name == "fitted"
    assert find_calibration("fitted+megatron", chip).name == "fitted"
    assert find_calibration("operations", chip) is CALIBRATIONS["hopper"]
    with pytest.raises(UnknownNameError, match=r"unknown software 'megatro'\. Nearest: megatron"):
        find_calibration("fitted+megatro", chip)
    with pytest.raises(UnknownNameError, match="unknown calibration 'fit'"):
        find_calibration("fit", chip)
