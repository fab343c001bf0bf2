"""The search finds what trying everything finds, over every choice of a layout at once, on small clusters.

`everything` lists the layouts from their definitions and shares with the search only the evaluator.
"""

import importlib
import math
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.costs.calibration import default_calibration
from meshwise.costs.estimate import evaluate_layout
from meshwise.costs.evaluate import evaluate
from meshwise.costs.fabric import Fabric
from meshwise.costs.fitted import fitted_calibration
from meshwise.costs.layout_choices import Candidates, LayoutChoices
from meshwise.costs.network import PlacedWires
from meshwise.costs.problem import TrainingProblem
from meshwise.exports import tools_for
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.search import FRONT_SPAN, SearchSpace, network_search, search, training_limits
from meshwise.search.candidates import Choices
from meshwise.search.until import OutOfTime
from meshwise.sharding.layout import MESH_AXES
from tests.costs.small_problems import (
    ALL_CALIBRATIONS,
    LEARNED,
    MIXTURE,
    NODE_LIMITED,
    all_factorings,
    all_placements,
    nodes,
    tiny,
    torus,
)
from tests.search.everything import KIND, all_places, everything

search_module = importlib.import_module("meshwise.search.search")  # the package has a function of that name

TOP = 6
EXACT = {"rel": 1e-12, "abs": 0}


@pytest.fixture(autouse=True)
def bounded(monkeypatch):
    """Bounds are tested on few layouts, too, which would else all be priced."""
    monkeypatch.setattr(network_search, "_FEW", 0)


def problem_on(cluster, *, sequences=8, seq_len=1024, hbm=None, model=None, changes=None, **sizes):
    if hbm is not None:
        cluster = cluster.replace(chip=cluster.chip.replace(hbm_capacity=hbm, hbm_reported=None))
    job = TrainingJob(
        batch_tokens=str(sequences * seq_len),
        seq_len=str(seq_len),
        batch_slack="0%",
        **{"precision": "book", **(changes or {})},
    )
    return TrainingProblem(model or tiny(**sizes), job, cluster, default_calibration(cluster.chip))


def large(chips="h100:8", **changes):
    return problem_on(parse_cluster(chips), **{"width": 4096, "hidden": 16384, "vocab": 32000, "layers": 4} | changes)


