"""A step and its memory under every pipeline schedule: LLaMA-3-8B on eight H100, four stages of eight layers."""

import numpy as np
import pytest

import meshwise
from meshwise.core.errors import LayoutError
from meshwise.costs.calibration import IDENTITY
from meshwise.costs.ends import pipeline_ends
from meshwise.costs.estimate import estimate_training, evaluate_layout, layout_candidate, layout_wires
from meshwise.costs.evaluate import evaluate, evaluated
from meshwise.costs.fabric import Fabric
from meshwise.costs.layout_choices import Candidates
from meshwise.costs.makespans import PipelineShape
from meshwise.costs.pipeline import Pipeline
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.schedules import SCHEDULES, Rounds, find_schedule
from meshwise.costs.step import Ledger
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.sharding.layout import SCHEDULES as LAYOUT_SCHEDULES
from meshwise.sharding.layout import Layout

D, F, KH, V, L, T = 4096, 14336, 1024, 128256, 32, 8192
LAYER = 2 * D * D + 2 * D * KH + 3 * D * F + 2 * D
CLUSTER = parse_cluster("h100:8")
M = 16


def layout(name, **more):
    virtual = 2 if name == "interleaved" else 1
    sizes = {"stage": 4, "fsdp": 2, "num_microbatches": M, "virtual_stages": virtual, "remat": "full", **more}
    wires = tuple((a, (sizes[a],)) for a in ("stage", "fsdp"))
    return Layout(schedule=name, wires=wires, **sizes)


def problem(of):
    return TrainingProblem(
        load_model("llama-3-8b"),
        TrainingJob(batch_tokens=str(of.sequences * T), seq_len=str(T)),
        CLUSTER,
        IDENTITY,
    )


def estimate(of):
    return estimate_training(problem(of), Fabric.of(CLUSTER), of)


@pytest.fixture(scope="module")
def estimates():
    return {name: estimate(layout(name)) for name in SCHEDULES}


def test_layouts_name_the_schedules_that_are_priced():
    assert set(LAYOUT_SCHEDULES) == set(SCHEDULES)


def test_work_is_the_same_but_for_where_the_head_is(estimates):
    plain = estimates["1f1b"]
    for name in ("gpipe", "interleaved", "zb-h1"):
        for term in ("forward", "backward", "recompute", "fsdp", "data"):
            assert estimates[name].terms[term] == pytest.approx(plain.terms[term], rel=1e-12)
    # Embedding and head on one device: of DualPipe every other microbatch.
    assert estimates["zb-v"].terms["forward"] > plain.terms["forward"]
    assert estimates["dualpipe"].terms["forward"] < plain.terms["forward"]
    assert estimates["dualpipe-v"].terms["backward"] == pytest.approx(estimates["zb-v"].terms["backward"], rel=1e-12)


def copied_seconds(zero, **more):
    """Seconds of the sends that DualPipe makes besides those of a V without copies."""
    sizes = {"fsdp": 1, "data": 2, "zero": zero, **more}
    of = Layout(
        schedule="dualpipe", stage=4, num_microbatches=M, remat="full", wires=(("stage", (4,)), ("data", (2,))), **sizes
    )
    plain = of.replace(schedule="gpipe")
    sends = [estimate(o).terms["pipeline_send"] for o in (of, plain)]
    hops = [find_schedule(o.schedule).hops(PipelineShape(4, M)) for o in (of, plain)]
    return sends[0] - sends[1] * hops[0] / hops[1]


def test_copies_of_a_stage_tell_each_other_what_the_optimizer_reads():
    """Two stages of four on a device, the first with the embedding and the head: bytes by hand."""
    model = load_model("llama-3-8b")
    table = 128256 * 4096
    layers = (model.parameters.total - 2 * table - 4096) / 2
    gradients = layers + 2 * table + 4096
    one_way = Fabric.of(CLUSTER).dimensions[0].bandwidth_one_way
    fp32 = problem(layout("dualpipe")).job.formats.reductions.bytes
    assert copied_seconds(zero=0) == pytest.approx(fp32 * gradients / one_way, rel=1e-9)
    assert copied_seconds(zero=1) == pytest.approx(copied_seconds(zero=0) / 2, rel=1e-9)
    assert copied_seconds(zero=2) == pytest.approx(copied_seconds(zero=1), rel=1e-9)


