"""The step time of LLaMA-3-8B on paper: gathers, all-reduces, bubbles; on TPU v5p and on H100."""

import math
from dataclasses import replace

import pytest

from meshwise.core.dtypes import DType
from meshwise.costs.calibration import CALIBRATIONS, IDENTITY
from meshwise.costs.estimate import evaluate_layout
from meshwise.costs.fabric import Fabric
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model, read_config
from meshwise.sharding.layout import Layout

D, F, NH, KH, N, V, L, T = 4096, 14336, 4096, 1024, 32, 128256, 32, 8192
LAYER = 2 * D * NH + 2 * D * KH + 3 * D * F + 2 * D
PARAMETERS = L * LAYER + 2 * V * D + D
V5P = {"peak": 4.59e14, "hbm": 2.765e12, "link": 9e10}
NVLINK, LEAF = 450e9, 50e9


def exactly(value):
    return pytest.approx(value, rel=1e-12, abs=0)


def step(cluster, calibration=IDENTITY, *, seq_len=T, layers=L, in_step=False, **layout):
    cluster = parse_cluster(cluster)
    whole = Layout(**layout)
    job = TrainingJob(batch_tokens=str(whole.sequences * seq_len), seq_len=str(seq_len), precision="book")
    config = {**load_model("llama-3-8b").config, "num_hidden_layers": layers}
    problem = TrainingProblem(read_config(config, name="llama-3-8b", where="here"), job, cluster, calibration, in_step)
    return evaluate_layout(problem, Fabric.of(cluster), whole).step, cluster.chip


def layer_forward(tokens, chip):
    """Seconds of one layer on one chip, operation by operation: the longer of FLOPs and bytes."""

    def matmul(a, b):
        return max(2 * tokens * a * b / chip_peak, 2 * (tokens * a + a * b + tokens * b) / chip.hbm_bandwidth)

    def elementwise(elements, flops, weights=0):
        return max(2 * (elements + weights) / chip.hbm_bandwidth, flops / chip.vector_flops_per_s)

    chip_peak = max(v for k, v in chip.flops_per_s.items() if k.value == "bf16")
    attention = max(4 * NH * tokens * (T + 1) / 2 / chip_peak, 2 * tokens * (2 * NH + 2 * KH) / chip.hbm_bandwidth)
    norm = elementwise(2 * tokens * D, 4 * tokens * D, D)
    rope = elementwise(2 * tokens * NH, 3 * tokens * NH) + elementwise(2 * tokens * KH, 3 * tokens * KH)
    residual = elementwise(3 * tokens * D, tokens * D)
    act = elementwise(3 * tokens * F, 5 * tokens * F)
    matmuls = [(D, NH), (D, KH), (D, KH), (NH, D), (D, F), (D, F), (F, D)]
    return sum(matmul(a, b) for a, b in matmuls) + attention + 2 * norm + rope + 2 * residual + act


def test_fsdp_on_a_cube_of_v5p():
    s, chip = step("v5p:4x4x4", fsdp=64, remat="none", wires=(("fsdp", (4, 4, 4)),))
    # Book, Training: gathering V bytes over three axes of rings takes V / (3 x 2 W); 63/64 of that at least.
    per_byte = 1 / (3 * 2 * V5P["link"])
    gather = 2 * LAYER * per_byte
    head = 2 * (V * D + D) * per_byte
    embedding = 2 * V * D * per_byte
    # Gathered forward and backward, gradients scattered; the head, whose passes follow each other, is gathered once; an
    # embedding's backward pass needs no weights.
    sent = L * 3 * gather + 2 * head + 2 * embedding
    assert s.terms["fsdp"] + s.hidden["fsdp"] == exactly(sent)
    assert s.resources["fsdp"] == exactly(63 / 64 * sent)
    forward = layer_forward(T, chip)
    assert gather < forward
    # What sticks out: the embedding, which has next to nothing to hide behind.
    assert s.terms["fsdp"] < 2 * embedding
    assert s.terms["fsdp"] > 2 * embedding - 6 * T * D * 2 / chip.hbm_bandwidth
    assert s.terms["tensor"] == s.terms["data"] == s.terms["context"] == s.terms["pipeline_bubble"] == 0


def test_padding_of_uneven_shards_travels():
    """4,096 rows over 24 chips: shards of 171, so that 24 x 171 = 4,104 rows are gathered and scattered."""
    s, _chip = step("h100:24", fsdp=24, remat="none", wires=(("fsdp", (8, 3)),))
    per_byte = max(7 / 8 / NVLINK, 2 / 3 / 8 / LEAF) * 4104 / 4096
    weights = L * 3 * LAYER + 2 * (V * D + D) + 2 * V * D
    assert s.resources["fsdp"] == exactly(2 * weights * per_byte)