#: Name -> problem, and what varies besides sizes, a little on each; the slow test has everything vary on all of them.
PROBLEMS = {
    "8 H100": (
        large,
        {"remat": ("none", "full"), "zero": (1, 2), "context_method": ("ring",), "schedule": ("1f1b", "interleaved")},
    ),
    "8 H100, little memory": (
        lambda: large(hbm=2e9, sequences=16),
        {"remat": ("attention", "full"), "zero": (0, 1), "fully_sharded": (True,), "schedule": ("1f1b", "zb-h1")},
    ),
    "8 H100, next to no memory": (
        lambda: large(hbm=1.6e9, sequences=4),
        {
            "remat": ("none", "full"), "zero": (1,), "context_method": ("ring",), "schedule": ("1f1b", "zb-v"),
            "fully_sharded": (True,),
        },
    ),
    "8 H100, what fits is partly recomputed": (
        lambda: large(hbm=6.4e9, sequences=16, layers=8),
        {
            "remat": ("none", "full"), "zero": (1, 2), "context_method": ("gather",), "schedule": ("1f1b",),
            "offload": ((), ("optimizer",)), "fully_sharded": (True,),
        },
    ),
    "8 H100, mixture": (
        lambda: problem_on(parse_cluster("h100:8"), model=MIXTURE, sequences=8),
        {
            "remat": ("full",), "zero": (1,), "context_method": ("gather",), "schedule": ("1f1b", "dualpipe"),
            "expert_tensor_parallel": (True, False),
        },
    ),
    "16 H100, mixture with few nodes a token, little memory": (
        lambda: problem_on(parse_cluster("h100:16"), model=NODE_LIMITED, sequences=16, hbm=0.3e9),
        {"remat": ("full",), "zero": (1,), "context_method": ("gather",), "schedule": ("1f1b", "dualpipe-v")},
    ),
    "8 v5e, pipelines": (
        lambda: problem_on(torus((8,), wraps=False, chip="v5e"), layers=8, width=4096, hidden=8192, sequences=16),
        {"remat": ("none", "full"), "zero": (1, 2), "fully_sharded": (True,), "context_method": ("gather",)},
    ),
    "16 v5e": (
        lambda: problem_on(parse_cluster("v5e:4x4"), width=1024, hidden=4096, layers=4, sequences=4),
        {"remat": ("none", "full"), "zero": (1,), "context_method": ("ring",), "schedule": ("1f1b",)},
    ),
    "16 v5p": (
        lambda: problem_on(parse_cluster("v5p:2x2x4"), width=2048, hidden=8192, layers=2, sequences=4),
        {"remat": ("none", "attention"), "zero": (0, 1), "schedule": ("1f1b", "zb-h1")},
    ),
    "16 H100, switches add": (
        lambda: problem_on(parse_cluster("h100:16+sharp"), width=2048, hidden=8192, layers=2),
        {"remat": ("none", "matmuls"), "context_method": ("gather",), "schedule": ("1f1b",)},
    ),
    "8 H100, fp8 and Muon": (
        lambda: large(changes={"precision": "fp8-block", "optimizer": "muon"}),
        {"zero": (1,), "remat": ("none", "full"), "schedule": ("1f1b",)},
    ),
    "8 H100, QLoRA, little memory": (
        lambda: large(hbm=1.2e9, sequences=16, changes={"fine_tune": "qlora"}),
        {"zero": (0, 2), "context_method": ("gather",), "schedule": ("1f1b",)},
    ),
    "8 H100, LoRA": (
        lambda: large(changes={"fine_tune": "lora:rank=16"}),
        {"zero": (1,), "context_method": ("gather",), "schedule": ("1f1b", "gpipe")},
    ),
    "8 H100, large vocabulary, little memory": (
        lambda: large(hbm=4.5e9, vocab=256000, width=1024, hidden=4096, sequences=64),
        {"remat": ("none", "full"), "zero": (1,), "context_method": ("gather",), "schedule": ("1f1b", "zb-v")},
    ),
    "12 chips": (
        lambda: problem_on(torus((3, 4)), sequences=12, layers=3, width=1536, hidden=4608),
        {"remat": ("none", "full"), "zero": (0, 1), "schedule": ("1f1b", "interleaved")},
    ),
    "8 H100, learned positions": (
        lambda: problem_on(parse_cluster("h100:8"), model=LEARNED, sequences=8),
        {"remat": ("none", "full"), "zero": (0, 2), "context_method": ("gather",), "schedule": ("1f1b",)},
    ),
    "two slices": (
        lambda: problem_on(parse_cluster("v5e:2x2*2"), width=1024, hidden=4096, layers=2),
        {"remat": ("none", "full"), "zero": (0, 2), "context_method": ("gather",), "schedule": ("1f1b", "zb-v")},
    ),
}  # fmt: skip

#: What the best plan of a problem is to use, lest memory or network rule nothing out.
WINS = {
    "8 H100, little memory": lambda layout: layout.offload,
    "8 H100, next to no memory": lambda layout: "optimizer" in layout.offload,
    "8 H100, what fits is partly recomputed": lambda layout: layout.remat_layers,
    "8 H100, large vocabulary, little memory": lambda layout: layout.loss == "chunked",
    "8 H100, mixture": lambda layout: layout.expert > 1,
    "8 v5e, pipelines": lambda layout: layout.stage > 1,
}


class Searched(NamedTuple):
    problem: TrainingProblem
    fabric: Fabric
    space: SearchSpace
    result: object
    points: object


def searched(problem, *, fixed=None, memory_share=1.0, top=TOP, tools=(), **varied):
    """Search one network, and price everything on it."""
    choices = Choices(**varied)
    fabric = Fabric.of(problem.cluster, flat_rings=problem.calibration.flat_rings)
    space = SearchSpace(training_limits(problem, fixed), choices, memory_share=memory_share, front=True, tools=tools)
    result = search(problem, [fabric], space, top=top)
    capacity = memory_share * problem.cluster.chip.hbm_usable
    return Searched(
        problem,
        fabric,
        space,
        result,
        everything(problem, fabric, choices, capacity=capacity, fixed=fixed, tools=tools),
    )


