"""Constants of serving engines: which there are, what they change of a step, and that they never beat a data sheet."""

from dataclasses import replace

import pytest

from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError, UnknownNameError
from meshwise.costs.calibration import CALIBRATIONS
from meshwise.costs.calibration_files import calibration_text
from meshwise.costs.engines import ENGINES, find_serving_calibration, serving_calibration
from meshwise.costs.fitted import BEST_MATMULS, find_calibration
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import ServingSetup
from meshwise.costs.serving.engine import engine_costs
from meshwise.costs.serving.estimate import estimate_serving
from meshwise.hardware import load_chip, parse_cluster
from meshwise.jobs import ServingLoad
from meshwise.models import load_model
from meshwise.sharding.serving import ServingLayout
from tests.each import each

PLAIN = replace(CALIBRATIONS["none"], name="plain")


def estimated(calibration, *, precision="bf16", batch=8, tensor=1, model="llama-3-8b", prompt=1024):
    cluster = parse_cluster(f"h100:{tensor}")
    problem = ServingProblem(load_model(model), ServingLoad(prompt=prompt, output=129, precision=precision), cluster,
                             calibration)  # fmt: skip
    layout = ServingLayout(tensor=tensor)
    return problem, estimate_serving(problem, ServingSetup("aggregated", layout, layout, batch))


def test_steps_with_prompts_take_as_long_as_their_launches():
    """17 operations of a layer with weights or a cache are 8 that are launched; decode steps are graphs."""
    _, without = estimated(PLAIN)
    _, found = estimated(replace(PLAIN, launch=1e-3))
    assert found.decode == without.decode
    assert found.prefill.seconds.expected == pytest.approx((32 * 8 + 1) * 1e-3)
    assert sum(found.prefill.terms.values()) == pytest.approx(found.prefill.seconds.expected)
    assert estimated(replace(PLAIN, launch=1e-9))[1].prefill == without.prefill, "chips take longer"


@pytest.mark.parametrize(("chip", "pcie"), [("l40s", True), ("h100-pcie", True), ("a100-sxm-80gb", False)])
def test_chips_that_meet_over_pcie_sum_by_nccl(chip, pcie):
    own, nccl = (serving_calibration(load_chip(chip), e) for e in ("vllm", "trtllm-2023"))
    assert own.pcie == nccl.pcie == pcie
    assert (own.chained_startup == nccl.chained_startup) == pcie
    assert own.links.direct != pcie
    assert not nccl.links.direct
    assert (own.links.efficiency == 0.62) == pcie


@pytest.mark.parametrize(("precision", "times"), [("bf16", 1), ("weights=bf16,kv=fp8", 2)])
def test_a_cache_in_8_bits_may_be_read_more_slowly(precision, times):
    _, plain = estimated(PLAIN, precision=precision, batch=64)
    _, found = estimated(replace(PLAIN, narrow_cache=0.5), precision=precision, batch=64)
    assert found.decode.terms["attention"] == pytest.approx(times * plain.decode.terms["attention"])


@pytest.mark.parametrize(
    ("model", "times"), [("llama-2-7b", 1), ("llama-3-8b", 4), ("llama-3-70b", 8), ("llama-2-70b", 8)]
)
@pytest.mark.parametrize("grouped", [(), (8,)])
def test_each_query_head_may_read_the_cache_for_itself(model, times, grouped):
    """At the bandwidth of the HBM; prompts are attended to by other kernels."""
    slow = replace(PLAIN, query_bandwidth=load_chip("h100").hbm_bandwidth, grouped_heads=grouped)
    plain, found = (estimated(c, tensor=4, batch=64, model=model)[1] for c in (PLAIN, slow))
    expected = 1 if times in grouped else times
    assert found.decode.terms["attention"] == pytest.approx(expected * plain.decode.terms["attention"])
    assert found.prefill == plain.prefill


def test_what_the_host_adds_is_a_term_of_every_step():
    _, without = estimated(PLAIN)
    _, found = estimated(replace(PLAIN, host_step=2e-3, host_request=1e-5))
    assert found.decode.terms["host"] == pytest.approx(2e-3 + 8e-5)
    assert found.prefill.terms["host"] == pytest.approx(2e-3 + 1e-5)
    for a, b in ((found.decode, without.decode), (found.prefill, without.prefill)):
        assert sum(a.terms.values()) == pytest.approx(a.seconds.expected)
        assert a.seconds.expected == pytest.approx(b.seconds.expected + a.terms["host"])
        assert a.seconds.lower == b.seconds.lower, "no data sheet bounds the host"


def test_weights_are_read_at_the_share_of_their_format():
    """Of a step whose products wait for weights alone, twice as fast where the share is twice as large."""
    for precision, dtype in (("bf16", DType.BF16), ("weights=int4", DType.INT4), ("weights=int8", DType.INT8)):
        _, whole = estimated(PLAIN, precision=precision, batch=1)
        _, half = estimated(replace(PLAIN, weight_reads=((dtype, 0.5),)), precision=precision, batch=1)
        ratio = half.decode.terms["matmuls"] / whole.decode.terms["matmuls"]
        assert 1.8 < ratio <= 2.0 or dtype is not DType.BF16, ratio
        assert ratio > 1.5, "the head stays in 16 bits"
        assert half.decode.terms["attention"] == whole.decode.terms["attention"]


