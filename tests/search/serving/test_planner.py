"""The search is exact: its numbers are the estimates', and nothing in its space is better than what it finds."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

import meshwise
from meshwise.core.errors import InfeasibleError, LayoutError, UnknownNameError
from meshwise.costs.calibration import default_calibration
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import ServingSetup
from meshwise.costs.serving.estimate import estimate_serving
from meshwise.hardware import parse_cluster
from meshwise.jobs import ServingLoad
from meshwise.jobs.lengths import parse_lengths
from meshwise.jobs.mix import mix_lengths
from meshwise.models import load_model
from meshwise.search.serving import ServingConstraints, kept, plan_serving, planner, tables
from meshwise.search.serving.pairs import aggregated, disaggregated, undominated
from meshwise.search.serving.space import candidates, divisors, engine_sizes
from meshwise.search.serving.tables import Tables


def problem(model="llama-3-8b", on="h100:8", *, prompt=1024, output=256, **load):
    cluster = parse_cluster(on)
    if isinstance(prompt, str):
        whole = ServingLoad.of_mix(mix_lengths(parse_lengths(prompt), parse_lengths(output)), **load)
    else:
        whole = ServingLoad(prompt=prompt, output=output, **load)
    return ServingProblem(load_model(model), whole, cluster, default_calibration(cluster.chip))


@pytest.mark.parametrize(
    ("model", "on", "load"),
    [
        ("llama-3-8b", "h100:8", {}),
        ("mixtral-8x7b", "h100:16", {}),
        ("llama-3-8b", "v5e:4x4", {}),
        ("llama-3-8b", "h100:8", {"prompt": "lognormal:1024:0.8:4096", "output": "uniform:64-448"}),
    ],
)
def test_numbers_of_the_search_are_those_of_the_estimate(model, on, load):
    given = problem(model, on, **load)
    fabric = given.network
    tables = Tables.priced(given, fabric, max_batch=64)
    random = np.random.default_rng(7)
    for found in (aggregated(tables), disaggregated(tables)):
        parts = [p for p in found if len(p)]
        assert parts
        for _ in range(12):
            pairs = parts[random.integers(len(parts))]
            i = int(random.integers(len(pairs)))
            e = estimate_serving(given, pairs.setup(i, tables), fabric, count=False)
            assert e.ttft.expected == pytest.approx(float(pairs.ttft[i]), rel=1e-9)
            assert e.tpot.expected == pytest.approx(float(pairs.tpot[i]), rel=1e-9)
            assert e.output_tokens_per_s == pytest.approx(float(pairs.tokens[i]), rel=1e-9)
            assert e.requests_per_s == pytest.approx(float(pairs.rate[i]), rel=1e-9)
            most = max(x.memory["total"] for x in (e.prefill, e.decode))
            assert most == pytest.approx(float(pairs.memory[i]), rel=1e-9)


def objective_and_tie(e, constraints):
    """What is asked for, and what decides where it is the same within 1 %; less is better."""
    return {
        "throughput": (-e.output_tokens_per_s, e.end_to_end_s),
        "tpot": (e.tpot.expected, e.ttft.expected),
        "ttft": (e.ttft.expected, -e.output_tokens_per_s),
    }[constraints.objective]


def every_estimate(given):
    """Every pair of layouts, batches and ratios on two chips that fits, estimated one by one."""
    fabric = given.network
    found = {
        step: [layout.replace(wires=tuple(w.items())) for c in candidates(given, fabric, step, (1, 2))
               for layout, w in map(c.place, range(len(c.places)))]
        for step in ("prefill", "decode")
    }  # fmt: skip
    for prefill, decode in itertools.product(found["prefill"], found["decode"]):
        for batch, prompts in itertools.product((1, 2, 3, 4), (1, 2, 4)):
            for mode in ("aggregated", "disaggregated"):
                own = 2 // decode.engine_chips if mode == "aggregated" else 1
                setup = ServingSetup(mode, prefill.replace(replicas=own), decode.replace(replicas=own), batch, prompts)
                if setup.num_chips > 2 or prefill.engine_chips * own > 2:
                    continue
                try:
                    e = estimate_serving(given, setup, fabric, count=False)
                except LayoutError:
                    continue
                if e.fits:
                    yield e


@pytest.mark.parametrize(
    "constraints",
    [
        ServingConstraints(max_batch=4),
        ServingConstraints(max_batch=4, objective="tpot"),
        ServingConstraints(max_batch=4, objective="ttft"),
        ServingConstraints(max_batch=4, max_tpot=0.0046),
    ],
    ids=("throughput", "tpot", "ttft", "target"),
)
def test_nothing_in_the_space_is_better(constraints, monkeypatch):
    given = problem(on="h100:2", prompt=512, output=64)
    every_score = [
        objective_and_tie(e, constraints)
        for e in every_estimate(given)
        if not constraints.max_tpot or e.tpot.expected <= constraints.max_tpot
    ]
    best = min(score for score, _ in every_score)
    own, own_tie = objective_and_tie(plan_serving(given, constraints=constraints).plans[0], constraints)
    assert own <= best + 0.01 * abs(best)  # prompts in other numbers together are searched, too
    tie = min(tie for score, tie in every_score if score <= best + 0.01 * abs(best))
    assert own_tie <= tie + 0.01 * abs(tie) + 1e-9
    monkeypatch.setattr(planner, "ties", lambda _: (0.0, 0.0, 0.0))
    own, _ = objective_and_tie(plan_serving(given, constraints=constraints).plans[0], constraints)
    assert own <= best + 1e-9 * abs(best)


@pytest.mark.parametrize(
    ("on", "besides"),
    [
        ("h100:8", (3, 5, 6, 7)),  # on one switch each chip is a node
        ("h100:64", (24, 40, 48, 56)),
        ("h100:160", (24, 48, 56, 64, 128)),  # twelve nodes are not tried beside ten
        ("h100:88", (16, 24, 32, 40, 48, 56, 64)),  # eleven nodes
        ("gb200-nvl72:7", (2, 3, 4, 5, 6)),
        ("v5p:4x4x12", ()),
    ],
)
def test_engines_of_whole_nodes_need_not_divide_the_cluster(on, besides):
    given = problem("mixtral-8x7b", on)
    sizes = engine_sizes(given.network)
    assert sizes == tuple(sorted({*divisors(given.cluster.num_chips), *besides}))
    assert {c for g in candidates(given, given.network, "decode", besides) for c in g.chips} == {*besides}


def test_engines_that_do_not_divide_the_cluster_serve_more(monkeypatch):
    """Eight experts and 56 layers go into thirteen parts badly."""
    given = problem("mixtral-8x22b", "gb200-nvl72:13")
    best = plan_serving(given).plans[0]
    monkeypatch.setattr(tables, "engine_sizes", lambda _: (1, 13))
    assert best.output_tokens_per_s > 1.1 * plan_serving(given).plans[0].output_tokens_per_s


@pytest.mark.parametrize(
    ("model", "on", "objective", "gain"),
    [("llama-3-8b", "rtx-4090:8", "ttft", 1.1), ("llama-3.1-405b", "h100:64", "throughput", 1.02)],
)
def test_two_kinds_of_engines_share_few_nodes_out_in_unequal_parts(model, on, objective, gain, monkeypatch):
    """Six cards prefill and two generate; five nodes and three."""
    given, asked = (
        problem(model, on, prompt=2048, output=512),
        ServingConstraints(objective=objective, forbid=("fsdp",)),
    )
    best = plan_serving(given, constraints=asked).plans[0]
    assert best.setup.prefill.engine_chips + best.setup.decode.engine_chips == given.cluster.num_chips
    better, _ = objective_and_tie(best, asked)
    monkeypatch.setattr(tables, "engine_sizes", lambda network: divisors(math.prod(network.sizes)))
    own, _ = objective_and_tie(plan_serving(given, constraints=asked).plans[0], asked)
    assert max(own / better, better / own) > gain


@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
def test_no_more_prompts_are_prefilled_together_than_are_generated_for_at_once(mode):
    """Else all but a few would wait for a place between their first token and their second."""
    given = problem(on="h100:4", prompt=512, output=64)
    for e in plan_serving(
        given, constraints=ServingConstraints(max_batch=64, objective="tpot", mode=mode), top=20
    ).plans:
        slots = e.setup.batch * (e.setup.decode.replicas if mode == "disaggregated" else 1)
        assert e.setup.prefill_batch <= slots
        assert e.ttft.expected < 5
    too_many = dataclasses.replace(e.setup, prefill_batch=2 * slots)
    with pytest.raises(LayoutError, match=f"prefill_batch: expected at most {slots:,}, .* found {2 * slots:,}: "):
        estimate_serving(given, too_many, count=False)


def test_palm_generates_with_two_dimensional_weights_and_prefills_with_gathered_ones():
    """Pope et al. 2022, table 2, high throughput; their layouts have no pipelines."""
    given = problem("palm-540b", "v4:4x4x4", prompt=1984, output=64, reserve=0)
    best = plan_serving(
        given, constraints=ServingConstraints(max_batch=512, mode="aggregated", forbid=("stage",))
    ).plans[0]
    assert best.setup.batch >= 256
    assert best.setup.decode.width > 1
    assert best.setup.decode.cache_split == "batch"
    assert best.setup.prefill.fsdp > 1
    assert best.setup.prefill_batch >= 32


def test_plans_keep_their_targets_and_the_front_rises():
    given = problem("llama-3-70b", "h100:16", precision="fp8")
    planning = plan_serving(given, constraints=ServingConstraints(max_ttft=0.3, max_tpot=0.02))
    for e in planning.plans:
        assert e.fits
        assert e.ttft.expected <= 0.3
        assert e.tpot.expected <= 0.02
        assert e.setup.num_chips <= 16
    tokens = [e.output_tokens_per_s for e in planning.plans]
    assert all(tokens[i] >= 0.99 * max(tokens[i:]) for i in range(len(tokens)))
    front = planning.pareto
    assert [p.tpot for p in front] == sorted(p.tpot for p in front)
    assert [p.tokens for p in front] == sorted(p.tokens for p in front)
    within = max(p.tokens for p in front if p.tpot <= 0.02)
    assert 0.99 * within <= tokens[0] <= within * (1 + 1e-9)
    assert planning.neighbours


def test_a_little_throughput_does_not_buy_seconds():
    """Without targets, gathering hundreds of prompts is worth thousandths of the throughput."""
    given = problem("llama-3-70b", "h100:16", precision="fp8")
    planning = plan_serving(given)
    best, most = planning.plans[0], planning.pareto[-1]
    assert 0.99 * most.tokens <= best.output_tokens_per_s < most.tokens
    assert best.ttft.expected < 0.5 * most.ttft
    assert best.end_to_end_s < most.ttft + (given.load.output - 1) * most.tpot
    more = [n.reason for n in planning.neighbours if "% more tokens/s, " in n.reason]
    assert more  # whoever wants them finds what they cost
    assert all(" at TTFT " in reason for reason in more)


def test_a_rate_is_served_with_few_chips():
    given = problem("llama-3-8b", "h100:16")
    few = plan_serving(given, constraints=ServingConstraints(rate=5.0, max_tpot=0.02)).plans[0]
    many = plan_serving(given, constraints=ServingConstraints(rate=60.0, max_tpot=0.02)).plans[0]
    assert few.requests_per_s >= 5
    assert many.requests_per_s >= 60
    assert few.setup.num_chips < many.setup.num_chips <= 16


@pytest.mark.parametrize(
    ("model", "on", "constraints", "said"),
    [
        ("llama-3-70b", "h100:1", ServingConstraints(), "nothing fits: .* use more chips, narrower formats"),
        ("llama-3-8b", "h100:8", ServingConstraints(max_tpot=1e-4), "TPOT within 100 us .the least is "),
        ("llama-3-8b", "h100:8", ServingConstraints(max_ttft=1e-4, max_tpot=1e-4), "together; loosen a target"),
        ("llama-3-8b", "h100:8", ServingConstraints(rate=1e6), "1e.06 requests/s .the most is "),
    ],
)
def test_what_is_impossible_says_what_would_work(model, on, constraints, said):
    with pytest.raises(InfeasibleError, match=said):
        plan_serving(problem(model, on), constraints=constraints)


def test_the_leanest_is_of_the_layouts_that_a_tool_takes():
    with pytest.raises(InfeasibleError, match=r"jetstream takes holds .* in the 16 GiB .* the leanest needs 17\.7 GiB"):
        meshwise.plan_serve("llama-2-70b", on="v5e:4x8", prompt=1024, output=128, tool="jetstream")


def test_axes_that_do_not_exist_cannot_be_forbidden():
    with pytest.raises(UnknownNameError, match="unknown serving mesh axis 'zero'"):
        ServingConstraints(forbid=("zero",))


def test_what_others_beat_is_left_out():
    columns = np.array([[1, 2, 3, 1, 2.0], [3, 2, 1, 3, 3.0]])
    assert sorted(undominated(*columns)) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(6))
def test_a_front_has_the_first_of_each_plan_that_no_other_beats(seed):
    random = np.random.default_rng(seed)
    small, large = random.integers(1, 3 + 40 * seed, size=(2, 700)).astype(float)
    front = [
        i
        for i in range(700)
        if not any(
            small[j] <= small[i] and large[j] >= large[i] and (small[j] < small[i] or large[j] > large[i] or j < i)
            for j in range(700)
        )
    ]
    assert sorted(kept._pareto(small, large)) == front


@pytest.mark.parametrize("seed", range(8))
def test_of_every_row_left_out_another_is_as_good_in_everything(seed):
    random = np.random.default_rng(seed)
    columns = random.integers(0, 2 + 3 * seed, size=(4, 150)).astype(float)  # with ties, and whole rows that are equal
    kept = undominated(*columns)
    rows = columns.T
    for i, row in enumerate(rows):
        others = [j for j in range(len(rows)) if (rows[j] <= row).all() and ((rows[j] < row).any() or j < i)]
        assert (i in kept) == (not others)


def test_chunks_are_tried_and_are_estimated_alike():
    given = problem(on="h100:2", prompt=1024, output=64)
    whole = plan_serving(given, constraints=ServingConstraints(max_batch=32, mode="aggregated"))
    chunked = plan_serving(
        given, constraints=ServingConstraints(max_batch=32, mode="aggregated", chunks=(256, 512, 4096))
    )
    assert all(e.setup.chunk is None for e in whole.plans)
    chunks = {e.setup.chunk for e in chunked.plans}
    assert chunks <= {None, 256, 512}
    assert len(chunks) > 1
    best = chunked.plans[0]
    assert best.output_tokens_per_s >= whole.plans[0].output_tokens_per_s
    again = estimate_serving(given, best.setup, count=False)
    assert again.tpot.expected == best.tpot.expected
    if best.setup.chunk is not None:
        assert [n.name for n in chunked.neighbours] == ["prompts prefilled whole"]
    tight = ServingConstraints(max_batch=32, mode="aggregated", chunks=(256,), max_ttft=whole.plans[0].ttft.expected)
    assert all(e.ttft.expected <= tight.max_ttft for e in plan_serving(given, constraints=tight).plans)