def check(found):
    """Hold the ranking, the front and the least memory to those of everything; and what was found to what it costs."""
    fitting = found.points.fitting
    if not len(fitting.seconds):
        assert found.result.best == found.result.front == ()
        assert found.result.least_memory == pytest.approx(found.points.memory.min(), **EXACT)
        return
    check_ranking(found.result, fitting.best_of_each_kind())
    check_front(found.result, fitting.front(FRONT_SPAN))
    for f in (*found.result.best, *found.result.front):
        costs = evaluate_layout(found.problem, f.fabric, f.layout)
        seconds = costs.step.expected / (f.layout.sequences * found.problem.job.seq_len)
        assert f.seconds_per_token == pytest.approx(seconds, **EXACT)
        assert f.memory_bytes == pytest.approx(costs.memory["total"], **EXACT)


def check_ranking(result, expected):
    assert [f.score for f in result.best] == pytest.approx([p.seconds for p in expected[:TOP]], **EXACT)
    for f in result.best:
        kind = tuple(f.layout.sizes[a] for a in KIND)
        (same,) = (p.seconds for p in expected if p.kind == kind)
        assert same == pytest.approx(f.score, **EXACT)


def check_front(result, expected):
    found = [(f.seconds_per_token, f.memory_bytes) for f in result.front]
    assert found == sorted(found)
    slack = 1 + 1e-12
    for p in expected:
        assert any(t <= p.seconds * slack and m <= p.memory * slack for t, m in found), p
    for t, m in found:
        assert any(p.seconds <= t * slack and p.memory <= m * slack for p in expected)


#: Slow because together they take long, and prove the same of other models, jobs and networks.
SLOW = ("8 H100, LoRA", "8 H100, QLoRA, little memory", "8 H100, fp8 and Muon", "8 H100, learned positions",
        "12 chips", "16 v5e", "16 v5p")  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in sorted(PROBLEMS)]
)
def test_the_search_finds_what_trying_everything_finds(name):
    make, varied = PROBLEMS[name]
    found = searched(make(), **varied)
    check(found)
    best = found.result.best[0].layout
    assert WINS.get(name, lambda _: True)(best), best
    assert len(found.result.front) > 2
    if "little" in name:
        assert found.points.seconds.min() < found.points.fitting.seconds.min(), "memory was to rule out the fastest"
    again = search(found.problem, [found.fabric], replace(found.space, front=False), top=TOP)
    assert again.best == found.result.best
    assert again.front == ()


#: What varies where tools restrict it: values that each of them has, and others.
TOOLED = {
    "remat": ("none", "full", "matmuls"), "zero": (0, 1, 2), "context_method": ("ring",),
    "schedule": ("1f1b", "interleaved", "zb-v", "gpipe"),
}  # fmt: skip


@pytest.mark.parametrize("names", [("megatron",), pytest.param(("torchtitan", "maxtext"), marks=pytest.mark.slow)])
def test_with_tools_it_finds_what_trying_all_that_they_take_finds(names):
    problem = large(chips="h100:4", changes={"precision": "mixed"}, layers=8, heads=8)
    tools = tools_for(problem, names)
    assert tuple(t.name for t in tools) == names
    found = searched(problem, tools=tools, **TOOLED)
    check(found)
    assert all(any(t.runs(f.layout) for t in tools) for f in (*found.result.best, *found.result.front))
    assert not np.isfinite(found.points.memory).all(), "the tools were to rule something out"


# Slow: all choices vary at once on every problem, a few million layouts each; proves the search over the whole space.
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PROBLEMS))
def test_the_search_over_all_choices_finds_what_trying_everything_finds(name):
    check(searched(PROBLEMS[name][0]()))


CLUSTERS = {
    "4 H100": lambda: parse_cluster("h100:4"),
    "8 H100": lambda: parse_cluster("h100:8"),
    "2 nodes of 2 H100": lambda: nodes(2, 2),
    "2 nodes of 4 H100": lambda: nodes(2, 4),
    "2 x 3 torus": lambda: torus((2, 3)),
    "line of 4": lambda: torus((4,), wraps=False, chip="v5e"),
    "two slices": lambda: parse_cluster("v5e:2x2*2"),
    "2 x 4": lambda: torus((2, 4), chip="v5e"),
}


