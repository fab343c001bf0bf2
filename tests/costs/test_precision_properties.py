"""Invariants of every precision, optimizer and kind of fine-tuning, on layouts drawn at random."""

import math
from dataclasses import replace

import numpy as np
import pytest

from meshwise.core.errors import MeshwiseError
from meshwise.costs.compute import check_precision
from meshwise.costs.estimate import estimate_training, evaluate_layout, layout_candidate, layout_wires
from meshwise.costs.evaluate import evaluate
from meshwise.costs.explain import work_out
from meshwise.costs.memory import MEMORY_CLASSES
from meshwise.jobs import OPTIMIZERS, PRECISIONS
from meshwise.report.bounds import upper_parts
from tests.costs.corpus import assume, between, every_case, one_of

TUNINGS = ("full", "lora:rank=8", "qlora:rank=8,storage=int4", "lora:rank=4,targets=q+down")


def can(chip, name):
    try:
        check_precision(chip, PRECISIONS[name])
    except MeshwiseError:
        return False
    return PRECISIONS[name].compute in chip.flops_per_s


def changed(case, **changes):
    job = case.problem.job
    return replace(case.problem, job=type(job)(**{**job.model_dump(), **changes}))


def trained(case, choose):
    """With any precision that the chip has, any optimizer, any fine-tuning."""
    chip = case.problem.cluster.chip
    precision = choose.choice([n for n in sorted(PRECISIONS) if can(chip, n)])
    tuning = "full" if PRECISIONS[precision].recipe else choose.choice(TUNINGS)
    optimizer = choose.choice(sorted(OPTIMIZERS))
    return case._replace(problem=changed(case, precision=precision, optimizer=optimizer, fine_tune=tuning))


@every_case(of=trained, count=50)
def test_bounds_stand_on_both_sides_and_everything_adds_up(case):
    problem, fabric, layout = case
    e = estimate_training(problem, fabric, layout)
    t = e.step_time
    assert 0 < t.lower <= t.expected * (1 + 1e-12)
    assert t.expected <= t.upper * (1 + 1e-12)
    assert all(v >= 0 for v in (*e.terms.values(), *e.hidden.values(), *e.memory.values()))
    assert math.fsum(e.terms.values()) == pytest.approx(t.expected, rel=1e-12)
    assert sum(e.memory[name] for name in MEMORY_CLASSES) == e.memory["total"]
    assert t.lower >= e.model_flops / layout.num_chips / e.peak_flops_per_s * (1 - 1e-9)


@every_case(of=trained, count=25)
def test_workings_add_up_to_the_bounds(case):
    problem, fabric, layout = case
    e = estimate_training(problem, fabric, layout)
    w = work_out(problem, fabric, layout)
    assert math.fsum(upper_parts(w).values()) == pytest.approx(e.step_time.upper, rel=1e-9)
    for one in w.memory:
        assert one.total == pytest.approx(e.memory[one.name], rel=1e-9)
    for block in w.blocks:
        for name, sums in block.passes.items():
            own = [o for o in block.operations if o.when == name]
            assert math.fsum(o.seconds for o in own) == pytest.approx(float(sums.seconds), rel=1e-9)
            assert math.fsum(o.flops for o in own) == pytest.approx(float(sums.flops), rel=1e-9)


@every_case(one_of("flops_per_s", "hbm_bandwidth"), between(1.0, 20.0), of=trained, count=25)
def test_a_faster_chip_never_slows_a_step(case, what, factor):
    problem, fabric, layout = case
    chip = problem.cluster.chip
    old = getattr(chip, what)
    new = {k: v * factor for k, v in old.items()} if what == "flops_per_s" else old * factor
    faster = replace(problem, cluster=problem.cluster.replace(chip=replace(chip, **{what: new})))
    before, after = (evaluate_layout(p, fabric, layout).step for p in (problem, faster))
    for name in ("lower", "expected", "upper"):
        assert getattr(after, name) <= getattr(before, name) * (1 + 1e-9), name


@every_case(between(0.0, 1.0))
def test_a_recipe_never_gains_more_than_its_bits(case, which):
    chip = case.problem.cluster.chip
    names = sorted(name for name, p in PRECISIONS.items() if p.recipe and can(chip, name))
    assume(names)
    name = names[min(int(which * len(names)), len(names) - 1)]
    wide, narrow = (estimate_training(changed(case, precision=p), *case[1:]).step_time for p in ("mixed", name))
    peaks = chip.peak(PRECISIONS[name].compute) / chip.peak(PRECISIONS["mixed"].compute)
    most = max(peaks, 2 / (PRECISIONS[name].compute.bytes))
    for bound in ("lower", "expected", "upper"):
        assert getattr(narrow, bound) * most >= getattr(wide, bound) * (1 - 1e-9), bound


@every_case(one_of(*TUNINGS[1:]), one_of("bf16", "mixed"), count=50)
def test_adapters_hold_less_state_than_training_everything(case, tuning, precision):
    full, adapters = (
        estimate_training(changed(case, precision=precision, fine_tune=t), *case[1:]).memory for t in ("full", tuning)
    )
    if case.layout.num_chips == case.layout.tensor * case.layout.stage:  # storage axes do not split every adapter
        for name in ("gradients", "master_copies", "optimizer"):
            assert adapters[name] <= full[name]
    assert adapters["parameters"] > 0


@every_case(of=trained, count=25)
def test_arrays_of_candidates_cost_what_each_of_them_costs(case):
    problem, fabric, layout = case
    structure, one = layout_candidate(problem.model, layout)
    wires = layout_wires(problem, fabric, layout)
    alone = evaluate(problem, structure, one, wires)
    arrays = replace(one, micro_batch=np.array([one.micro_batch, 2 * one.micro_batch]))
    both = evaluate(problem, structure, arrays, wires)
    for name, value in alone.step.terms.items():
        assert np.broadcast_to(both.step.terms[name], 2)[0] == pytest.approx(float(value), rel=1e-12), name
    for name, value in alone.memory.items():
        assert np.broadcast_to(both.memory[name], 2)[0] == pytest.approx(float(value), rel=1e-12), name
