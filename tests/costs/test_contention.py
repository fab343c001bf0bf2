"""Groups of chips that send at once over the same links: their times add up; over other links they do not."""

import pytest

from meshwise.costs.calibration import CALIBRATIONS
from meshwise.costs.estimate import layout_candidate, layout_wires
from meshwise.costs.evaluate import evaluate
from meshwise.costs.fabric import Fabric
from meshwise.costs.fitted import find_calibration
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.step import Ledger
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.sharding.layout import Layout

T = 4096


def step(of, on, *, alone=False, ledger=None):
    """The step of a layout; `alone` prices each group as if it had its links to itself."""
    cluster = parse_cluster(on)
    job = TrainingJob(batch_tokens=str(of.sequences * T), seq_len=str(T))
    problem = TrainingProblem(load_model("llama-3-8b"), job, cluster, find_calibration("operations", cluster.chip))
    structure, candidates = layout_candidate(problem.model, of)
    fabric = Fabric.of(cluster, flat_rings=problem.calibration.flat_rings)
    wires = layout_wires(problem, fabric, of)
    priced = wires.__call__ if alone else wires
    return evaluate(problem, structure, candidates, priced, ledger=ledger).step


def torus(tensor, fsdp, data=(1, 1, 1), **more):
    extents = {"tensor": tensor, "fsdp": fsdp, "data": data}
    sizes = {a: e[0] * e[1] * e[2] for a, e in extents.items()}
    return Layout(**sizes, wires=tuple(extents.items()), remat="full", **more)


APART = torus((1, 4, 1), (4, 1, 4))
TOGETHER = torus((1, 2, 2), (4, 2, 2))


def test_groups_on_different_axes_of_a_torus_do_not_slow_each_other():
    assert float(step(APART, "v5p:4x4x4").expected) == float(step(APART, "v5p:4x4x4", alone=True).expected)


def test_weights_hide_behind_what_collective_matmuls_leave_of_shared_links():
    shared, alone = Ledger(), Ledger()
    slow = step(TOGETHER, "v5p:4x4x4", ledger=shared)
    fast = step(TOGETHER, "v5p:4x4x4", alone=True, ledger=alone)
    assert slow.expected > fast.expected
    assert slow.lower == fast.lower
    assert slow.upper == fast.upper
    assert len(shared.hidings) == len(alone.hidings)
    for mine, other in zip(shared.hidings, alone.hidings, strict=True):
        if mine.rule == 3:
            fused = sum(
                sent.seconds
                for h in shared.hidings
                if h.block is mine.block and h.when is mine.when and h.rule == 2 and h.cover
                for sent in h.sent
            )
            assert fused > 0
            assert mine.cover == pytest.approx(max(other.cover - fused, 0.0), rel=1e-12)


def test_a_step_of_a_block_takes_its_links_as_long_as_they_send():
    """Where all sends share links and compute is short, gathers and collective matmuls simply add up."""
    of = torus((1, 2, 2), (4, 2, 2), micro_batch=1)
    ledger = Ledger()
    slow = step(of, "v5p:4x4x4", ledger=ledger)
    sent = sum(
        float(h.count * one.seconds)
        for h in ledger.hidings
        for one in h.sent
        if h.rule in (2, 3) and (h.cover or h.rule == 3)
    )
    terms = {n: float(s) for n, s in slow.terms.items()}
    assert sum(terms.values()) >= sent


@pytest.mark.parametrize("context", [(2, 2), (4, 1)])
def test_a_ring_and_gathers_of_weights_share_the_port_of_a_chip(context):
    """Eight chips a node: the ring leaves it, or does not; gathers do, and cross NVLink, too."""
    fsdp = (8 // context[0], 2 // context[1])
    of = Layout(context=4, fsdp=4, context_method="ring", remat="full", wires=(("context", context), ("fsdp", fsdp)))
    assert step(of, "h100:16").expected >= step(of, "h100:16", alone=True).expected
    shared, alone = Ledger(), Ledger()
    step(of, "h100:16", ledger=shared)
    step(of, "h100:16", alone=True, ledger=alone)
    pairs = [(a, b) for a, b in zip(shared.hidings, alone.hidings, strict=True) if a.rule == 3]
    assert any(a.cover < b.cover for a, b in pairs)
    assert all(a.cover <= b.cover for a, b in pairs)


def test_without_collective_matmuls_gathers_have_the_links_to_themselves():
    """Tensor collectives stand on the critical path: nothing runs beside them."""
    assert not CALIBRATIONS["hopper"].collective_matmul
    of = Layout(tensor=2, fsdp=8, remat="full", wires=(("tensor", (2, 1)), ("fsdp", (4, 2))))
    assert step(of, "h100:16").expected == step(of, "h100:16", alone=True).expected
