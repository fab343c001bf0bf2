"""The fit: exact where it must be, priors where rows are silent, limits; rows priced again; what is left out."""

from dataclasses import replace

import numpy as np
import pytest

from meshwise.costs.calibration import IDENTITY
from meshwise.scoring import TrainingRun, predict_training, shipped_rows
from meshwise.scoring.constants import Constant, all_constants
from meshwise.scoring.fitting import Sensitivities, fit, sensitivities, training_fit

RUNS = {run.id: run for run in shipped_rows(TrainingRun)}


def constant(name="rate", prior=1.0, spread=0.1, **limits):
    return Constant(
        name, "", prior, spread, "", lambda *_: True, lambda c: c.gap, lambda c, v: replace(c, gap=v), **limits
    )


def points(slopes, seconds):
    slopes = np.array(slopes, dtype=float)
    return Sensitivities({f"c{j}": 1.0 for j in range(slopes.shape[1])}, np.array(seconds, dtype=float), slopes)


def test_one_row_moves_a_constant_by_its_share_of_what_is_known():
    """A normal prior of 0.1 and a row good to 0.09: 0.1^2 / (0.1^2 + 0.09^2) of the way."""
    found = fit([constant("c0")], points([[1.0]], [1.0]), np.array([1.05]))
    assert np.log(found.values["c0"]) == pytest.approx(np.log(1.05) * 0.1**2 / (0.1**2 + 0.09**2), rel=1e-6)
    assert found.spreads["c0"] == pytest.approx((1 / 0.1**2 + 1 / 0.09**2) ** -0.5, rel=1e-6)


def test_many_rows_decide_and_a_wild_one_does_not():
    measured = np.array([*[1.05] * 200, 50.0])
    found = fit([constant("c0")], points([[1.0]] * 201, [1.0] * 201), measured)
    assert found.values["c0"] == pytest.approx(1.05, rel=0.005)


def test_what_no_row_depends_on_keeps_its_prior():
    found = fit([constant("c0"), constant("c1", prior=1.0)], points([[1.0, 0.0]], [1.0]), np.array([1.2]))
    assert found.values["c1"] == 1.0
    assert found.spreads["c1"] == pytest.approx(0.1)


def test_limits_hold_and_others_make_up_for_them():
    pair = points([[1.0, 0.5]] * 50, [1.0] * 50)
    free = fit([constant("c0"), constant("c1", spread=0.3)], pair, np.full(50, 1.1))
    bound = fit([constant("c0", most=1.01), constant("c1", spread=0.3)], pair, np.full(50, 1.1))
    assert bound.values["c0"] == pytest.approx(1.01)
    assert bound.values["c1"] > free.values["c1"]


@pytest.fixture(scope="module")
def rows():
    names = ("T-korthikanti-0003", "T-llmfoundry-0001", "T-vtrain-0056", "T-maxtext-0021")
    return [predict_training(RUNS[name]) for name in names]


def test_rows_are_priced_again_as_they_were_and_slopes_are_theirs(rows):
    for row in rows:
        assert row.seconds_under(row.calibration) == row.expected
    constants = all_constants()
    found = sensitivities(rows, constants, {c.name: c.prior for c in constants})
    by_name = {c.name: found.slopes[:, j] for j, c in enumerate(constants)}
    assert (by_name["matmul.ampere"][[0, 2]] < -0.3).all(), "most of a step is matmuls"
    assert by_name["matmul.ampere"][3] == 0
    assert by_name["matmul.tpu"][3] < -0.3
    assert by_name["passes.eager-2023"][1] > 0


def test_every_constant_puts_what_it_reads():
    base = replace(IDENTITY, narrow=tuple((d, 0.5) for d in (*default_formats(),)), attention_efficiency=0.4)
    for c in all_constants():
        changed = c.put(base, c.clipped(c.prior))
        assert c.read(changed) == pytest.approx(c.clipped(c.prior)), c.name
        assert c.source


def default_formats():
    from meshwise.core.dtypes import DType  # noqa: PLC0415

    return DType.FP8, DType.FP4


def test_left_out_rows_are_predicted_without_them(rows):
    """A source made three times as long moves its own prediction in second order alone: slopes are taken elsewhere."""
    plain = training_fit(rows).leave_out(lambda p: p.run.source)
    slow = [replace(p, measured=3 * p.measured) if p.run.source == "vtrain" else p for p in rows]
    moved = training_fit(slow).leave_out(lambda p: p.run.source)
    for a, b in zip(plain, moved, strict=True):
        assert a.likely.low < a.expected < a.likely.high
        if a.run.source == "vtrain":
            assert a.expected == pytest.approx(b.expected, rel=0.01)
        elif a.run.source == "korthikanti":
            assert b.expected > a.expected * 1.01, "of the same chip and software"
