"""The simulator against what must hold: queueing theory, closed forms, conservation, and what each feature is for."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from meshwise.core.errors import InfeasibleError, MeshwiseError
from meshwise.costs.engine import AttentionCosts, EngineCosts
from meshwise.jobs.lengths import parse_lengths
from meshwise.jobs.traffic import Demand, DrawnLoad, SharedPrefixes, Trace, parse_arrivals
from meshwise.simulation.serving import (
    POLICIES,
    PREEMPTIONS,
    Autoscaling,
    PrefillPool,
    Scheduling,
    ServingSystem,
    Speculation,
    Targets,
    find_capacity,
    simulate_serving,
)
from meshwise.simulation.serving.fleet import Fleet
from meshwise.simulation.serving.recording import Recorder

#: About LLaMA-3-70B on eight H100.
COSTS = EngineCosts(
    overhead_s=2e-3,
    token_seconds=((1, 12e-3), (256, 14e-3), (2048, 80e-3)),
    attention=(AttentionCosts(8e-9, 1e-10),),
    kv_blocks=30_000,
    kv_bytes_per_token=3e5,
    transfer_bytes_per_s=5e10,
    swap_bytes_per_s=2e10,
    num_chips=8,
    usd_per_chip_hour=2.0,
)


def load(count, rate, prompt="1024", output="256", arrivals="poisson", **more):
    return DrawnLoad(parse_arrivals(arrivals, rate), parse_lengths(prompt), parse_lengths(output), count, **more)


@pytest.mark.parametrize("busy", [0.3, 0.6, 0.85])
def test_one_by_one_it_is_the_queue_m_d_1(busy):
    """Prompts of one length, one at a time, nothing to decode: Pollaczek-Khinchine with constant service."""
    service = COSTS.step_seconds(chunks=[(0, 1024)])
    system = ServingSystem(COSTS, scheduling=Scheduling(max_batch=1))
    result = simulate_serving(system, load(40_000, busy / service, output="1", seed=3))
    expected = busy * service / (2 * (1 - busy))
    assert result.queueing_s.mean() == pytest.approx(expected, rel=0.05)
    assert result.ttft_s.mean() == pytest.approx(expected + service, rel=0.03)
    assert result.utilisation == pytest.approx(busy, rel=0.02)


def test_a_batch_that_starts_at_once_takes_what_the_closed_form_says():
    demands = tuple(Demand(0.0, 100, 65) for _ in range(16))
    result = simulate_serving(ServingSystem(COSTS), Trace(demands, "at once"))
    prefill, run = COSTS.step_seconds(chunks=[(0, 100)] * 16), COSTS.run_seconds([101] * 16, 64)
    assert np.allclose(result.ttft_s, prefill, rtol=1e-12)
    assert np.allclose(result.end_to_end_s, prefill + run, rtol=1e-12)
    assert result.tpot_s == pytest.approx(run / 64)


@pytest.mark.parametrize("rate", [2.0, 6.0])
def test_constant_load_is_the_fixed_point_of_interleaved_prefills(rate):
    """Requests come evenly: B decode; prefills between take rate * t_prefill of all time, and stretch each step.

    B = rate * outputs * TPOT and TPOT = t_generate(B) / (1 - rate * t_prefill), which is
    TPOT = t_generate + (B / outputs) * t_prefill.
    """
    outputs = 400
    prefill = COSTS.step_seconds(chunks=[(0, 1024)])
    tpot = 0.02
    for _ in range(200):
        batch = rate * outputs * tpot
        step = 2e-3 + COSTS.tokens_seconds(1) + (batch - 1) * (2e-3 / 255) + 8e-9 * batch * (1024 + outputs / 2)
        tpot = step + batch / outputs * prefill
    result = simulate_serving(ServingSystem(COSTS), load(4000, rate, output=str(outputs + 1), arrivals="constant"))
    settled = slice(1500, 3500)
    assert result.tpot_s[settled].mean() == pytest.approx(tpot, rel=0.02)
    assert result.replicas[0].mean_batch == pytest.approx(batch, rel=0.1)


def test_littles_law():
    """The mean number of requests in the system is rate times mean time in it, whatever the policy."""
    for policy in POLICIES:
        result = simulate_serving(ServingSystem(COSTS, scheduling=Scheduling(policy)), load(3000, 4.0, seed=1))
        arrivals, ends = np.sort(result.columns["arrival"]), np.sort(result.columns["finished"])
        times = np.linspace(0, result.end, 20_001)
        inside = np.searchsorted(arrivals, times, "right") - np.searchsorted(ends, times, "right")
        assert inside.mean() * result.end == pytest.approx(result.end_to_end_s.sum(), rel=0.01)


EVERYTHING = [
    ("least-loaded", Scheduling(policy, 24, 512, preemption, prefix_cache=prefixes, speculation=speculation))
    for policy in sorted(POLICIES)
    for preemption in sorted(PREEMPTIONS)
    for prefixes, speculation in ((False, None), (True, None), (True, Speculation(0.7, 3, 1e-3)))
]


@pytest.mark.parametrize(("routing", "scheduling"), EVERYTHING)
@pytest.mark.parametrize("separate", [False, True])
def test_nothing_is_lost(routing, scheduling, separate):
    """Requests, tokens and blocks are conserved and time goes on, with a cache that is far too small."""
    costs = COSTS.replace(kv_blocks=160)
    pool = PrefillPool(costs, 2, replace(scheduling, speculation=None)) if separate else None
    system = ServingSystem(costs, 2, scheduling, routing, pool)
    asked = load(
        300, 40.0, "lognormal:200:1:900", "uniform:1-300", "gamma:2", seed=5, prefixes=SharedPrefixes(200, groups=3)
    )
    recorder = Recorder(spans=10**6)
    fleet = Fleet(system, recorder, seed=1)
    fleet.run(asked)
    replicas = [*fleet.replicas, *fleet.prefill]
    for replica in replicas:
        assert (replica.outstanding, replica.decoding.count) == (0, 0)
        scheduler = replica.scheduler
        assert not [*scheduler.waiting, *scheduler.ready, *scheduler.prefilling]
        replica.clock = math.inf
        replica._drop_sent()
        assert replica.caches[0].used == pytest.approx(0, abs=1e-6)
        if replica.caches[0].prefixes is not None:
            assert replica.caches[0].prefixes.pinned == 0
            assert replica.caches[0].prefixes.blocks <= costs.kv_blocks
        assert replica.activity.kv_peak_blocks <= costs.kv_blocks + (1 if scheduling.speculation else 0)
    rows = np.array(recorder.rows).reshape(-1, 8)
    index, arrival, started, first, finished, prompt, output, preemptions = rows.T
    assert sorted(index) == list(range(300))
    assert (arrival <= started).all()
    assert (started < first).all()
    assert (first <= finished).all()
    assert ((finished > first) == (output > 1)).all()
    spans = {number: [s for s in recorder.spans if s.replica == number] for number in (0, 1, -1, -2)}
    for one in spans.values():
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(one))
    prefilled = sum(r.activity.prefilled + r.activity.hit_tokens for r in replicas)
    if preemptions.sum() == 0:
        assert prefilled == prompt.sum()
    assert prefilled >= prompt.sum()
    if scheduling.speculation is None:
        assert sum(r.activity.generated for r in replicas) <= (output - 1).sum()
        assert sum(r.activity.generated for r in replicas) >= (output - 1).sum() - preemptions.sum()


def test_a_small_cache_does_make_requests_give_way():
    crowded = ServingSystem(COSTS.replace(kv_blocks=700), scheduling=Scheduling(preemption="swap"))
    swapped = simulate_serving(crowded, load(500, 20.0, "300", "300"))
    recomputed = simulate_serving(
        replace(crowded, scheduling=Scheduling(preemption="recompute")), load(500, 20.0, "300", "300")
    )
    assert swapped.replicas[0].preemptions > 50
    assert recomputed.replicas[0].prefilled > 500 * 300 == swapped.replicas[0].prefilled


def test_a_seed_decides_everything():
    system = ServingSystem(COSTS, 2, Scheduling(speculation=Speculation(0.6, 2)))
    one, same, other = (simulate_serving(system, load(300, 5.0), seed=seed) for seed in (1, 1, 2))
    assert all((one.columns[name] == same.columns[name]).all() for name in one.columns)
    assert (one.columns["finished"] != other.columns["finished"]).any()


def test_policies_trade_first_tokens_for_later_ones():
    """Prefill-first stops those that decode; chunks bound how long; decode-first makes newcomers wait."""
    found = {
        policy: simulate_serving(
            ServingSystem(COSTS, scheduling=Scheduling(policy, 128, 512)), load(3000, 6.0, "lognormal:1024:1:8192")
        )
        for policy in POLICIES
    }
    ttft = {policy: np.median(result.ttft_s) for policy, result in found.items()}
    tpot = {policy: np.quantile(result.tpot_s, 0.99) for policy, result in found.items()}
    assert ttft["prefill-first"] < ttft["chunked"] < ttft["decode-first"]
    assert tpot["chunked"] < tpot["prefill-first"]


def test_a_prefix_that_is_cached_is_not_prefilled_again():
    shared = SharedPrefixes(2048, groups=4)
    asked = load(800, 5.0, "128", "64", prefixes=shared)
    without = simulate_serving(ServingSystem(COSTS), asked)
    cached = simulate_serving(ServingSystem(COSTS, scheduling=Scheduling(prefix_cache=True)), asked)
    prompts = 800 * (2048 + 128)
    assert without.replicas[0].prefilled == prompts
    assert cached.replicas[0].prefilled + cached.replicas[0].hit_tokens == prompts
    assert cached.replicas[0].hit_tokens >= (800 - 4 * 8) * 2048
    assert np.median(cached.ttft_s) < np.median(without.ttft_s) / 2


def test_a_conversation_goes_on_from_its_last_answer():
    """Three turns: each prompt begins with the whole turn before, of which all but its last token was cached."""
    turns = [
        Demand(0.0, 500, 101, (), "1"),
        Demand(60.0, 800, 101, (("1", 600),), "2"),
        Demand(120.0, 1200, 11, (("1", 600), ("2", 300)), None),
    ]
    system = ServingSystem(COSTS, scheduling=Scheduling(prefix_cache=True))
    result = simulate_serving(system, Trace(tuple(turns), "conversation"))
    hits = 600 // 16 * 16 + 900 // 16 * 16
    assert result.replicas[0].hit_tokens == hits
    assert result.replicas[0].prefilled == 500 + 800 + 1200 - hits
    alone = simulate_serving(system, Trace((turns[0], turns[1]._replace(prefix=(("other", 600),))), "none"))
    assert alone.replicas[0].hit_tokens == 0


def test_affinity_finds_more_of_the_prefixes():
    asked = load(2000, 12.0, "64", "64", prefixes=SharedPrefixes(3000, groups=40))
    costs = COSTS.replace(kv_blocks=4000)  # a replica's cache holds about half of them
    found = {
        routing: simulate_serving(ServingSystem(costs, 4, Scheduling(prefix_cache=True), routing), asked)
        for routing in ("round-robin", "affinity")
    }
    hits = {routing: sum(r.hit_tokens for r in result.replicas) for routing, result in found.items()}
    assert hits["affinity"] > 1.2 * hits["round-robin"]
    assert hits["affinity"] > 0.9 * 2000 * 3000


def test_least_loaded_waits_less_than_round_robin():
    asked = load(4000, 30.0, "lognormal:1024:2:16384", "lognormal:256:2:4096", seed=2)
    found = {
        routing: simulate_serving(ServingSystem(COSTS, 5, Scheduling(max_batch=64), routing), asked)
        for routing in ("round-robin", "least-loaded")
    }
    assert np.quantile(found["least-loaded"].ttft_s, 0.99) < np.quantile(found["round-robin"].ttft_s, 0.99)


def test_separate_pools_keep_prefills_out_of_the_way():
    asked = load(2000, 8.0)
    together = simulate_serving(ServingSystem(COSTS, 2, routing="least-loaded"), asked)
    apart = simulate_serving(ServingSystem(COSTS, 1, prefill=PrefillPool(COSTS, 1)), asked)
    assert np.quantile(apart.tpot_s, 0.99) < np.quantile(together.tpot_s, 0.99)
    assert apart.transferred_tokens == 2000 * 1024
    assert apart.replicas[1].number == -1
    assert apart.replicas[1].decode_steps == apart.replicas[0].prefilled == 0
    assert apart.chip_seconds == pytest.approx(16 * apart.end)


def test_sending_the_cache_takes_its_time():
    """One request: prefill, transfer, decode, one after the other."""
    slow = COSTS.replace(transfer_bytes_per_s=1e9, transfer_startup_s=0.01)
    system = ServingSystem(COSTS, 1, prefill=PrefillPool(slow, 1))
    result = simulate_serving(system, Trace((Demand(0.0, 1024, 11), Demand(0.0, 1024, 1)), "two"))
    prefill = COSTS.step_seconds(chunks=[(0, 1024), (0, 1024)])
    assert result.ttft_s == pytest.approx(prefill)
    transfer = 0.01 + 1024 * 3e5 / 1e9
    assert result.end_to_end_s[0] == pytest.approx(prefill + transfer + COSTS.run_seconds([1025], 10))
    assert result.end_to_end_s[1] == pytest.approx(prefill)


def test_blocks_that_are_not_sent_yet_are_not_free():
    """The prefill replica has room for one prompt; the second waits until the first one's cache has been sent."""
    slow = COSTS.replace(transfer_bytes_per_s=1e9, kv_blocks=64)
    system = ServingSystem(COSTS, 1, prefill=PrefillPool(slow, 1))
    result = simulate_serving(system, Trace((Demand(0.0, 1024, 11), Demand(0.0, 1024, 11)), "two"))
    prefill, transfer = COSTS.step_seconds(chunks=[(0, 1024)]), 1024 * 3e5 / 1e9
    assert result.ttft_s == pytest.approx([prefill, 2 * prefill + transfer])