def test_fsdp_that_sticks_out_of_a_short_microbatch():
    """256 tokens a chip: gathering takes longer than the layer."""
    s, _chip = step("v5p:4x4x4", fsdp=64, remat="none", seq_len=256, wires=(("fsdp", (4, 4, 4)),))
    long, _ = step("v5p:4x4x4", fsdp=64, remat="none", wires=(("fsdp", (4, 4, 4)),))
    busy = s.terms["forward"] + s.terms["backward"]
    assert s.resources["fsdp"] == exactly(long.resources["fsdp"])  # weights do not care
    sent = 64 / 63 * s.resources["fsdp"]
    assert s.terms["fsdp"] == pytest.approx(sent - busy, rel=1e-3)
    assert s.expected == pytest.approx(sent + s.terms["optimizer"], rel=1e-3)


def test_the_forward_pass_operation_by_operation():
    s, chip = step("v5p:4x4x4", fsdp=64, remat="none", wires=(("fsdp", (4, 4, 4)),))
    lookup = 2 * 2 * T * D / chip.hbm_bandwidth  # rows read and written
    norm = 2 * (2 * T * D + D) / chip.hbm_bandwidth
    logits = max(2 * T * D * V / V5P["peak"], 2 * (T * D + D * V + T * V) / chip.hbm_bandwidth)
    loss = max((2 * T * V + 4 * T + 2 * T) / chip.hbm_bandwidth, 5 * T * V / chip.vector_flops_per_s)
    assert s.terms["forward"] == exactly(L * layer_forward(T, chip) + lookup + norm + logits + loss)


def test_tensor_parallelism_in_one_node_of_h100():
    s, _ = step("h100:8", tensor=8, remat="none", wires=(("tensor", (8,)),))
    missing, hops = 7 / 8, 3 * 600e-9

    def time(num_bytes):
        return max(missing * num_bytes / NVLINK, hops)

    residual = time(2 * T * D)
    # Forward: two gathers and two scatters (Korthikanti et al. 2022). Backward: the same for gradients, and the two
    # gathered inputs again for the weights' gradients.
    layer = (2 + 2) * residual + (4 + 2) * residual
    ids = time(4 * T)
    embedding = (ids + residual) + (ids + residual)
    losses = time(2 * T)
    head = (residual + ids + losses) + (losses + residual)  # what is gathered forward is there backward
    # On GPUs they stand on the critical path.
    assert s.terms["tensor"] == exactly(L * layer + embedding + head)
    assert s.hidden["tensor"] == 0
    # The gradients of norms, whole on every GPU, are summed once a step, and hide behind the backward pass.
    assert s.hidden["data"] == exactly(2 * hops * (L + 1))


@pytest.mark.parametrize("remat", ["none", "full"])
def test_what_runs_beside_nothing_comes_on_top_of_the_lower_bound(remat):
    layout = {"tensor": 8, "remat": remat, "wires": (("tensor", (8,)),)}
    bare, chip = step("h100:8", **layout)
    s, _ = step("h100:8", replace(IDENTITY, in_turn=True), **layout)
    residual = 7 / 8 * 2 * T * D / NVLINK
    peak = max(v for k, v in chip.flops_per_s.items() if k.value == "bf16")
    # Computed again: two gathers, and a scatter; the last of a layer is not needed. These gathers serve gradients of
    # weights, too, which else need two more. Products for such gradients hide what they can of the backward pass.
    again, gradients = {"none": (0, 6), "full": (3, 4)}[remat]
    products = 2 * T * (LAYER - 2 * D) / 8 / peak
    layers = L * ((4 + again) * residual + gradients * residual - products)
    busier = max(s.resources["compute"], s.resources["hbm"])
    assert 0 < s.lower - busier - layers < 5 * residual  # of embedding and head
    assert bare.lower == max(bare.resources.values()) == busier
    assert s.expected == bare.expected


