"""Bounds of the search are never above what they bound, and no placement that is left out is faster than all kept."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.costs.estimate import evaluate_layout
from meshwise.costs.fabric import Fabric
from meshwise.costs.fitted import fitted_calibration
from meshwise.costs.local import evaluate_passes, local_prices
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.weight_traffic import state_sums, weight_choices
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.search import training_limits
from meshwise.search.asked import SearchSpace
from meshwise.search.candidates import Choices, candidate_table
from meshwise.search.ideal import ideal_chip_seconds_per_token
from meshwise.search.network import LocalTables, SearchedNetwork
from meshwise.search.pricing import Pricing
from meshwise.search.space import meshes, placements
from meshwise.sharding.layout import MESH_AXES, Layout, parse_layout
from tests.costs.small_problems import tiny
from tests.search.test_search_exact import small_searches

BELOW = 1 + 1e-12


def pricing_of(case, **others):
    problem, varied, _ = case
    fabric = Fabric.of(problem.cluster, flat_rings=problem.calibration.flat_rings)
    choices = Choices(**varied, **others)
    space = SearchSpace(training_limits(problem), choices, memory_share=math.inf)
    table = candidate_table(problem, meshes(math.prod(fabric.sizes), space.limits))
    return Pricing(SearchedNetwork(LocalTables(problem), space, fabric, table))


def some_candidates(pricing, generator, groups, candidates):
    """Of some groups, some candidates."""
    every = pricing.bounds.groups(range(len(pricing.network.schedules)), everything)
    batch = pricing.bounds.members_of(every.take(generator.integers(len(every), size=groups)))
    return batch.take(generator.integers(len(batch), size=candidates))


def everything(bound, key):
    return np.ones(len(bound), bool)


def unbounded(batch):
    """The same, as if nothing were known of their time."""
    return replace(batch, bound=np.zeros(len(batch)))


def hold_bounds(case, generator):
    pricing = pricing_of(case)
    batch = some_candidates(pricing, generator, 24, 48)
    fitting, _ = pricing.fitting(batch)
    plain, without_host = fitting.where(fitting.saving == 0), pricing_of(case, offload=((),))
    in_chunks, _ = pricing_of(case, loss=("chunked",)).fitting(batch)
    for bounds in (pricing.bounds, without_host.bounds):
        assert (bounds.memory_floor(plain) <= plain.memory * BELOW).all()
        assert (bounds.memory_floor(in_chunks) <= in_chunks.memory * BELOW).all()
    assert len(fitting)
    bounded = pricing.bounded(unbounded(fitting))
    assert (fitting.bound <= bounded.bound * BELOW).all()
    assert (pricing.placement_bounds[0].raised(unbounded(fitting)).bound <= bounded.bound).all()
    placed = pricing.raised(pricing.raised(unbounded(fitting), everything), everything, placed=True)
    for i in range(len(placed)):
        best = min(priced.seconds.min() for priced in pricing.placed(fitting.take(slice(i, i + 1))))
        assert placed.bound[i] <= best
    ideal = ideal_chip_seconds_per_token(pricing.network.local, Choices(**case[1])) / math.prod(
        pricing.network.fabric.sizes
    )
    assert (ideal <= bounded.bound * BELOW).all()
    for priced in pricing.placed(bounded):
        assert (priced.batch.bound <= priced.seconds * BELOW).all()


def hold_work(case):
    """What stands for many choices: state for all remat policies, the forward pass for what these compute again."""
    pricing = pricing_of(case)
    problem, network = pricing.problem, pricing.network
    every = np.arange(np.size(pricing.table.sizes.micro_batch))
    for variant in network.variants:
        policy = replace(variant.own, partial_remat=False)
        prices = local_prices(problem, policy, pricing.table.sizes, bounded=False)
        blocks = zip(problem.lowered.training(policy), evaluate_passes(problem, policy, prices), strict=True)
        computed = sum(b.placed.block.repeat * p.seconds for b, passes in blocks for p in passes.values())
        busy, plain = (network.busy(choices, every) for choices in (policy, replace(policy, remat="none")))
        assert (busy <= computed * BELOW).all()
        assert (busy > plain).all() or policy.remat != "full"
        for stored in variant.stored:
            alone = replace(stored, partial_remat=False)
            assert state_sums(problem, alone) == state_sums(problem, weight_choices(stored))


def hold_placements(case, generator):
    pricing = pricing_of(case)
    problem, fabric = pricing.problem, pricing.network.fabric
    batch = some_candidates(pricing, generator, 4, 4)
    for i in range(len(batch)):
        row, _ = pricing.fitting(batch.take(slice(i, i + 1)))
        (priced,) = pricing.placed(row)
        layout = pricing.found(priced, 0, 0.0).layout
        # As text it leaves out what means nothing: that costs nothing either.
        request = parse_layout(str(layout), num_chips=math.prod(fabric.sizes))
        layout = Layout(**request.sizes, **request.choices)
        every = []
        for way in placements(fabric.sizes, tuple(layout.sizes[a] for a in MESH_AXES)):
            wires = tuple((a, tuple(int(e) for e in extents)) for a, extents in zip(MESH_AXES, way, strict=True))
            costs = evaluate_layout(problem, fabric, layout.replace(wires=wires))
            every.append(costs.step.expected / (layout.sequences * problem.job.seq_len))
        # Wires are compared to nine digits.
        assert priced.seconds.min() == pytest.approx(min(every), rel=1e-8, abs=0)


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("vocab", [1024, 65536])
def test_bounds_of_placements_of_dense_pipelines_are_nearly_their_prices(vocab, in_step):
    """What is sent between stages counts, and what the busiest device does once a step, which a large head makes so."""
    cluster = parse_cluster("h100:16")
    job = TrainingJob(batch_tokens=str(32 * 1024), seq_len="1024", batch_slack="0%")
    problem = TrainingProblem(
        tiny(layers=8, vocab=vocab), job, cluster, fitted_calibration(cluster.chip, "xla"), in_step
    )
    choices = {"remat": ("none", "full"), "schedule": ("1f1b", "interleaved"), "context_method": ("gather",)}
    pricing = pricing_of((problem, choices, None))
    batch, _ = pricing.fitting(some_candidates(pricing, np.random.default_rng(1), 200, 400))
    batch = batch.where((pricing.network.table.axis("stage", batch.at) > 1) & (batch.saving == 0))
    placed = pricing.raised(unbounded(batch), everything, placed=True)
    least = dict(zip(pricing.numbers(batch).tolist(), [math.inf] * len(batch), strict=True))
    for priced in pricing.placed(batch):
        for number, seconds in zip(pricing.numbers(priced.batch).tolist(), priced.seconds.tolist(), strict=True):
            least[number] = min(least[number], seconds)
    prices = np.array([least[number] for number in pricing.numbers(placed).tolist()])
    assert (placed.bound <= prices).all()
    assert (placed.bound >= 0.99 * prices).all()


@pytest.mark.parametrize("zero", [(0, 1, 2), (1,)])
def test_stages_in_step_hold_what_each_layout_holds_alone(zero):
    """Two stages divide 1,020 positions, not those of a device where four have a part; three no rows of the tables."""
    cluster = parse_cluster("h100:24")
    job = TrainingJob(batch_tokens=str(48 * 1020), seq_len="1020", batch_slack="0%")
    problem = TrainingProblem(
        tiny(layers=6, vocab=16384), job, cluster, fitted_calibration(cluster.chip, "xla"), in_step=True
    )
    pricing = pricing_of((problem, {"remat": ("full",), "schedule": ("1f1b", "gpipe"), "zero": zero}, None))
    batch, _ = pricing.fitting(some_candidates(pricing, np.random.default_rng(0), 64, 96))
    assert {1, 2, 3} <= {*pricing.network.table.axis("stage", batch.at)}
    assert (pricing.bounds.memory_floor(batch) <= batch.memory * BELOW).all()
    for i in range(len(batch)):
        (priced,) = pricing.placed(batch.take(slice(i, i + 1)))
        layout = pricing.found(priced, 0, 0.0).layout
        alone = evaluate_layout(problem, pricing.network.fabric, layout).memory["total"]
        assert batch.memory[i] == pytest.approx(alone, rel=1e-12), layout


seeds = st.integers(0, 2**32).map(np.random.default_rng)


@settings(max_examples=3, deadline=None)
@given(small_searches(), seeds)
def test_each_bound_is_below_the_next_and_below_every_placement(case, generator):
    hold_bounds(case, generator)


@settings(max_examples=3, deadline=None)
@given(small_searches())
def test_what_stands_for_all_remat_policies_does(case):
    hold_work(case)


@settings(max_examples=4, deadline=None)
@given(small_searches(), seeds)
def test_the_best_of_all_placements_is_among_those_kept(case, generator):
    hold_placements(case, generator)


# Slow: the same of many more problems.
@pytest.mark.slow
@settings(max_examples=24, deadline=None)
@given(small_searches(), seeds)
def test_on_many_problems_bounds_and_placements_are_admissible(case, generator):
    hold_bounds(case, generator)
    hold_work(case)
    hold_placements(case, generator)
