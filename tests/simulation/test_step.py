"""The timeline of a step ends when the estimate says, and its spans are the estimate's terms."""

import itertools
import math
from dataclasses import replace

import pytest

from meshwise.costs.calibration import CALIBRATIONS, IDENTITY
from meshwise.costs.estimate import evaluate_layout
from meshwise.costs.fabric import Fabric
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.sharding.layout import Layout
from meshwise.simulation import STREAMS, simulate_training_step

T = 8192
CLUSTER = parse_cluster("h100:16")

CASES = {
    "one stage": {"fsdp": 8, "tensor": 2, "num_microbatches": 2},
    "replicas": {"data": 4, "tensor": 4, "zero": 1, "num_microbatches": 4},
    "context": {"fsdp": 4, "context": 4},
    "gpipe": {"stage": 4, "fsdp": 4, "schedule": "gpipe", "num_microbatches": 8},
    "1f1b": {"stage": 4, "fsdp": 2, "tensor": 2, "num_microbatches": 16},
    "1f1b, few microbatches": {"stage": 8, "tensor": 2, "num_microbatches": 3},
    "interleaved": {"stage": 4, "fsdp": 4, "schedule": "interleaved", "virtual_stages": 4, "num_microbatches": 16},
    "zb-h1": {"stage": 4, "data": 2, "tensor": 2, "schedule": "zb-h1", "num_microbatches": 8},
    "zb-v": {"stage": 4, "fsdp": 4, "schedule": "zb-v", "num_microbatches": 16},
    "dualpipe": {"stage": 4, "tensor": 4, "schedule": "dualpipe", "num_microbatches": 16},
    "dualpipe-v": {"stage": 2, "tensor": 8, "schedule": "dualpipe-v", "num_microbatches": 16},
}


@pytest.fixture(scope="module", params=sorted(CASES))
def case(request):
    sizes = {"remat": "full", **CASES[request.param]}
    wires = tuple(
        (a, _extents(a, sizes)) for a in ("tensor", "context", "fsdp", "data", "stage") if sizes.get(a, 1) > 1
    )
    of = Layout(**sizes, wires=wires)
    job = TrainingJob(batch_tokens=str(of.sequences * T), seq_len=str(T))
    calibration = CALIBRATIONS["hopper"] if "stage" in sizes else IDENTITY
    problem = TrainingProblem(load_model("llama-3-8b"), job, CLUSTER, calibration)
    fabric = Fabric.of(CLUSTER)
    return problem, fabric, of, simulate_training_step(problem, fabric, of)


