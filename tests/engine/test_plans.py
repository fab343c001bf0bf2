"""Plans of serving for our own engine: found by `--tool meshwise`, and what it cannot run refused by name."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

import meshwise
from meshwise.commands.serve import ServeRequest, _asked
from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.costs.machine import FEW_ROWS, machine_document
from meshwise.engine.launch import Launched, Pool
from meshwise.exports.serving import check_served_by
from meshwise.runtime.steps import Bucket
from meshwise.scheduling import Scheduling
from meshwise.search.serving import ServingPlan, simulator_setup
from meshwise.sharding.serving import ServingLayout
from tests.costs.test_machine import ROWS, SERVING

SMALL = "D=64 F=128 L=2 N=4 K=2 H=16 V=256"
JOB = {"on": "h100:8", "prompt": "1024", "output": "256"}


def executing(buckets):
    """An executor on GPUs, which attends by a kernel."""
    placement = SimpleNamespace(is_nvidia=True, platform="gpu")
    return SimpleNamespace(buckets=buckets, model=SimpleNamespace(stack=SimpleNamespace(placement=placement)))


def test_a_plan_for_our_own_engine_is_one_that_it_takes(tmp_path):
    found = meshwise.plan_serve("llama-3-70b", **JOB, tool="meshwise")
    plan = ServingPlan(found.problem, found.plans[0])
    check_served_by("meshwise", plan)
    file, said = tmp_path / "plan.json", []
    file.write_text(plan.to_json())
    asked = _asked(ServeRequest(model=str(file)), said.append)
    assert (asked.model.name, asked.layout.tensor) == ("llama-3-70b", plan.setup.decode.tensor)
    assert asked.cluster.name == plan.problem.cluster.name
    assert asked.planned["max_batch"] == plan.setup.batch
    assert (asked.replicas, said) == (plan.setup.decode.replicas, [])
    fewer = _asked(ServeRequest(model=str(file), replicas=1), said.append)
    assert fewer.replicas == 2
    assert said == ["the plan has 2 engines; this process runs 1, with their share"]


@pytest.mark.parametrize(
    ("layout", "more", "words"),
    [
        ("tensor=4,stage=2", {}, "stage=2: its engine splits over tensor, cache, expert"),
        ("tensor=4,cache=2,cache_split=batch", {}, "cache_split=batch: it spreads a cache's positions, not its requ"),
        ("tensor=8", {"precision": "fp8"}, "it holds no weights so; nearest: one of weights=int8,compute=bf16"),
        ("tensor=8", {"precision": "weights=int8,head=int8"}, "it holds embedding and head as wide as activations"),
        ("tensor=8", {"draft_tokens": 3, "acceptance": 0.7}, "it does not speculate"),
    ],
)
def test_what_it_cannot_run_is_refused_by_name(layout, more, words):
    with pytest.raises(MeshwiseError, match=words):
        meshwise.estimate_serve("llama-3-70b", **JOB, batch=16, layout=layout, tool="meshwise", **more)


def test_a_cache_spread_over_devices_is_planned_and_served(tmp_path):
    """Its positions are on several: the plan's prices are of that, and so are those of the buckets."""
    found = meshwise.estimate_serve(
        "llama-3-70b", **JOB, layout="tensor=4,cache=2,cache_split=sequence", batch=16, tool="meshwise"
    )
    file = tmp_path / "plan.json"
    file.write_text(ServingPlan(found.problem, found).to_json())
    asked = _asked(ServeRequest(model=str(file)), lambda _: None)
    assert (asked.layout.tensor, asked.layout.cache, asked.layout.cache_split) == (4, 2, "sequence")
    assert ServeRequest(model=SMALL, tensor=4, cache=2).layout == asked.layout.replace(wires=None)
    executor = executing([Bucket(16, 0, 16)])
    made = Launched((executor,), Scheduling(max_batch=16), 64, 1024, "8 x H100", "jax", DType.BF16)
    whole = replace(asked, layout=ServingLayout(tensor=4))
    read, of_four = (a.predicted(made).attention[0].seconds_per_cached_token for a in (asked, whole))
    assert read == pytest.approx(of_four / 2), "each device reads half of the positions"
    odd, split = "D=64 F=66 L=2 N=6 K=2 H=16 V=258", "cache=3,cache_split=sequence,replicas=2"
    with pytest.raises(MeshwiseError, match="cache=3: its pages of 16 tokens do not divide over it; nearest: cache=1"):
        meshwise.estimate_serve(odd, **JOB | {"on": "h100:6"}, layout=split, batch=16, tool="meshwise")


