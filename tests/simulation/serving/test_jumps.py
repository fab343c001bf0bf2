"""Jumping from event to event gives exactly what one step after the other gives.

All times are multiples of powers of two, so that sums have no rounding, and results must be equal to the last bit.
"""

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwise.costs.engine import AttentionCosts, EngineCosts
from meshwise.jobs.traffic import Demand, Trace
from meshwise.scheduling import POLICIES, PREEMPTIONS, Scheduling
from meshwise.simulation.serving.decoding import Decoding
from meshwise.simulation.serving.fleet import Fleet
from meshwise.simulation.serving.recording import COLUMNS, Recorder
from meshwise.simulation.serving.system import ServingSystem
from tests.simulation.serving.naive import Naive

TICK = 2.0**-12


def served(costs, scheduling, demands):
    """Rows of the simulator in order of requests, and its replica."""
    recorder = Recorder()
    fleet = Fleet(ServingSystem(costs, scheduling=scheduling), recorder)
    fleet.run(Trace(tuple(demands), "test"))
    width = len(COLUMNS)
    rows = [tuple(recorder.rows[k : k + width]) for k in range(0, len(recorder.rows), width)]
    return sorted(rows), fleet.replicas[0]


def row(one):
    return (one.index, one.arrival, one.started, one.first, one.finished, one.prompt, one.output, one.preemptions)


def ticks(least, most):
    return st.integers(least, most).map(lambda n: n * TICK)


attention = st.builds(
    AttentionCosts,
    seconds_per_cached_token=ticks(0, 4),
    seconds_per_pair=ticks(0, 2),
    window=st.none() | st.integers(1, 60),
)
engines = st.builds(
    EngineCosts,
    overhead_s=ticks(1, 50),
    per_request_s=ticks(0, 5),
    token_seconds=st.sampled_from(
        [((1, 0.0),), ((1, 8 * TICK), (17, 24 * TICK)), ((4, TICK), (8, 2 * TICK), (72, 1.0))]
    ),
    attention=st.lists(attention, max_size=2).map(tuple),
    kv_blocks=st.integers(8, 60),
    block_tokens=st.sampled_from([1, 2, 4, 16]),
    kv_bytes_per_token=st.just(1.0),
    swap_bytes_per_s=st.just(2.0**8),
)
schedulings = st.builds(
    Scheduling,
    policy=st.sampled_from(sorted(POLICIES)),
    max_batch=st.integers(1, 8),
    max_step_tokens=st.sampled_from([9, 16, 40]),
    preemption=st.sampled_from(sorted(PREEMPTIONS)),
    watermark=st.sampled_from([0.0, 0.05, 0.2]),
)


@st.composite
def workloads(draw):
    """An engine, and demands that fit in its cache alone."""
    costs = draw(engines)
    demands, time = [], 0.0
    for gap in draw(st.lists(st.sampled_from([0, 0, 1, 3, 50, 300, 5000]), min_size=1, max_size=14)):
        time += gap * TICK
        prompt = draw(st.integers(1, min(50, costs.kv_tokens - 1)))
        output = draw(st.integers(1, min(60, costs.kv_tokens + 1 - prompt)))
        demands.append(Demand(time, prompt, output))
    return costs, demands


@settings(max_examples=80, deadline=None)
@given(workloads(), schedulings)
def test_jumps_are_exact(workload, scheduling):
    costs, demands = workload
    naive = Naive(costs, scheduling)
    expected = [row(one) for one in naive.serve(demands)]
    found, replica = served(costs, scheduling, demands)
    assert found == expected
    assert replica.caches[0].used == 0
    assert replica.caches[0].prefixes is None
    assert naive.peak_blocks <= costs.kv_blocks
    tokens = sum(d.output - 1 for d in demands)
    assert replica.activity.generated + sum(r.preemptions for r in naive.done) >= tokens


CROWDED = EngineCosts(
    overhead_s=8 * TICK,
    token_seconds=((1, 4 * TICK), (65, 68 * TICK)),
    attention=(AttentionCosts(TICK / 16, TICK / 64), AttentionCosts(TICK / 8, TICK / 32, window=40)),
    kv_blocks=60,
    block_tokens=4,
    kv_bytes_per_token=1.0,
    swap_bytes_per_s=2.0**10,
)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("preemption", sorted(PREEMPTIONS))
def test_a_crowded_cache(policy, preemption):
    """Many requests, far more than fit: requests give way again and again, and still all is equal."""
    demands = [Demand(k * 60 * TICK, 5 + 7 * k % 41, 1 + 13 * k % 59) for k in range(120)]
    scheduling = Scheduling(policy, 16, 48, preemption, watermark=0.0)
    naive = Naive(CROWDED, scheduling)
    expected = [row(one) for one in naive.serve(demands)]
    found, replica = served(CROWDED, scheduling, demands)
    assert found == expected
    assert replica.activity.preemptions == sum(r.preemptions for r in naive.done) > 20
    assert naive.peak_blocks > 0.95 * CROWDED.kv_blocks


