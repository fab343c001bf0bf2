"""The engine and the simulator decide alike: the same requests, the same steps, hits, preemptions and pages.

The engine goes step by step, is told ends as they come, and numbers its pages; the simulator jumps and knows lengths.
All times are multiples of powers of two, so that sums have no rounding.
"""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.core.errors import ConfigError
from meshwise.costs.engine import AttentionCosts, EngineCosts
from meshwise.engine.engine import Engine
from meshwise.engine.replay import replay, to_line
from meshwise.engine.requests import Collected, EngineRequest
from meshwise.engine.virtual import Event, VirtualExecutor, serve_events
from meshwise.jobs.traffic import Demand
from meshwise.scheduling import POLICIES, Scheduling
from meshwise.simulation.serving.fleet import Fleet
from meshwise.simulation.serving.recording import Recorder
from meshwise.simulation.serving.replica import Replica
from meshwise.simulation.serving.requests import Request
from meshwise.simulation.serving.system import PrefillPool, ServingSystem

TICK = 2.0**-12
BLOCK = 4
COSTS = EngineCosts(
    overhead_s=8 * TICK,
    token_seconds=((1, 4 * TICK), (65, 68 * TICK)),
    attention=(AttentionCosts(TICK / 16, TICK / 64), AttentionCosts(TICK / 8, TICK / 32, window=40)),
    kv_blocks=40,
    block_tokens=BLOCK,
)


class Known(Request):
    """A request of the simulator that keeps the very blocks that the engine keeps."""

    __slots__ = ("keeps",)

    def kept(self):
        return self.keeps


def drawn(seed, count, costs, cancelling=0.0, salts=(b"",)):
    """Requests that often begin alike: time, prompt, output, salt, and when they are cancelled, if ever."""
    draw = random.Random(seed)  # noqa: S311
    roots = [[draw.randrange(50) for _ in range(40)] for _ in range(3)]
    time, found = 0.0, []
    for _ in range(count):
        time += draw.choice([0, 0, 1, 3, 50, 300]) * TICK
        prompt = draw.choice(roots)[: draw.randrange(0, 30)] + [
            draw.randrange(50) for _ in range(draw.randrange(1, 14))
        ]
        output = [draw.randrange(50) for _ in range(draw.randint(1, min(60, costs.kv_tokens + 1 - len(prompt))))]
        leaves = time + draw.randrange(1, 4000) * TICK if draw.random() < cancelling else None
        found.append((time, prompt, output, draw.choice(salts), leaves))
    return found


def checked(engine):
    """No page of any rank is lost, or has two owners."""
    for cache in engine.caches:
        cache.check()


def used(engine):
    return sum(cache.used for cache in engine.caches)


def kept(caches):
    return [0 if cache.prefixes is None else cache.prefixes.blocks for cache in caches]


def engine_serves(costs, scheduling, demands, check=False):
    outputs, events, sinks = {}, [], []
    for time, prompt, output, salt, leaves in demands:
        sinks.append(Collected())
        request = EngineRequest(prompt, len(output), sinks[-1], block_tokens=costs.block_tokens, salt=salt)
        outputs[request] = output
        events.append(Event(time, request))
        if leaves is not None:
            events.append(Event(leaves, request, cancelled=True))
    executor = VirtualExecutor(costs, outputs, ranks=scheduling.ranks)
    log = []
    engine = Engine(scheduling, costs.kv_blocks, executor, block_tokens=BLOCK, clock=executor.clock, log=log.append)
    if check:
        step, engine.step = engine.step, lambda: (step(), checked(engine))[0]
    serve_events(engine, executor, sorted(events, key=lambda e: e.time))
    return engine, executor, outputs, log


def simulator_serves(costs, scheduling, demands):
    recorder = Recorder(spans=10**6)
    replica = Replica(0, costs, scheduling, recorder)
    events = []
    for index, (time, prompt, output, salt, leaves) in enumerate(demands):
        twin = EngineRequest([*prompt, *output], 1, Collected(), block_tokens=BLOCK, salt=salt)
        prefix = EngineRequest(prompt, 1, Collected(), block_tokens=BLOCK, salt=salt).prefix
        request = Known(index, time, len(prompt), len(output), prefix)
        request.keeps = twin.kept()
        events.append((time, len(events), replica.enqueue, request))
        if leaves is not None:
            events.append((leaves, len(events), replica.cancel, request))
    for time, _, act, request in sorted(events, key=lambda e: e[0]):
        replica.run_until(time)
        act(request, time)
    replica.run_until(float("inf"))
    return replica, steps_of(recorder, 0), times_of(recorder)