def test_experts_and_requests_spread_over_devices_are_planned_and_served(tmp_path):
    """Ranks share out requests, pages and prices: four times as many of each as one has, where all have as many."""
    given = {"batch": 16, "tool": "meshwise"}
    found = meshwise.estimate_serve("mixtral-8x7b", **JOB, layout="tensor=2,expert=4", **given)
    file = tmp_path / "plan.json"
    file.write_text(ServingPlan(found.problem, found).to_json())
    asked = _asked(ServeRequest(model=str(file)), lambda _: None)
    assert (asked.layout.tensor, asked.layout.expert, asked.replicas) == (2, 4, 1)
    assert ServeRequest(model=SMALL, tensor=2, expert=4).layout == asked.layout.replace(wires=None)
    executor = executing([Bucket(1, 0, 1), Bucket(4, 0, 4), Bucket(0, 512, 1)])
    made = Launched((executor,), Scheduling(max_batch=16, ranks=4), 64, 1024, "8 x H100", "jax", DType.BF16)
    costs = asked.predicted(made)
    assert [tokens for tokens, _ in costs.token_seconds] == [1, 4, 5, 16, 17, 2048]
    system = simulator_setup(found.problem, found.setup)
    assert system.scheduling.ranks == 4
    assert found.largest_batch * 80 <= system.costs.kv_blocks < 1.1 * found.largest_batch * 80  # of 1,280 tokens
    layout = "tensor=2,expert=8,expert_tensor_parallel=off"
    with pytest.raises(MeshwiseError, match="8 experts do not divide over 16 devices"):
        meshwise.estimate_serve("mixtral-8x7b", **JOB | {"on": "h100:16"}, layout=layout, **given)


def test_prefill_and_generation_apart_are_planned_and_served(tmp_path):
    found = meshwise.plan_serve("llama-3-70b", **JOB, mode="disaggregated", tool="meshwise")
    plan, file = ServingPlan(found.problem, found.plans[0]), tmp_path / "plan.json"
    file.write_text(plan.to_json())
    asked = _asked(ServeRequest(model=str(file)), lambda _: None)
    assert (asked.layout.tensor, asked.replicas) == (plan.setup.decode.tensor, plan.setup.decode.replicas)
    assert (asked.prefill.layout.tensor, asked.prefill.replicas) == (
        plan.setup.prefill.tensor, plan.setup.prefill.replicas,
    )  # fmt: skip
    executors = [(executing([Bucket(0, 512, 4), Bucket(4, 0, 4)]),)] * 2
    own = [Pool(e, Scheduling(max_batch=8), 64) for e in executors]
    made = Launched(own[0].executors, own[0].scheduling, 64, 1024, "8 x H100", "jax", DType.BF16, prefill=own[1])
    decode, prefill = asked.predicted(made), asked.predicted(made, prefill=True)
    ways = plan.setup.decode.tensor / plan.setup.prefill.tensor
    assert (ways > 1) == (decode.tokens_seconds(512) < prefill.tokens_seconds(512))
    assert (ways == 1) == (decode.tokens_seconds(512) == prefill.tokens_seconds(512))


def test_whole_experts_on_each_device_are_planned_and_served(tmp_path):
    layout, given = "tensor=8,expert_tensor_parallel=off", {"batch": 16, "tool": "meshwise"}
    found = meshwise.estimate_serve("mixtral-8x7b", **JOB, layout=layout, **given)
    file = tmp_path / "plan.json"
    file.write_text(ServingPlan(found.problem, found).to_json())
    asked = _asked(ServeRequest(model=str(file)), lambda _: None)
    assert (asked.layout.tensor, asked.layout.expert_tensor_parallel) == (8, False)
    assert asked.layout.structure.strategy("decode").splits(["E", "Fe"]) == {"E": ("tensor", "cache", "expert")}
    odd, split = "D=64 Fe=64 E=6 top_k=2 L=2 N=4 K=4 H=16 V=256", "tensor=4,expert_tensor_parallel=off,replicas=2"
    with pytest.raises(MeshwiseError, match="6 experts do not divide over 4 devices; nearest: expert_tensor_parallel="):
        meshwise.estimate_serve(odd, **JOB, layout=split, **given)
    with pytest.raises(MeshwiseError, match="sequence_parallel=on: it holds the residual stream whole"):
        meshwise.estimate_serve("mixtral-8x7b", **JOB, layout="tensor=8,sequence_parallel=on", **given)