def test_the_cache_is_read_at_its_own_share_after_a_start():
    _, plain = estimated(PLAIN, prompt=8192, batch=32)
    _, slow = estimated(replace(PLAIN, cache_reads=0.5, cache_start=1e-5), prompt=8192, batch=32)
    expected = 2 * plain.decode.terms["attention"] + 32 * 1e-5
    assert slow.decode.terms["attention"] == pytest.approx(expected)
    assert slow.decode.terms["matmuls"] == plain.decode.terms["matmuls"]


def test_weights_of_experts_are_read_at_a_share_of_their_own():
    _, plain = estimated(PLAIN, model="mixtral-8x7b", tensor=2, batch=1)
    _, slow = estimated(replace(PLAIN, weight_reads=((DType.BF16, 1.0),), expert_reads=0.5), model="mixtral-8x7b",
                        tensor=2, batch=1)  # fmt: skip
    more = slow.decode.terms["matmuls"] / plain.decode.terms["matmuls"]
    assert 1.5 < more < 2.0, "most of what a token reads is experts"


def test_a_simulation_takes_what_an_estimate_does():
    """A step of the simulated engine is as long as the estimated one, start-ups of attention and the host included."""
    for name in ("vllm", "trtllm-2023"):
        problem, e = estimated(serving_calibration(load_chip("h100-sxm"), name), batch=16)
        costs = engine_costs(problem, e.setup, "decode")
        context = int(problem.load.mean_context)
        assert costs.overhead_s == ENGINES[name].host_step
        assert costs.step_seconds([context] * 16) == pytest.approx(e.decode.seconds.expected, rel=0.02)


@each("engine", ENGINES)
@each("chip", ["a100-sxm-80gb", "h100-sxm", "b200-sxm", "mi300x", "l40s", "v5e"])
def test_every_engine_on_every_family_is_no_faster_than_its_data_sheet(engine, chip):
    found = serving_calibration(load_chip(chip), engine)
    assert found.name == f"fitted+{engine}"
    shares = [found.matmul_efficiency, found.hbm_efficiency, found.cache_reads or 1.0, found.links.efficiency]
    assert all(0 < s <= 1 for s in (*shares, *(s for _, s in found.weight_reads)))
    assert found.expert_reads * max((s for _, s in found.weight_reads), default=1.0) <= 1.0
    assert found.source
    assert found.uncertainty_sources


def test_names():
    chip = load_chip("h100-sxm")
    assert find_serving_calibration("fitted", chip).name == "fitted+vllm"
    assert find_serving_calibration("fitted", load_chip("v5e")).name == "fitted+jax"
    assert find_serving_calibration("operations", chip) == find_calibration("operations", chip)
    with pytest.raises(UnknownNameError, match="sglang"):
        find_serving_calibration("fitted+sglnag", chip)
    with pytest.raises(UnknownNameError, match="serving engine"):
        find_serving_calibration("fitted+megatron", chip)
    with pytest.raises(UnknownNameError, match="megatron"):
        find_calibration("fitted+vllm", chip)
    with pytest.raises(UnknownNameError, match=r"unknown calibration 'foo'. Known: .*fitted\+vllm") as unknown:
        find_serving_calibration("foo", chip)
    assert "megatron" not in str(unknown.value)


def test_a_file_that_training_refined_is_refused(tmp_path):
    """Its constants are those of a training program; with them a token of llama-3-8b took six times as long."""
    chip, path = load_chip("h100-sxm"), tmp_path / "ours.json"
    base = find_calibration("fitted", chip)
    path.write_text(calibration_text(chip.name, base, replace(base, gap=1e-5), {"rows": 1}), encoding="utf-8")
    with pytest.raises(MeshwiseError, match="refined by steps of training"):
        find_serving_calibration(str(path), chip)
    with pytest.raises(MeshwiseError, match="No such file"):
        find_serving_calibration(str(tmp_path / "none.json"), chip)


def test_tpus_keep_the_rates_of_their_family():
    """Pope et al. 2022 measured whole steps; nothing of the host is added to a program of XLA."""
    chip = load_chip("v4")
    found, family = serving_calibration(chip), find_calibration("operations", chip)
    plain = replace(found, name="", source="", uncertainty_sources=None, compiled=False)
    assert plain == replace(family, name="", source="")


def test_a_family_without_rows_is_no_better_than_its_own_matmuls():
    """MI300X: half of its FLOP/s was measured; what engines make of A100s does not change that."""
    found, own = serving_calibration(load_chip("mi300x")), CALIBRATIONS["cdna"]
    assert found.matmul_efficiency == own.matmul_efficiency == 0.51
    assert found.attention_efficiency <= found.matmul_efficiency
    assert max(found.hbm_efficiency, found.cache_reads, dict(found.weight_reads)[DType.FP8]) <= own.hbm_efficiency
    assert dict(found.narrow)[DType.FP8] < found.matmul_efficiency
    best = serving_calibration(load_chip("mi355x"))
    assert best.matmul_efficiency == BEST_MATMULS["mi355x"] > found.matmul_efficiency
    assert "family" in found.uncertainty_sources