def steps_of(recorder, number):
    own = [span for span in recorder.spans if span.replica == number and span.decoding + span.tokens]
    return [(span.decoding, span.tokens) for span in own for _ in range(max(span.steps, 1))]


def times_of(recorder):
    """Of each request when it began, had its first token, and was done."""
    width = 8
    rows = [tuple(recorder.rows[k : k + width]) for k in range(0, len(recorder.rows), width)]
    return {int(r[0]): (r[2], r[3], r[4]) for r in rows}


def compare(costs, scheduling, demands, check=False):
    engine, executor, outputs, log = engine_serves(costs, scheduling, demands, check)
    assert replay(map(to_line, log)) == len(executor.steps)
    replica, steps, times = simulator_serves(costs, scheduling, demands)
    assert [(decoding, tokens) for _, decoding, _, tokens in executor.steps] == steps
    assert engine.scheduler.hit_tokens == replica.scheduler.hit_tokens
    assert engine.scheduler.preemptions == replica.scheduler.preemptions
    for request, output in outputs.items():
        if request.reason == "cancelled":
            assert request.index not in times
            continue
        assert request.reason == "length"
        assert request.sink.ids == list(output)
        own = tuple(request.times[name] for name in ("begun", "first", "done"))
        assert times[request.index] == own
    checked(engine)
    assert used(engine) == 0 == engine.outstanding
    assert kept(engine.caches) == kept(replica.caches)
    return engine


schedulings = st.builds(
    Scheduling,
    policy=st.sampled_from(sorted(POLICIES)),
    max_batch=st.integers(1, 8),
    max_step_tokens=st.sampled_from([9, 16, 40]),
    watermark=st.sampled_from([0.0, 0.05]),
    prefix_cache=st.booleans(),
    ranks=st.sampled_from([1, 1, 2, 3]),
)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), schedulings, st.integers(18, 60), st.sampled_from([0.0, 0.3]))
def test_the_engine_decides_as_the_simulator(seed, scheduling, blocks, cancelling):
    costs, whole = COSTS.replace(kv_blocks=blocks), COSTS.replace(kv_blocks=blocks * scheduling.ranks)
    compare(whole, scheduling, drawn(seed, 14, costs, cancelling, salts=(b"", b"a:")), check=True)


def apart_serve(costs, scheduling, first, demands):
    """One engine prefills, another decodes; each with its log."""
    outputs, events, handed, logs = {}, [], [], ([], [])
    for time, prompt, output, salt, _ in demands:
        request = EngineRequest(prompt, len(output), Collected(), block_tokens=BLOCK, salt=salt)
        outputs[request] = output
        events.append(Event(time, request))
    one, other = (VirtualExecutor(costs, outputs, ranks=own.ranks) for own in (first, scheduling))

    def hand_over(request):
        handed.append(Event(one.sent[-1].time, request))

    limits = {"block_tokens": BLOCK, "clock": one.clock, "log": logs[0].append}
    prefill = Engine(first, costs.kv_blocks, one, hand_over=hand_over, **limits)
    serve_events(prefill, one, events)
    one.now = float("inf")
    assert not prefill.step(), "all has arrived"
    decode = Engine(scheduling, costs.kv_blocks, other, block_tokens=BLOCK, clock=other.clock, log=logs[1].append)
    serve_events(decode, other, sorted(handed, key=lambda e: (e.time, e.request.index)))
    for engine in (prefill, decode):
        checked(engine)
        assert used(engine) == 0 == engine.outstanding
    return (one, other), (prefill, decode), outputs, logs


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), schedulings, schedulings, st.integers(18, 60))
def test_engines_that_prefill_and_others_that_decode_decide_as_the_simulator(seed, scheduling, first, blocks):
    """What is sent takes time on a link, and its blocks until it has arrived; who decodes may have to prefill again."""
    costs = COSTS.replace(
        kv_blocks=blocks, kv_bytes_per_token=1.0, transfer_bytes_per_s=2.0**9, transfer_startup_s=8 * TICK
    )
    scheduling, first = replace(scheduling, prefix_cache=False), replace(first, ranks=scheduling.ranks)
    demands, costs = drawn(seed, 14, costs), costs.replace(kv_blocks=blocks * scheduling.ranks)
    executors, engines, outputs, logs = apart_serve(costs, scheduling, first, demands)
    recorder = Recorder(spans=10**6)
    system = ServingSystem(costs, 1, scheduling, "round-robin", PrefillPool(costs, 1, first))
    prefixes = [request.prefix for request in outputs]
    load = [Demand(d[0], len(d[1]), len(d[2]), prefix) for d, prefix in zip(demands, prefixes, strict=True)]
    fleet = Fleet(system, recorder)
    fleet.run(SimpleNamespace(requests=lambda: iter(load)))
    found = [[(decoding, tokens) for _, decoding, _, tokens in executor.steps] for executor in executors]
    assert found == [steps_of(recorder, -1), steps_of(recorder, 0)]
    assert [engine.scheduler.hit_tokens for engine in engines] == [fleet.prefill[0].scheduler.hit_tokens, 0]
    assert engines[1].scheduler.preemptions == fleet.replicas[0].scheduler.preemptions
    times = times_of(recorder)
    for request, output in outputs.items():
        assert (request.reason, request.sink.ids) == ("length", list(output))
        assert times[request.index] == tuple(request.times[name] for name in ("begun", "first", "done"))
    assert [replay(map(to_line, log)) for log in logs] == [len(executor.steps) for executor in executors]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), schedulings, st.integers(18, 60), st.booleans(), st.sampled_from([0.0, 0.3]))
