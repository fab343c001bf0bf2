"""Layers of which only some follow the remat policy: everything is linear in how many, and exact at both ends."""

import numpy as np
import pytest

from meshwise.core.errors import LayoutError
from meshwise.costs.calibration import IDENTITY
from meshwise.costs.estimate import estimate_training, evaluate_layout, layout_candidate, layout_wires
from meshwise.costs.evaluate import evaluate
from meshwise.costs.explain import work_out
from meshwise.costs.fabric import Fabric
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.sharding.layout import Layout
from tests.costs.corpus import between, every_case
from tests.costs.small_problems import tiny

SUMS = ("forward", "backward", "recompute", "tensor", "optimizer")
HELD = ("parameters", "master_copies", "gradients", "optimizer", "activations", "logits_and_loss")
CLOSE = {"rel": 1e-12, "abs": 1e-18}


def estimate(**layout):
    cluster = parse_cluster("h100:8")
    whole = Layout(**{"tensor": 8, "micro_batch": 2, **layout}, wires=(("tensor", (8,)),))
    job = TrainingJob(batch_tokens=str(whole.sequences * 4096), seq_len="4096")
    problem = TrainingProblem(tiny(layers=8, kv_heads=8), job, cluster, IDENTITY)
    return estimate_training(problem, Fabric.of(cluster), whole)


@pytest.mark.parametrize("policy", ["matmuls", "attention", "full"])
def test_times_and_memory_are_linear_in_the_layers_that_recompute(policy):
    """On one chip's worth of layers nothing hides behind anything, so each sum is a weighted mean of its ends."""
    none, all_of_them = estimate(remat="none"), estimate(remat=policy)
    for layers in range(1, 9):
        some, share = estimate(remat=policy, remat_layers=layers), layers / 8
        for term in SUMS:
            mean = (1 - share) * none.terms[term] + share * all_of_them.terms[term]
            assert some.terms[term] == pytest.approx(mean, **CLOSE), term
        for name in HELD:
            mean = (1 - share) * none.memory[name] + share * all_of_them.memory[name]
            assert some.memory[name] == pytest.approx(mean, **CLOSE), name
        assert some.recompute_flops == pytest.approx(share * all_of_them.recompute_flops, **CLOSE)
        # The largest counts: a layer that recomputes needs room to do so as long as there is one.
        assert some.memory["workspace"] == max(
            all_of_them.memory["workspace"], 0 if layers == 8 else none.memory["workspace"]
        )


def test_what_a_layer_keeps_by_hand():
    """Of 8 layers of width 256, 8 x 32 of queries, keys and values, feed-forward 512: 3 repeat all, 5 keep all."""
    elements = 4 * 256 + 4 * 256 + 3 * 512
    m = estimate(remat="full", remat_layers=3).memory
    assert m["activations"] == pytest.approx(2 * 4096 * 2 * (3 * 256 + 5 * elements) / 8, rel=1e-12)


@every_case(between(1, 6), count=50)
def test_terms_add_up_and_nothing_leaves_the_range_of_its_ends(drawn, layers):
    problem, fabric, layout = drawn
    layers = min(layers, problem.model.num_layers)
    if layout.remat == "none":
        layout = layout.replace(remat="full")
    some, none, every = (
        estimate_training(problem, fabric, layout.replace(**changes))
        for changes in ({"remat_layers": layers}, {"remat": "none"}, {"remat_layers": None})
    )
    assert sum(some.terms.values()) == some.step_time.expected
    assert sum(v for k, v in some.memory.items() if k != "total") == pytest.approx(some.memory["total"], rel=1e-15)
    assert every.memory["activations"] <= some.memory["activations"] * (1 + 1e-12)
    assert some.memory["activations"] <= none.memory["activations"] * (1 + 1e-12)
    assert some.terms["recompute"] <= every.terms["recompute"] * (1 + 1e-12)
    if layers == problem.model.num_layers:
        assert some.step_time.expected == pytest.approx(every.step_time.expected, rel=1e-12)
        assert some.memory["total"] == pytest.approx(every.memory["total"], rel=1e-12)


@every_case(count=15, anew=50)
def test_workings_add_up(drawn):
    problem, fabric, layout = drawn
    layout = layout.replace(remat="attention", remat_layers=2)
    w, e = work_out(problem, fabric, layout), estimate_training(problem, fabric, layout)
    for term in ("forward", "backward", "recompute"):
        assert sum(b.seconds(term) for b in w.blocks) == pytest.approx(e.terms[term], rel=1e-9)
    names = [b.name for b in w.blocks]
    assert {"layer", "layer (all kept)"} <= set(names)
    assert len(set(names)) == len(names)
    for c in w.memory:
        assert c.total == pytest.approx(e.memory[c.name], rel=1e-9)


def test_an_array_of_shares_is_what_each_share_is():
    cluster = parse_cluster("h100:8")
    layout = Layout(fsdp=4, tensor=2, num_microbatches=2, remat="full", remat_layers=1)
    layout = layout.replace(wires=(("tensor", (2,)), ("fsdp", (4,))))
    job = TrainingJob(batch_tokens=str(layout.sequences * 4096), seq_len="4096")
    problem, fabric = TrainingProblem(tiny(layers=8), job, cluster, IDENTITY), Fabric.of(cluster)
    structure, candidate = layout_candidate(problem.model, layout)
    shares = np.array([0.125, 0.5, 1.0])
    sizes = {n: np.full(3, getattr(candidate, n)) for n in ("data", "fsdp", "tensor", "stage", "micro_batch")}
    many = type(candidate)(**sizes, context=1.0, num_microbatches=candidate.num_microbatches, remat_share=shares)
    costs = evaluate(problem, structure, many, layout_wires(problem, fabric, layout))
    for i, layers in enumerate((1, 4, 8)):
        one = evaluate_layout(problem, fabric, layout.replace(remat_layers=layers))
        assert costs.step.expected[i] == pytest.approx(one.step.expected, rel=1e-14)
        assert costs.memory["total"][i] == pytest.approx(one.memory["total"], rel=1e-14)


def test_more_layers_than_there_are_is_refused():
    with pytest.raises(LayoutError, match=r"remat_layers=9 is more than the 8 layers of tiny; use 8 or less"):
        estimate(remat="full", remat_layers=9)