@pytest.mark.parametrize(("precision", "form"), [("int8-weights", DType.INT8), ("weights=fp8", DType.FP8)])
def test_a_plan_of_narrow_weights_is_served_so(tmp_path, precision, form):
    found = meshwise.plan_serve("llama-3-70b", **JOB, precision=precision, tool="meshwise")
    file = tmp_path / "plan.json"
    file.write_text(ServingPlan(found.problem, found.plans[0]).to_json())
    asked = _asked(ServeRequest(model=str(file)), lambda _: None)
    assert asked.narrow is form
    executor = executing([Bucket(1, 0, 1)])
    made = Launched((executor,), Scheduling(max_batch=8), 64, 128, "8 x H100", "jax", DType.BF16)
    wide, narrow = (asked.predicted(replace(made, narrow=n)).tokens_seconds(1) for n in (None, form))
    fewer = 80 * 8192 * (2 * 64 * 128 + 2 * 8 * 128 + 3 * 28672) / asked.layout.tensor  # bytes a chip
    saved = (wide - narrow) * asked.cluster.chip.hbm_bandwidth
    assert 0.75 * fewer < saved < 1.5 * fewer, "kernels reach less than the memory's rate, those that widen least"
    with pytest.raises(MeshwiseError, match="it holds experts' weights as wide as activations"):
        meshwise.plan_serve("mixtral-8x7b", **JOB, precision=precision, tool="meshwise")


def test_steps_are_predicted_in_the_format_that_runs_and_in_its_buckets(tmp_path):
    """A plan in bf16 that runs in fp32 is priced in fp32: its bytes, and the rate at which it is multiplied."""
    file = tmp_path / "machine.toml"
    rows = [*ROWS, *(replace(row, dtype="bf16") for row in SERVING if row.op == FEW_ROWS), *SERVING]
    text = machine_document(rows, title="a machine", num_devices=1, memory=16 * 2**30)
    file.write_text(text)
    found = meshwise.plan_serve(SMALL, cluster=str(file), prompt="64", output="64", precision="bf16", tool="meshwise")
    plan = tmp_path / "plan.json"
    plan.write_text(ServingPlan(found.problem, found.plans[0]).to_json())
    buckets = [Bucket(1, 0, 1), Bucket(8, 0, 8), Bucket(0, 64, 4)]
    costs = {}
    for dtype in (DType.BF16, DType.FP32):
        executor = executing(buckets)
        made = Launched((executor,), Scheduling(max_batch=8), 64, 128, "a machine", "jax", dtype)
        of_plan, of_file = (
            _asked(ServeRequest(model=model, cluster=given), print).predicted(made)
            for model, given in ((str(plan), None), (SMALL, str(file)))
        )
        assert of_plan.token_seconds == of_file.token_seconds
        assert of_plan.tokens_seconds(3) == of_plan.tokens_seconds(8)
        costs[dtype] = of_plan
    read = costs[DType.FP32].attention[0].seconds_per_cached_token
    assert read == pytest.approx(2 * 2 * 2 * 16 * 4 / 1e9)  # keys and values of two heads in two layers, at 1 GB/s
    assert costs[DType.BF16].token_seconds != costs[DType.FP32].token_seconds
    asked = _asked(ServeRequest(model=SMALL, cluster=str(file)), print)
    assert asked.predicted(replace(made, narrow=DType.INT8)) is None, "nothing was measured of narrow weights there"


def test_nothing_predicts_twice(tmp_path):
    with pytest.raises(MeshwiseError, match="--costs a and --cluster b: give one of them"):
        _asked(ServeRequest(model=SMALL, costs="a", cluster="b"), print)