def test_terms_add_up_and_bounds_hold(estimates):
    for name, e in estimates.items():
        assert sum(e.terms.values()) == pytest.approx(e.step_time.expected, rel=1e-12), name
        assert e.step_time.lower <= e.step_time.expected <= e.step_time.upper, name
        assert all(v >= 0 for v in e.terms.values()), name
        assert all(v >= 0 for v in e.hidden.values()), name


def test_bubbles_shrink_in_the_order_of_their_papers(estimates):
    bubble = {name: e.terms["pipeline_bubble"] for name, e in estimates.items()}
    assert bubble["gpipe"] == bubble["1f1b"]
    # Chunks are half as long, but for the embedding, which is waited for p times instead of once.
    assert 0.5 * bubble["1f1b"] < bubble["interleaved"] < 0.53 * bubble["1f1b"]
    assert bubble["zb-h1"] < 0.55 * bubble["1f1b"]
    assert bubble["zb-v"] < bubble["zb-h1"]
    sends = {name: e.terms["pipeline_send"] for name, e in estimates.items()}
    assert sends["interleaved"] == pytest.approx(7 / 3 * sends["1f1b"], rel=1e-12)
    assert sends["zb-v"] == pytest.approx(2 * sends["1f1b"], rel=1e-12)
    assert sends["zb-h1"] == sends["1f1b"]
    assert sends["dualpipe"] > sends["1f1b"]  # gradients between copies; see above


def test_1f1b_idles_for_the_other_stages(estimates):
    ledger = Ledger()
    one = layout("1f1b")
    step = evaluate_layout(problem(one), Fabric.of(CLUSTER), one, ledger).step
    times = ledger.times
    expected = times.first.total + 2 * times.middle.total
    assert step.terms["pipeline_bubble"] == pytest.approx(expected, rel=1e-12)
    # Gradients of weights take as many FLOPs as those of activations, without attention's and what is run again.
    assert times.middle.weights < times.middle.backward
    assert times.middle.weights > 0.4 * times.middle.forward


def test_activations_in_flight(estimates):
    """Full remat keeps the input of a layer, T x D bf16 values; token ids are next to nothing."""
    held = {name: e.memory["activations"] / (8 * T * D * 2) for name, e in estimates.items()}
    assert held["1f1b"] == pytest.approx(1, rel=1e-3)  # the last stage, whose logits weigh more
    assert held["gpipe"] == pytest.approx(M, rel=1e-3)
    assert held["zb-h1"] == held["zb-v"] == pytest.approx(4, rel=1e-3)
    assert held["dualpipe"] == pytest.approx(4 + 1, rel=1e-3)
    assert held["dualpipe-v"] == pytest.approx(4.5, rel=1e-3)
    assert {e.in_flight for e in pipeline_ends(32, layout_pipeline("1f1b"))} == {1, 4}
    assert {e.in_flight for e in pipeline_ends(32, layout_pipeline("interleaved"))} == {2.5, 5.5}
    # Of 30 layers, the ends have 7 and the others 8: the second stage may hold most.
    assert [e.in_flight for e in pipeline_ends(30, layout_pipeline("1f1b"))] == [4, 1, 3]


def test_stages_in_step_hold_alike():
    """In one program: both ends on each device, whose update and head they share, and what the first stage holds."""
    (end,) = pipeline_ends(32, layout_pipeline("1f1b"), 0.5, positions=4096)
    assert end.counts == {"embed": 1.0, "layer": 8 / 32, "head": 1.0}
    assert (end.in_flight, end.head_share, end.state_share, end.made) == (7, 1 / 4, 1 / 4, 0.5)
    (all_positions,) = pipeline_ends(32, layout_pipeline("1f1b"), 0.5, positions=4098)  # which 4 do not divide
    assert (all_positions.head_share, all_positions.state_share) == (1, 1 / 4)
    (two,) = pipeline_ends(32, layout_pipeline("interleaved"), 0.5)
    assert (two.in_flight, two.made) == (12 / 2, 0.25)  # 8 of the first piece, 4 of the second
    assert len(pipeline_ends(32, layout_pipeline("zb-h1"), 0.5)) == 2  # which no program runs in step


