"""The engine with JAX: tokens are those of decoding alone, whatever else runs; nothing is compiled after the start."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from meshwise.core.dtypes import DType
from meshwise.engine.engine import Engine
from meshwise.engine.executor import JaxExecutor, plan_buckets
from meshwise.engine.requests import Collected, EngineRequest, Sampling
from meshwise.runtime import generator
from meshwise.runtime.layered import LayeredModel
from meshwise.runtime.steps import paged_model
from meshwise.scheduling import Scheduling
from meshwise.sharding.layout import Layout
from meshwise.sharding.serving import ServingLayout
from tests.runtime.golden import Golden
from tests.runtime.steps import dense

MODEL = dense("D=32 F=64 L=2 N=4 K=2 H=8 V=64")
MIXTURE = dense("D=32 L=2 N=4 K=2 H=8 V=64 E=8 top_k=2 Fe=32 Fs=32")
LONGEST = 64


def largest(buckets):
    """Of each kind of step the last, into which all others fit: buckets that differ in size are alike otherwise."""
    return list({(b.decoding > 0, b.prefill > 0): b for b in buckets}.values())


def engine_of(scheduling, blocks=24, layout=None, model=MODEL, *, ahead=False, sampled=True):
    layout = layout or ServingLayout()
    if layout.ranks > 1:
        scheduling = replace(scheduling, max_batch=3 * layout.ranks, ranks=layout.ranks)
        blocks = 16 * layout.ranks
    model = paged_model(model, layout, jax.devices()[: layout.num_chips], pages=blocks, page_tokens=4, dtype=DType.FP32)
    weights = model.initial_weights(3)
    buckets = plan_buckets(scheduling, LONGEST, model.fewest_rows)
    buckets = buckets if layout.num_chips == 1 else largest(buckets)
    executor = JaxExecutor(model, weights, scheduling, LONGEST, buckets=buckets, ahead=ahead, sampled=sampled)
    return Engine(scheduling, blocks, executor, block_tokens=4, ahead=ahead), weights


def alone(weights, prompt, count, model=MODEL):
    made = generator(model, Layout(), jax.devices()[:1], sequences=1, length=LONGEST, dtype=DType.FP32)
    weights = jax.tree.map(lambda w: jax.device_put(np.asarray(w), jax.devices()[0]), weights)
    return np.asarray(made.greedy(weights, np.asarray([prompt]), count))[0].tolist()


def are_as_alone(requests, asked, weights, model):
    """Each token is the likeliest after those before it, in a sequence that nobody shares a step with."""
    made = generator(model, Layout(), jax.devices()[:1], sequences=len(asked), length=LONGEST, dtype=DType.FP32)
    weights = jax.tree.map(lambda w: jax.device_put(np.asarray(w), jax.devices()[0]), weights)
    rows = [[*prompt, *r.sink.ids] for r, (prompt, _) in zip(requests, asked, strict=True)]
    whole = np.asarray([row + [0] * (LONGEST - len(row)) for row in rows], np.int32)
    logits, _ = made.extend(weights, made.empty_cache(), whole, 0)
    for request, (prompt, count), likely in zip(requests, asked, np.asarray(logits).argmax(axis=-1), strict=True):
        assert request.sink.ids == likely[len(prompt) - 1 :][:count].tolist(), request.index


def prompts(count, draw):
    root = draw.integers(0, 64, 20).tolist()
    return [[*root[: draw.integers(0, 18)], *draw.integers(0, 64, draw.integers(1, 12)).tolist()] for _ in range(count)]


@pytest.mark.jax
@pytest.mark.parametrize(
    ("policy", "layout", "model", "ahead"),
    [
        ("chunked", ServingLayout(), MODEL, True),
        ("prefill-first", ServingLayout(tensor=2), MODEL, True),
        ("chunked", ServingLayout(tensor=2, expert_tensor_parallel=False), MIXTURE, False),
        ("chunked", ServingLayout(tensor=2, cache=2, cache_split="sequence"), MIXTURE, True),
        ("prefill-first", ServingLayout(expert=4), MIXTURE, True),
        ("chunked", ServingLayout(tensor=2, expert=2, expert_tensor_parallel=False), MIXTURE, False),
    ],
)
def test_tokens_are_those_of_decoding_alone(policy, layout, model, ahead):
    """Batches, shared prefixes and preemptions change no token; nor is anything compiled once it runs.

    Nor does it matter whether steps are started before the tokens of the last are here, or whose requests a rank has.
    """
    served_as_alone(policy, layout, model, ahead=ahead)


@pytest.mark.slow  # two programs a bucket each: latents, experts after dense layers; windows and sinks
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize(
    "layout",
    [
        ServingLayout(tensor=2, expert=4),
        ServingLayout(cache=2, cache_split="sequence", expert=2, expert_tensor_parallel=False),
    ],
)
def test_tokens_of_other_families_are_those_of_decoding_alone(name, layout):
    served_as_alone("chunked", layout, Golden.of(name).model, ahead=True)


def served_as_alone(policy, layout, model, *, ahead):
    scheduling = Scheduling(policy, 4, 24, prefix_cache=True, watermark=0.0)
    engine, weights = engine_of(scheduling, layout=layout, model=model, ahead=ahead, sampled=False)
    draw = np.random.default_rng(0)
    asked = [(prompt, int(draw.integers(1, 24))) for prompt in prompts(12, draw)]
    requests = [EngineRequest(p, n, Collected(), block_tokens=4) for p, n in asked]
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax._src.compiler.backend_compile_and_load", None)  # whatever compiles now, fails
        for request in requests:
            engine.submit(request)
            engine.step()
        while engine.step():
            for cache in engine.caches:
                cache.check()
    assert not sum(cache.used for cache in engine.caches)
    assert {request.rank for request in requests} == set(range(layout.ranks))
    assert engine.scheduler.preemptions
    assert engine.scheduler.hit_tokens
    are_as_alone(requests, asked, weights, model)


@pytest.mark.jax
@pytest.mark.parametrize(
    ("layouts", "model"),
    [
        ((ServingLayout(), ServingLayout(tensor=2)), MODEL),
        ((ServingLayout(tensor=2), ServingLayout()), MODEL),
        pytest.param((ServingLayout(tensor=2, expert=2), ServingLayout(expert=2)), MIXTURE, marks=pytest.mark.slow),
    ],
)
def test_caches_change_devices_and_no_token(layouts, model):
    """Prefilled on one mesh, decoded on another, where some give way and are prefilled again; nothing is compiled."""
    first, then = Scheduling("prefill-first", 2, 24, prefix_cache=True), Scheduling("prefill-first", 4, 24)
    devices, executors, schedulings = jax.devices(), [], []
    for layout, scheduling, pages in zip(layouts, (first, then), (24, 16), strict=True):
        own, devices = devices[: layout.num_chips], devices[layout.num_chips :]
        ranks = layout.ranks
        schedulings.append(replace(scheduling, ranks=ranks, max_batch=scheduling.max_batch * ranks))
        made = paged_model(model, layout, own, pages=pages * ranks, page_tokens=4, dtype=DType.FP32)
        made = LayeredModel.of(made) if layout.tensor == 2 or layout.num_chips == 1 else made  # as on GPUs, and on CPUs
        buckets, flags = largest(plan_buckets(schedulings[-1], LONGEST, made.fewest_rows)), {"sampled": False}
        weights = made.initial_weights(3)
        executors.append(JaxExecutor(made, weights, schedulings[-1], LONGEST, buckets=buckets, sends=True, **flags))
    executors[1].prepare(executors[:1])
    first, then = schedulings
    decode = Engine(then, 16 * then.ranks, executors[1], block_tokens=4)
    prefill = Engine(first, 24 * first.ranks, executors[0], block_tokens=4, hand_over=decode.submit)
    draw = np.random.default_rng(0)
    asked = [(prompt, int(draw.integers(1, 24))) for prompt in prompts(10, draw)]
    requests = [EngineRequest(p, n, Collected(), block_tokens=4) for p, n in asked]
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax._src.compiler.backend_compile_and_load", None)  # whatever compiles now, fails
        for request in requests:
            prefill.submit(request)
        while any([prefill.step(), decode.step()]) or any(cache.used for cache in prefill.caches):
            pass
    assert prefill.scheduler.hit_tokens
    assert decode.scheduler.preemptions
    for engine in (prefill, decode):
        assert engine.outstanding == 0
        for cache in engine.caches:
            cache.check()
            assert not cache.used
    weights = paged_model(model, ServingLayout(), jax.devices()[:1], pages=1, dtype=DType.FP32).initial_weights(3)
    are_as_alone(requests, asked, weights, model)


@pytest.mark.jax
def test_nothing_is_compiled_over_a_thousand_mixed_requests():
    """Greedy, sampled, penalised, with logprobs, cancelled; prompts of all lengths: layer by layer."""
    scheduling = Scheduling("chunked", 8, 32, prefix_cache=True)
    model = paged_model(MODEL, ServingLayout(), jax.devices()[:1], pages=96, page_tokens=4, dtype=DType.FP32)
    layered = LayeredModel.of(model)
    executor = JaxExecutor(layered, layered.initial_weights(3), scheduling, LONGEST)
    engine, draw = Engine(scheduling, 96, executor, block_tokens=4), np.random.default_rng(1)
    kinds = [Sampling(), Sampling(0.8, top_p=0.9, seed=1), Sampling(1.0, top_k=5), Sampling(logprobs=4)]
    kinds += [Sampling(0.5, frequency_penalty=0.5), Sampling(repetition_penalty=1.2, min_p=0.1)]
    requests = [
        EngineRequest(p, int(draw.integers(1, 12)), Collected(), sampling=kinds[k % len(kinds)], block_tokens=4)
        for k, p in enumerate(prompts(1000, draw))
    ]
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _seconds, **_: compiled.append(name) if "backend_compile" in name else None
    )
    jax.jit(lambda x: x * 3 + 1)(np.ones(7, np.float32))
    assert len(compiled) == 1  # what is compiled is heard of
    waiting = list(requests)
    while waiting or engine.outstanding:
        for request in waiting[-4:] if engine.outstanding < 20 else []:
            engine.submit(request)
            waiting.pop()
            if len(waiting) % 50 == 0:
                engine.cancel(request)
        engine.step()
    assert len(compiled) == 1
    assert sum(r.reason == "length" for r in requests) > 900
    assert sum(r.reason == "cancelled" for r in requests) > 10
    assert engine.caches[0].used == 0
    engine.caches[0].check()


@pytest.mark.jax
def test_sampled_tokens_do_not_depend_on_who_shares_the_batch():
    how = Sampling(temperature=0.9, top_p=0.9, top_k=30, presence_penalty=0.3, seed=11, logprobs=3)
    engine, _ = engine_of(Scheduling("prefill-first", 4, 32), blocks=64)

    def served(others):
        mine = EngineRequest([5, 6, 7], 12, Collected(), sampling=how, block_tokens=4)
        for request in [*others, mine]:
            engine.submit(request)
        while engine.step():
            pass
        return mine.sink.tokens

    first = served([])
    others = [EngineRequest([k, 1], 9, Collected(), sampling=Sampling(1.0, seed=k), block_tokens=4) for k in range(3)]
    assert [t.id for t in served(others)] == [t.id for t in first]
    assert all(len(t.likely) == 3 and t.logprob <= t.likely[0][1] + 1e-6 for t in first)


@pytest.mark.jax
def test_stop_tokens_and_cancellation():
    engine, weights = engine_of(Scheduling("chunked", 4, 24), sampled=False)
    expected = alone(weights, [1, 2, 3], 8)
    stopped = EngineRequest([1, 2, 3], 8, Collected(), stops=frozenset(expected[3:4]), block_tokens=4)
    gone = EngineRequest([4] * 9, 40, Collected(), block_tokens=4)
    engine.submit(stopped)
    engine.submit(gone)
    for _ in range(5):
        engine.step()
    engine.cancel(gone)
    while engine.step():
        pass
    assert (stopped.reason, gone.reason) == ("stop", "cancelled")
    assert stopped.sink.ids == expected[: expected.index(expected[3])]
    assert engine.caches[0].used == 0
    engine.caches[0].check()


def test_buckets_hold_every_step_that_the_limits_allow():
    for policy in ("prefill-first", "chunked"):
        buckets = plan_buckets(Scheduling(policy, 6, 40), 100)
        assert max(b.prefill for b in buckets) >= 100 + 15 * 6
        assert {b.decoding for b in buckets if not b.prefill} == {1, 2, 4, 6}
        assert ({b.decoding for b in buckets if b.prefill} == {0, 6}) == (policy == "chunked")