def test_sums_of_gradients_that_nothing_runs_beside():
    alone = replace(IDENTITY, sums_alone=True)
    wires = (("fsdp", (4, 4, 4)),)
    s, _ = step("v5p:4x4x4", alone, fsdp=64, remat="none", wires=wires)
    bare, _ = step("v5p:4x4x4", fsdp=64, remat="none", wires=wires)
    sums = 63 / 64 * 2 * PARAMETERS / (3 * 2 * V5P["link"])
    assert s.lower == exactly(bare.lower + sums)
    # Gathers hide as before, and the embedding's sum, that did, no longer does.
    assert 0.9 * sums < s.terms["fsdp"] - bare.terms["fsdp"] < 64 / 63 * sums
    assert s.terms["fsdp"] + s.hidden["fsdp"] == exactly(bare.terms["fsdp"] + bare.hidden["fsdp"])

    wires = (("data", (4, 4, 4)),)
    s, _ = step("v5p:4x4x4", alone.of_slices(1), data=64, remat="none", wires=wires)
    assert s.hidden["data"] == 0 < s.resources["data"] <= s.terms["data"]
    assert s.lower == exactly(max(s.resources["compute"], s.resources["hbm"]) + s.resources["data"])
    assert alone.of_slices(2) == alone

    # In programs of our own all that activations wait for comes on top, too, and collective matmuls are none.
    wires = (("tensor", (4, 1, 1)), ("data", (1, 4, 4)))
    layout = {"tensor": 4, "data": 16, "remat": "none", "wires": wires}
    alone = replace(alone, collective_matmul=True, compiled=True)
    (s, _), (other, _) = (step("v5p:4x4x4", alone, in_step=ours, **layout) for ours in (True, False))
    busier, others = (max(one.resources["compute"], one.resources["hbm"]) for one in (s, other))
    assert s.lower == exactly(busier + s.resources["tensor"] + s.resources["data"])
    assert other.lower == exactly(others + s.resources["data"])
    assert s.hidden["tensor"] == 0 < other.hidden["tensor"]

    # Over all of a square slice, or of one of three dimensions, XLA makes AllReduces of our sums; else none.
    ours, plain = (
        {
            (on, ways): step(on, alone, in_step=own, fsdp=ways, data=64 // ways, zero=0, remat="none", wires=wires)[0]
            for on, ways, wires in (
                ("v5e:8x8", 64, (("fsdp", (8, 8)),)),
                ("v5e:4x16", 64, (("fsdp", (4, 16)),)),
                ("v5e:8x8", 8, (("fsdp", (8, 1)), ("data", (1, 8)))),
                ("v5p:4x4x4", 64, (("fsdp", (4, 4, 4)),)),
                ("v5p:4x4x4", 16, (("fsdp", (4, 4, 1)), ("data", (1, 1, 4)))),
            )
        }
        for own in (True, False)
    )
    sums = {key: s.resources["fsdp"] - plain[key].resources["fsdp"] for key, s in ours.items()}
    assert sums["v5e:8x8", 64] == exactly(63 / 64 * 2 * PARAMETERS / (2 * 45e9)), "a corner has two links"
    assert sums["v5p:4x4x4", 64] == exactly(63 / 64 * 2 * PARAMETERS / (6 * 90e9)), "rings in three dimensions"
    assert sums["v5e:4x16", 64] == sums["v5e:8x8", 8] == sums["v5p:4x4x4", 16] == 0
    longer = ours["v5e:8x8", 64].terms["fsdp"] - plain["v5e:8x8", 64].terms["fsdp"]
    assert longer > sums["v5e:8x8", 64] > 0

    # Where other programs run beside sums, our own do not: XLA starts most where it waits for them.
    beside = replace(alone, sums_alone=False)
    (found, _), (other, _) = (step("v5p:4x4x4", beside, in_step=ours, **layout) for ours in (True, False))
    assert found.lower == s.lower
    assert found.terms == s.terms
    assert other.lower == exactly(others)
    assert found.hidden["data"] == 0 < other.hidden["data"]


def test_collective_matmuls_hide_tensor_parallelism_on_tpus():
    tpu = CALIBRATIONS["tpu"]
    wires = (("tensor", (4, 1, 1)), ("fsdp", (1, 4, 4)))
    s, _ = step("v5p:4x4x4", tpu, tensor=4, fsdp=16, remat="none", wires=wires)
    bare, _ = step("v5p:4x4x4", tensor=4, fsdp=16, remat="none", wires=wires)
    assert bare.terms["tensor"] > 100 * s.terms["tensor"]
    assert s.hidden["tensor"] > 0.9 * (s.hidden["tensor"] + s.terms["tensor"])
    assert s.resources["tensor"] == exactly(bare.resources["tensor"])


def test_data_parallel_all_reduce_hides_behind_the_backward_pass():
    s, _ = step("h100:8", data=8, remat="none", wires=(("data", (8,)),))
    all_reduce = 2 * 7 / 8 * 2 * PARAMETERS / NVLINK
    assert s.resources["data"] == exactly(all_reduce)
    # One microbatch's backward pass covers it but for one layer of 32.
    assert s.terms["data"] == exactly(max(0.0, all_reduce - s.terms["backward"] * 31 / 32))
    short, _ = step("h100:8", data=8, remat="none", seq_len=256, wires=(("data", (8,)),))
    norms = (2 * L + 1) * D  # in buckets of their own, too small to fill the wires
    alone = 2 * 7 / 8 * 2 * (PARAMETERS - norms) / NVLINK + (L + 1) * 2 * 3 * 600e-9
    assert short.terms["data"] == exactly(alone - short.terms["backward"] * 31 / 32)
    assert short.terms["data"] > 0
    # However many microbatches, it happens once.
    more, _ = step("h100:8", data=8, remat="none", seq_len=256, num_microbatches=4, wires=(("data", (8,)),))
    assert more.terms["data"] == exactly(short.terms["data"])


def test_zero_one_scatters_and_gathers_where_zero_reduces():
    s, _ = step("h100:8", data=8, zero=1, remat="none", wires=(("data", (8,)),))
    assert s.resources["data"] == exactly(7 / 8 * (2 + 2) * PARAMETERS / NVLINK)
    two, _ = step("h100:8", data=8, zero=2, remat="none", num_microbatches=3, wires=(("data", (8,)),))
    # Gradients scattered every microbatch, weights gathered once a step.
    assert two.resources["fsdp"] + two.resources["data"] == exactly(7 / 8 * (3 * 2 + 2) * PARAMETERS / NVLINK)


def test_an_all_reduce_across_nodes_leaves_by_the_slower_level():
    s, _ = step("h100:16", data=16, remat="none", wires=(("data", (8, 2)),))
    assert s.resources["data"] == exactly(2 * max(7 / 8 / NVLINK, 1 / 2 / 8 / LEAF) * 2 * PARAMETERS)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (8, 8), (4, 1)])