def some(*values, least=1):
    """A selection, in order."""
    return st.sets(st.sampled_from(values), min_size=least).map(lambda s: tuple(v for v in values if v in s))


class SmallSearch(NamedTuple):
    """A problem, what varies, and how much memory there is, from less than any layout needs (0) to enough (1)."""

    problem: TrainingProblem
    varied: dict
    tightness: float

    def __repr__(self):
        p = self.problem
        sizes = {k: v for k, v in p.model.sizes.items() if k in "DFNKVE"} | {"L": p.model.num_layers}
        job = f"{p.job.sequences:.0f} x {p.job.seq_len:.0f} {p.job.precision} {p.calibration.name}"
        return f"<{p.model.name} {sizes} {job} {p.cluster.name} {p.cluster.network} {self.varied} {self.tightness}>"


@st.composite
def small_searches(draw):
    cluster = CLUSTERS[draw(st.sampled_from(sorted(CLUSTERS)))]()
    width = draw(st.sampled_from((256, 1024, 4096)))
    dense = tiny(layers=draw(st.sampled_from((2, 3, 4))), width=width, hidden=4 * width)
    job = TrainingJob(
        batch_tokens=str(draw(st.sampled_from((4, 8, 12))) * 1024),
        seq_len="1024",
        batch_slack="0%",
        precision=draw(st.sampled_from(("bf16", "mixed"))),
    )
    calibration = ALL_CALIBRATIONS[draw(st.sampled_from(sorted(ALL_CALIBRATIONS)))]
    model = draw(st.sampled_from((dense, MIXTURE, NODE_LIMITED, LEARNED)))
    if ours := draw(st.booleans()):  # our own programs, which XLA compiles
        calibration = fitted_calibration(cluster.chip, "xla")
    problem = TrainingProblem(model, job, cluster, calibration, in_step=ours)
    varied = {
        "remat": draw(some("none", "matmuls", "attention", "full")),
        "zero": draw(some(0, 1, 2)),
        "fully_sharded": draw(st.sampled_from(((True,), (False,), (True, False)))),
        "expert_tensor_parallel": draw(st.sampled_from(((True,), (False,), (True, False)))),
        "context_method": draw(st.sampled_from((("gather",), ("ring",), ("gather", "ring")))),
        "schedule": ("1f1b", *draw(some("interleaved", "zb-h1", "zb-v", "dualpipe", "dualpipe-v", least=0))),
    }
    return SmallSearch(problem, varied, draw(st.floats(0.0, 1.0)))


def hold_to_everything(case):
    problem, varied, tightness = case
    fabric = Fabric.of(problem.cluster, flat_rings=problem.calibration.flat_rings)
    sizes = np.sort(everything(problem, fabric, Choices(**varied), capacity=math.inf).memory)
    limit = sizes[int(tightness**2 * (len(sizes) - 1))] * (0.9 if tightness < 0.2 else 1.0)  # at times below all
    check(searched(problem, memory_share=limit / problem.cluster.chip.hbm_usable, **varied))


# Slow: many problems drawn at random, each of whose layouts are all priced; the default run has those above.
@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(small_searches())
def test_on_any_small_problem_the_search_is_exact(case):
    hold_to_everything(case)


def test_where_nothing_fits_the_least_memory_says_what_would():
    found = searched(large(hbm=0.4e9), remat=("none", "full"), context_method=("ring",), zero=(1,), schedule=("1f1b",))
    assert not len(found.points.fitting.seconds)
    check(found)


def test_the_least_memory_is_found_a_few_layouts_at_a_time_and_in_no_more_time_than_there_is(monkeypatch):
    p = large("h100:4")
    space = SearchSpace(training_limits(p), memory_share=1e-4)
    whole = search(p, [p.network], space)
    assert not whole.best
    bounds = importlib.import_module("meshwise.search.bounds")
    monkeypatch.setattr(bounds, "_KEYS", 7)
    monkeypatch.setattr(bounds, "_ROWS", 40)
    assert search(p, [p.network], space).least_memory == whole.least_memory
    by_memory, asked = bounds.Bounds.by_memory, []

    def late(*given):
        for groups in by_memory(*given):
            asked.append(groups)
            if len(asked) == 3:
                monkeypatch.setattr(search_module.time, "monotonic", lambda: math.inf)
            yield groups

    monkeypatch.setattr(bounds.Bounds, "by_memory", late)
    with pytest.raises(OutOfTime):
        search(p, [p.network], space, until=1e18)
    assert len(asked) == 3