@settings(max_examples=40, deadline=None)
@given(workloads(), schedulings, st.integers(3, 11))
def test_jumps_agree_at_any_numbers(workload, scheduling, odd):
    """With times that do round, a step of one microsecond more or less, both agree to rounding."""
    costs, demands = workload
    costs = costs.replace(
        overhead_s=costs.overhead_s / odd,
        attention=tuple(
            AttentionCosts(a.seconds_per_cached_token / odd, a.seconds_per_pair / 7, a.window) for a in costs.attention
        ),
    )
    demands = [d._replace(arrival=0.0) for d in demands]  # arrivals beside a step's end could fall either way
    expected = [row(one) for one in Naive(costs, scheduling).serve(demands)]
    found, _ = served(costs, scheduling, demands)
    for one, other in zip(found, expected, strict=True):
        assert all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(one, other, strict=True))


@st.composite
def sharing(draw):
    """Demands that begin with parts of few names, some of which stay for those that go on from them."""
    demands, time = [], 0.0
    for k in range(draw(st.integers(2, 24))):
        time += draw(st.sampled_from([0, 1, 3, 50, 300])) * TICK
        names = draw(st.lists(st.sampled_from("abc"), max_size=3))
        prefix = tuple((name, 5 + 3 * depth) for depth, name in enumerate(names))
        prompt = sum(size for _, size in prefix) + draw(st.integers(1, 12))
        kept = f"{k}" if draw(st.booleans()) else None
        if kept and demands and draw(st.booleans()):
            before = demands[-1]
            if before.keep_as and before.prompt + before.output < 40:
                own = before.prompt + before.output - 1 - sum(size for _, size in before.prefix)
                prefix = (*before.prefix, (before.keep_as, own))
                prompt = before.prompt + before.output + draw(st.integers(1, 8))
        demands.append(Demand(time, prompt, draw(st.integers(1, 50)), prefix, kept))
    return demands


class OneByOne(Decoding):
    """Requests that decode, of which no run is longer than a step."""

    def longest_run(self, blocks):
        assert all(self.next_blocks(rank) <= left for rank, left in enumerate(blocks))
        return min(super().longest_run(blocks), 1)


#: Who gives way for those that decode, where no prompt goes on, finds blocks of another rank in the next step.
BACK_AT_ONCE = [
    Demand(0.0, 25, 1, (("a", 5), ("a", 8), ("a", 11)), None),
    *(Demand(0.0, 1, 1, (), None) for _ in range(2)),
    *(Demand(0.0, 6, n, (("a", 5),), None) for n in (1, 15)),
    Demand(0.0, 25, 13, (("a", 5), ("a", 8), ("b", 11)), None),
    Demand(TICK, 26, 11, (("b", 5), ("b", 8), ("a", 11)), None),
    Demand(TICK, 2, 29, (), "7"),
    Demand(TICK, 32, 6, (("7", 30),), "8"),
    Demand(TICK, 2, 3, (), None),
    Demand(301 * TICK, 2, 5, (), None),
    Demand(601 * TICK, 5, 5, (), None),
    Demand(602 * TICK, 2, 5, (), None),
]


@settings(max_examples=80, deadline=None)
@given(sharing(), schedulings, st.integers(26, 60), st.integers(1, 3))
@example(BACK_AT_ONCE, Scheduling("chunked", 5, 9, "swap", watermark=0.0), 26, 2)
def test_jumps_with_prefixes_decide_as_single_steps_do(demands, scheduling, blocks, ranks):
    costs = CROWDED.replace(kv_blocks=blocks * ranks)
    scheduling = replace(scheduling, prefix_cache=True, ranks=ranks)
    jumped, replica = served(costs, scheduling, demands)
    with patch("meshwise.simulation.serving.replica.Decoding", OneByOne):
        single, slow = served(costs, scheduling, demands)
    assert jumped == single
    for one in (replica, slow):
        for cache in one.caches:
            assert cache.used == cache.prefixes.pinned == 0
            assert cache.prefixes.blocks <= blocks
        assert one.activity.kv_peak_blocks <= costs.kv_blocks
    decided = ("hit_tokens", "preemptions", "prefilled", "generated", "decode_steps", "kv_peak_blocks")
    assert all(getattr(replica.activity, name) == getattr(slow.activity, name) for name in decided)
    assert [c.prefixes.blocks for c in replica.caches] == [c.prefixes.blocks for c in slow.caches]