def test_steps_that_are_started_ahead_lose_no_page_and_change_no_output(seed, scheduling, blocks, stopping, cancelling):
    """Where all come at once and end by their length, steps are the simulator's; who stops takes a step more."""
    costs = COSTS.replace(kv_blocks=blocks)
    demands = [(0.0 if not cancelling else d[0], *d[1:]) for d in drawn(seed, 14, costs, cancelling)]
    most_tokens, costs = costs.kv_tokens, costs.replace(kv_blocks=blocks * scheduling.ranks)
    outputs, events, log = {}, [], []
    for time, prompt, output, salt, leaves in demands:
        output = [*output[:-1], 50] if stopping else output  # noqa: PLW2901
        most = min(len(output) + 3 * stopping, most_tokens + 1 - len(prompt))
        request = EngineRequest(prompt, most, Collected(), stops=frozenset([50]), block_tokens=BLOCK, salt=salt)
        outputs[request] = output
        events.append(Event(time, request))
        events += [Event(leaves, request, cancelled=True)] if leaves is not None else []
    executor = VirtualExecutor(costs, outputs, ranks=scheduling.ranks)
    engine = Engine(
        scheduling, costs.kv_blocks, executor, block_tokens=BLOCK, clock=executor.clock, log=log.append, ahead=True
    )
    step, engine.step = engine.step, lambda: (step(), checked(engine))[0]
    serve_events(engine, executor, sorted(events, key=lambda e: e.time))
    for request, output in outputs.items():
        given = [token for token in output if token != 50]
        if request.reason != "cancelled":
            assert (request.reason, request.sink.ids) == ("stop" if 50 in output else "length", given)
    assert used(engine) == 0 == engine.outstanding
    assert replay(map(to_line, log)) == len(executor.steps)
    if not stopping and not cancelling and not scheduling.prefix_cache:
        _, steps, _ = simulator_serves(costs, scheduling, demands)
        assert [(decoding, tokens) for _, decoding, _, tokens in executor.steps] == steps


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_crowded_cache_with_prefixes_and_cancellations(policy):
    costs = COSTS.replace(kv_blocks=44)
    engine = compare(costs, Scheduling(policy, 16, 48, prefix_cache=True), drawn(7, 150, costs, 0.2), check=True)
    assert engine.scheduler.preemptions > 5
    assert engine.scheduler.hit_tokens > 500


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_ranks_share_out_requests_and_pages(policy):
    """Each has a part of the batch; who gives way does so for another of its rank; a crowded cache, and prefixes."""
    scheduling = Scheduling(policy, 16, 48, prefix_cache=True, ranks=4)
    engine = compare(COSTS.replace(kv_blocks=4 * 24), scheduling, drawn(7, 150, COSTS, 0.2), check=True)
    assert engine.scheduler.preemptions > 5
    assert engine.scheduler.hit_tokens > 500
    _, executor, requests, _ = engine_serves(
        COSTS.replace(kv_blocks=160), scheduling, [(0.0, [5], [1] * 9, b"", None)] * 8
    )
    assert sorted(request.rank for request in requests) == [0, 0, 1, 1, 2, 2, 3, 3]
    of_one = engine_serves(COSTS, replace(scheduling, ranks=1), [(0.0, [5], [1] * 9, b"", None)] * 2)[1]
    whole = COSTS.step_seconds([2] * 8, filled=(8, 0))
    assert executor.steps[1][0] - executor.steps[0][0] == whole
    assert of_one.steps[1][0] - of_one.steps[0][0] == COSTS.step_seconds([2] * 2)


