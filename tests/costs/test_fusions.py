"""Which operations of serving engines are kernels of their own, and what a step takes for them."""

from dataclasses import replace

import pytest

from meshwise.costs.calibration import CALIBRATIONS
from meshwise.costs.engines import ENGINES, serving_calibration
from meshwise.costs.fusions import FUSIONS, fused_operations
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import ServingSetup
from meshwise.costs.serving.estimate import estimate_serving
from meshwise.hardware import load_chip, parse_cluster
from meshwise.jobs import ServingLoad
from meshwise.models import load_model
from meshwise.sharding.serving import ServingLayout


def layer(model, precision="bf16"):
    problem = ServingProblem(load_model(model), ServingLoad(prompt=64, output=8, precision=precision),
                             parse_cluster("h100:8"), CALIBRATIONS["none"])  # fmt: skip
    return [b for b in problem.blocks("decode", ServingLayout().structure) if b.role == "layer"][-1]


def kernels(model, engine, chip="h100-sxm", precision="bf16"):
    """Operations of a layer that an engine launches, in order."""
    block, fused = layer(model, precision), serving_calibration(load_chip(chip), engine).fused
    return [op.name for op in block.placed.block.ops if block.joins.get(op.name, "") not in fused]


def test_engines_fuse_what_is_known():
    assert {key for engine in ENGINES.values() for key in engine.fused} == set(FUSIONS)
    assert set(fused_operations(layer("llama-3-70b", "fp8").placed.block.ops).values()) == set(FUSIONS) - {"shared"}


def test_layers_of_llama_are_the_kernels_that_engines_launch():
    vllm = ["norm.attn", "q", "rope.q", "cache.k.rope", "attention", "o", "norm.mlp", "gate", "act", "down"]
    assert kernels("llama-3-8b", "vllm") == vllm
    assert kernels("llama-3-8b", "trtllm-2023") == [n for n in vllm if n not in ("rope.q", "cache.k.rope")]
    assert kernels("llama-3-8b", "vllm", precision="fp8") == vllm, "conversions are done by the kernel before"
    assert len(kernels("llama-3-8b", "sglang", precision="fp8")) == len(vllm) + 4
    assert len(kernels("llama-3-70b", "trtllm", precision="fp8")) == 7
    assert "norm.mlp" not in kernels("llama-3-70b", "sglang", "b200-sxm")


def test_shared_experts_have_no_kernels_and_experts_convert_by_their_own():
    names = kernels("deepseek-v3", "trtllm", precision="fp8")
    assert not [n for n in names if "shared" in n or n == "convert.x.mlp"]
    assert {"convert.slots", "expert.gate", "expert.down", "router", "convert.x.attn"} <= set(names)
    assert not {"expert.up", "dispatch.gates", "norm.kv_a", "kv_a"} & set(names)


@pytest.mark.parametrize(
    ("model", "tensor", "saved"), [("llama-3-70b", 8, 2), ("llama-3-70b", 1, 0), ("llama-3-8b", 8, 0)]
)
def test_sums_do_the_norms_of_wide_models_that_are_shared(model, tensor, saved):
    """4,096 wide is not wide enough, and without a sum there is nothing to do it."""
    gap = replace(CALIBRATIONS["none"], name="gap", gap=1e-3)
    seconds = []
    for calibration in (gap, replace(gap, fused=("norm",))):
        load = ServingLoad(prompt=64, output=8, precision="bf16")
        problem = ServingProblem(load_model(model), load, parse_cluster(f"h100:{tensor}"), calibration)
        layout = ServingLayout(tensor=tensor)
        found = estimate_serving(problem, ServingSetup("aggregated", layout, layout, 1))
        seconds.append(found.decode.seconds.expected)
    layers = {"llama-3-70b": 80, "llama-3-8b": 32}[model]
    assert seconds[0] - seconds[1] == pytest.approx(saved * layers * 1e-3)


def test_only_prompts_have_their_scores_in_memory():
    """FasterTransformer's attention of a token has a kernel of its own; a long prompt's does not."""
    calibration = serving_calibration(load_chip("a100-sxm-80gb"), "fastertransformer")
    assert calibration.unfused_attention
    terms = []
    for c in (calibration, replace(calibration, unfused_attention=False)):
        load = ServingLoad(prompt=2048, output=8, precision="bf16")
        problem = ServingProblem(load_model("llama-2-7b"), load, parse_cluster("a100-sxm-80gb:1"), c)
        layout = ServingLayout()
        found = estimate_serving(problem, ServingSetup("aggregated", layout, layout, 1))
        terms.append((found.prefill.terms["attention"], found.decode.terms["attention"]))
    (prompts, tokens), (fused, same) = terms
    assert prompts > 2 * fused
    assert tokens == same
