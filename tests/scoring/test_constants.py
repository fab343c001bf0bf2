"""Constants of serving: what each row depends on, and predictions without a model's rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.fits import serving_constants, serving_fit, start_values
from meshwise.scoring import ServingRun, predict_serving, shipped_rows
from meshwise.scoring.fitting import sensitivities, with_constants

NAMES = ("S-gptfast-0001", "S-gptfast-0009", "S-ft-0104", "S-aicsilicon-2387", "S-aicsilicon-0061", "S-esti-0011")


@pytest.fixture(scope="module")
def rows():
    runs = {r.id: r for r in shipped_rows(ServingRun)}
    return [predict_serving(runs[name]) for name in NAMES]


def test_rows_are_priced_again_as_they_were(rows):
    for p in rows:
        assert p.seconds_under(p.calibration) == p.expected


def test_shipped_constants_are_near_those_that_slopes_are_taken_at(rows):
    """What `costs.engines` holds is put back by the constants."""
    constants, at = serving_constants(), start_values()
    for p in rows:
        assert p.seconds_under(with_constants(p, constants, at)) == pytest.approx(p.expected, rel=1e-9)


def test_every_constant_is_physical_and_says_where_it_is_from():
    at = start_values()
    names = [c.name for c in serving_constants()]
    assert len(set(names)) == len(names)
    for c in serving_constants():
        assert c.source
        assert c.unit
        assert c.clipped(at[c.name]) == at[c.name] > 0, c.name


def test_slopes_are_of_what_a_row_has(rows):
    constants = serving_constants()
    found = sensitivities(rows, constants, start_values())
    slope = {c.name: dict(zip(NAMES, found.slopes[:, j], strict=True)) for j, c in enumerate(constants)}
    assert slope["weights.ampere"]["S-gptfast-0001"] < -0.7, "one request in 16 bits reads weights"
    assert slope["weights.int4"]["S-gptfast-0009"] < -0.6
    assert slope["weights.int4"]["S-gptfast-0001"] == 0
    assert slope["startup.nccl"]["S-ft-0104"] > 0.01
    assert slope["startup.nccl"]["S-gptfast-0001"] == 0
    assert slope["experts"]["S-aicsilicon-0061"] < -0.2
    assert slope["host.step.trtllm"]["S-aicsilicon-2387"] > 0
    assert slope["host.step.vllm"]["S-aicsilicon-2387"] == 0
    assert slope["host.request.python"]["S-gptfast-0001"] > 0 == slope["host.request.python"]["S-aicsilicon-2387"]
    assert all(s["S-esti-0011"] == 0 for s in slope.values()), "TPUs keep the constants of their family"


def test_a_model_is_predicted_without_its_rows(rows):
    """A model made twice as slow moves the others of its engine, and not itself."""
    rows = rows[:2]
    plain = serving_fit(rows).leave_out(lambda p: p.run.model)
    slow = [replace(p, measured=2 * p.measured) if p.run.model == "Llama-2-70B" else p for p in rows]
    moved = serving_fit(slow).leave_out(lambda p: p.run.model)
    for a, b in zip(plain, moved, strict=True):
        if a.run.model == "Llama-2-70B":
            assert b.expected == a.expected
        else:
            assert b.expected > a.expected * 1.001
        assert a.likely.low < a.expected < a.likely.high
    assert np.isfinite([p.expected for p in moved]).all()
