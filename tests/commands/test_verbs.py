"""The Python verbs: they answer what the command line answers, and refuse in the package's own errors only."""

import inspect
import json
import math

import pytest
from pydantic_core import PydanticUndefined

import meshwise
from meshwise.cli.main import main
from meshwise.commands.collective import CollectiveRequest
from meshwise.commands.estimate_train import EstimateTrainRequest
from meshwise.commands.plan_train import PlanTrainRequest
from meshwise.commands.roofline import RooflineRequest
from meshwise.commands.shard import ShardRequest
from meshwise.core.errors import MeshwiseError
from tests.each import each

TRAIN = {"on": "v5p:4x4x4", "batch_tokens": "1Mi", "seq_len": 4096}
REQUESTS = {
    "plan_train": PlanTrainRequest,
    "estimate_train": EstimateTrainRequest,
    "roofline": RooflineRequest,
    "shard": ShardRequest,
    "collective": CollectiveRequest,
}


#: Parameters that say how an answer is looked for, not what is asked.
HOW = ("progress", "time_limit")


def told(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("verb", REQUESTS)
def test_parameters_and_defaults_are_those_of_the_request(verb):
    request = REQUESTS[verb]
    parameters = {n: p for n, p in inspect.signature(getattr(meshwise, verb)).parameters.items() if n not in HOW}
    assert set(parameters) == set(request.model_fields)
    for name, info in request.model_fields.items():
        default = parameters[name].default
        if info.default is PydanticUndefined:
            assert default is inspect.Parameter.empty, name
        elif info.default in ({}, ()):
            assert default is None, name
        else:
            assert default == getattr(info.default, "value", info.default), name


def test_plan_train_answers_as_the_command_does(capsys):
    planning = meshwise.plan_train("llama-3-8b", **TRAIN, tokens="1T", top=2)
    command = ["plan", "train", "llama-3-8b", "--on", "v5p:4x4x4", "--batch-tokens", "1Mi", "--seq-len", "4096"]
    plans = told(capsys, *command, "--tokens", "1T", "--top", "2")["plans"]
    assert [str(p.layout) for p in planning.plans] == [p["layout_text"] for p in plans]
    assert [p.estimate.step_time.expected for p in planning.plans] == [
        p["estimate"]["step_time_s"]["expected"] for p in plans
    ]
    assert planning.plans[0].training.days.expected == plans[0]["training"]["days"]


def test_estimate_train_answers_as_the_command_does(capsys):
    (plan,) = meshwise.estimate_train("llama-3-8b", **TRAIN, layout="fsdp=16,tensor=4").plans
    command = ["estimate", "train", "llama-3-8b", "--on", "v5p:4x4x4", "--batch-tokens", "1Mi", "--seq-len", "4096"]
    (row,) = told(capsys, *command, "--layout", "fsdp=16,tensor=4")["plans"]
    assert plan.estimate.step_time.expected == row["estimate"]["step_time_s"]["expected"]
    assert dict(plan.estimate.memory) == row["estimate"]["memory_bytes"]


def test_a_layout_that_never_fits_is_shown_in_its_leanest_way(capsys):
    asked = {"on": "h100:8", "batch_tokens": "1Mi", "seq_len": 8192}
    (leanest,) = meshwise.estimate_train("llama-3-8b", **asked, layout="data=8,zero=0").plans
    assert not leanest.estimate.fits
    for choices in ("remat=none", "remat=attention", "remat=full,micro_batch=4", "remat=full,micro_batch=1"):
        (other,) = meshwise.estimate_train("llama-3-8b", **asked, layout=f"data=8,zero=0,{choices}").plans
        assert other.estimate.memory["total"] >= leanest.estimate.memory["total"]
    command = ["estimate", "train", "llama-3-8b", "--on", "h100:8", "--batch-tokens", "1Mi", "--seq-len", "8192"]
    assert main([*command, "--layout", "data=8,zero=0"]) == 3
    told = capsys.readouterr().out
    assert "each element held 8 times" in told
    assert "zero=1: fits in " in told


def test_numbers_and_mappings_serve_as_well_as_text():
    text = meshwise.plan_train("llama-3-8b", **TRAIN, fix="tensor=4", top=1)
    numbers = meshwise.plan_train(
        "llama-3-8b", on="v5p:4x4x4", batch_tokens=2**20, seq_len="4096", fix={"tensor": 4}, top=1
    )
    assert text.plans[0].layout == numbers.plans[0].layout
    assert text.plans[0].layout.tensor == 4
    a = meshwise.shard("A[I_X, J] -> A[I, J]", mesh={"X": 4}, sizes={"I": 8, "J": 8})
    assert a == meshwise.shard("A[I_X, J] -> A[I, J]", mesh="X=4", sizes="I=8,J=8")


def test_a_plan_is_simulated_as_its_job_and_layout_are():
    asked = {**TRAIN, "layout": "stage=4,fsdp=4,tensor=4"}
    plan = meshwise.estimate_train("llama-3-8b", **asked).plans[0]
    assert meshwise.simulate_step("llama-3-8b", **asked).total == meshwise.simulate_step(plan).total
    with pytest.raises(MeshwiseError, match="a plan has its job in it, found on besides; leave them out"):
        meshwise.simulate_step(plan, on="v5p:4x4x4")


def test_the_catalogs():
    assert meshwise.all_models()["llama-3-70b"] is meshwise.model("llama-3-70b")
    assert meshwise.chips()["v5p"] is meshwise.chip("v5p")
    assert meshwise.cluster("v5p:4x4x4", price=3.0).price_per_chip_hour == 3.0
    assert {"v5e", "dgx-h100", "a3-megagpu-8g"} <= set(meshwise.clusters())


@each(
    "call, message",
    [
        (lambda: meshwise.plan_train("llama-3-8c", **TRAIN), "unknown model 'llama-3-8c'"),
        (lambda: meshwise.plan_train("llama-3-8b", **{**TRAIN, "batch_tokens": "4 apples"}), "batch_tokens: unknown"),
        (lambda: meshwise.plan_train("llama-3-8b", **{**TRAIN, "batch_tokens": math.nan}), "batch_tokens: "),
        (lambda: meshwise.plan_train("llama-3-8b", **{**TRAIN, "seq_len": -1}), "seq_len: "),
        (lambda: meshwise.plan_train("llama-3-8b", **{**TRAIN, "seq_len": None}), "seq_len: "),
        (lambda: meshwise.plan_train("llama-3-8b", **{**TRAIN, "on": 3}), "on: "),
        (lambda: meshwise.plan_train("llama-3-8b", **{**TRAIN, "on": "v5x:4"}), "unknown"),
        (lambda: meshwise.plan_train("llama-3-8b", **TRAIN, top=0), "top: expected at least 1, found 0"),
        (lambda: meshwise.plan_train("llama-3-8b", **TRAIN, max_memory=1.5), "max_memory: expected at most 1"),
        (lambda: meshwise.plan_train("llama-3-8b", **TRAIN, max_memory="0%"), "max_memory: expected more than 0"),
        (lambda: meshwise.plan_train("llama-3-8b", **TRAIN, objective="speed"), "objective: expected 'time', 'cost'"),
        (lambda: meshwise.plan_train("llama-3-8b", **TRAIN, fix={"tensors": 4}), "fix: unknown layout axis or"),
        (lambda: meshwise.plan_train("llama-3-8b", **TRAIN, fix=5), "fix: expected NAME=VALUE such as tensor=8"),
        (lambda: meshwise.plan_train("llama-3-8b", **TRAIN, fix=["tensor=2", 5]), "fix: expected NAME=VALUE such"),
        (lambda: meshwise.plan_train("llama-3-8b", **TRAIN, fix={4: 2}), "fix: unknown layout axis or choice '4'"),
        (lambda: meshwise.plan_train("llama-3-8b", **TRAIN, fix={"tensor": None}), "fix: tensor must be a whole"),
        (lambda: meshwise.plan_train("llama-3-8b", **TRAIN, fix="tensor=-1"), "fix: a fixed axis has a size, found"),
        (lambda: meshwise.plan_train("llama-3-8b", **TRAIN, fix="zero=3"), "fix: zero must be 0, 1 or 2, found 3"),
        (lambda: meshwise.plan_train("llama-3-8b", **TRAIN, forbid="rings"), "forbid: unknown thing to forbid 'rings'"),
        (lambda: meshwise.plan_train("llama-3-8b", **TRAIN, forbid=[3]), "forbid: expected words such as pipeline"),
        (lambda: meshwise.plan_train("llama-3-8b", **TRAIN, forbid="tensor=8"), "forbid: sizes are not forbidden one"),
        (lambda: meshwise.plan_train("llama-3-8b", **TRAIN, fix="tp=2", forbid="tp"), "--fix and --forbid: tensor=2"),
        (
            lambda: meshwise.plan_train("llama-3-8b", **TRAIN, fix="tensor=8", max_chips=4),
            "--fix: these axes need 8 chips, --max-chips allows 4",
        ),
        (lambda: meshwise.plan_train("llama-3-8b", **TRAIN, max_chips=0), "max_chips: expected at least 1, found 0"),
        (lambda: meshwise.plan_train("llama-3-8b", **TRAIN, deadline="3d"), "a deadline needs the tokens of the run"),
        (lambda: meshwise.plan_train("llama-3-8b", **TRAIN, budget="3M$"), "a budget needs the tokens of the run"),
        (lambda: meshwise.shard("A[I_X, J] -> A[I, J]", mesh="X=4", sizes=5), "sizes: expected NAME=SIZE"),
        (lambda: meshwise.plan_train(3, **TRAIN), "model: expected text, found 3"),
        (lambda: meshwise.estimate_train("llama-3-8b", **TRAIN, layout="fsdp"), "layout: expected name=value"),
        (lambda: meshwise.model(3), "model: expected a name, found 3"),
        (lambda: meshwise.chip("v5x"), "unknown chip"),
        (lambda: meshwise.cluster("missing.toml"), "cluster file 'missing.toml' does not exist"),
        (lambda: meshwise.roofline("bf16[B, D]", on="v5e"), ""),
        (lambda: meshwise.roofline("fp32[N] + fp32[N] -> fp32[N]", on="v5e", memory="disk"), "memory: "),
        (lambda: meshwise.shard("A[I_X, J] -> A[I, J]", mesh={"X": 0}), ""),
        (lambda: meshwise.collective("all-gather", "bf16[8_X]", mesh="X=4"), "on which cluster?"),
        (lambda: meshwise.collective("gather", "bf16[8_X]", mesh="X=4", on="v5e:4x4"), "kind: "),
    ],
)  # fmt: skip
def test_bad_arguments_get_the_packages_own_errors(call, message):
    with pytest.raises(MeshwiseError) as caught:
        call()
    assert str(caught.value).startswith(message)


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'meshwise' has no attribute 'plan_all'"):
        meshwise.plan_all  # noqa: B018


def test_the_public_list_is_what_can_be_loaded():
    assert dir(meshwise) == sorted(meshwise.__all__)
    for name in meshwise.__all__:
        assert getattr(meshwise, name) is not None


def test_a_zero_byte_is_refused_by_the_name_of_its_parameter():
    with pytest.raises(MeshwiseError, match=r"model: expected text, found a zero byte in it"):
        meshwise.estimate_train("llama\0", **TRAIN, layout="fsdp=64")
