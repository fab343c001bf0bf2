"""Layouts of which little is open are priced without a search, and come out as a search has them."""

from dataclasses import replace

import pytest

from meshwise.costs.calibration import default_calibration
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.search.completed import complete_layout, search_layout
from meshwise.search.plan import Plan
from meshwise.search.written import placed, written_layouts
from meshwise.sharding.layout import parse_layout

CASES = (
    ("llama-3-8b", "h100:64", "fsdp=64,remat=full,micro_batch=1,num_microbatches=4"),
    ("llama-3-8b", "h100:64", "fsdp=16,tensor=4,remat=none,micro_batch=2,num_microbatches=8"),
    ("llama-3-8b", "v5p:4x4x4", "data=4,fsdp=4,tensor=4,zero=1,micro_batch=4,num_microbatches=4"),
    ("llama-3-8b", "v5e:8x8", "data=16,context=2,tensor=2,context_method=ring,micro_batch=1,num_microbatches=16"),
    ("llama-3-8b", "h100:64", "data=4,tensor=4,stage=4,schedule=1f1b,zero=1,micro_batch=1,num_microbatches=64"),
    ("llama-3-8b", "h100:64", "fsdp=64,remat=none,micro_batch=1,num_microbatches=4,offload=optimizer"),
    ("mixtral-8x7b", "h100:64", "data=8,expert=8,micro_batch=2,num_microbatches=2"),
    ("mixtral-8x7b", "v5p:4x4x4", "fsdp=8,expert=8,fully_sharded=off,micro_batch=2,num_microbatches=2,remat=full"),
)

#: Recomputation of attention hides here beside gathers whole: of layouts as fast a search takes the smallest, and
#: one that is written the one that recomputes nothing.
AS_FAST = CASES[3][2]


def asked(model: str, on: str) -> TrainingProblem:
    cluster = parse_cluster(on)
    job = TrainingJob(batch_tokens=256 * 4096, seq_len=4096, batch_slack=0.0)
    return TrainingProblem(load_model(model), job, cluster, default_calibration(cluster.chip))


@pytest.mark.parametrize(("model", "on", "text"), CASES)
def test_as_a_search_finds_it(model, on, text):
    problem = asked(model, on)
    request = parse_layout(text, num_chips=64)
    assert written_layouts(problem, request)
    found = complete_layout(problem, request, memory_share=1.0)
    (best,) = search_layout(problem, request, (), 1.0).best
    assert found.layout == (best.layout if text != AS_FAST else replace(best.layout, remat="none"))
    assert found.estimate.step_time.expected / found.estimate.tokens == pytest.approx(best.seconds_per_token, rel=1e-12)
    searched = Plan.of(problem, best.layout, best.fabric).estimate
    assert searched.memory["total"] == pytest.approx(best.memory_bytes, rel=1e-12)
    assert found.estimate.memory["total"] >= searched.memory["total"]
    assert Plan.of(problem, found.layout, found.fabric).estimate == found.estimate  # of many placements, or of one


@pytest.mark.parametrize(("model", "on", "text"), [case for case in CASES if "remat" not in case[2]])
def test_recomputation_is_never_faster(model, on, text):
    """So that it is not tried where everything fits."""
    problem = asked(model, on)
    layouts = written_layouts(problem, parse_layout(text, num_chips=64))
    for whole in (layout for layout in layouts if layout.remat == "none"):
        others = [layout for layout in layouts if replace(layout, remat="none") == whole]
        steps = [_expected(placed(problem, [layout], [problem.network], 0.0)) for layout in others]
        assert len(steps) == 4
        assert min(steps) >= steps[0] * (1 - 1e-12)


def _expected(plans: list[Plan]) -> float:
    (plan,) = plans
    return plan.estimate.step_time.expected


@pytest.mark.parametrize("left_out", ["micro_batch", "num_microbatches"])
def test_more_that_is_open_is_searched(left_out):
    text = ",".join(part for part in CASES[1][2].split(",") if not part.startswith(left_out))
    assert written_layouts(asked("llama-3-8b", "h100:64"), parse_layout(text, num_chips=64)) == []