def test_stages_in_step_hold_gradients_that_are_reduced_each_microbatch_twice():
    """Others are added up where they are made: a device holds sums of its layers' and of both ends' gradients."""
    gradients = {
        zero: meshwise.estimate_train(
            "llama-3-8b", on="h100:8", batch_tokens="512Ki", seq_len=T, precision="mixed", tool="meshwise",
            layout=f"stage=4,data=2,zero={zero},micro_batch=1,schedule=1f1b,remat=full",
        ).plans[0].estimate.memory["gradients"]
        for zero in (1, 2)
    }  # fmt: skip
    own, ends = 8 * LAYER, 2 * V * D + D
    assert gradients[1] == pytest.approx(4 * (own + ends), rel=1e-6)
    assert gradients[2] == pytest.approx(gradients[1] / 2 + 4 / 2 * own, rel=1e-6)


@pytest.mark.parametrize(("length", "logits"), [(6144, 3), (4096, 1)])
@pytest.mark.parametrize(("vocab", "update"), [(49152, 3), (49664, 1)])
def test_three_stages_share_what_divides(length, logits, vocab, update):
    """Logits are shared where positions divide, and the optimizer's state of both tables where their rows do."""

    def memory(number, layout):
        job = {"on": f"h100:{number}", "batch_tokens": 2 * number * length, "seq_len": length, "tool": "meshwise"}
        model = f"D=1024 F=1024 L=3 N=8 K=8 V={vocab}"
        return meshwise.estimate_train(model, layout=layout, precision="book", **job).plans[0].estimate.memory

    one, three = memory(2, "fsdp=2,micro_batch=2,remat=full"), memory(6, "fsdp=2,stage=3,micro_batch=2,remat=full")
    assert three["logits_and_loss"] == pytest.approx(one["logits_and_loss"] / logits, rel=1e-9)
    layer, table = 7 * 1024**2, vocab * 1024
    assert three["optimizer"] == pytest.approx((layer + 2 * table / update) * 8 / 2, rel=1e-3)


def test_a_head_that_is_dealt_is_fullest_when_its_gradient_is_there():
    """Logits and their gradient are halved; the weight's in fp32 is not, and layers' wait beside it."""
    width, vocab, length = 3072, 65536, 4096

    def memory(on, sequences, layout):
        model = f"D={width} F=1024 L=2 N=24 K=24 V={vocab}"
        job = {"on": on, "batch_tokens": sequences * length, "seq_len": length, "tool": "meshwise"}
        return meshwise.estimate_train(model, layout=f"fsdp=8,micro_batch=1,{layout}", **job).plans[0].estimate.memory

    one, two = memory("h100:8", 8, "remat=full"), memory("h100:16", 64, "stage=2,schedule=1f1b,remat=full")
    logits, stream, table = length * vocab * 2, length * width * 2, vocab * width
    layer = 4 * width**2 + 3 * width * 1024
    assert one["logits_and_loss"] == pytest.approx(2 * logits + 2 * stream, rel=1e-3)
    assert two["logits_and_loss"] == pytest.approx((logits + 3 * stream) / 2, rel=1e-3)
    assert one["gathered_weights"] == pytest.approx(2 * table, rel=1e-3)
    assert two["gathered_weights"] == pytest.approx(4 * table, rel=1e-3)
    assert two["gradients"] == pytest.approx(4 * (2 * table + 2 * layer) / 8, rel=1e-3)


def test_only_our_own_program_is_priced_as_one_whose_stages_work_in_step():
    job = {"on": "v5p:8", "batch_tokens": 16 * 4096, "seq_len": 4096}
    layout = "stage=4,fsdp=2,schedule=gpipe,micro_batch=1,num_microbatches=8,remat=full"
    asked = {"model": "llama-3-8b", "precision": "mixed", "layout": layout} | job
    own, other = (meshwise.estimate_train(**asked, tool=tool).plans[0] for tool in ("meshwise", "maxtext"))
    plain = meshwise.estimate_train(**asked).plans[0]
    assert own.problem.calibration == other.problem.calibration == plain.problem.calibration
    assert other.estimate == plain.estimate
    assert own.estimate.memory["activations"] == pytest.approx(plain.estimate.memory["activations"] * 9 / 8, rel=1e-3)
    assert own.estimate.memory["total"] < plain.estimate.memory["total"], "logits of one microbatch, dealt"
    again = meshwise.Plan.from_json(own.to_json())
    assert (again.stale, again.estimate) == ("", own.estimate)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_places_of_rounds_are_those_counted(name):
    for p, v in [(p, v) for p in range(2, 9) for v in ((1,) if name != "interleaved" else range(2, 7))]:
        counted = find_schedule(name).held_in_step(PipelineShape(p, 2 * p, v))
        assert counted == sum(Rounds(name, p, v, 2 * p).kept)


