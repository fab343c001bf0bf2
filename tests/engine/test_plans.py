"""Plans of serving for our own engine: found by `--tool meshwise`, and what it cannot run refused by name."""

import pytest

import meshwise
from meshwise.commands.serve import ServeRequest, _asked
from meshwise.core.errors import MeshwiseError
from meshwise.exports.serving import check_served_by
from meshwise.search.serving import ServingPlan

JOB = {"on": "h100:8", "prompt": "1024", "output": "256"}


def test_a_plan_for_our_own_engine_is_one_that_it_takes(tmp_path):
    found = meshwise.plan_serve("llama-3-70b", **JOB, tool="meshwise")
    plan = ServingPlan(found.problem, found.plans[0])
    check_served_by("meshwise", plan)
    file, said = tmp_path / "plan.json", []
    file.write_text(plan.to_json())
    model, layout, costs, limits = _asked(ServeRequest(model=str(file)), said.append)
    assert (model.name, layout.tensor) == ("llama-3-70b", plan.setup.decode.tensor)
    assert costs.kv_blocks > 0
    assert limits["max_batch"] == plan.setup.batch
    assert bool(said) == (plan.setup.decode.replicas > 1)


@pytest.mark.parametrize(
    ("layout", "more", "words"),
    [
        ("tensor=4,stage=2", {}, "stage=2: its engine splits over tensor alone"),
        ("tensor=4,cache=2,cache_split=sequence", {}, "cache=2: its engine splits over tensor alone"),
        ("tensor=8", {"precision": "fp8"}, "it keeps weights as wide as activations"),
        ("tensor=8", {"draft_tokens": 3, "acceptance": 0.7}, "it does not speculate"),
    ],
)
def test_what_it_cannot_run_is_refused_by_name(layout, more, words):
    with pytest.raises(MeshwiseError, match=words):
        meshwise.estimate_serve("llama-3-70b", **JOB, batch=16, layout=layout, tool="meshwise", **more)
