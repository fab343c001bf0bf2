"""The search finds what trying everything finds: each layout of small clusters priced alone, by the scalar evaluator.

The enumeration here shares nothing with the search but the evaluator: meshes, cuts of the batch and placements are
listed from their definitions.
"""

import itertools
import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from small_problems import REMATS, all_factorings, all_placements, divisors, tiny, torus

from meshwise.costs.calibration import CALIBRATIONS, default_calibration
from meshwise.costs.evaluate import Candidates, Structure, TrainingProblem, evaluate
from meshwise.costs.network import Fabric, make_wire
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.planning import FRONT_SPAN, SearchSpace, search, training_limits
from meshwise.planning.structures import Choices
from meshwise.sharding.layout import MESH_AXES

TOP = 6
KINDS = ("tensor", "ulysses", "context", "expert", "stage")


class Priced(NamedTuple):
    score: float
    memory: float
    kind: tuple[int, ...]


def everything(problem, fabric, *, zeros=(0, 1, 2), remats=REMATS, max_tensor, max_stage, fixed=None):
    """Price every layout there is; only batches that divide exactly."""
    job, chips = problem.job, math.prod(fabric.sizes)
    for sizes in all_factorings(chips, len(MESH_AXES)):
        mesh = dict(zip(MESH_AXES, sizes, strict=True))
        if any(mesh[a] != n for a, n in (fixed or {}).items()):
            continue
        too_large = mesh["tensor"] > max_tensor or mesh["stage"] > max_stage or mesh["context"] > job.seq_len // 128
        share, rest = divmod(job.sequences, mesh["data"] * mesh["fsdp"] * mesh["expert"])
        if too_large or rest or job.seq_len % mesh["context"] or not experts_fit(problem.model, mesh["expert"]):
            continue
        if mesh["ulysses"] > 1 and not ulysses_fits(mesh, max_tensor, job.seq_len):
            continue
        choices = structures(problem.model, mesh, zeros, remats)
        for rows in all_placements(fabric.sizes, sizes):
            yield from price(problem, fabric, mesh, rows, int(share), choices)


def experts_fit(model, ways):
    return all(m.experts % ways == 0 for m in model.mixtures) and (ways == 1 or bool(model.mixtures))


def ulysses_fits(mesh, heads, seq_len):
    positions = mesh["ulysses"] * mesh["context"]
    return mesh["ulysses"] * mesh["tensor"] <= heads and positions <= seq_len // 128 and not seq_len % mesh["ulysses"]


def structures(model, mesh, zeros, remats):
    """Every choice on every mesh; those that mean nothing there are copies."""
    tensors = (True, False) if model.mixtures and mesh["tensor"] > 1 else (True,)
    shared = mesh["context"] * mesh["ulysses"] * mesh["expert"] > 1
    methods = ("gather", "ring") if mesh["context"] > 1 else ("gather",)
    choices = itertools.product(zeros, remats, (True, False) if shared else (True,), tensors, methods)
    return [Structure(z, True, r, f, e, c, exchanges=mesh["expert"] > 1) for z, r, f, e, c in choices]


