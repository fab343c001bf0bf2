"""Plans for a tool: what a search finds under it can be exported to it, and what a plan is said to run in takes it."""

import functools
import json
import math
from types import SimpleNamespace
from typing import NamedTuple

import pytest

import meshwise
from benchmarks import tool_jobs
from meshwise.cli.main import main
from meshwise.core.errors import HandoverError, LayoutError, MeshwiseError, UnknownNameError
from meshwise.costs.calibration import default_calibration
from meshwise.costs.fitted import find_calibration
from meshwise.costs.layout_choices import LayoutChoices
from meshwise.costs.problem import TrainingProblem
from meshwise.exports import TARGETS, runs_in, tools_for
from meshwise.exports.serving import check_served_by, serving_runs_in, serving_tools_for
from meshwise.exports.targets import USUAL
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.runtime.refusals import check_even, check_layout
from meshwise.search import plan_training
from meshwise.search.diagnosis import single_changes
from meshwise.search.serving import ServingPlan
from meshwise.sharding.layout import Layout, parse_layout

#: Jobs of all kinds: model, cluster, batch, length.
JOBS = {
    "dense": ("llama-3-8b", "h100:16", "1Mi", 8192),
    "dense on a torus": ("llama-3-8b", "v5e:4x4", "512Ki", 4096),
    "long": ("llama-3.1-8b", "h100:64", "1Mi", 131072),
    "mixture": ("mixtral-8x7b", "h100:64", "1Mi", 4096),
    "latent attention": ("deepseek-v2", "h200:128", "1Mi", 4096),
    "hybrid": ("jamba-v0.1", "h100:32", "1Mi", 4096),
    "odd": ("qwen2.5-7b", "mi300x:24", "768Ki", 4096),
}
QUICK = ("dense",)


def plans(job, **asked):
    model, on, batch_tokens, seq_len = JOBS[job]
    return meshwise.plan_train(model, on=on, batch_tokens=batch_tokens, seq_len=seq_len, **asked).plans


def taken_by(plan, tool):
    try:
        meshwise.export(plan, to=tool)
    except HandoverError:
        return False
    return True


@pytest.mark.parametrize("job", [pytest.param(j, marks=[] if j in QUICK else pytest.mark.slow) for j in JOBS])
def test_what_is_found_for_a_tool_can_be_exported_to_it(job):
    best = plans(job)
    problem = best[0].problem
    able = [t.name for t in tools_for(problem, USUAL)]
    assert able, "some tool takes the job"
    for plan in best:
        assert set(runs_in(plan)) & set(able)
        told = tuple(t for t in runs_in(plan) if t != "meshwise")
        assert told == tuple(t for t in TARGETS if t in _all_able(problem) and taken_by(plan, t))
    for tool in able:
        found = plans(job, tool=tool, top=3)
        assert all(taken_by(plan, tool) for plan in found)
        if found[0].problem.calibration == problem.calibration:  # else its own overlap prices it
            assert found[0].estimate.step_time.expected >= best[0].estimate.step_time.expected * (1 - 1e-12)


def test_jax_is_offered_no_split_that_is_uneven():
    # On eight chips six replicas fill the batch better, and six do not divide the width of 1,024.
    found = meshwise.plan_train("qwen3-0.6b", on="rtx-pro-6000:8", batch_tokens="512Ki", seq_len=4096, tool="jax")
    assert all(taken_by(plan, "jax") for plan in found.plans)


def _all_able(problem):
    return {t.name for t in tools_for(problem)}


@pytest.mark.parametrize(("on", "tools"), [("gaudi3:8", []), ("trn2:16", ["jax", "meshwise"])])
def test_no_tool_is_claimed_for_chips_that_it_does_not_run_on(on, tools):
    best = meshwise.plan_train("llama-3-8b", on=on, batch_tokens="512Ki", seq_len=4096).plans[0]
    assert [tool.name for tool in tools_for(best.problem)] == tools
    assert set(runs_in(best)) <= set(tools)
    with pytest.raises(HandoverError, match=r"JAX does not run on it|it runs on chips of google"):
        meshwise.export(best, to="maxtext" if tools else "jax")


def test_any_plan_where_no_tool_is_to_take_it():
    free, usual = plans("dense on a torus", tool="none"), plans("dense on a torus")
    assert free[0].estimate.step_time.expected <= usual[0].estimate.step_time.expected
    assert not all(runs_in(plan) for plan in free)