def test_of_ranks_with_equally_few_requests_the_one_with_the_longest_match_is_taken():
    """By the engine and the simulator; a rank with fewer requests goes first all the same."""
    pairs = [[(time, [first] * 12, [7] * 2, b"", None) for first in (1, 2)] for time in (0.0, 1.0, 2.0)]
    demands = [*pairs[0], *pairs[1][::-1], pairs[2][1]]
    scheduling = Scheduling(prefix_cache=True, ranks=2)
    engine = compare(COSTS.replace(kv_blocks=80), scheduling, demands, check=True)
    assert engine.scheduler.hit_tokens == 3 * 8
    _, _, requests, _ = engine_serves(COSTS.replace(kv_blocks=80), scheduling, demands)
    assert [request.rank for request in requests] == [0, 1, 1, 0, 1]
    _, _, requests, _ = engine_serves(COSTS.replace(kv_blocks=80), scheduling, [*pairs[0], pairs[1][1], pairs[1][1]])
    assert [request.rank for request in requests] == [0, 1, 1, 0]


def test_a_preempted_request_may_end_with_the_token_of_its_second_prefill():
    costs = COSTS.replace(kv_blocks=6)
    demands = [(0.0, [1] * 8, [2] * 12, b"", None), (0.0, [3] * 8, list(range(9)), b"", None)]
    engine = compare(costs, Scheduling(max_batch=2, watermark=0.0), demands)
    assert engine.scheduler.preemptions
    seen = set()
    for outputs in range(2, 12):  # some number of tokens is just reached by the second prefill
        demands[1] = (0.0, [3] * 8, list(range(outputs)), b"", None)
        _, _, requests, log = engine_serves(costs, Scheduling(max_batch=2, watermark=0.0), demands)
        second = list(requests)[1]
        ends = [[index for index, _ in entry[1]] for entry in log if entry[0] == "ended"]
        last = [entry for entry in log if entry[0] == "step"][ends.index([1])]
        seen.add((bool(second.preemptions), any(c[0] == 1 for c in last[2])))
    assert (True, True) in seen


def test_others_salt_hides_what_is_cached():
    same = [(0.0, [5] * 16, [1], b"", None), (1.0, [5] * 16, [1], b"", None)]
    other = [same[0], (1.0, [5] * 16, [1], b"b:", None)]
    hits = [
        engine_serves(COSTS, Scheduling(prefix_cache=True), demands)[0].scheduler.hit_tokens
        for demands in (same, other)
    ]
    assert hits == [12, 0]


@pytest.mark.slow  # 10,000 random requests, a page check after each step: no page is lost over a long time
def test_no_page_is_lost_in_ten_thousand_requests():
    for seed in range(100):
        policy = sorted(POLICIES)[seed % 3]
        scheduling = replace(Scheduling(policy, 8, 24, prefix_cache=True), watermark=0.0)
        compare(COSTS, scheduling, drawn(seed, 100, COSTS, 0.2), check=True)


def test_a_sink_that_fails_harms_no_other():
    class Broken(Collected):
        def token(self, token):
            raise RuntimeError(f"gone at {token}")

    good, bad = Collected(), Broken()
    requests = [EngineRequest([1, 2, 3], 4, sink, block_tokens=BLOCK) for sink in (good, bad)]
    executor = VirtualExecutor(COSTS, {r: [7, 8, 9, 6] for r in requests})
    engine = Engine(Scheduling(), 10, executor, block_tokens=BLOCK, clock=executor.clock)
    serve_events(engine, executor, [Event(0.0, r) for r in requests])
    assert (good.ids, good.reason, bad.reason) == ([7, 8, 9, 6], "length", "error")
    checked(engine)
    assert used(engine) == 0


def test_a_log_that_was_changed_is_noticed():
    *_, log = engine_serves(COSTS, Scheduling(prefix_cache=True), drawn(3, 6, COSTS))
    third = [k for k, entry in enumerate(log) if entry[0] == "step"][2]
    word, decodes, chunks = log[third]
    log[third] = (word, [*decodes[::-1], [0, 0, []]], chunks)
    with pytest.raises(ConfigError, match="step 3 was decided otherwise"):
        replay(map(to_line, log))
    with pytest.raises(ConfigError, match="expected the engine's limits first"):
        replay(map(to_line, log[1:]))
    with pytest.raises(ConfigError, match="ranks: expected at least 1"):
        replay(map(to_line, [(log[0][0], {**log[0][1], "ranks": 0}, *log[0][2:]), *log[1:]]))
    with pytest.raises(ConfigError, match="expected what 'meshwise serve --log' writes"):
        replay(["{"])
