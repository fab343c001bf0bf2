"""The simplest plan is first: nothing in the space that cannot be told from the best is simpler."""

from __future__ import annotations

import dataclasses

import pytest

import meshwise
from meshwise.search.serving import ServingConstraints, plan_serving
from meshwise.search.serving.constraints import estimate_scores
from meshwise.search.serving.simplest import complexity
from tests.search.serving.test_planner import every_estimate, problem


@pytest.fixture(scope="module")
def given():
    return problem(on="h100:2", prompt=512, output=64)


@pytest.fixture(scope="module")
def everything(given):
    return list(every_estimate(given))


@pytest.mark.parametrize("within", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("objective", ["throughput", "tpot", "ttft"])
def test_nothing_that_is_as_good_is_simpler(given, everything, objective, within):
    constraints = ServingConstraints(objective, max_batch=4)
    best = plan_serving(given, constraints=constraints).plans[0]
    first = plan_serving(given, constraints=dataclasses.replace(constraints, within=within)).plans[0]

    def alike(e):
        pairs = zip(estimate_scores(constraints, e)[:2], estimate_scores(constraints, best)[:2], strict=True)
        return all(a <= b + within * abs(b) + 1e-9 * abs(b) for a, b in pairs)

    assert alike(first)
    assert complexity(first.setup) == min(complexity(e.setup) for e in everything if alike(e))


def test_a_simple_plan_is_first_and_the_best_follows_with_what_it_gains():
    asked = {"on": "h100:8", "prompt": 1024, "output": 256}
    best = meshwise.plan_serve("qwen3-32b", within=0, **asked)
    found = meshwise.plan_serve("qwen3-32b", **asked)
    simple = found.plans[0]
    assert complexity(simple.setup) < complexity(best.plans[0].setup)
    assert found.plans[1].setup == best.plans[0].setup
    assert not any("simplest" in n.reason for n in best.neighbours)
    assert "1.9 % more tokens/s; within 2% predictions" in found.neighbours[0].reason
    assert 1 < best.plans[0].output_tokens_per_s / simple.output_tokens_per_s < 1.02
    assert len(found.plans) == 5


@pytest.mark.parametrize(
    ("layouts", "expected"),
    [
        ({"decode": "tensor=8"}, (1, False)),
        ({"decode": "replicas=8"}, (0, False)),
        ({"decode": "stage=8"}, (1, True)),
        ({"decode": "tensor=4,stage=2"}, (2, True)),
        ({"decode": "tensor=2,expert=4", "precision": "bf16"}, (2, False)),
        ({"decode": "tensor=4", "prefill": "replicas=4", "mode": "disaggregated"}, (2, True)),
        ({"decode": "tensor=8", "prefill": "fsdp=8"}, (2, True)),
    ],
)
def test_engines_of_two_kinds_count_as_one_axis_more(layouts, expected):
    options = {"mode": layouts.get("mode", "aggregated"), "prefill_layout": layouts.get("prefill")}
    e = meshwise.estimate_serve(
        "mixtral-8x7b", on="h100:8", prompt=1024, output=256, batch=8, layout=layouts["decode"], **options
    )
    assert complexity(e.setup) == expected