def test_what_is_left_open_is_chosen_for_the_tool():
    for tool, remat in (("maxtext", "matmuls"), ("torchtitan", "none")):
        planning = meshwise.estimate_train(
            "llama-3-8b", on="h100:16", batch_tokens="1Mi", seq_len=8192, layout="fsdp=16", tool=tool
        )
        assert planning.plans[0].layout.remat == remat
        assert taken_by(planning.plans[0], tool)


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"tool": "megaton"}, UnknownNameError, "unknown tool 'megaton'. Nearest: megatron"),
        ({"tool": "vllm"}, UnknownNameError, "tool 'vllm'. .*; 'plan serve' and 'estimate serve' take"),
        ({"tool": "none,megatron"}, MeshwiseError, "none leaves the choice to no tool"),
        ({"tool": "megatron", "on": "v5e:4x4"}, HandoverError, "it runs on chips of nvidia; nearest: --tool maxtext"),
        ({"tool": "maxtext", "precision": "book"}, HandoverError, "optimizer moments have the format of the weights"),
        ({"tool": "maxtext", "model": "jamba-v0.1"}, HandoverError, "its layers are of several kinds"),
        ({"tool": "megatron", "layout": "stage=2,fsdp=8,schedule=zb-v"}, HandoverError, "a choice of this plan:.*zb-v"),
    ],
)
def test_what_a_tool_cannot_do_is_said_by_name(asked, error, message):
    asked = {"model": "llama-3-8b", "on": "h100:16", "batch_tokens": "1Mi", "seq_len": 8192} | asked
    with pytest.raises(error, match="(?s)" + message):
        (meshwise.estimate_train if "layout" in asked else meshwise.plan_train)(**asked)


#: Loads: model, cluster, formats.
LOADS = {
    "dense": ("llama-3-8b", "h100:8", "bf16"),
    "large": ("llama-3-70b", "h100:16", "fp8"),
    "torus": ("llama-3-8b", "v5e:2x4", "bf16"),
    "mixture": ("mixtral-8x7b", "h100:8", "bf16"),
    "latents": ("deepseek-v3", "h200:16", "fp8"),
    "amd": ("qwen2.5-7b", "mi300x:8", "bf16"),
}


@functools.cache
def serving(load, **asked):
    model, on, precision = LOADS[load]
    return meshwise.plan_serve(model, on=on, prompt=1024, output=256, precision=precision, **asked)


@pytest.mark.parametrize("load", LOADS)
def test_what_is_found_for_an_engine_can_be_exported_to_it(load):
    usual, free = serving(load), serving(load, tool="none", top=100)
    able = [t.name for t in serving_tools_for(usual.problem)]
    assert able
    for e in usual.plans:
        takers = tuple(t for t in serving_runs_in(usual.problem, e.setup) if t != "meshwise")  # it reads plans
        assert takers == tuple(t for t in able if taken_by(ServingPlan(usual.problem, e), t))
        assert takers
    for engine in able:
        found = serving(load, tool=engine, top=3, within=0).plans
        assert all(taken_by(ServingPlan(usual.problem, e), engine) for e in found)
        others = [e for e in free.plans if engine in serving_runs_in(usual.problem, e.setup)]
        assert all(e.throughput_per_chip <= 1.01 * found[0].throughput_per_chip for e in others), "ties are within 1 %"


@pytest.mark.parametrize("load", LOADS)
def test_plans_say_that_our_engine_runs_them_where_it_would_not_refuse_them(load):
    """One table: what `--tool meshwise` finds, what `meshwise serve` takes, and the names that plans show."""
    free = serving(load, tool="none", top=100)
    takes = []
    for e in free.plans:
        try:
            check_served_by("meshwise", ServingPlan(free.problem, e))
            takes.append(True)
        except HandoverError:
            takes.append(False)
    assert ["meshwise" in serving_runs_in(free.problem, e.setup) for e in free.plans] == takes
    assert any(takes) is (load not in {"large", "latents"}), "those are in fp8"
    if any(takes):
        asked = serving(load, tool="meshwise").plans
        assert all("meshwise" in serving_runs_in(free.problem, e.setup) for e in asked)