def _extents(axis, sizes):
    """Inner axes fill the node of eight, the outermost goes on over both nodes."""
    inside = 1
    for a in ("tensor", "context", "fsdp", "data", "stage"):
        size = sizes.get(a, 1)
        here = math.gcd(size, 8 // inside)
        if a == axis:
            return (here, size // here)
        inside *= here
    raise AssertionError


def test_the_end_is_the_expected_step_time(case):
    problem, fabric, of, timeline = case
    expected = evaluate_layout(problem, fabric, of).step.expected
    assert timeline.step.expected == expected
    assert timeline.total == pytest.approx(expected, rel=1e-12)
    # Chunks that differ: the closed form is a bound, or near the simulation.
    assert timeline.scale == pytest.approx(1, abs=0.03)
    if of.schedule in ("gpipe", "1f1b", "interleaved", "zb-h1"):
        assert timeline.scale == pytest.approx(1, abs=1e-9)


def test_exposed_spans_of_the_busiest_stage_are_the_terms(case):
    _, _, of, timeline = case
    terms = {n: float(s) for n, s in timeline.step.terms.items()}
    busy = [sum(e.end - e.start for e in timeline.simulated.events if e.device == d) for d in range(timeline.stages)]
    busiest = busy.index(max(busy))
    found = timeline.exposed(busiest)
    if of.schedule.startswith("dualpipe"):
        return
    scale = timeline.scale
    assert found["forward"] == pytest.approx(scale * terms["forward"], rel=1e-9)
    assert found["backward"] + found["weights"] == pytest.approx(scale * terms["backward"], rel=1e-9)
    assert found["recompute"] == pytest.approx(scale * terms["recompute"], rel=1e-9)
    assert found["optimizer"] == pytest.approx(terms["optimizer"], rel=1e-9)
    assert found.get("pipeline", 0.0) == pytest.approx(terms["pipeline_send"], rel=1e-9)
    networks = sum(found.get(n, 0.0) for n in ("tensor", "context", "expert", "fsdp", "data"))
    assert networks == pytest.approx(sum(terms[n] for n in ("tensor", "context", "expert", "fsdp", "data")), rel=0.03)
    if scale == pytest.approx(1, abs=1e-12):
        assert found["idle"] == pytest.approx(terms["pipeline_bubble"], rel=1e-6, abs=1e-9)
        for n in ("tensor", "context", "fsdp", "data"):
            assert found.get(n, 0.0) == pytest.approx(terms[n], rel=1e-9, abs=1e-12)


def test_no_stream_does_two_things_at_once(case):
    _, _, of, timeline = case
    for stage in range(timeline.stages):
        path = [s for s in timeline.of(stage) if s.exposed]
        for a, b in itertools.pairwise(path):
            assert b.start >= a.end - 1e-9
        assert path[0].start >= 0
        assert {s.stream for s in timeline.of(stage)} <= set(STREAMS)
        done = {(s.microbatch, s.chunk) for s in path if s.name == "forward"}
        v = {"zb-v": 2, "dualpipe-v": 2}.get(of.schedule, of.virtual_stages)
        assert len(done) == of.num_microbatches * v


def test_dualpipe_hides_exchanges_and_sets_compute_units_aside_for_them():
    """With 1/51 of the units set aside, arithmetic takes a fiftieth longer, and as much of an exchange is exposed."""
    sizes = {"expert": 2, "tensor": 2, "stage": 4, "num_microbatches": 16, "remat": "full", "fully_sharded": False}
    of = Layout(**sizes, schedule="dualpipe", wires=(("tensor", (2, 1)), ("expert", (2, 1)), ("stage", (2, 2))))
    job = TrainingJob(batch_tokens=str(of.sequences * T), seq_len=str(T))

    def timeline(schedule, exchange_cores):
        calibration = replace(IDENTITY, exchange_cores=exchange_cores)
        problem = TrainingProblem(load_model("mixtral-8x7b"), job, CLUSTER, calibration)
        return simulate_training_step(problem, Fabric.of(CLUSTER), of.replace(schedule=schedule))

    plain, free, taxed = timeline("1f1b", 0.0), timeline("dualpipe", 0.0), timeline("dualpipe", 1 / 51)
    assert free.exposed(1)["expert"] < 0.5 * plain.exposed(1)["expert"]
    assert free.hidden(1)["expert"] > 0.5 * plain.exposed(1)["expert"]
    assert plain.hidden(1).get("expert", 0.0) == 0
    # Before passes are stretched to the closed form; one stage's compute of one microbatch, in all pairs that it has.
    hidden = [t.hidden(1)["expert"] / t.scale for t in (free, taxed)]
    pairs = sum(e.device == 1 and len(e.works) > 1 for e in free.simulated.events)
    computes = ("forward", "recompute", "backward", "weights")
    compute = sum(free.exposed(1)[name] for name in computes) / of.num_microbatches / free.scale
    assert hidden[0] - hidden[1] == pytest.approx(pairs * compute / 50, rel=1e-9)
    # Nothing else is split up so that it could run beside another microbatch's compute.
    assert free.exposed(1)["tensor"] == pytest.approx(plain.exposed(1)["tensor"], rel=0.05)
    assert free.hidden(1).get("tensor", 0.0) == 0


WHOLE = {
    "mixture, two kinds of context": (
        "mixtral-8x7b",
        {"expert": 4, "context": 2, "ulysses": 2, "zero": 1, "remat": "full"},
    ),
    "ring": ("llama-3-8b", {"fsdp": 4, "context": 4, "context_method": "ring", "remat": "full"}),
    "offload": ("llama-3-8b", {"fsdp": 16, "offload": ("optimizer", "activations"), "remat": "full"}),
    "replicas": ("llama-3-8b", {"data": 16, "zero": 1, "remat": "none", "num_microbatches": 2}),
    "some layers recomputed": ("llama-3-8b", {"fsdp": 16, "remat": "full", "remat_layers": 16}),
}


@pytest.mark.parametrize("name", WHOLE)
def test_every_stream_of_a_step_is_in_its_timeline(name):
    """What is hidden, too: without a pipeline each term of the estimate is there to the second."""
    model, sizes = WHOLE[name]
    axes = ("tensor", "ulysses", "context", "expert", "fsdp", "data", "stage")
    wires, inside = [], 1
    for axis in axes:
        size = sizes.get(axis, 1)
        if size > 1:
            here = math.gcd(size, 8 // inside)
            wires.append((axis, (here, size // here)))
            inside *= here
    of = Layout(**sizes, wires=tuple(wires))
    job = TrainingJob(batch_tokens=str(of.sequences * T), seq_len=str(T))
    problem = TrainingProblem(load_model(model), job, CLUSTER, CALIBRATIONS["hopper"])
    timeline = simulate_training_step(problem, Fabric.of(CLUSTER), of)
    exposed, hidden = timeline.exposed(0), timeline.hidden(0)
    names = {"host": "offload", **{n: n for n in ("tensor", "context", "expert", "fsdp", "data")}}
    for stream, term in names.items():
        assert exposed.get(stream, 0.0) == pytest.approx(float(timeline.step.terms[term]), rel=1e-9, abs=1e-11)
        mine = float(timeline.step.hidden.get(term, 0.0))
        assert hidden.get(stream, 0.0) == pytest.approx(mine, rel=1e-9, abs=1e-11)
    assert timeline.total == pytest.approx(float(timeline.step.expected), rel=1e-12)
    assert timeline.bubbles(0) == ()