def test_speculation_takes_as_many_steps_as_it_says():
    speculation = Speculation(acceptance=0.8, draft_tokens=4, draft_step_s=5e-4)
    drawn = [speculation.steps(np.random.default_rng(seed), 1000) for seed in range(200)]
    assert 1000 / np.mean(drawn) == pytest.approx(speculation.tokens_per_step, rel=0.01)
    assert speculation.tokens_per_step == pytest.approx(sum(0.8**k for k in range(5)))
    assert Speculation(0.0, 4).steps(np.random.default_rng(0), 77) == 77
    seldom = load(300, 0.05, output="1001")
    plain = simulate_serving(ServingSystem(COSTS), seldom)
    faster = simulate_serving(ServingSystem(COSTS, scheduling=Scheduling(speculation=speculation)), seldom)
    # alone, a step takes the same plus its four drafts: five tokens are read for as fast as one
    step = plain.tpot_s.mean()
    longer = 4 * 5e-4 + COSTS.tokens_seconds(5) - COSTS.tokens_seconds(1)
    assert faster.tpot_s.mean() == pytest.approx((step + longer) / speculation.tokens_per_step, rel=0.01)


def test_the_number_of_replicas_follows_the_load():
    scaling = Autoscaling(requests_per_replica=20, least=1, most=6, interval_s=2, startup_s=5)
    system = ServingSystem(COSTS, 1, routing="least-loaded", autoscaling=scaling)
    asked = load(6000, 10.0, arrivals="on-off:20s/40s", seed=4)
    result = simulate_serving(system, asked)
    sizes = [size for _, size in result.sizes]
    assert result.requests == 6000
    assert (min(sizes), max(sizes)) == (1, 6)
    always = simulate_serving(ServingSystem(COSTS, 6, routing="least-loaded"), asked)
    assert result.chip_seconds < 0.75 * always.chip_seconds
    assert np.quantile(result.ttft_s, 0.99) > np.quantile(always.ttft_s, 0.99)
    assert result.usd == pytest.approx(result.chip_seconds / 3600 * 2.0)