@pytest.mark.parametrize(("engine", "splits_width"), [("vllm", False), ("sglang", False), (("none",), True)])
def test_what_a_serving_layout_leaves_open_is_chosen_for_the_engine(engine, splits_width):
    asked = {"on": "h100:8", "prompt": 1024, "output": 256, "precision": "bf16", "batch": 32}
    e = meshwise.estimate_serve("mixtral-8x7b", layout="tensor=2,expert=4", tool=engine, **asked)
    assert e.setup.decode.expert_tensor_parallel is e.setup.prefill.expert_tensor_parallel is splits_width
    problem = serving("mixture", max_batch=1).problem
    assert (engine in serving_runs_in(problem, e.setup)) is not splits_width
    whole = {"layout": "tensor=2,expert=4,expert_tensor_parallel=on", "tool": engine}
    if not splits_width:
        with pytest.raises(HandoverError, match=r"expert_tensor_parallel=on: .*; nearest: expert_tensor_parallel=off"):
            meshwise.estimate_serve("mixtral-8x7b", **asked, **whole)


def test_a_serving_layout_that_no_engine_asked_for_takes_is_refused():
    asked = {"on": "h100:8", "prompt": 1024, "output": 256, "precision": "bf16", "batch": 32}
    with pytest.raises(HandoverError, match=r"(?s)vLLM cannot express a choice.*width=4: .*; nearest: tensor=8"):
        meshwise.estimate_serve("llama-3-8b", layout="tensor=2,width=4", tool="vllm,sglang", **asked)
    with pytest.raises(HandoverError, match="its engines have one layout for both"):
        meshwise.estimate_serve(
            "llama-3-8b", layout="tensor=4,cache=2,cache_split=sequence", prefill_layout="tensor=8", tool="sglang",
            **asked,
        )  # fmt: skip


