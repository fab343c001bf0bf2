"""Collective matmuls that a layout asks for: how long their rings take, and what they hide behind."""

import math

import pytest

from meshwise.costs.calibration import Links
from meshwise.costs.collectives import ring_time, wire_time
from meshwise.costs.estimate import layout_candidate, layout_wires
from meshwise.costs.evaluate import evaluate
from meshwise.costs.fabric import Fabric
from meshwise.costs.fitted import find_calibration
from meshwise.costs.network import make_group_link
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.step import Ledger
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.sharding import CollectiveKind
from meshwise.sharding.layout import Layout
from meshwise.sharding.placed import Purpose

MB = 1e6


def wire(on, *factors):
    return make_group_link(Fabric.of(parse_cluster(on)), {"tensor": factors}, ("tensor",))


def test_both_ways_round_a_ring_no_schedule_is_faster():
    """v5p, an axis of 8 that wraps: 7/8 of 100 MB over 9e10 bytes/s one way; half of that both ways."""
    ring = wire("v5p:8x8x8", 8.0, 1.0, 1.0)
    one_way = 7 / 8 * 100 * MB / 9e10
    assert ring_time(100 * MB, ring, both_ways=False) == pytest.approx(one_way)
    assert ring_time(100 * MB, ring, both_ways=True) == pytest.approx(one_way / 2)
    assert wire_time(CollectiveKind.ALL_GATHER, 100 * MB, ring) == pytest.approx(one_way / 2)


@pytest.mark.parametrize(("on", "factors"), [("v5p:8x8x8", (4.0, 1.0, 1.0)), ("h100:8", (8.0,))])
def test_on_a_line_and_at_a_switch_both_ways_share_what_one_has(on, factors):
    line = wire(on, *factors)
    one_way, both = (ring_time(100 * MB, line, both_ways=b) for b in (False, True))
    assert one_way == pytest.approx(both)
    assert one_way == pytest.approx(100 * MB * line.gather)


def test_every_send_starts_up_anew():
    """Eight members: seven sends one way, four both ways."""
    ring, links = wire("h100:8", 8.0), Links(1.0, startup=1e-5)
    for both_ways, sends in ((False, 7), (True, 4)):
        assert ring_time(0.0, ring, both_ways=both_ways, links=links) == pytest.approx(
            sends * (1e-5 + ring.send_latency)
        )


def step(on, ledger=None, tensor=(4,), fsdp=(2,), **choices):
    cluster = parse_cluster(on)
    sizes = {"tensor": math.prod(tensor), "fsdp": math.prod(fsdp)}
    layout = Layout(**sizes, remat="full", wires=(("tensor", tensor), ("fsdp", fsdp)), **choices)
    job = TrainingJob(batch_tokens=str(layout.sequences * 4096), seq_len="4096")
    problem = TrainingProblem(load_model("llama-3-8b"), job, cluster, find_calibration("operations", cluster.chip))
    structure, candidates = layout_candidate(problem.model, layout)
    fabric = Fabric.of(cluster, flat_rings=problem.calibration.flat_rings)
    return evaluate(problem, structure, candidates, layout_wires(problem, fabric, layout), ledger=ledger).step


def test_what_stands_on_the_critical_path_of_a_gpu_hides_where_a_layout_asks_for_it():
    asked, left = step("h100:8", collective_matmul="bidirectional"), step("h100:8")
    assert left.hidden["tensor"] == 0
    assert asked.hidden["tensor"] > 0
    assert asked.terms["tensor"] < 0.1 * left.terms["tensor"]
    assert asked.expected < left.expected
    assert asked.flops == left.flops


def test_one_way_round_a_ring_of_a_torus_takes_twice_as_long():
    """16 chips along a whole axis: what both ways hide, one way sends for twice as long."""
    wires = {"tensor": (16, 1), "fsdp": (1, 16)}
    both, one = (step("v5e:16x16", **wires, collective_matmul=how) for how in ("bidirectional", "unidirectional"))
    total = [s.hidden["tensor"] + s.terms["tensor"] for s in (both, one)]
    assert 1.5 * total[0] < total[1] < 2.1 * total[0]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_bytes_are_those_of_the_collectives_that_rings_stand_for(sequence_parallel):
    """An AllReduce is a scatter beside its product and a gather on the critical path: the same bytes received."""
    sent = []
    for how in ("compiler", "unidirectional"):
        ledger = Ledger()
        step("h100:8", ledger, collective_matmul=how, sequence_parallel=sequence_parallel)
        worth = {CollectiveKind.ALL_GATHER: 1, CollectiveKind.REDUCE_SCATTER: 1, CollectiveKind.ALL_REDUCE: 2}
        all_sent = [(s, h.count) for h in ledger.hidings for s in h.sent if s.collective.key.mesh_axes == ("tensor",)]
        sent.append(sum(worth[s.collective.key.kind] * s.num_bytes * s.number * count for s, count in all_sent))
        beside = [s.collective for s, _ in all_sent if s.collective.purpose is Purpose.MATMUL]
        assert bool(beside) == (how == "unidirectional")
        assert not any(c.key.kind is CollectiveKind.ALL_REDUCE for c in beside)
    assert sent[0] == pytest.approx(sent[1])