def test_what_does_not_fit_is_refused_and_said():
    small = ServingSystem(COSTS.replace(kv_blocks=80))
    result = simulate_serving(small, Trace((Demand(0, 1000, 100), Demand(0, 1200, 100), Demand(1, 1, 1)), "three"))
    assert (result.requests, result.refused) == (2, 1)
    with pytest.raises(
        InfeasibleError, match=r"2,000 tokens of prompt and 50 of output, a replica's cache holds 1,280"
    ):
        simulate_serving(small, load(10, 1.0, "2000", "50"))


def test_goodput_counts_who_kept_both_targets():
    result = simulate_serving(ServingSystem(COSTS), load(500, 6.0))
    targets = Targets(ttft_s=0.1, tpot_s=0.02)
    both = (result.ttft_s <= 0.1) & (result.tpot_s <= 0.02)
    assert 0 < both.mean() < 1
    assert result.goodput(targets) == pytest.approx(both.mean() * result.requests_per_s)
    assert result.goodput(Targets()) == result.requests_per_s
    single = simulate_serving(ServingSystem(COSTS), load(50, 1.0, output="1"))
    assert len(single.tpot_s) == 0
    assert single.kept(Targets(tpot_s=1e-6)).all()


def test_capacity_of_a_queue_that_is_known():
    """Evenly spaced prompts, one at a time: all wait for nothing up to one a service time."""
    service = COSTS.step_seconds(chunks=[(0, 1024)])
    system = ServingSystem(COSTS, scheduling=Scheduling(max_batch=1))
    asked = load(2000, 1.0, output="1", arrivals="constant")
    capacity = find_capacity(system, asked, Targets(ttft_s=1.5 * service))
    assert capacity.rate == pytest.approx(1 / service, rel=0.011)
    assert capacity.rate <= 1.0002 / service
    assert capacity.tried[0] == (1.0, True)
    # in M/D/1 the mean wait at 0.8 is two services; nine in ten wait less than that and a bit
    random = find_capacity(system, load(5_000, 1.0, output="1"), Targets(ttft_s=6 * service, share=0.9))
    assert 0.75 < random.rate * service < 0.9


