"""Searches whose plans are sent requests: what they say holds in longer simulations, by other draws."""

from dataclasses import replace

import pytest

import meshwise
from meshwise.jobs import drawn_requests
from meshwise.search.serving import simulator_setup
from meshwise.simulation.serving import LatencyTarget, LatencyTargets, Targets, keeps_targets, simulate_serving

LOAD = {"on": "h100:8", "prompt": 512, "output": 64, "precision": "fp8", "tool": "none"}


@pytest.fixture(scope="module")
def planning():
    said = []
    found = meshwise.plan_serve("llama-3-8b", **LOAD, max_ttft="150ms", max_tpot=0.02, progress=said.append)
    return found, said


def test_plain_targets_are_the_99th_percentile(planning):
    found, _ = planning
    assert found.targets == LatencyTargets(LatencyTarget(0.15, 0.99), LatencyTarget(0.02, 0.99))
    asked = meshwise.plan_serve("llama-3-8b", **LOAD, rate=4, max_ttft="mean:1s", max_tpot="40ms", share=0.9).targets
    assert (asked.ttft.share, asked.tpot.share) == (None, 0.9)


def test_what_is_said_holds_for_the_whole_plan_and_other_draws(planning):
    found, _ = planning
    assert found.simulated
    for p in found.simulated:
        assert p.share >= 0.98  # each target by itself is kept by 99 %
        load = replace(drawn_requests(found.problem.load, p.rate, 8000), seed=7)
        result = simulate_serving(simulator_setup(found.problem, p.estimate.setup), load)
        assert found.targets.share_kept(result) >= 0.97
        assert p.rate <= p.estimate.requests_per_s


def test_the_share_done_is_told_from_the_beginning(planning):
    _, said = planning
    assert said[0].startswith("searching layouts")
    assert "0% done" in said[1]
    assert any("left" in line for line in said)


def test_the_objective_holds_beside_percentiles():
    fast = meshwise.plan_serve("llama-3-8b", **LOAD, objective="tpot", max_ttft="300ms")
    tpot = [p.estimate.tpot.expected for p in fast.simulated]
    assert tpot == sorted(tpot)


@pytest.mark.parametrize("targets", [Targets(0.02, 0.01, 0.95), LatencyTargets(LatencyTarget(0.03, 0.9))])
def test_a_simulation_that_ends_early_says_what_a_whole_one_says(planning, targets):
    found, _ = planning
    system = simulator_setup(found.problem, found.plans[0].setup)
    outcomes = set()
    for share in (0.05, 0.3, 0.6, 0.8, 0.95, 1.2):
        load = drawn_requests(found.problem.load, share * found.plans[0].requests_per_s, 800)
        whole = targets.met_by(simulate_serving(system, load))
        assert (keeps_targets(system, load, targets) is not None) == whole
        outcomes.add(whole)
    assert outcomes == {True, False}
