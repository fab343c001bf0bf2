"""Forecasts: a source's own rows, software and constants have no part in what is forecast of it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from meshwise.costs.fitted import SOFTWARE
from meshwise.costs.spread import EIGHTY_PERCENT, SPREADS, WIDTH, relative_spread
from meshwise.scoring import TrainingRun, predict_training, shipped_rows
from meshwise.scoring.held_out import FREEDOMS, HeldOut, held_by_next, mean_of, rests_on
from meshwise.scoring.software import RECIPES

RUNS = {run.id: run for run in shipped_rows(TrainingRun)}
NAMES = ("T-korthikanti-0003", "T-llmfoundry-0157", "T-vtrain-0056", "T-bloomprequel-0232")


@pytest.fixture(scope="module")
def rows():
    return [predict_training(RUNS[name]) for name in NAMES]


@pytest.fixture(scope="module")
def held_out(rows):
    return HeldOut(rows)


def test_software_that_one_source_knows_is_not_known_without_it(rows, held_out):
    assert [p.calibration.name for p in rows] == [
        "fitted+megatron-2021",
        "fitted+eager-2023",
        "fitted+megatron-2021",
        "fitted+megatron-deepspeed-blocking",
    ]
    blind = [p.calibration.name for p in held_out.blind]
    assert blind == ["fitted+megatron-2021", "fitted+eager-2023", "fitted+megatron-2021", "fitted+megatron-deepspeed"]


def test_recipes_are_read_unless_they_are_withheld():
    """A step of NeMo 26.06 in MXFP8 is one graph by NVIDIA's recipes, whatever its rows show."""
    row = predict_training(RUNS["T-mbridge-0079"])
    found = [HeldOut([row], withheld=withheld).blind[0].calibration.name for withheld in ((), (RECIPES,))]
    assert found == ["fitted+megatron-graphs", "fitted"]


def test_every_software_names_sources_that_ship():
    sources = {run.source for run in RUNS.values()}
    for software in SOFTWARE.values():
        assert set(software.rests_on) <= sources, software.name


def test_a_source_has_no_part_in_its_own_forecast(rows, held_out):
    """Of vTrain, three times as slow, the forecast stays but for where slopes are taken; others follow."""
    slow = [replace(p, measured=3 * p.measured) if p.run.source == "vtrain" else p for p in rows]
    before, after = held_out.forecasts(), HeldOut(slow).forecasts()
    for a, b in zip(before.rows, after.rows, strict=True):
        if a.run.source == "vtrain":
            assert b.expected == pytest.approx(a.expected, rel=0.02)
            assert b.likely.high == pytest.approx(a.likely.high, rel=0.02)
        elif a.run.source == "korthikanti" and before.freedoms["korthikanti"]:
            assert b.expected > a.expected * 1.01
    own = NAMES.index("T-vtrain-0056")
    assert after.one_mfu[own].expected == pytest.approx(before.one_mfu[own].expected)


def test_what_only_a_source_has_measured_is_new_in_its_intervals():
    """The family of TPUs, A100 of 40 GB, FP8 on Hopper, 16 bits on Hopper; two sources have A100 of 80 GB in fp16."""
    new = {
        "T-maxtext-0015": ["family"],
        "T-llmfoundry-0277": ["chip"],
        "T-nemo2407-0001": ["format"],
        "T-jaxtoolbox-0013": ["format"],
        "T-vtrain-0056": [],
        "T-sc21-0001": [],
        "T-bloomprequel-0321": [],  # bf16, as the A100 of 40 GB
    }
    found = HeldOut([predict_training(RUNS[name]) for name in new])
    for p, stated in zip(found.blind, found.stated, strict=True):
        causes = {*p.scenario.causes, *new[p.run.id]}
        assert WIDTH * stated == pytest.approx(relative_spread(p.estimate.terms, causes)), p.run.id


def test_of_ten_sources_that_count_alike_86_percent_are_below():
    """(10 + 1/3) x 4/5 + 1/3 = 8.6 of ten; one of them has as many rows as all others together, and more."""
    ratios = [np.full(100, 0.1), *(np.full(1 + k % 3, float(k)) for k in range(1, 10))]
    assert held_by_next(ratios) == 8.0
    assert held_by_next([*ratios[:8], np.array([7.0, 7.5]), np.array([7.7, 8.0])]) == 7.5  # 8.6 of ten, not 8.5
    assert held_by_next([*ratios[:8], np.array([7.0, 7.5, 7.8]), np.array([8.0])]) == 7.5
    assert held_by_next(ratios[:3]) == 2.0


def test_widths_hold_more_than_four_of_five_where_other_sources_are_few(held_out):
    """Of three others all: four of five by four thirds."""
    found, ratios = held_out.forecasts(), []
    for i, other in enumerate(held_out.names):
        if other != "vtrain":
            fit = held_out.fit(("vtrain", other), found.freedoms["vtrain"])
            ratios.append(abs(held_out.errors(other, fit)[0]) / (EIGHTY_PERCENT * held_out.stated[i]))
    assert found.widths["vtrain"] == pytest.approx(max(ratios))
    likely = found.rows[NAMES.index("T-vtrain-0056")]
    spread = found.widths["vtrain"] * held_out.stated[NAMES.index("T-vtrain-0056")]
    assert likely.likely.high / likely.expected == pytest.approx(np.exp(EIGHTY_PERCENT * spread))


def test_without_freedom_constants_stay_where_single_operations_put_them(held_out):
    for c in held_out.fitted.constants:
        assert held_out.fit((), 0.0).values[c.name] == pytest.approx(c.clipped(c.prior), rel=1e-3)
    assert held_out.freedom("vtrain") in FREEDOMS


def test_the_constant_mfu_is_one_of_the_other_sources(held_out):
    found = held_out.forecasts()
    reached = [p.estimate.mfu * p.expected / p.measured for p in held_out.blind]
    for i, (p, own) in enumerate(zip(found.one_mfu, reached, strict=True)):
        taken = own * p.measured / p.expected
        others = [mfu for j, mfu in enumerate(reached) if j != i]
        errors = [mean_of(np.log(np.array(others) / m)) for m in (taken, taken * 1.02, taken / 1.02)]
        assert errors[0] <= min(errors[1:]) + 0.01


def test_a_constant_rests_on_the_sources_whose_steps_it_moves(held_out):
    found = rests_on(held_out.fitted)
    assert found["passes.eager"] == ("llmfoundry",)
    assert found["matmul.ampere"] == ("korthikanti", "llmfoundry", "vtrain", "bloomprequel")
    assert found["matmul.tpu"] == ()


def test_mixtures_that_wait_for_hosts_are_less_sure_than_those_of_one_graph():
    """DeepSeek-V3 on GB300: NeMo 26.04.01 launches kernels one by one, recipes of 26.06 make a step one graph."""
    one_by_one, graph = (predict_training(RUNS[name]) for name in ("T-mbridge-0175", "T-mbridge-0079"))
    assert one_by_one.calibration.mixture_launch > graph.calibration.mixture_launch == 0.0
    assert one_by_one.launched > graph.launched == 0.0
    for p in (one_by_one, graph):
        own = p.launched * SPREADS["launches"].sigma * WIDTH
        plain = relative_spread(p.estimate.terms, p.scenario.causes)
        assert p.spread(p.scenario.causes) == pytest.approx(math.hypot(plain, own))
        assert p.likely.high == pytest.approx(p.expected * math.exp(EIGHTY_PERCENT * math.hypot(plain, own)))
