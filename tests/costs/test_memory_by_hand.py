"""Memory of LLaMA-3-8B on eight H100, class by class, against closed forms on paper."""

from dataclasses import replace

import pytest

from meshwise.costs.calibration import IDENTITY
from meshwise.costs.estimate import estimate_training
from meshwise.costs.fabric import Fabric
from meshwise.costs.memory import RESERVE_SHARE
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model, read_config
from meshwise.sharding.layout import Layout

D, F, NH, KH, V, L, T = 4096, 14336, 4096, 1024, 128256, 32, 4096
LAYER = 2 * D * NH + 2 * D * KH + 3 * D * F + 2 * D  # w_q and w_o, w_k and w_v, gate up down, two norms
PARAMETERS = L * LAYER + 2 * V * D + D
BF16, FP32 = 2, 4

#: Elements that a layer keeps per token, after Korthikanti et al. 2022 without the T x T scores (flash attention), in a
#: gated network with grouped queries: "none": x, its norm, q, k, v, attention's output, the middle of the residual, its
#: norm, gate, up and their product. "matmuls": x, q, k, v, attention and its projection, gate, up. "attention": without
#: the feed-forward part.
KEPT = {
    "none": 4 * D + 2 * NH + 2 * KH + 3 * F,
    "matmuls": D + 2 * NH + 2 * KH + D + 2 * F,
    "attention": D + 2 * NH + 2 * KH + D,
    "full": D,
}

#: Of eager software, and of what XLA compiles.
CALIBRATION = {False: IDENTITY, True: replace(IDENTITY, compiled=True)}


def memory(
    *, on="h100:8", precision="bf16", sequences=8, tied=False, vocabulary=V, compiled=False, in_step=False, **layout
):
    cluster = parse_cluster(on)
    job = TrainingJob(batch_tokens=str(sequences * T), seq_len=str(T), precision=precision)
    config = {**load_model("llama-3-8b").config, "tie_word_embeddings": tied, "vocab_size": vocabulary}
    problem = TrainingProblem(
        read_config(config, name="llama-3-8b", where="here"), job, cluster, CALIBRATION[compiled], in_step
    )
    torus = (2, 2, 2) if on.startswith("v5p") else None  # all of it is one axis of the mesh
    wires = tuple((a, torus or (n,)) for a, n in layout.items() if a in ("data", "fsdp", "tensor", "stage", "context"))
    return estimate_training(problem, Fabric.of(cluster), Layout(**layout, wires=wires)).memory


@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_in_chunks_holds_the_logits_of_one(compiled):
    large, of = 8 * V, {"sequences": 16, "micro_batch": 2, "remat": "full", "precision": "mixed", "compiled": compiled}
    whole, chunked = (memory(fsdp=8, loss=loss, vocabulary=8 * V, **of) for loss in ("whole", "chunked"))
    tokens, chunk = 2 * T, 2048
    # From the first chunk to the last: residual, its norm, that norm's gradient, the losses', of all tokens; of a
    # chunk, its logits and their gradient. Beside them the gathered weights and their gradient.
    assert chunked["logits_and_loss"] == (3 * D + 1) * tokens * BF16 + 2 * chunk * large * BF16
    stored = 0 if compiled else large * D * BF16 / 8
    assert chunked["gathered_weights"] == pytest.approx(large * D * (FP32 + BF16) - stored)
    four = memory(fsdp=8, loss="chunked", vocabulary=large, num_microbatches=4, **{**of, "sequences": 64})
    assert four["logits_and_loss"] == chunked["logits_and_loss"]
    assert four["gathered_weights"] == pytest.approx(large * D * (FP32 + BF16) - large * D * BF16 / 8)
    assert whole["logits_and_loss"] > tokens * large * BF16
    others = whole.keys() - {"logits_and_loss", "gathered_weights", "communication_buffers", "total"}
    assert {name: whole[name] for name in others} == {name: chunked[name] for name in others}


