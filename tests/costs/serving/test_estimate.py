"""Latencies, throughput and memory of a setup follow from its steps; what fits is what the classes add up to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwise.core.dtypes import DType
from meshwise.core.errors import ClusterError, LayoutError
from meshwise.costs.serving.engine import engine_costs
from meshwise.costs.serving.estimate import estimate_serving, layout_wires
from meshwise.costs.serving.memory import frontier, largest_batch, longest_context, sizes_of_steps
from meshwise.costs.serving.step import price_mixed_step
from tests.costs.serving.cases import estimate, problem, setup, step


def test_time_per_token_is_a_step_and_its_share_of_prefills():
    given = problem("llama-3-70b", precision="fp8")
    e = estimate(given, "tensor=8", 64)
    decode = step(given, "decode", "tensor=8", 64, 1, 1024 + 128).expected
    prefill = step(given, "prefill", "tensor=8", 1, 1024, 1024).expected
    assert e.tpot.expected == pytest.approx(decode + 63 / 255 * prefill, rel=1e-12)  # not its own
    assert e.ttft.expected == pytest.approx(prefill + decode / 2, rel=1e-12)
    # In the time of a request's prefill and its 255 steps all 64 get one: what the engine does in that time adds up.
    assert e.requests_per_s * (prefill + e.tpot.expected * 255) == pytest.approx(64, rel=1e-12)
    assert estimate(given, "tensor=8", 1).tpot.expected == estimate(given, "tensor=8", 1).decode.seconds.expected
    assert e.throughput_per_chip == pytest.approx(e.requests_per_s * 256 / 8)
    assert e.usd_per_million_output_tokens == pytest.approx(
        given.cluster.price_per_chip_hour / 3600 / e.throughput_per_chip * 1e6
    )
    assert e.prefill_share == pytest.approx(e.requests_per_s * prefill)


def test_engines_apart_wait_for_the_slower_kind():
    given = problem("llama-3-70b", "h100:32", precision="fp8")
    e = estimate(given, "tensor=8,replicas=3", 64, "tensor=8", "disaggregated")
    prefill = step(given, "prefill", "tensor=8", 1, 1024, 1024).expected
    decode = step(given, "decode", "tensor=8", 64, 1, 1152).expected
    assert e.tpot.expected == pytest.approx(decode, rel=1e-9)
    assert e.requests_per_s == pytest.approx(min(1 / prefill, 3 * 64 / (255 * decode)), rel=1e-9)
    assert e.handover_s > 0
    assert e.ttft.expected == pytest.approx(prefill + e.handover_s, rel=1e-9)
    assert e.setup.num_chips == 32


def test_chunks_read_their_context_again_and_weights_with_what_is_generated():
    given = problem("llama-3-70b", prompt=4096, precision="fp8")
    whole, chunks = estimate(given, "tensor=8", 64), estimate(given, "tensor=8", 64, chunk=512)
    assert chunks.ttft.expected > whole.ttft.expected
    assert chunks.prefill.terms["attention"] > whole.prefill.terms["attention"]
    assert chunks.tpot.expected == pytest.approx(whole.tpot.expected, rel=0.5)


@pytest.mark.parametrize("layout", ["tensor=4", "tensor=2,stage=2"])
def test_many_chunks_priced_at_once_are_each_alone(layout):
    """Chunks go through the stages one behind the other: the first takes its time, each further one its interval."""
    given = problem("gemma-3-27b", prompt=700, precision="bf16", cached_prefix=300)
    made = setup(given, layout, 8, chunk=64)
    e = estimate_serving(given, made, count=False)
    sizes = sizes_of_steps(given, made, "prefill")
    wires = layout_wires(given, given.network, e.setup.decode)
    along, structure = sizes_of_steps(given, made, "decode"), e.setup.decode.structure
    first, *others = (
        price_mixed_step(given, structure, replace(sizes, queries=float(q), keys=float(k)), along, wires)
        for q, k in zip(sizes.queries, sizes.keys, strict=True)
    )
    assert [len(others), float(sizes.queries[-1]), float(sizes.keys[-1])] == [6, 400 - 6 * 64, 700]
    assert e.prefill.seconds.expected == pytest.approx(first.expected + sum(s.interval for s in others), rel=1e-12)
    assert e.prefill.seconds.lower == pytest.approx(first.lower + sum(s.lower for s in others), rel=1e-12)
    assert e.prefill.terms["attention"] == pytest.approx(sum(s.terms["attention"] for s in (first, *others)))
    assert sum(e.prefill.terms.values()) == pytest.approx(e.prefill.seconds.expected, rel=1e-12)


def test_a_prompt_in_very_many_chunks_is_refused_with_the_least_that_is_not():
    given = problem("llama-3-70b", prompt=1 << 20)
    with pytest.raises(LayoutError, match=r"at most 100,000 steps of a prompt, found 3 .* use 11 or more"):
        estimate_serving(given, setup(given, "tensor=8", 1, chunk=3))
    assert estimate_serving(given, setup(given, "tensor=8", 1, chunk=11), count=False).ttft.expected > 0


def test_accepted_proposals_divide_the_time_per_token():
    plain, drafted = (
        estimate(problem("llama-3-70b", prompt=128, output=1024, draft_tokens=d, acceptance=0.8), "tensor=8", 1)
        for d in (0, 3)
    )
    gained = 1 + 0.8 + 0.8**2 + 0.8**3
    assert drafted.tpot.expected == pytest.approx(plain.tpot.expected / gained, rel=0.03)  # memory-bound


def test_memory_is_the_book_s():
    """Book, Inference: weights and caches, in whole blocks."""
    given = problem("llama-2-13b", "v5e:2x4", prompt=3072, output=1024, reserve=0, block_tokens=128)
    e = estimate(given, "tensor=8", 4)
    memory = e.memory
    assert sum(v for name, v in memory.items() if name != "total") == pytest.approx(memory["total"])
    assert memory["weights"] == pytest.approx(2 * given.model.parameters.total / 8, rel=0.001)
    sequence = given.model.kv_cache.bytes_per_sequence(4096, DType.BF16)
    assert memory["kv_cache"] == pytest.approx(4 * sequence / 8)
    assert memory["reserve"] == 0


def test_blocks_are_whole_and_cached_heads_are_copied_beyond_their_number():
    few, many = (
        estimate(problem("llama-3-8b", prompt=100, output=4, block_tokens=b), "tensor=8", 1).memory["kv_cache"]
        for b in (16, 64)
    )
    assert many / few == pytest.approx(128 / 112)
    given = problem("qwen3-30b-a3b")  # 4 key/value heads
    split, copied = (estimate(given, f"tensor={n},replicas={8 // n}", 8).memory["kv_cache"] for n in (4, 8))
    assert split == copied
    assert estimate(given, "tensor=4,cache=2,cache_split=batch", 8).memory["kv_cache"] < 0.7 * copied


@pytest.mark.parametrize("layout", ["tensor=8", "tensor=4,cache=2,cache_split=batch", "tensor=4,stage=2"])
def test_the_largest_batch_and_the_longest_context_just_fit(layout):
    given = problem("llama-3-70b", precision="fp8")
    one = setup(given, layout, 8)
    most = largest_batch(given, one)
    fits, not_fits = (estimate(given, layout, n).fits for n in (most, most + 1))
    assert fits
    assert not not_fits
    for batch, tokens in frontier(given, one):
        assert longest_context(given, setup(given, layout, batch)) == tokens


def test_what_a_simulation_is_told_is_what_steps_take():
    given = problem("gemma-3-27b-it", prompt=2048)
    one = setup(given, "tensor=8", 32)
    engine = engine_costs(given, one, "decode")
    for batch, context in ((32, 1500), (32, 4096), (8, 900)):
        took = step(given, "decode", "tensor=8", batch, 1, context).expected
        assert engine.step_seconds([context] * batch) == pytest.approx(took, rel=0.05)
    prompt = step(given, "prefill", "tensor=8", 1, 2048, 2048).expected
    assert engine.step_seconds(chunks=[(0, 2048)]) == pytest.approx(prompt, rel=0.1)
    memory = estimate_serving(given, one).memory
    room = given.cluster.chip.hbm_usable - memory["total"] + memory["kv_cache"]
    per_token = sum(k.layers * k.elements for k in given.model.kv_cache.kinds) * 2 / 8
    assert engine.kv_tokens * per_token == pytest.approx(room, rel=0.01)
    assert engine.num_chips == 8


@pytest.mark.parametrize(
    ("model", "layout", "more", "said"),
    [
        ("llama-3-8b", "expert=8", {}, "llama-3-8b has none; for engines that work apart write replicas=8"),
        ("llama-3-8b", "context=8", {}, "write cache=8,cache_split=sequence"),
        ("gpt2", "stage=16", {}, "stage=16 is more than the 12 layers of gpt2"),
        ("llama-3-8b", "tensor=4,replicas=2", {"prefill": "tensor=8"}, "use the same chips for both"),
        ("llama-3-8b", "tensor=4,stage=2", {"prefill": "tensor=8"}, "have one copy"),
        ("llama-3-8b", "tensor=8", {"prefill": "fsdp=8", "chunk": 64}, "leave out chunk"),
    ],
)
def test_what_a_layout_cannot_be_is_said(model, layout, more, said):
    given = problem(model, "h100:16", prompt=64, output=8)
    with pytest.raises(LayoutError, match=said):
        estimate(given, layout, 8, **more)


def test_engines_that_cannot_be_laid_out_are_refused():
    with pytest.raises(ClusterError, match="cannot be laid on x 4 x y 4"):
        estimate(problem("llama-3-8b", "v5e:4x4"), "tensor=3", 8)


@pytest.mark.parametrize("layout", ["tensor=8,stage=2", "tensor=16", "tensor=4,cache=4,cache_split=sequence"])
@pytest.mark.parametrize("chips", [24, 40])
def test_an_engine_of_whole_nodes_takes_as_long_among_other_nodes(layout, chips):
    alone, among = (estimate(problem("llama-3-70b", f"h100:{n}"), layout, 8) for n in (16, chips))
    for name in ("ttft", "tpot", "requests_per_s", "memory"):
        assert getattr(among, name) == getattr(alone, name)
    with pytest.raises(ClusterError, match="whole nodes"):
        estimate(problem("llama-3-70b", "h100:24"), "tensor=4,stage=5", 8)


def test_a_step_takes_one_chunk_along_however_many_prompts_wait():
    """Short outputs: more chunks than steps. Then all steps are mixed, and requests come as fast as chunks go."""
    for output, crowded in ((64, True), (2048, False)):
        given = problem("llama-3-8b", "h100:1", prompt=1024, output=output)
        e = estimate_serving(given, setup(given, "tensor=1", 32, chunk=256), count=False)
        mixed = e.prefill.interval / 4
        assert (e.requests_per_s == pytest.approx(1 / e.prefill.interval, rel=1e-9)) == crowded
        assert (e.tpot.expected == pytest.approx(mixed, rel=1e-9)) == crowded
        assert e.tpot.expected <= mixed * (1 + 1e-9)


@pytest.mark.parametrize("drafted", [0, 3])
def test_steps_with_chunks_give_as_many_tokens_as_others(drafted):
    """Where all steps take a chunk along, a token takes such a step over the tokens that it gives, bounds as well."""
    given = problem("llama-3-8b", "h100:1", prompt=1024, output=32, draft_tokens=drafted, acceptance=0.8)
    e = estimate_serving(given, setup(given, "tensor=1", 32, chunk=256), count=False)
    steps = 4 * given.load.tokens_per_step
    assert e.tpot.expected == pytest.approx(e.prefill.interval / steps, rel=1e-9)
    assert e.tpot.lower == pytest.approx(e.prefill.seconds.lower / steps, rel=1e-9)
    assert e.tpot.upper == pytest.approx(e.prefill.seconds.upper / steps, rel=1e-9)