def layout_pipeline(name):
    of = layout(name)
    return Pipeline.of(name, of.stage, of.num_microbatches, of.virtual_stages)


def test_copies_of_parameters_and_where_the_ends_are(estimates):
    """bf16 weights over two chips of FSDP."""
    ends = {"1f1b": 8 * LAYER + V * D, "zb-v": 8 * LAYER + 2 * V * D + D, "dualpipe": 16 * LAYER + 2 * V * D + D}
    for name, parameters in ends.items():
        found = estimates[name].memory["parameters"]
        # 1F1B: the fuller of the first and the last stage, which has the final norm, too.
        assert found in (parameters, parameters + D), name


def test_logits_wait_where_gradients_of_weights_do(estimates):
    one = estimates["zb-v"].memory["logits_and_loss"]
    assert one > 0
    assert estimates["zb-h1"].memory["logits_and_loss"] == pytest.approx(4 * one, rel=1e-12)
    assert estimates["gpipe"].memory["logits_and_loss"] == pytest.approx(M * one, rel=1e-12)


def test_layers_that_do_not_divide_leave_the_last_stage_first():
    """32 layers on 3 stages: 11, 11 and 10 beside the head."""
    of = Layout(stage=3, num_microbatches=6, remat="full", wires=(("stage", (3,)),))
    cluster = parse_cluster("h100:3")
    p = TrainingProblem(
        load_model("llama-3-8b"), TrainingJob(batch_tokens=str(6 * T), seq_len=str(T)), cluster, IDENTITY
    )
    ledger = Ledger()
    costs = evaluate_layout(p, Fabric.of(cluster), of, ledger)
    even = Ledger()
    evaluate_layout(p, Fabric.of(cluster), of.replace(stage=1, wires=(("stage", (1,)),)), even)
    whole = even.times.first.total
    t = ledger.times
    assert t.first.total + t.middle.total + t.last.total == pytest.approx(whole, rel=1e-12)
    # The head is worth less than a layer more: the middle stage's neighbour with the embedding works longest.
    work = 6 * max(t.first.total, t.middle.total, t.last.total)
    names = ("forward", "backward", "recompute", "tensor", "context", "expert", "fsdp", "data")
    assert sum(costs.step.terms[n] for n in names) == pytest.approx(work, rel=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_many_candidates_cost_what_each_costs_alone(name):
    of = layout(name)
    p = problem(of)
    structure, one = layout_candidate(p.model, of)
    wires = layout_wires(p, Fabric.of(CLUSTER), of)
    numbers = np.array([8.0, 16.0, 32.0])
    many = Candidates(
        **{a: getattr(one, a) for a in ("data", "fsdp", "context", "tensor", "stage", "micro_batch")},
        num_microbatches=numbers, virtual_stages=one.virtual_stages, schedule=name,
    )  # fmt: skip
    together = evaluate(p, structure, many, wires)
    for i, n in enumerate(numbers):
        alone = evaluate_layout(p, Fabric.of(CLUSTER), of.replace(num_microbatches=int(n)))
        assert np.broadcast_to(together.step.expected, 3)[i] == alone.step.expected
        assert np.broadcast_to(together.memory["total"], 3)[i] == alone.memory["total"]


def test_one_evaluation_serves_every_schedule():
    of = layout("1f1b")
    p = problem(of)
    structure, candidates = layout_candidate(p.model, of)
    shared = evaluated(p, structure, candidates, layout_wires(p, Fabric.of(CLUSTER), of))
    for name in SCHEDULES:
        own = layout(name)
        costs = shared.costs(Pipeline.of(name, 4.0, float(M), float(own.virtual_stages)))
        assert costs == evaluate_layout(p, Fabric.of(CLUSTER), own)


@pytest.mark.parametrize(
    ("of", "words"),
    [
        ({"name": "interleaved", "num_microbatches": 6}, "6 microbatches do not divide by 4 stages"),
        ({"name": "dualpipe", "num_microbatches": 6}, "twice as many microbatches as stages: 6 are fewer than 8"),
        ({"name": "interleaved", "virtual_stages": 16}, "cuts the model into 64 chunks, found 32 layers"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(of, words):
    with pytest.raises(LayoutError, match=words):
        estimate(layout(**of))