@pytest.mark.parametrize(
    ("arrays", "compiled", "chip", "sequences"),
    [(3, False, "h100", 16), (2, True, "h100", 16), (2, True, "h100", 32), (1, True, "v5e", 16), (1, True, "v5e", 32)],
)
def test_capped_logits_and_one_gradient_of_them_are_held_by_what_is_compiled(arrays, compiled, chip, sequences):
    """The gradient before the cap, beside what the cap made; on TPUs over it; each an array where nothing is fused."""
    model, tokens = load_model("gemma-2-2b"), 2 * T
    job = TrainingJob(batch_tokens=sequences * T, seq_len=T, precision="mixed")
    cluster = parse_cluster({"h100": "h100:8", "v5e": "v5e:2x4"}[chip])
    problem = TrainingProblem(model, job, cluster, CALIBRATION[compiled], in_step=compiled)
    wires = (("fsdp", (8,) if chip == "h100" else (2, 4)),)
    layout = Layout(fsdp=8, micro_batch=2, num_microbatches=sequences // 16, remat="full", wires=wires)
    memory = estimate_training(problem, Fabric.of(problem.cluster), layout).memory
    beside = 3 * 2304 + 2  # residual, its norm, that norm's gradient, losses and theirs
    assert memory["logits_and_loss"] == pytest.approx(arrays * tokens * 256_000 * BF16, rel=beside / 256_000 * 2)


def test_parameters_are_the_published_number():
    assert PARAMETERS == 8_030_261_248


@pytest.mark.parametrize("remat", sorted(KEPT))
def test_fsdp_over_eight(remat):
    m = memory(fsdp=8, remat=remat)
    assert m["parameters"] == PARAMETERS * BF16 / 8
    assert m["gradients"] == PARAMETERS * BF16 / 8
    assert m["optimizer"] == PARAMETERS * 2 * FP32 / 8
    assert m["master_copies"] == 0
    assert m["activations"] == L * KEPT[remat] * T * BF16  # one sequence a GPU
    # The head needs more than a layer, most while the gradient of its weights is made: the residual, its norm and the
    # norm's gradient, and that of the logits, which are gone by then.
    assert m["logits_and_loss"] == T * (3 * D + V) * BF16
    # Its weights once, 7/8 on top of what is stored, and the whole gradient before it is scattered.
    assert m["gathered_weights"] == pytest.approx((V * D + D) * BF16 * 7 / 8 + V * D * BF16, rel=1e-12)
    assert m["workspace"] == m["communication_buffers"] == 0  # no layer is at work


def test_a_compiled_head_holds_weights_or_gradient_of_one_microbatch_and_both_where_gradients_are_added_up():
    one = memory(fsdp=8, remat="full", compiled=True)
    assert one["gathered_weights"] + one["logits_and_loss"] == pytest.approx(
        T * (2 * D + 2 * V) * BF16 + V * D * BF16, rel=0.01
    )
    two = {"fsdp": 8, "remat": "full", "sequences": 16, "num_microbatches": 2}
    assert memory(**two, compiled=True) == memory(**two)


def test_our_own_program_holds_no_gradients_of_layers_of_one_microbatch_while_its_head_is_at_work():
    layout = {"fsdp": 8, "remat": "full", "compiled": True, "sequences": 16, "micro_batch": 2}
    ours, whole = memory(**layout, in_step=True), memory(**layout)
    layers = L * LAYER * BF16 / 8
    assert whole["total"] - ours["total"] == pytest.approx(layers, rel=1e-12)
    assert ours["gradients"] == pytest.approx((2 * V * D + D) * BF16 / 8, rel=1e-12)
    # Where a layer needs most they are all there, and where those of microbatches are added up.
    assert memory(**layout, in_step=True, vocabulary=1024) == memory(**layout, vocabulary=1024)
    two = layout | {"sequences": 32, "num_microbatches": 2}
    assert memory(**two, in_step=True) == memory(**two)


def test_a_layer_at_work_counts_where_it_needs_more_than_the_head():
    m = memory(fsdp=8, remat="none", vocabulary=1024)
    assert m["logits_and_loss"] == 0
    # A layer's weights, 7/8 on top of what is stored, and a layer's gradients before they are scattered.
    assert m["gathered_weights"] == pytest.approx(LAYER * BF16 * 7 / 8 + LAYER * BF16, rel=1e-12)
    # Of all operations those of the feed-forward part hold most: from one gradient, and what is kept, two more.
    assert m["workspace"] == T * 2 * F * BF16
    m = memory(tensor=8, remat="none", micro_batch=8, vocabulary=1024)
    assert m["logits_and_loss"] == m["gathered_weights"] == 0
    assert m["communication_buffers"] == 8 * T * D * BF16 * 7 / 8  # one gathered activation, besides its own shard


def test_tpu_programs_scatter_each_gradient_as_it_is_made():
    m = memory(on="v5p:2x2x2", fsdp=8, remat="none", vocabulary=1024)
    # The gradient of a feed-forward weight, beside that of what the operation made; 4,096 tokens, so as much of each.
    assert m["gathered_weights"] + m["workspace"] == pytest.approx(LAYER * BF16 * 7 / 8 + 2 * D * F * BF16, rel=1e-12)
    few = memory(on="v5p:2x2x2", context=8, sequences=1, remat="none", vocabulary=1024)
    assert few["gathered_weights"] == pytest.approx(LAYER * BF16 * 7 / 8 + D * F * BF16, rel=1e-12)
    assert few["workspace"] == T / 8 * F * BF16
    waiting = memory(context=8, sequences=1, remat="none", vocabulary=1024)
    assert waiting["gathered_weights"] == pytest.approx(LAYER * BF16 * 7 / 8 + LAYER * BF16, rel=1e-12)


def test_gradients_before_they_are_scattered_have_the_format_that_they_are_sent_in():
    narrow, wide = (memory(fsdp=8, remat="none", vocabulary=1024, precision=p) for p in ("bf16", "mixed"))
    assert wide["gathered_weights"] - narrow["gathered_weights"] == LAYER * (FP32 - BF16)


def test_the_head_and_a_layer_are_not_at_work_at_once():
    """What the larger of both needs, and no more: the smaller one changes nothing."""
    small, large = (memory(fsdp=8, remat="none", vocabulary=v) for v in (1024, 2048))
    state = ("parameters", "gradients", "optimizer")
    assert [small[name] for name in small if name not in (*state, "total")] == [
        large[name] for name in large if name not in (*state, "total")
    ]


def test_what_a_lookup_alone_reads_is_not_there_when_its_gradient_is():
    # A first stage that is the fullest, since it holds two microbatches, with a table that outweighs a layer.
    m = memory(stage=2, fsdp=4, remat="none", num_microbatches=8, sequences=32, vocabulary=4 * V)
    assert m["logits_and_loss"] == 0
    assert m["gathered_weights"] == 4 * V * D * BF16  # the gathered table, or its gradient before it is scattered


@pytest.mark.parametrize("remat", sorted(KEPT))
def test_tensor_over_eight(remat):
    m = memory(tensor=8, remat=remat, micro_batch=8)
    norms = (2 * L + 1) * D  # whole on every GPU
    local = (PARAMETERS - norms) / 8 + norms
    assert m["parameters"] == local * BF16
    assert m["gradients"] == local * BF16
    assert m["optimizer"] == local * 2 * FP32
    assert m["activations"] == L * KEPT[remat] / 8 * 8 * T * BF16  # every tensor is split: heads, width, or positions
    assert m["gathered_weights"] == 0
    # The head, most while the loss is differentiated: the residual, its norm as it was gathered for the forward pass,
    # logits, their gradient, and that of the loss, a number a token.
    assert m["logits_and_loss"] == 8 * T * (D / 8 + D + 2 * V / 8 + 1) * BF16
    alone = memory(tensor=8, remat=remat, micro_batch=8, sequence_parallel=False)
    split = {
        "none": 2 * NH + 2 * KH + 3 * F,
        "matmuls": 2 * NH + 2 * KH + 2 * F,
        "attention": 2 * NH + 2 * KH,
        "full": 0,
    }
    whole = KEPT[remat] - split[remat]  # the residual and its norms, on every GPU without sequence parallelism
    assert alone["activations"] == L * (split[remat] / 8 + whole) * 8 * T * BF16


def test_mixed_precision_keeps_sixteen_bytes_and_fp32_gradients():
    m = memory(fsdp=8, remat="full", precision="mixed")
    state = m["parameters"] + m["gradients"] + m["optimizer"] + m["master_copies"]
    assert state == PARAMETERS * (2 + 4 + 4 + 8) / 8
    assert m["gradients"] == PARAMETERS * FP32 / 8


def test_zero_splits_what_it_says():
    by_stage = [memory(data=8, zero=zero, remat="full") for zero in (0, 1, 2)]
    assert [m["parameters"] for m in by_stage] == [PARAMETERS * BF16] * 3
    assert [m["optimizer"] for m in by_stage] == [PARAMETERS * 8, PARAMETERS, PARAMETERS]
    assert [m["gradients"] for m in by_stage] == [PARAMETERS * BF16] * 2 + [PARAMETERS * BF16 / 8]


@pytest.mark.parametrize(("stages", "microbatches", "layers", "in_flight"), [(4, 8, 8, 4), (4, 2, 8, 2), (8, 16, 4, 8)])
def test_a_pipeline_holds_as_many_microbatches_as_are_in_flight(stages, microbatches, layers, in_flight):
    fsdp = 8 // stages
    m = memory(stage=stages, fsdp=fsdp, remat="none", num_microbatches=microbatches, sequences=fsdp * microbatches)
    # The first of the 1F1B stages: its layers, the embedding, a microbatch for every stage from itself on.
    assert m["activations"] == layers * in_flight * KEPT["none"] * T * BF16
    assert m["parameters"] == (layers * LAYER + V * D) / fsdp * BF16
    assert m["logits_and_loss"] == 0


def test_the_last_stage_counts_where_it_is_fuller():
    m = memory(stage=8, remat="full", num_microbatches=8, micro_batch=1)
    # 4 layers of one kept input are little against a head with its logits.
    # The loss differentiated: residual, norm, logits, their gradient, and that of the loss.
    assert m["logits_and_loss"] == T * (2 * D + 2 * V + 1) * BF16
    assert m["activations"] == 4 * D * T * BF16
    assert m["parameters"] == (4 * LAYER + V * D + D) * BF16


def test_the_last_stage_holds_a_tied_table_and_what_adds_up_to_its_gradient():
    m = memory(stage=2, fsdp=4, remat="full", sequences=4, precision="mixed", tied=True)
    # The head multiplies by a copy of the embedding's table and accumulates a gradient of it over all microbatches.
    # Once a step the first stage adds that to its own and updates the table; its moments are there alone.
    assert m["logits_and_loss"] > 0
    assert m["parameters"] == (16 * LAYER + V * D + D) / 4 * BF16
    assert m["gradients"] == (16 * LAYER + V * D + D) / 4 * FP32
    assert m["optimizer"] == (16 * LAYER + D) / 4 * 2 * FP32
    # One stage holds both once.
    whole = memory(fsdp=8, remat="full", precision="mixed", tied=True)
    assert whole["parameters"] * FP32 == whole["gradients"] * BF16


def test_layers_that_do_not_divide_make_one_stage_longer():
    cluster = parse_cluster("h100:3")
    job = TrainingJob(batch_tokens=str(6 * T), seq_len=str(T))
    problem = TrainingProblem(load_model("llama-3-8b"), job, cluster, IDENTITY)
    layout = Layout(stage=3, num_microbatches=6, remat="none", wires=(("stage", (3,)),))
    m = estimate_training(problem, Fabric.of(cluster), layout).memory
    assert m["activations"] == pytest.approx(11 * 3 * KEPT["none"] * T * BF16, rel=1e-12)


def test_accumulation_holds_one_microbatch():
    assert memory(fsdp=8, num_microbatches=4, sequences=32) == memory(fsdp=8, sequences=8)


@pytest.mark.parametrize(("expert", "room"), [(1, 1), (2, 2), (8, 4)])
@pytest.mark.parametrize(("on", "in_step"), [("h100:8", False), ("v5p:2x2x2", True)])
def test_programs_of_xla_have_room_for_all_rows_that_could_come(on, in_step, expert, room):
    """On TPUs those of our own runtime."""

    def kept(calibration, in_step=in_step):
        cluster, sizes = parse_cluster(on), {"data": 8 // expert, "expert": expert}
        if on == "h100:8":
            wires = tuple((axis, (size,)) for axis, size in sizes.items() if size > 1)
        else:
            own = {1: {"data": (2, 2, 2)}, 2: {"data": (1, 2, 2), "expert": (2, 1, 1)}, 8: {"expert": (2, 2, 2)}}
            wires = tuple(own[expert].items())
        layout = Layout(**sizes, remat="none", wires=wires)
        job = TrainingJob(batch_tokens=str(8 * T), seq_len=str(T), precision="bf16", expert_imbalance=1)
        problem = TrainingProblem(load_model("mixtral-8x7b"), job, cluster, calibration, in_step=in_step)
        return estimate_training(problem, Fabric.of(cluster), layout).memory["activations"]

    top_k, layers = 2, 32
    if in_step:
        assert kept(CALIBRATION[True], in_step=False) == pytest.approx(kept(CALIBRATION[False]))
    rows = layers * T * top_k * (D + 3 * F + 1) * BF16  # dispatched, gate, up, their product, and gates
    assert kept(CALIBRATION[True]) - kept(CALIBRATION[False]) == pytest.approx((room - 1) * rows)


def test_the_reserve_is_a_share_of_what_the_device_reports():
    m = memory(fsdp=8)
    assert m["reserve"] == RESERVE_SHARE * parse_cluster("h100:8").chip.hbm_usable


def test_gradients_of_a_lone_microbatch_are_scattered_as_they_are_made():
    ours = {"compiled": True, "in_step": True, "remat": "full", "precision": "mixed"}
    lone, scattered = (memory(data=8, zero=zero, **ours) for zero in (1, 2))
    assert lone == scattered
    assert lone["gradients"] < FP32 * PARAMETERS / 2, "the embedding's at most is whole while it is made"
    # Those of several are added up whole, as by other software those of one.
    assert memory(data=8, zero=1, num_microbatches=2, sequences=16, **ours)["gradients"] == FP32 * PARAMETERS
    assert memory(data=8, zero=1, **{**ours, "in_step": False})["gradients"] == FP32 * PARAMETERS
    assert memory(data=8, zero=0, **ours)["gradients"] == FP32 * PARAMETERS