def test_several_tools_are_named_with_commas(capsys):
    words = "estimate serve llama-3-8b --on h100:8 --prompt 1024 --output 256 --batch 8 --layout tensor=8 --json --tool"
    assert main([*words.split(), "vllm,sglang"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["runs_in"] == ["vllm", "sglang", "tensorrt-llm", "meshwise"]


class Even(NamedTuple):
    """What `check_even` reads of a placement, without devices."""

    layout: Layout
    strategy: object

    @property
    def mesh(self):
        return SimpleNamespace(shape=self.layout.sizes)

    def split(self, axes):
        return tuple(a for a in axes if self.layout.sizes[a] > 1)

    def ways(self, axes):
        return math.prod(self.layout.sizes[a] for a in axes)


LAYOUTS = (
    "fsdp=8,remat=full", "tensor=8,remat=none", "data=2,tensor=4,zero=1,remat=full", "stage=2,data=4,remat=none",
    "stage=2,data=4,schedule=interleaved,virtual_stages=2,num_microbatches=2,remat=full",
    "stage=2,data=4,schedule=zb-v,num_microbatches=4,remat=none", "stage=4,data=2,schedule=dualpipe,num_microbatches=8",
    "stage=2,data=4,num_microbatches=4,remat=full,remat_layers=3", "fsdp=8,remat=full,offload=optimizer",
    "fsdp=8,remat=full,offload=optimizer+activations", "fsdp=8,remat=none,offload=activations:4",
    "stage=2,data=4,num_microbatches=4,remat=full,offload=activations", "fsdp=8,remat=full,offload=parameters",
    "context=2,fsdp=4,remat=full", "ulysses=4,tensor=2,remat=full", "fsdp=3,data=2,remat=full", "tensor=5,remat=full",
)  # fmt: skip


@pytest.mark.parametrize("written", LAYOUTS)
def test_our_own_runtime_takes_what_it_does_not_refuse(written):
    request = parse_layout(written, num_chips=64)
    layout = Layout(**{"micro_batch": 1, "num_microbatches": 1} | request.choices | dict(request.sizes))
    model = load_model("D=64 F=192 L=8 N=8 K=4 H=16 V=256")
    job = TrainingJob(batch_tokens=64 * layout.sequences, seq_len=64)
    chips = parse_cluster(f"h100:{layout.num_chips}")
    problem = TrainingProblem(model, job, chips, default_calibration(chips.chip))
    (tool,) = tools_for(problem, ["meshwise"])
    program, placement = model.train_program(), Even(layout, LayoutChoices.of(layout).strategy)
    sizes = program.bind(batch=layout.sequences // layout.num_microbatches, queries=64)
    try:
        check_layout(layout, model)
        check_even(program, placement, sizes)
    except LayoutError:
        assert not tool.runs(layout)
    else:
        assert tool.runs(layout)


#: Of `benchmarks/tool_jobs.py`: a job of each kind.
SAMPLE = ("llama-3-8b h100:16", "mixtral-8x7b h100:64", "jamba", "gemma-3-1b v5e", "gpt-oss-120b h100:8", "v5e:2x4")


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_jobs_of_the_benchmark_are_as_they_should_be(name):
    (job,) = (j for j in tool_jobs.JOBS if name in j.name)
    answer = tool_jobs.check(job, timed=False)
    assert answer.first
    assert not answer.faults


def test_our_own_runtime_takes_stages_of_equal_pieces_only():
    asked = {"on": "h100:2", "batch_tokens": "64Ki", "seq_len": 4096, "tool": "meshwise"}
    uneven = "2 stages of 1 pieces: its stages run in step, and hold equal pieces; nearest: 1, 3 pieces in all"
    with pytest.raises(MeshwiseError, match=uneven):
        meshwise.estimate_train("D=64 F=128 L=3 N=4 V=512", layout="stage=2,schedule=1f1b", **asked)
    (even,) = meshwise.estimate_train("D=64 F=128 L=4 N=4 V=512", layout="stage=2,schedule=1f1b", **asked).plans
    assert even.layout.stage == 2


#: Jobs whose logits are much of what a chip holds, and others: as in `JOBS`.
FULL = (
    ("gemma-3-4b", "rtx-4090:8", "256Ki", 8192), ("llama-3.2-3b", "rtx-4090:8", "256Ki", 8192),
    ("qwen3-1.7b", "l40s:8", "512Ki", 4096), ("gemma-3-1b", "v5e:2x4", "512Ki", 8192),
    ("llama-3-8b", "h100:8", "512Ki", 8192),
)  # fmt: skip


#: Slow: the same of a mixture, of which there are far more layouts.
OF_MIXTURES = pytest.param(("gpt-oss-20b", "h100:8", "1Mi", 8192), marks=pytest.mark.slow)


@pytest.mark.parametrize("asked", [*FULL, OF_MIXTURES], ids=lambda asked: f"{asked[0]} on {asked[1]}")
def test_no_tool_has_a_faster_plan_than_the_whole_space_has(asked):
    model, on, batch, length = asked
    chips = parse_cluster(on)
    job = TrainingJob(batch_tokens=batch, seq_len=length)
    problem = TrainingProblem(load_model(model), job, chips, find_calibration("fitted", chips.chip))

    def least(*tools):
        (best, *_) = plan_training(problem, tools=tools, top=1, within=0).plans
        assert not tools or any(tool.runs(best.layout) for tool in tools)
        return best.estimate.step_time.expected / best.estimate.tokens

    tools, whole = tools_for(problem), least()
    each = {tool.name: least(tool) for tool in tools}
    assert len(each) > 1
    assert whole <= min(each.values()) * (1 + 1e-12)
    assert least(*tools) == pytest.approx(min(each.values()), rel=1e-12)


def test_a_loss_is_made_in_chunks_where_whole_logits_do_not_fit_and_a_tool_makes_them_so():
    job = {"on": "rtx-4090:8", "batch_tokens": "256Ki", "seq_len": 8192}

    def best(*tool, **asked):
        return meshwise.plan_train("gemma-3-4b", tool=tool, top=1, **job, **asked).plans[0]

    found = {tool: best(tool) for tool in ("none", "meshwise", "torchtitan", "torchtitan,deepspeed", "deepspeed")}
    assert {tool for tool, plan in found.items() if plan.layout.loss == "chunked"} == found.keys() - {"deepspeed"}
    assert runs_in(best()) == ("torchtitan", "meshwise")
    chunked, whole = found["meshwise"], best("meshwise", forbid="loss=chunked")
    again = meshwise.estimate_train("gemma-3-4b", tool="meshwise", layout=chunked.line, **job).plans[0]
    assert (again.layout, again.estimate.memory) == (chunked.layout, chunked.estimate.memory)
    assert whole.layout.loss == "whole"
    assert whole.estimate.step_time.expected > chunked.estimate.step_time.expected
    roomy = meshwise.plan_train("gemma-3-4b", tool="meshwise", top=1, **job | {"on": "h100:8"}).plans[0]
    assert roomy.layout.loss == "whole"


def test_a_layout_whose_logits_do_not_fit_is_offered_a_loss_in_chunks():
    layout = "data=8,micro_batch=16,num_microbatches=1,remat=full"
    job = {"on": "h100:8", "batch_tokens": "1Mi", "seq_len": 8192, "layout": layout}
    asked = meshwise.estimate_train("gemma-3-1b", tool="meshwise", **job)
    assert not asked.plans[0].estimate.fits
    assert "loss=chunked" in [change.what for change in single_changes(asked.plans[0], most=20)]