@pytest.mark.parametrize("objective", ["time", "cost"])
def test_over_several_fabrics_the_objective_decides(objective):
    problem = problem_on(parse_cluster("h100:16"), width=2048, hidden=8192, layers=2, sequences=4)
    whole = Fabric.of(problem.cluster)
    half = replace(whole, dimensions=(whole.dimensions[0], replace(whole.dimensions[1], size=1)))
    choices = Choices(remat=("none", "full"), zero=(1, 2), schedule=("1f1b",), context_method=("gather",))
    expected = []
    for fabric in (whole, half):
        weight = math.prod(fabric.sizes) if objective == "cost" else 1
        points = everything(problem, fabric, choices).fitting.best_of_each_kind()
        expected += [p.seconds * weight for p in points]
    result = search(problem, [whole, half], SearchSpace(training_limits(problem), choices), objective=objective, top=4)
    assert [f.score for f in result.best] == pytest.approx(sorted(expected)[:4], **EXACT)


@pytest.mark.parametrize("fixed", [{"tensor": 2}, {"context": 2, "fsdp": 2}, {"data": 4}, {"ulysses": 2, "stage": 2}])
def test_what_is_fixed_is_kept(fixed):
    problem = problem_on(parse_cluster("v5e:2x4"), width=1024, hidden=4096, layers=2)
    found = searched(problem, fixed=fixed, remat=("none", "full"), zero=(1,), schedule=("1f1b", "zb-h1"))
    check(found)
    assert all(f.layout.sizes[a] == n for f in found.result.best for a, n in fixed.items())


@pytest.mark.parametrize("fixed", [{"tensor": 2, "fsdp": 4}, {"stage": 4, "data": 2}])
def test_few_layouts_are_all_priced_with_the_same_end(monkeypatch, fixed):
    for on, share in (("h100:8", 1.0), ("v5e:2x4", 1.0), ("h100:8", 0.001)):
        p = large(on)
        space = SearchSpace(training_limits(p, fixed), memory_share=share)
        bounded_one = search(p, [p.network], space, top=3)
        monkeypatch.setattr(network_search, "_FEW", 10**6)
        priced = search(p, [p.network], space, top=3)
        monkeypatch.setattr(network_search, "_FEW", 0)
        assert priced.best == bounded_one.best
        assert priced.strategies == bounded_one.strategies
        assert priced.least_memory == pytest.approx(bounded_one.least_memory) or priced.best
        assert bool(priced.best) == (share == 1.0)


def test_layouts_of_few_axes_first_change_nothing_but_the_way(monkeypatch):
    p = large("h100:8")
    space = SearchSpace(training_limits(p), choices=Choices().usual)
    plain = search(p, [p.network], space, top=3)
    monkeypatch.setattr(search_module, "_MANY_CHIPS", 2)
    monkeypatch.setattr(search_module, "_SIMPLE", ((1, True), (2, False)))
    simple_first = search(p, [p.network], space, top=3)
    assert simple_first.best == plain.best
    assert (simple_first.strategies, simple_first.complete) == (plain.strategies, True)
    found = 0
    for lines in (1, 2, 4, 8, 16):  # interrupted on the way, it claims no more than is so
        told = iter(range(lines))

        def progress(_, told=told):
            if next(told, None) is None:
                raise KeyboardInterrupt

        with suppress(KeyboardInterrupt):  # before there was anything
            partly = search(p, [p.network], space, top=3, progress=progress)
            assert (1 - partly.gap) * partly.best[0].score <= plain.best[0].score * (1 + 1e-12)
            found += 1
    assert found >= 3


def test_given_cuts_and_policies_are_kept():
    problem = problem_on(parse_cluster("v5e:4x4"), width=1024, hidden=4096, layers=2, sequences=16)
    fabric = Fabric.of(problem.cluster)
    space = SearchSpace(training_limits(problem), Choices(remat=("full",), zero=(2,)), micro_batch=2)
    result = search(problem, [fabric], space, top=4)
    assert result.best
    for found in result.best:
        assert found.layout.remat == "full"
        assert found.layout.micro_batch == 2
        assert found.layout.zero == (2 if found.layout.data > 1 else 0)
        assert found.layout.sequences == 16


