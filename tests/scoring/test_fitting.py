"""The fit: exact where it must be, priors where rows are silent, limits; rows priced again; what is left out.

And a chip's calibration refined by a user's rows: the file goes to other verbs; bad rows and files are refused.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

import meshwise
from meshwise.cli.main import main
from meshwise.core.errors import MeshwiseError
from meshwise.costs.calibration import IDENTITY
from meshwise.costs.calibration_files import calibration_text
from meshwise.costs.fitted import find_calibration, fitted_calibration
from meshwise.hardware import load_chip
from meshwise.scoring import TrainingRun, predict_training, shipped_rows
from meshwise.scoring.constants import Constant, all_constants
from meshwise.scoring.fitting import Sensitivities, fit, mean_error, refine, sensitivities, training_fit

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
    assert by_name["passes.eager"][1] > 0


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


THREE = [RUNS[f"T-llmfoundry-{n}"] for n in ("0001", "0003", "0005")]


def slower(runs, factor):
    """The same runs, their throughput lower."""
    return [replace(run, measured_value=run.measured_value / factor) for run in runs]


def test_rows_pull_the_calibration_their_way():
    runs = slower(THREE, 1.3)
    found = refine(runs)
    assert mean_error(found.after) < 0.75 * mean_error(found.before)
    assert len(found.left_out) == 3
    assert mean_error(found.left_out) < mean_error(found.before)
    assert found.calibration.matmul_efficiency < found.base.matmul_efficiency
    one = refine(runs[:1])
    assert mean_error(one.after) < mean_error(one.before)
    assert one.left_out == ()
    assert mean_error(one.after) > mean_error(found.after) * 0.5, "one row is not believed more than three"


def test_impossible_rows_are_refused_with_the_reason():
    found = refine([*THREE, replace(THREE[0], id="warp", measured_value=1e9)])
    assert [r.run.id for r in found.refusals] == ["warp"]
    assert "faster than the chips' data sheets allow" in found.refusals[0].reason
    with pytest.raises(MeshwiseError, match=r"no row can be used to calibrate: warp: .*faster"):
        refine([replace(THREE[0], id="warp", measured_value=1e9)])


def test_rows_far_slower_than_predicted_are_refused_with_the_reason():
    slow = refine([THREE[0]]).rows[0].measured * 1e3
    late = replace(THREE[0], id="late", measured_metric="step_time", unit="s", measured_value=slow)
    found = refine([*THREE, late])
    assert [r.run.id for r in found.refusals] == ["late"]
    assert "times the" in found.refusals[0].reason
    assert len(found.rows) == 3
    with pytest.raises(MeshwiseError, match=r"no row can be used to calibrate: late: .* expected at most 10 times"):
        refine([late])


def test_rows_of_several_chips_are_refused():
    with pytest.raises(MeshwiseError, match="rows are of several chips: a100-sxm-80gb, h100-sxm"):
        refine([RUNS["T-vtrain-0056"], RUNS["T-nemo2407-0001"]])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "runs.csv"
    head = "id,chip,model,n_chips,seq_len,global_batch_seqs,micro_batch,dp,fsdp_or_zero_stage,recompute,software,year"
    row = "h100-sxm,llama-3-8b,8,4096,64,1,8,FSDP,none,NeMo,2025,tokens_per_s_per_chip,{},tokens/s"
    lines = [f"{head},measured_metric,measured_value,unit", f"a,{row.format(7000)}", f"b,{row.format(1e9)}"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_verb_saves_what_other_verbs_take(file, tmp_path, capsys):
    ours = tmp_path / "ours.json"
    assert main(["calibrate", str(file), "--save", str(ours), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["chip"] == "h100-sxm"
    assert [r["id"] for r in said["rows"]] == ["a"]
    assert [r["id"] for r in said["refused"]] == ["b"]
    assert said["mape"]["after"] < said["mape"]["before"]
    found = find_calibration(str(ours), load_chip("h100-sxm"))
    assert found.name == str(ours)
    assert "refined: 1 rows, ours.json" in found.source
    assert main(["score", str(file), "--calibration", str(ours), "--json"]) == 0
    scored = json.loads(capsys.readouterr().out)
    assert scored["overall"]["mape"] == pytest.approx(said["mape"]["after"], rel=1e-6)
    plan = meshwise.estimate_train(
        "llama-3-8b", on="h100:8", batch_tokens="256Ki", seq_len=4096, layout="fsdp=8", calibration=str(ours)
    )
    assert plan.calibration.name == str(ours) if hasattr(plan, "calibration") else plan
    assert main(["calibrate", str(file), "--save", str(ours)]) == 2
    assert "there is a file already" in capsys.readouterr().err


def test_the_verb_in_words(file, capsys):
    assert main(["calibrate", str(file)]) == 0
    text = capsys.readouterr().out
    assert "mean error of 1 row" in text
    assert "matmul.hopper" in text
    assert "b: " in text
    assert max(map(len, text.splitlines())) <= 80


def test_files_that_are_wrong(tmp_path):
    chip, path = load_chip("h100-sxm"), tmp_path / "a.json"
    base = fitted_calibration(chip)
    path.write_text(calibration_text("h100-sxm", base, replace(base, gap=1e-5), {"rows": 1}), encoding="utf-8")
    assert find_calibration(str(path), chip).gap == 1e-5
    with pytest.raises(MeshwiseError, match="another family than v5e's"):
        find_calibration(str(path), load_chip("v5e"))
    good = path.read_text(encoding="utf-8")
    for wrong, message in (
        ("{}", "expected the schema"),
        ("x", "not valid JSON"),
        (good.replace('"gap"', '"gaps"'), "'gaps' is no constant"),
        (good.replace("1e-05", "-1"), "gap is a number from 0 to 1, found -1"),
        (good.replace('"fitted"', '"other.json"'), "its base is a file"),
    ):
        path.write_text(wrong, encoding="utf-8")
        with pytest.raises(MeshwiseError, match=message):
            find_calibration(str(path), chip)
    with pytest.raises(MeshwiseError, match="No such file"):
        find_calibration(str(tmp_path / "none.json"), chip)


def test_a_refined_row_is_predicted_as_the_fit_says(tmp_path):
    found = refine(THREE)
    path = tmp_path / "ours.json"
    path.write_text(calibration_text(found.chip.name, found.base, found.calibration, {"rows": 3}), encoding="utf-8")
    for run, error in zip(THREE, found.after, strict=True):
        assert predict_training(run, str(path)).error == pytest.approx(error, rel=1e-6)