def price(problem, fabric, mesh, rows, share, choices):  # noqa: PLR0917 -- what a layout is made of
    made = {}

    def wires(axes):
        if axes not in made:
            routing = problem.routing if "expert" in axes else None
            factors = dict(zip(MESH_AXES, rows, strict=True))
            made[axes] = make_wire(fabric, factors, tuple(sorted(axes)), routing=routing)
        return made[axes]

    for structure in choices:
        for micro in divisors(share):
            c = Candidates(**{a: float(n) for a, n in mesh.items()}, micro_batch=micro, num_microbatches=share // micro)
            costs = evaluate(problem, structure, c, wires)
            seconds = costs.step.expected / (problem.job.sequences * problem.job.seq_len)
            yield Priced(seconds, costs.memory["total"], tuple(mesh[a] for a in KINDS))


def front(points):
    kept = []
    for p in sorted(points):
        if not kept or p.memory < kept[-1].memory:
            kept.append(p)
    return kept


def best_of_each_kind(points):
    best = {}
    for p in points:
        if p.kind not in best or p.score < best[p.kind].score:
            best[p.kind] = p
    return sorted(best.values())


def problem_on(cluster, *, sequences=8, seq_len=1024, hbm=None, calibration=None, changes=None, **model):
    if hbm is not None:
        cluster = cluster.replace(chip=cluster.chip.replace(hbm_capacity=hbm, hbm_reported=None))
    job = TrainingJob(batch_tokens=str(sequences * seq_len), seq_len=str(seq_len), batch_slack="0%", **(changes or {}))
    found = CALIBRATIONS[calibration] if calibration else default_calibration(cluster.chip)
    return TrainingProblem(tiny(**model), job, cluster, found)


PROBLEMS = {
    "v5e 4x4": lambda: problem_on(parse_cluster("v5e:4x4"), width=1024, hidden=4096, layers=2, sequences=4),
    "v5p 2x2x4": lambda: problem_on(parse_cluster("v5p:2x2x4"), width=2048, hidden=8192, layers=2, sequences=4),
    "v5e 4x4, little memory": lambda: problem_on(
        parse_cluster("v5e:4x4"), width=1024, hidden=4096, vocab=32000, layers=4, hbm=0.19e9, seq_len=2048, sequences=4
    ),
    "8 H100": lambda: problem_on(parse_cluster("h100:8"), width=4096, hidden=16384, layers=4, vocab=32000),
    "8 H100, little memory": lambda: problem_on(
        parse_cluster("h100:8"), width=4096, hidden=16384, layers=4, vocab=32000, hbm=4e9, sequences=16
    ),
    "16 H100": lambda: problem_on(parse_cluster("h100:16"), width=2048, hidden=8192, layers=4, sequences=4),
    "16 H100, switches add": lambda: problem_on(parse_cluster("h100:16+sharp"), width=2048, hidden=8192, layers=2),
    "8 H100, fp8 and Muon": lambda: problem_on(
        parse_cluster("h100:8"),
        width=4096,
        hidden=16384,
        layers=4,
        vocab=32000,
        changes={"precision": "fp8-block", "optimizer": "muon"},
    ),
    "8 H100, QLoRA, little memory": lambda: problem_on(
        parse_cluster("h100:8"),
        width=4096,
        hidden=16384,
        layers=4,
        vocab=32000,
        hbm=1.5e9,
        sequences=16,
        changes={"fine_tune": "qlora"},
    ),
    "12 chips": lambda: problem_on(torus((3, 4)), sequences=12, layers=3, width=1536, hidden=4608),
    "20 chips": lambda: problem_on(
        torus((5, 4)), sequences=20, layers=5, width=1280, hidden=5120, heads=10, kv_heads=5
    ),
    "two slices": lambda: problem_on(parse_cluster("v5e:2x2*2"), width=1024, hidden=4096, layers=2),
}


@pytest.fixture(scope="module", params=sorted(PROBLEMS))
def searched(request):
    problem = PROBLEMS[request.param]()
    fabric = Fabric.of(problem.cluster, flat_rings=problem.calibration.flat_rings)
    limits = training_limits(problem)
    sizes = problem.model.sizes
    points = list(everything(problem, fabric, max_tensor=sizes["N"], max_stage=problem.model.num_layers))
    capacity = problem.cluster.chip.hbm_usable
    fitting = [p for p in points if p.memory <= capacity]
    return request.param, problem, points, fitting, search(problem, [fabric], SearchSpace(limits, front=True), top=TOP)


def test_the_best_is_the_best_of_all(searched):
    name, _, points, fitting, result = searched
    assert fitting
    assert result.best[0].score == pytest.approx(min(fitting).score, rel=1e-12, abs=0)
    assert result.least_memory == pytest.approx(min(p.memory for p in points), rel=1e-12, abs=0)
    if "little" in name:
        assert min(points) not in fitting, "memory was to rule out the fastest"


def test_the_ranking_is_that_of_all_kinds(searched):
    _, _, _, fitting, result = searched
    expected = best_of_each_kind(fitting)[:TOP]
    assert [f.score for f in result.best] == pytest.approx([p.score for p in expected], rel=1e-12, abs=0)
    for found in result.best:
        kind = tuple(found.layout.sizes[a] for a in KINDS)
        same = [p.score for p in expected if p.kind == kind]
        ties = sum(p.score <= found.score * (1 + 1e-12) for p in best_of_each_kind(fitting))
        assert ties > TOP or same == pytest.approx([found.score], rel=1e-12, abs=0)


def test_the_front_is_that_of_all_layouts(searched):
    _, _, _, fitting, result = searched
    expected = front(fitting)
    expected = [p for p in expected if p.score <= FRONT_SPAN * expected[0].score]
    assert len(expected) > 2
    found = [(f.seconds_per_token, f.memory_bytes) for f in result.front]
    assert found == sorted(found)
    for p in expected:
        assert any(t <= p.score * (1 + 1e-12) and m <= p.memory * (1 + 1e-12) for t, m in found), p
    for t, m in found:
        assert any(p.score <= t * (1 + 1e-12) and p.memory <= m * (1 + 1e-12) for p in expected)


def test_what_was_found_is_what_it_costs(searched):
    _, problem, _, _, result = searched
    for found in (*result.best, *result.front):
        layout = found.layout
        rows = [extents for _, extents in layout.wires]
        share = layout.micro_batch * layout.num_microbatches
        points = price(problem, found.fabric, layout.sizes, rows, share, [Structure.of(layout)])
        same = [p for p in points if p.score == pytest.approx(found.seconds_per_token, rel=1e-12, abs=0)]
        assert any(p.memory == pytest.approx(found.memory_bytes, rel=1e-12, abs=0) for p in same)


@pytest.mark.parametrize("objective", ["time", "cost"])
def test_over_several_fabrics_the_objective_decides(objective):
    problem = problem_on(parse_cluster("h100:16"), width=2048, hidden=8192, layers=2, sequences=4)
    whole = Fabric.of(problem.cluster)
    half = replace(whole, dimensions=(whole.dimensions[0], replace(whole.dimensions[1], size=1)))
    limits = training_limits(problem)
    scores = []
    for fabric in (whole, half):
        chips = math.prod(fabric.sizes)
        points = everything(problem, fabric, max_tensor=8, max_stage=2, zeros=(1, 2))
        scores += [p.score * (chips if objective == "cost" else 1) for p in points]
    result = search(problem, [whole, half], SearchSpace(limits), objective=objective, top=1)
    assert result.best[0].score == pytest.approx(min(scores), rel=1e-12, abs=0)


def test_what_is_fixed_is_kept():
    problem = problem_on(parse_cluster("v5e:4x4"), width=1024, hidden=4096, layers=2)
    fabric = Fabric.of(problem.cluster)
    for fixed in ({"tensor": 2}, {"context": 2, "fsdp": 2}, {"data": 4}):
        points = everything(problem, fabric, max_tensor=8, max_stage=2, fixed=fixed)
        result = search(problem, [fabric], SearchSpace(training_limits(problem, fixed)), top=1)
        assert result.best[0].score == pytest.approx(min(points).score, rel=1e-12, abs=0)
        assert all(result.best[0].layout.sizes[a] == n for a, n in fixed.items())


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
    """Every row of every structure of two problems, terms and memory classes, bit by bit but for the last digits."""
    for problem in (PROBLEMS["20 chips"](), PROBLEMS["16 H100"]()):
        fabric = Fabric.of(problem.cluster)
        rows = []
        for sizes in all_factorings(math.prod(fabric.sizes), len(MESH_AXES)):
            rows += [(sizes, way) for way in itertools.islice(all_placements(fabric.sizes, sizes), 2)]
        rows = rows[:: max(1, len(rows) // 60)]
        micro = np.arange(len(rows)) % 3 + 1.0
        number = np.arange(len(rows)) % 4 + 1.0
        mesh = np.array([sizes for sizes, _ in rows], float)
        factors = np.array([way for _, way in rows], float)
        columns = {a: mesh[:, i] for i, a in enumerate(MESH_AXES)}
        by_axis = {a: [factors[:, i, d] for d in range(factors.shape[2])] for i, a in enumerate(MESH_AXES)}
        for structure in (Structure(0, False, "none"), Structure(1, True, "full"), Structure(2, True, "attention")):
            candidates = Candidates(**columns, micro_batch=micro, num_microbatches=number)
            many = evaluate(problem, structure, candidates, wires_of(fabric, by_axis))
            for i, (sizes, way) in enumerate(rows):
                alone = {a: [float(f) for f in extents] for a, extents in zip(MESH_AXES, way, strict=True)}
                cut = {"micro_batch": float(micro[i]), "num_microbatches": float(number[i])}
                one = evaluate(problem, structure, Candidates(**_ordered(sizes), **cut), wires_of(fabric, alone))
                _same(many, one, i, len(rows))


def wires_of(fabric, factors):
    return lambda axes: make_wire(fabric, factors, tuple(sorted(axes)))


def _ordered(sizes):
    mesh = dict(zip(MESH_AXES, sizes, strict=True))
    return {a: float(n) for a, n in mesh.items()}


def _same(many, one, i, rows):
    pairs = [(many.memory, one.memory)]
    pairs += [(getattr(many.step, n), getattr(one.step, n)) for n in ("terms", "hidden", "resources")]
    for those, these in pairs:
        assert set(those) == set(these)
        for name, value in these.items():
            assert np.broadcast_to(those[name], rows)[i] == pytest.approx(value, rel=1e-12, abs=1e-18), name
    for name in ("lower", "expected", "upper", "flops"):
        assert np.broadcast_to(getattr(many.step, name), rows)[i] == pytest.approx(
            getattr(one.step, name), rel=1e-12, abs=0
        )