def test_the_vectorised_evaluator_equals_the_scalar_one():
    """Rows of many structures and schedules of two problems, terms and memory classes, but for the last digits."""
    for name, structures in VECTORISED.items():
        problem = PROBLEMS[name][0]()
        fabric = Fabric.of(problem.cluster, flat_rings=problem.calibration.flat_rings)
        places = all_places(problem, fabric)
        for structure, schedule in structures:
            rows = np.flatnonzero(((places.expert > 1) == structure.exchanges) & can_run(schedule, places))
            assert len(rows) > 10
            some_places = places.take(rows[:: max(1, len(rows) // 20)])
            many = evaluate(problem, structure, some_places.candidates(**schedule), some_places.wires(problem, fabric))
            for i in range(len(some_places)):
                same_as_scalar(problem, fabric, structure, schedule, some_places, many, i)


def can_run(schedule, places):
    if schedule["schedule"] == "1f1b":
        return np.full(len(places), True)
    return (places.stage == 2) & (places.num_microbatches >= 4) & (places.num_microbatches % 2 == 0)


VECTORISED = {
    "12 chips": [
        (LayoutChoices(0, False, "none"), {"schedule": "1f1b"}),
        (LayoutChoices(1, True, "full", fully_sharded=False, context_method="ring"), {"schedule": "1f1b"}),
        (LayoutChoices(2, True, "attention"), {"schedule": "zb-h1"}),
    ],
    "16 H100, mixture with few nodes a token, little memory": [
        (LayoutChoices(1, True, "none", exchanges=True), {"schedule": "dualpipe"}),
        (
            LayoutChoices(1, True, "full", exchanges=True, expert_tensor_parallel=False, partial_remat=True),
            {"schedule": "1f1b", "remat_share": 0.25},
        ),
        (LayoutChoices(2, True, "matmuls", offload=("optimizer", "activations")), {"schedule": "1f1b"}),
    ],
}


def same_as_scalar(problem, fabric, structure, schedule, places, many, i):  # noqa: PLR0917 -- one row, and what it is of
    sizes = {a: float(getattr(places, a)[i]) for a in MESH_AXES}
    cut = {n: float(getattr(places, n)[i]) for n in ("micro_batch", "num_microbatches")}
    extents = {a: [float(e) for e in places.factors[i, k]] for k, a in enumerate(MESH_AXES)}

    wires = PlacedWires(fabric, extents, problem.routing)
    one = evaluate(problem, structure, Candidates(**sizes, **cut, **schedule), wires)
    pairs = [(many.memory, one.memory), (many.host_memory, one.host_memory)]
    pairs += [(getattr(many.step, n), getattr(one.step, n)) for n in ("terms", "hidden", "resources")]
    for those, these in pairs:
        assert set(those) == set(these)
        for name, value in these.items():
            assert np.broadcast_to(those[name], len(places))[i] == pytest.approx(value, rel=1e-12, abs=1e-18), name
    for name in ("lower", "expected", "upper", "flops"):
        assert np.broadcast_to(getattr(many.step, name), len(places))[i] == pytest.approx(
            getattr(one.step, name), **EXACT
        )


def test_everything_is_everything():
    """The list of meshes and placements is complete: as many as counting each mesh's placements finds."""
    problem = problem_on(torus((2, 4)), sequences=8, layers=8, heads=8, kv_heads=8)
    places = all_places(problem, Fabric.of(problem.cluster))
    found = {(tuple(m), tuple(map(tuple, f))) for m, f in zip(places.mesh, places.factors, strict=True)}
    expected = set()
    for sizes in all_factorings(8, len(MESH_AXES)):
        n = dict(zip(MESH_AXES, sizes, strict=True))
        if n["expert"] == 1 and n["tensor"] * n["ulysses"] <= 8 and n["context"] * n["ulysses"] <= 8:
            expected |= {(sizes, way) for way in all_placements((2, 4), sizes)}
    assert found == expected