def test_a_pipeline_idles_for_all_stages_but_one(stages, microbatches):
    layout = {"stage": stages, "fsdp": 8 // stages, "wires": (("stage", (stages,)), ("fsdp", (8 // stages,)))}
    s, chip = step("h100:8", num_microbatches=microbatches, remat="full", **layout)
    names = ("forward", "backward", "recompute", "tensor", "context", "fsdp")
    busy = sum(s.terms[n] for n in names)
    # The last stage runs all microbatches without a pause. Before its first, each other stage runs one forward pass;
    # after its last, one backward pass. They hold as many layers but no head: (stages - 1) x (its share - the head).
    # The first has the embedding besides: gathered and scattered, or else its rows read and written, both ways.
    # Twice the layers adds the layers' share once more, and no head.
    deep, _ = step("h100:8", num_microbatches=microbatches, remat="full", layers=2 * L, **layout)
    layers = sum(deep.terms[n] for n in names) - busy
    assert busy > 1.01 * layers
    fsdp = 8 // stages
    embedding = 2 * max(2 * V * D * (fsdp - 1) / fsdp / NVLINK, 2 * 2 * T * D / chip.hbm_bandwidth)
    assert s.terms["pipeline_bubble"] == pytest.approx(layers * (stages - 1) / microbatches + embedding, rel=1e-9)
    # Narayanan et al. 2021: of equal stages, bubble over busy time is (stages - 1) / microbatches.
    assert s.terms["pipeline_bubble"] < busy * (stages - 1) / microbatches
    # The bounds wait for the same: FLOPs of all microbatches of the last stage, of one on each other.
    other = (deep.flops - s.flops) / microbatches
    peak = chip.peak(DType.BF16)
    assert s.resources["compute"] == exactly((s.flops + (stages - 1) * other) / peak)
    send = max(2 * T * D / NVLINK, 600e-9)
    assert s.terms["pipeline_send"] == exactly(2 * (stages - 1) * send)


def test_stages_share_out_the_layers():
    def flops(stage):
        fsdp = 8 // stage
        wires = (("stage", (stage,)), ("fsdp", (fsdp,)))
        s, _ = step("h100:8", stage=stage, fsdp=fsdp, num_microbatches=8, remat="none", wires=wires)
        return s.flops

    head = 6 * 8 * T * D * V
    attention = 3.5 * 4 * NH * T * (T + 1) / 2 * 8
    layer = 6 * 8 * T * (LAYER - 2 * D) + attention
    assert flops(4) == exactly(8 * layer + head)
    assert flops(8) == exactly(4 * layer + head)
    assert flops(1) == exactly(32 * layer + head)


def test_the_optimizer_reads_and_writes_its_state():
    s, chip = step("h100:8", fsdp=8, remat="full", wires=(("fsdp", (8,)),))
    # Two fp32 moments read and written, bf16 weights read and written, gradients read: 22 bytes a parameter.
    assert s.terms["optimizer"] == exactly(PARAMETERS / 8 * (16 + 4 + 2) / chip.hbm_bandwidth)


def test_context_parallelism_gathers_keys_and_values():
    s, _ = step("h100:8", context=8, remat="none", wires=(("context", (8,)),))
    each = 7 / 8 * 2 * T * KH / NVLINK  # all keys (or values) of the sequence
    # Gathered forward and backward, their gradients scattered.
    assert s.resources["context"] == exactly(L * 2 * (1 + 1 + 1) * each)


def test_bounds_of_a_compute_bound_step():
    s, _chip = step("v5p:4x4x4", fsdp=64, remat="full", wires=(("fsdp", (4, 4, 4)),))
    attention = 4 * NH * T * (T + 1) / 2
    forward = 2 * T * (LAYER - 2 * D) + attention
    # Full remat runs the forward pass again but for its last matmul, whose result the backward pass does not read.
    again = forward - 2 * T * F * D
    total = L * (forward + again + 2 * 2 * T * (LAYER - 2 * D) + 2.5 * attention) + 6 * T * D * V
    assert s.lower == exactly(total / V5P["peak"])
    assert s.resources["compute"] == s.lower
    assert math.fsum(s.terms.values()) == exactly(s.expected)


def test_bounds_of_our_own_programs_count_what_xla_leaves():
    compiled = replace(IDENTITY, compiled=True, attention_efficiency=0.5)  # no bound is above what is expected
    hidden, kv, wide = (2 * T * width for width in (D, KH, F))
    moved = {}
    looped = 37, 38  # and those of fewer are written out
    for on, wires, block in (("h100:8", (8,), 1), ("v6e:2x4", (2, 4), 512)):
        for layers in (1, 2, *looped):
            layout = {"layers": layers, "fsdp": 8, "remat": "none", "wires": (("fsdp", wires),)}
            (s, chip), (other, _) = (step(on, compiled, in_step=ours, **layout) for ours in (True, False))
            # Of attention's gradients, one kernel finds those of queries and one those of keys and values: two of five
            # products are computed twice. On TPUs blocks of 512 positions count, with what is masked on the diagonal.
            scores = 4 * NH * T / 2
            again = (s.resources["compute"] - other.resources["compute"]) * chip.flops_per_s[DType.BF16]
            assert again == pytest.approx(layers * scores * (4.5 * (T + block) - 3.5 * (T + 1)), rel=1e-9)
            assert s.flops == other.flops
            moved[on, layers] = (s.resources["hbm"] - other.resources["hbm"]) * chip.hbm_bandwidth
    a_layer = moved["h100:8", 2] - moved["h100:8", 1]
    # Norms read and write the stream, as do positions queries and keys; sums read two and write one, gates those of F.
    forward = 2 * 2 * hidden + 2 * hidden + 2 * kv + 2 * 3 * hidden + 3 * wide
    # Backward: gates read both and a gradient, and write two; norms read two and write one, and once more for their own
    # weights; gradients of what two products read, or three, and of what goes past them, are added up.
    backward = 5 * wide + 2 * (3 + 2) * hidden + 2 * hidden + 2 * kv + (3 + 4) * hidden + 2 * 3 * hidden
    assert a_layer == pytest.approx(forward + backward, rel=0.01)
    # And of loops XLA for GPUs copies what is kept into stacks of all layers and out again: what norms read and write,
    # queries, keys, values and attention's result; gate, product and what both make. On TPUs it does not.
    kept = 2 * 2 * hidden + 2 * hidden + 2 * kv + 3 * wide
    more, same = (moved[on, 38] - moved[on, 37] - moved[on, 2] + moved[on, 1] for on in ("h100:8", "v6e:2x4"))
    assert (more, same) == (pytest.approx(2 * 2 * kept, rel=0.01), pytest.approx(0, abs=0.001 * kept))
    # Keys and values of 16 MiB stay in VMEM: made, turned, read by attention, and their gradients the same way back.
    stays = a_layer - (moved["v6e:2x4", 2] - moved["v6e:2x4", 1])
    assert 14 * kv < stays < 18 * kv
    # The gradient of the logits is read and written on GPUs; on TPUs the head's products make it as they read these.
    ends = [2 * moved[on, 1] - moved[on, 2] for on in ("h100:8", "v6e:2x4")]
    assert 2 * 2 * T * V < ends[0] - ends[1] < 2.2 * 2 * T * V
