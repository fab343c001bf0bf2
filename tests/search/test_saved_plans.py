"""Plans that were saved: read back as they were, or refused in words."""

import json

import pytest

import meshwise
from meshwise.commands.estimate_serve import EstimateServeRequest
from meshwise.commands.plan_files import read_plan
from meshwise.core.errors import ConfigError, MeshwiseError, StalePlanWarning
from meshwise.search import Plan, plan_training
from meshwise.search.plan import ServingPlan
from tests.costs.small_problems import FEW, tiny
from tests.search.asked import estimate, planned, problem


@pytest.mark.parametrize("cluster", ["h100:16", "v5p:4x4x4", "v5e:4x4*2", "h100:16+sharp"])
def test_a_plan_is_reproduced_from_its_json(cluster):
    p = problem(tiny(layers=4, width=1024, hidden=4096), cluster, price=1.5, batch_tokens="128Ki", seq_len="2048")
    for plan in plan_training(p, top=2, **FEW).plans:
        again = Plan.from_json(plan.to_json())
        assert again.estimate == plan.estimate
        assert again.training == plan.training
        assert again.layout == plan.layout
        assert again.fabric == plan.fabric
        assert again.to_json() == plan.to_json()
        assert again.problem.cluster.price_per_chip_hour == 1.5


def test_a_plan_on_a_part_of_the_network_is_reproduced():
    plan = estimate(problem(cluster="v5p:4x4x4"), "fsdp=32")
    assert Plan.from_json(plan.to_json()).estimate == plan.estimate


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", r"plan JSON: .* at line 1, column 2"),
        ("[]", r"plan JSON: expected the keys .*layout.*; found list"),
        ('{"layout": 1}', r"plan JSON: expected the keys .*; found layout"),
    ],
)
def test_torn_plans_are_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("schema_version",), "2", "schema_version: expected '1', found '2'"),
        (("job",), None, "a value was changed: one is of another kind than its neighbours need"),
        (("job", "seq_len"), "x", "a value was changed: seq_len: expected a number such as .* found 'x'; undo that"),
        (("job", "nonsense"), 1, "a value was changed: nonsense: extra inputs are not permitted; undo that"),
        (("model", "hub_names"), 3, "a value was changed"),
        (("in_step",), "yes", "a value was changed"),
        (("cluster",), 3, "expected a cluster name"),
        (("layout", "wires"), None, r"layout\.wires: expected"),
        (("layout", "data"), [], "whole number"),
        (("fabric", 0, "size"), 1e400, "a value was changed"),
        (("fabric", 0), None, "a value was changed"),
        (("fabric", 0), {"name": "nvlink"}, "a value was changed: 'size' is missing; undo that"),
    ],
    ids=str,
)
def test_plans_with_a_changed_value_are_refused(path, value, words):
    changed = json.loads(planned().plans[0].to_json())
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(MeshwiseError, match=words):
        Plan.from_json(json.dumps(changed))


def test_sequences_longer_than_the_model_reads_are_refused():
    (plan,) = meshwise.estimate_train("gpt2", on="h100:8", batch_tokens="64Ki", seq_len=1024, layout="data=8").plans
    changed = json.loads(plan.to_json())
    changed["job"]["seq_len"] = 2048
    with pytest.raises(MeshwiseError, match="gpt2 has learned positions for 1,024 tokens, found 2,048"):
        Plan.from_json(json.dumps(changed))


def test_a_plan_of_another_network_is_refused():
    text = planned().plans[0].to_json().replace('"name": "nvlink"', '"name": "x"')
    with pytest.raises(ConfigError, match="plan JSON: fabric names"):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda wires: wires.pop("data"), "layout.wires: data=64 lies nowhere"),
        (lambda wires: wires.update(data=[1, 64]), "dimension y of the network has 8 chips, the wires use 64"),
        (lambda wires: wires.update(data=[64]), "wires.data: expected 2 extents, one for each dimension"),
        (lambda wires: wires.update(data=[]), "wires of data multiply to 1, but data is 64"),
    ],
)
def test_wires_that_leave_out_an_axis_or_lie_off_the_network_are_refused(change, words):
    plan = estimate(problem(cluster="v5e:8x8", batch_tokens="512Ki", seq_len="2048"), "data=64")
    changed = json.loads(plan.to_json())
    change(changed["layout"]["wires"])
    with pytest.raises(MeshwiseError, match=words):
        Plan.from_json(json.dumps(changed))


@pytest.mark.parametrize(
    ("number", "words"),
    [(n, f"its microbatches are {128 * n:,} sequences a step, the job's.* 256 ") for n in (1, 2**53)]
    + [(2**63, "num_microbatches must be at most 9,007,199,254,740,992, found 9223372036854775808")],
)
def test_microbatches_that_are_not_the_jobs_batch_are_refused(number, words):
    plan = estimate(problem(cluster="v5e:8x8", batch_tokens="512Ki", seq_len="2048"), "data=64,num_microbatches=2")
    changed = json.loads(plan.to_json())
    assert Plan.from_json(json.dumps(changed)).layout.sequences == 256
    changed["layout"]["num_microbatches"] = number
    with pytest.raises(MeshwiseError, match=words):
        Plan.from_json(json.dumps(changed))


def test_a_serving_plan_of_more_chips_than_there_are_is_refused():
    given = {"on": "h100:8", "prompt": 512, "output": 64, "batch": 8, "layout": "tensor=4,replicas=2"}
    saved = json.loads(EstimateServeRequest(model="llama-3-8b", **given).plan().to_json())
    assert ServingPlan.from_json(json.dumps(saved)).setup.num_chips == 8
    for step in ("prefill", "decode"):
        saved["setup"][step]["replicas"] = 100
    with pytest.raises(MeshwiseError, match="its engines need 400 chips, h100:8 has 8"):
        ServingPlan.from_json(json.dumps(saved))


def test_numbers_that_are_too_long_or_nested_too_deeply_are_refused():
    text = planned().plans[0].to_json()
    for bad in ("9" * 5000, "[" * 500 + "]" * 500, "NaN"):
        with pytest.raises(MeshwiseError):
            Plan.from_json(text.replace('"seq_len": 8192.0', f'"seq_len": {bad}'))


def test_an_estimate_that_the_inputs_do_not_give_is_noticed(tmp_path):
    plan = planned().plans[0]
    assert Plan.from_json(plan.to_json()).stale == ""
    saved = json.loads(plan.to_json())
    saved["estimate"]["step_time_s"] *= 2
    assert Plan.from_json(json.dumps(saved)).stale.startswith("step_time_s ")
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(saved))
    with pytest.warns(StalePlanWarning, match=r"plan .*plan.json': its estimate is not what .* saved, .* now"):
        read_plan(file, Plan)
    saved["job"]["precision"] = "fp32"  # what was asked was changed, the estimate was not
    assert "step_time_s" in Plan.from_json(json.dumps(saved)).stale
    del saved["estimate"]  # as versions before wrote it
    assert Plan.from_json(json.dumps(saved)).stale == ""


@pytest.mark.parametrize("kept", [{}, {"step_time_s": 1}, {"step_time_s": "1", "memory_bytes": 1}, [], None])
def test_an_estimate_of_other_kinds_is_refused(kept):
    saved = json.loads(planned().plans[0].to_json())
    saved["estimate"] = kept
    with pytest.raises(ConfigError, match="plan JSON: estimate"):
        Plan.from_json(json.dumps(saved))
