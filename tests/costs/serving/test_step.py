"""Steps of serving against the book's arithmetic, and never faster than physics."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwise.core.dtypes import DType
from meshwise.costs.network import NO_WIRE
from meshwise.costs.serving.sizes import StepSizes
from meshwise.costs.serving.step import COMPUTE_TERMS, price_mixed_step, price_step
from meshwise.sharding.serving import SERVING_AXES, ServingLayoutChoices
from tests.costs.serving.cases import problem, step

LAYOUTS = (
    "tensor=8",
    "tensor=2,cache=4,cache_split=batch",
    "tensor=2,cache=4,cache_split=sequence",
    "width=2,tensor=4",
    "width=2,cache=4,cache_split=batch",
    "stage=2,tensor=4",
    "fsdp=2,tensor=4",
)


def alone(given, name, batch, queries, keys, **mesh):
    """A step without networks, on as many chips."""
    whole = {**dict.fromkeys(SERVING_AXES, 1.0), **mesh}
    sizes = StepSizes(batch, queries, keys, whole)
    return price_step(given, name, ServingLayoutChoices(), sizes, lambda _: NO_WIRE)


def test_a_generate_step_reads_weights_and_cache_once():
    """Book, Inference: batch x KV cache + parameters over bandwidth; the embedding table is not read."""
    given = problem("llama-2-13b", "v5e:1", ideal=True)
    model, chip = given.model, given.cluster.chip
    read = model.parameters.total - model.parameters.by_part["embedding"]
    for batch in (1.0, 8.0, 32.0):
        cache = batch * model.kv_cache.bytes_per_sequence(2048, DType.BF16)
        floor = (2 * read + cache) / chip.hbm_bandwidth
        costs = alone(given, "decode", batch, 1.0, 2048.0)
        assert (1 - 1e-4) * floor <= costs.lower <= floor, (
            "activations stay on the chip, gains of norms are not counted"
        )
        assert floor <= costs.expected <= 1.05 * floor


def test_bounds_count_what_of_an_activation_the_chip_cannot_hold():
    """By how much each chip's bound of a prefill's HBM time is above weights and cache; expected times do not move."""
    given = problem("llama-3-8b", "v5e:1", ideal=True)

    def prefill(capacity):
        chip = replace(given.cluster.chip, onchip_capacity=capacity)
        cluster = replace(given.cluster, chip=chip)
        return alone(replace(given, cluster=cluster), "prefill", 1.0, 8192.0, 8192.0)

    unknown, whole, small = prefill(None), prefill(1e12), prefill(2.0**20)
    hbm = [costs.resources["hbm"] for costs in (unknown, whole, small)]
    assert hbm[0] == hbm[1] < hbm[2]
    residual = 8192 * 4096 * 2
    assert (hbm[2] - hbm[1]) * given.cluster.chip.hbm_bandwidth > 32 * 8 * (residual - 2**20)
    assert unknown.expected == whole.expected == small.expected


def test_a_prefill_takes_two_flops_a_parameter_and_token():
    given = problem("llama-2-13b", "v5p:1", ideal=True)
    model, chip = given.model, given.cluster.chip
    layers = model.parameters.total - sum(model.parameters.by_part[p] for p in ("embedding", "head", "norms"))
    tokens = 4096.0
    attention = 40 * 4 * 5120 * tokens * (tokens + 1) / 2
    flops = 2 * layers * tokens + attention + 2 * model.parameters.by_part["head"]
    costs = alone(given, "prefill", 1.0, tokens, tokens)
    assert costs.resources["compute"] == pytest.approx(flops / chip.peak(DType.BF16), rel=1e-9)


def test_a_cached_prefix_costs_no_products():
    """Book, Inference: a prompt that shares a prefix computes what is left of it."""
    given = problem("llama-2-13b", "v5p:1", ideal=True)
    whole, rest = (alone(given, "prefill", 1.0, new, 4096.0).terms["matmuls"] for new in (4096.0, 1024.0))
    assert rest == pytest.approx(whole / 4, rel=0.02)


def test_windows_are_read_no_further():
    given = problem("mistral-7b-v0.1", "v5p:1", ideal=True)
    near, far = (alone(given, "decode", 16.0, 1.0, keys).terms["attention"] for keys in (4096.0, 32768.0))
    assert far == pytest.approx(near, rel=1e-9)
    assert alone(given, "decode", 16.0, 1.0, 2048.0).terms["attention"] < 0.6 * near


def test_states_are_read_and_written_however_long_the_sequence():
    given = problem("mamba2-2.7b", "v5p:1", ideal=True)
    short, long = (alone(given, "decode", 16.0, 1.0, keys) for keys in (128.0, 65536.0))
    assert short.expected == long.expected
    states = 16 * 2 * given.model.kv_cache.state_bytes(DType.FP32, DType.BF16)
    assert short.terms["attention"] >= states / given.cluster.chip.hbm_bandwidth


def test_few_tokens_touch_few_experts():
    given = problem("mixtral-8x7b", "v5p:1", ideal=True)
    bandwidth = given.cluster.chip.hbm_bandwidth
    experts = 2 * given.model.parameters.by_part["experts"] / bandwidth
    others = 2 * (given.model.parameters.active - given.model.parameters.by_part["experts"] / 4) / bandwidth
    one = alone(given, "decode", 1.0, 1.0, 128.0).terms["matmuls"]
    assert one == pytest.approx(experts * 2 / 8 + others, rel=0.02)  # 2 of 8
    two = alone(given, "decode", 2.0, 1.0, 128.0).terms["matmuls"]
    assert two == pytest.approx(experts * (1 - 0.75**2) + others, rel=0.02)
    assert alone(given, "decode", 64.0, 1.0, 128.0).terms["matmuls"] >= experts + 0.9 * others


@pytest.mark.parametrize(
    ("precision", "bits"), [("bf16", 16), ("int8-weights", 8), ("int4-weights", 4 + 16 / 128), ("fp8", 8)]
)
def test_weights_are_read_in_their_format(precision, bits):
    given = problem("llama-2-13b", "h100:1", ideal=True, precision=precision)
    p = given.model.parameters.by_part
    layers = p["attention"] + p["mlp"]
    read = (layers * bits / 8 + 2 * p["head"]) / given.cluster.chip.hbm_bandwidth
    assert alone(given, "decode", 1.0, 1.0, 128.0).terms["matmuls"] == pytest.approx(read, rel=0.01)


def test_narrow_operands_compute_twice_as_fast_and_narrow_weights_do_not():
    times = {}
    for precision in ("bf16", "int8-weights", "fp8"):
        given = problem("llama-2-13b", "h100:1", ideal=True, precision=precision)
        times[precision] = alone(given, "prefill", 4.0, 4096.0, 4096.0).terms["matmuls"]
    assert times["int8-weights"] == pytest.approx(times["bf16"], rel=1e-6)
    assert times["fp8"] == pytest.approx(times["bf16"] / 2, rel=0.01)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "queries"), [("decode", 1), ("prefill", 512)])
def test_terms_add_up_and_bounds_hold(layout, name, queries):
    given = problem()
    costs = step(given, name, layout, 16, queries, 1024)
    assert sum(costs.terms.values()) == pytest.approx(costs.expected, rel=1e-12)
    assert costs.lower <= costs.expected <= costs.upper * (1 + 1e-12)
    assert costs.lower >= max(costs.resources.values()) * (1 - 1e-12)
    assert all(v >= 0 for v in costs.terms.values())


@pytest.mark.parametrize("model", ["llama-3-8b", "deepseek-v3", "mixtral-8x7b", "jamba-v0.1"])
def test_more_requests_or_longer_ones_never_take_less(model):
    given = problem(model, "h100:8")
    for layout in ("tensor=8", "tensor=4,cache=2,cache_split=batch"):
        by_batch = [step(given, "decode", layout, b, 1, 1024).expected for b in (1, 2, 3, 8, 9, 64, 200, 1024)]
        assert by_batch == sorted(by_batch)
        by_length = [step(given, "decode", layout, 8, 1, s).expected for s in (16, 100, 1000, 10000)]
        assert by_length == sorted(by_length)


def test_arrays_give_what_floats_give():
    given = problem("deepseek-v3", "h100:8")
    batches = np.array([1.0, 7.0, 64.0, 512.0])
    mesh = {**dict.fromkeys(SERVING_AXES, 1.0), "tensor": 4.0, "expert": 2.0}
    for name in ("decode", "prefill"):
        together = price_step(
            given, name, ServingLayoutChoices(), StepSizes(batches, 4.0, 4096.0, mesh), lambda _: NO_WIRE
        )
        for i, batch in enumerate(batches):
            one = alone(given, name, float(batch), 4.0, 4096.0, tensor=4.0, expert=2.0)
            assert together.expected[i] == pytest.approx(one.expected, rel=1e-12)


def test_stages_hold_parts_of_the_batch_and_wait_for_the_longest():
    given = problem(ideal=True)
    one = step(given, "decode", "tensor=4", 64, 1, 1024)
    two = step(given, "decode", "tensor=4,stage=2", 64, 1, 1024)
    halves = step(given, "decode", "tensor=4", 32, 1, 1024)
    assert one.expected / 2 < two.expected < one.expected  # each part of the batch reads the weights
    assert two.expected == pytest.approx(halves.expected, rel=0.15)
    assert step(given, "decode", "tensor=4,stage=2", 1, 1, 1024).expected == pytest.approx(
        step(given, "decode", "tensor=4", 1, 1, 1024).expected, rel=0.01
    )


def test_a_mixed_step_reads_weights_once():
    given = problem(ideal=True)
    mesh = dict.fromkeys(SERVING_AXES, 1.0)
    decode, chunk = StepSizes(32.0, 1.0, 1024.0, mesh), StepSizes(1.0, 256.0, 512.0, mesh)
    structure = ServingLayoutChoices()
    mixed = price_mixed_step(given, structure, chunk, decode, lambda _: NO_WIRE)
    apart = [
        price_step(given, "decode", structure, decode, lambda _: NO_WIRE),
        price_step(given, "prefill", structure, chunk, lambda _: NO_WIRE),
    ]
    assert mixed.terms["attention"] == pytest.approx(sum(c.terms["attention"] for c in apart), rel=1e-12)
    assert max(c.expected for c in apart) < mixed.expected < 0.7 * sum(c.expected for c in apart)
    assert sum(mixed.terms[t] for t in COMPUTE_TERMS) == pytest.approx(mixed.expected, rel=1e-9)


@pytest.mark.parametrize("model", ["llama-3-8b", "gemma-3-1b", "deepseek-v2", "mamba2-2.7b"])
@pytest.mark.parametrize("stages", [1, 4])
def test_a_mixed_step_is_bounded_by_data_sheets_whatever_is_achieved(model, stages):
    """Its FLOPs, its bytes and its lower bound are those of both parts' attention and of all tokens' products."""
    mesh = {**dict.fromkeys(SERVING_AXES, 1.0), "stage": float(stages)}
    decode, chunk = StepSizes(32.0, 1.0, 4096.0, mesh), StepSizes(1.0, 512.0, 2048.0, mesh)
    mixed = []
    for ideal in (True, False):
        given = problem(model, ideal=ideal)
        mixed.append(price_mixed_step(given, ServingLayoutChoices(), chunk, decode, lambda _: NO_WIRE))
    ideal, achieved = mixed
    peak = given.cluster.chip.flops_per_s[DType.BF16]
    assert achieved.lower == pytest.approx(ideal.lower, rel=1e-12)
    assert ideal.lower == pytest.approx(max(ideal.flops / peak, ideal.resources["hbm"]), rel=1e-12)
    assert ideal.lower <= ideal.expected <= achieved.expected <= achieved.upper
    assert sum(achieved.terms.values()) == pytest.approx(achieved.expected, rel=1e-9)


def test_a_mixed_step_s_flops_are_counted_once():
    """Products of 32 + 256 tokens, four FLOPs a pair of query and key, causal within the chunk."""
    given = problem(ideal=True)
    mesh = dict.fromkeys(SERVING_AXES, 1.0)
    decode, chunk = StepSizes(32.0, 1.0, 1024.0, mesh), StepSizes(1.0, 256.0, 512.0, mesh)
    mixed = price_mixed_step(given, ServingLayoutChoices(), chunk, decode, lambda _: NO_WIRE)
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    pairs = 32 * 1024 + sum(257 + i for i in range(256))
    hand = 2 * 288 * 32 * layer + 2 * 33 * 4096 * 128256 + 32 * 4 * 4096 * pairs
    assert mixed.flops == pytest.approx(hand, rel=1e-9)


def test_a_prompt_is_of_one_rank_and_its_experts_of_all():
    """Four ranks that attend for their own: a prompt for each takes as long as one prompt, but for its experts."""
    structure, mesh = ServingLayoutChoices(), {**dict.fromkeys(SERVING_AXES, 1.0), "expert": 4.0}
    decode, given = StepSizes(4.0, 1.0, 1024.0, mesh), problem("deepseek-v2", ideal=True)

    def mixed(prompts):
        return price_mixed_step(given, structure, StepSizes(prompts, 1024.0, 1024.0, mesh), decode, lambda _: NO_WIRE)

    one, four = mixed(1.0), mixed(4.0)
    layer = given.model.parameters
    dense = layer.total - layer.by_part["experts"]
    assert one.terms["attention"] == pytest.approx(four.terms["attention"], rel=1e-9)
    assert one.terms["elementwise"] > 0.5 * four.terms["elementwise"]
    assert one.flops > 2 * 1024 * (dense - layer.by_part["embedding"]) * 0.9


def test_a_pipeline_shares_out_a_chunk_s_attention():
    """One chunk through four stages: each part has a fourth of its tokens, and of its pairs."""
    structure = ServingLayoutChoices()
    decode, chunk = StepSizes(32.0, 1.0, 64.0, {}), StepSizes(1.0, 1024.0, 4096.0, {})

    def attention(stages):
        mesh = {**dict.fromkeys(SERVING_AXES, 1.0), "stage": stages}
        both = [StepSizes(s.sequences, s.queries, s.keys, mesh) for s in (chunk, decode)]
        return price_mixed_step(problem(ideal=True), structure, *both, lambda _: NO_WIRE)

    one, four = attention(1.0), attention(4.0)
    head = 2 * 4096 * 128256  # the last stage has it all: 8 rows of its own four parts, and one of a chunk in each
    assert four.flops == pytest.approx((one.flops - 33 * head) / 4 + 4 * 9 * head, rel=1e-9)
    assert four.interval < 0.5 * one.interval