def test_capacity_grows_with_replicas_and_shrinks_with_targets():
    asked = load(600, 4.0)
    targets = Targets(ttft_s=0.5, tpot_s=0.03, share=0.9)
    one = find_capacity(ServingSystem(COSTS), asked, targets)
    two = find_capacity(ServingSystem(COSTS, 2, routing="least-loaded"), asked, targets)
    tight = find_capacity(ServingSystem(COSTS), asked, Targets(ttft_s=0.5, tpot_s=0.02, share=0.9))
    assert 1.8 < two.rate / one.rate < 2.6
    assert tight.rate < one.rate
    assert one.result.kept(targets)[300:].mean() >= 0.9


def test_a_capacity_that_cannot_be_says_what_could():
    with pytest.raises(InfeasibleError, match=r"99% have their first token within 0\.0\d+ s .* allow more"):
        find_capacity(ServingSystem(COSTS), load(200, 1.0), Targets(ttft_s=0.01))
    with pytest.raises(MeshwiseError, match="needs a target"):
        find_capacity(ServingSystem(COSTS), load(200, 1.0), Targets())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Scheduling("fifo"), "unknown policy 'fifo'.*chunked, decode-first, prefill-first"),
        (lambda: Scheduling(preemption="drop"), "unknown preemption"),
        (lambda: Scheduling("chunked", 256, 256), "leaves none for prompts; give at least 257"),
        (lambda: Scheduling(watermark=1.0), "watermark"),
        (lambda: Speculation(1.0, 3), "acceptance: expected a share"),
        (lambda: Speculation(0.5, 0), "at least 1"),
        (lambda: ServingSystem(COSTS, 0), "replicas: expected a whole number, at least 1, found 0"),
        (lambda: ServingSystem(COSTS, 100_001), "replicas: expected at most 100,000, found 100,001"),
        (lambda: ServingSystem(COSTS, routing="random"), "unknown routing"),
        (lambda: ServingSystem(COSTS, 1, autoscaling=Autoscaling(5, 2, 4)), "expected 2 to 4, as autoscaling says"),
        (lambda: Autoscaling(5, 4, 2), "expected at least 4 replicas at most"),
        (lambda: Autoscaling(0), "requests_per_replica and interval_s above 0"),
        (lambda: PrefillPool(COSTS.replace(transfer_bytes_per_s=None), 1), "needs transfer_bytes_per_s"),
        (
            lambda: ServingSystem(COSTS.replace(swap_bytes_per_s=None), scheduling=Scheduling(preemption="swap")),
            "needs swap_bytes_per_s",
        ),
        (
            lambda: ServingSystem(COSTS, prefill=PrefillPool(COSTS, 1, Scheduling(speculation=Speculation(0.5, 1)))),
            "prefill replicas decode nothing",
        ),
        (lambda: Targets(ttft_s=0), "more than 0 seconds"),
        (lambda: Targets(share=0), "a share of requests"),
    ],
)
def test_what_cannot_be_is_said(make, words):
    with pytest.raises(MeshwiseError, match=words):
        make()


def test_time_is_linear_in_requests_and_samples_are_bounded():
    counts = (2_000, 8_000)
    results = [simulate_serving(ServingSystem(COSTS), load(count, 6.0)) for count in counts]
    assert all(len(r.replicas[0].samples) <= 512 for r in results)
    steps = [r.replicas[0].decode_steps for r in results]
    assert steps[1] / steps[0] == pytest.approx(4, rel=0.1)
    assert math.isfinite(results[0].cpu_s)


def test_an_autoscaler_decides_a_bounded_number_of_times():
    scaling = Autoscaling(requests_per_replica=20, least=1, most=6, interval_s=1e-9, startup_s=5)
    system = ServingSystem(COSTS, 1, routing="least-loaded", autoscaling=scaling)
    with pytest.raises(MeshwiseError, match="360,000 decisions by 360 us of the load"):
        simulate_serving(system, Trace((Demand(0.0, 10, 2), Demand(1.0, 10, 2)), "test"))
