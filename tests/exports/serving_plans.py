"""Plans of serving for the tests of the hand-over: layouts that are given, no search."""

import functools
from dataclasses import replace

from meshwise.costs.estimate import Interval
from meshwise.costs.fitted import find_calibration
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import ServingSetup
from meshwise.costs.serving.estimate import estimate_serving
from meshwise.hardware import parse_cluster
from meshwise.jobs import ServingLoad
from meshwise.models import load_model
from meshwise.search.serving import ServingPlan
from meshwise.sharding.serving import parse_serving_layout


@functools.cache
def make_serving_plan(model, on, layout, batch, *, prefill=None, prefill_batch=1, chunk=None, **load):
    """A plan of engines that do both, or of engines apart where `prefill` gives the layout of the others."""
    cluster = parse_cluster(on)
    decode = parse_serving_layout(layout, num_chips=cluster.num_chips)
    first = decode if prefill is None else parse_serving_layout(prefill, num_chips=cluster.num_chips)
    load = ServingLoad(**{"prompt": 1024, "output": 256, **load})
    problem = ServingProblem(load_model(model), load, cluster, find_calibration("operations", cluster.chip))
    mode = "aggregated" if prefill is None else "disaggregated"
    setup = ServingSetup(mode, first, decode, batch, prefill_batch, chunk)
    return ServingPlan(problem, estimate_serving(problem, setup))


_dense = functools.partial(make_serving_plan, "llama-3-70b", "h100:8", "tensor=8", 64, precision="fp8-kv8")
_wide = functools.partial(
    make_serving_plan, "deepseek-v3", "h200:64", "expert=32", 1024, prefill="expert=32", prefill_batch=32,
    prompt=4096, output=1024, precision="fp8",
)  # fmt: skip

#: Seconds that the plans of the cases are said to take.
_TTFT, _TPOT = 0.25, 0.02

#: Name -> (the plan, the engines that it is handed over to); the texts stand in tests/data/export.
SERVING_CASES = {
    "serve-dense": (_dense, ("vllm", "sglang", "tensorrt-llm")),
    "serve-apart": (_wide, ("vllm", "sglang", "tensorrt-llm")),
    "serve-mixture": (
        lambda: make_serving_plan(
            "mixtral-8x7b", "h100:8", "tensor=4,replicas=2,expert_tensor_parallel=off", 128, chunk=512, prompt=2048,
            output=512, precision="fp8",
        ),
        ("vllm", "sglang", "tensorrt-llm"),
    ),
    "serve-long": (
        lambda: make_serving_plan(
            "llama-3.1-8b", "h100:32", "tensor=8,cache=2,replicas=2,cache_split=sequence", 16, chunk=1024,
            prompt=32768, cached_prefix=8192, output=512, draft_tokens=3, precision="int4-weights,kv=fp8",
        ),
        ("vllm", "sglang"),
    ),
    "serve-stages": (
        lambda: make_serving_plan(
            "llama-3.1-70b", "b200:16", "tensor=4,stage=2,replicas=2", 96, precision="fp4", prefill_batch=2
        ),
        ("vllm", "sglang", "tensorrt-llm"),
    ),
    "serve-tpu": (
        lambda: make_serving_plan("llama-3-70b", "v5e:4x4", "tensor=8,replicas=2", 32, precision="int8,kv=int8"),
        ("jetstream",),
    ),
    "serve-tpu-mixture": (
        lambda: make_serving_plan("mixtral-8x7b", "v6e:8", "expert=4,tensor=2", 24, precision="int8-weights"),
        ("jetstream",),
    ),
}  # fmt: skip

SERVED = [(case, engine) for case, (_, engines) in SERVING_CASES.items() for engine in engines]


@functools.cache
def serving_plan(case):
    """The plan of a case, made once, with rounded predictions: what it says is tested, not what it takes."""
    plan = SERVING_CASES[case][0]()
    estimate, setup, output = plan.estimate, plan.setup, plan.problem.load.output
    rate = setup.batch * setup.decode.replicas / (_TPOT * output)
    memory = {"weights": 0.4, "kv_cache": 0.2, "activations": 0.02, "workspace": 0.0, "reserve": 0.1, "total": 0.72}
    memory = {name: share * estimate.hbm_capacity for name, share in memory.items()}
    said = {
        "ttft": Interval(_TTFT, _TTFT, _TTFT),
        "tpot": Interval(_TPOT, _TPOT, _TPOT),
        "requests_per_s": rate,
        "output_tokens_per_s": rate * output,
        "prefill": replace(estimate.prefill, seconds=Interval(_TTFT, _TTFT, _TTFT), memory=memory),
        "decode": replace(estimate.decode, seconds=Interval(_TPOT, _TPOT, _TPOT), memory=memory),
    }
    return replace(plan, estimate=replace(estimate, **said))
