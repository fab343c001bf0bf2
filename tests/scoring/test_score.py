"""The score: errors, ranking and coverage by hand; refusals; the shipped rows."""

import json
import math
from pathlib import Path

import pytest

import meshwise
from meshwise.cli.main import main
from meshwise.costs.spread import SERVING_WIDTH, SPREADS, WIDTH, likely_interval, relative_spread
from meshwise.scoring import Refusal, TrainingPrediction, TrainingRun, predict_training, score_training, shipped_rows
from meshwise.scoring.score import errors_of, macro, ranking_of

RUNS = {run.id: run for run in shipped_rows(TrainingRun)}
#: A few rows of every source.
SOME = ["T-maxtext-0021", "T-llmfoundry-0001", "T-llmfoundry-0261", "T-korthikanti-0003", "T-korthikanti-0011",
        "T-vtrain-0056", "T-vtrain-0071", "T-vtrain-0085", "T-mbridge-0151", "T-mbridge-0545", "T-nemo2407-0001",
        "T-sc21-0009", "T-bloomprequel-0100", "T-jaxtoolbox-0013"]  # fmt: skip


@pytest.fixture(scope="module")
def found():
    return score_training([RUNS[name] for name in SOME])


@pytest.fixture
def file():
    return Path(__file__).parents[1] / "data" / "measured" / "runs.csv"


def test_every_row_is_predicted_or_refused(found):
    assert found.rows == len(SOME)
    assert [r.run.id for r in found.refusals] == ["T-mbridge-0545"]
    assert "ep 64 does not divide dp x tp = 32 x 1" in found.refusals[0].reason
    assert len(found.times) == len(SOME) - 2


def test_errors_by_hand(found):
    errors = [p.expected / p.measured - 1 for p in found.times]
    overall = found.overall
    assert overall.mape == pytest.approx(sum(map(abs, errors)) / len(errors))
    assert overall.bias == pytest.approx(sum(errors) / len(errors))
    assert overall.within_20 == sum(abs(e) <= 0.2 for e in errors) / len(errors)
    assert overall.bound_bias < overall.bias, "the bound is never slower than the expectation"
    assert found.macro_mape == pytest.approx(
        sum(e.mape for e in found.groups["source"].values()) / len(found.groups["source"])
    )
    assert macro({}) is None
    assert errors_of([]) is None


def test_the_interval_is_not_cut_at_the_upper_bound():
    """Which overlaps nothing at the expected rates: a step of NVIDIA's was slower."""
    (slow,) = score_training([RUNS["T-mbridge-0547"]]).times
    assert slow.estimate.step_time.upper < slow.measured < slow.likely.high


def test_ranking_by_hand(found):
    group = [p for p in found.times if p.run.source == "vtrain"]
    assert len(group) == 3
    pairs = [(a, b) for i, a in enumerate(group) for b in group[i + 1 :]]
    right = sum((a.measured < b.measured) == (a.expected < b.expected) for a, b in pairs)
    ranking = ranking_of(found.times)
    assert (ranking.pairs, ranking.groups) == (3, 1)
    assert ranking.pairwise == right / 3


def test_layouts_of_different_machines_are_not_ranked(found):
    assert ranking_of([p for p in found.times if p.run.source != "vtrain"]).pairwise is None


def test_a_user_s_file(file, capsys):
    assert main(["score", str(file), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["overall"]["rows"] == 5
    assert said["overall"]["predicted"] == 3
    reasons = {r["id"]: r["reason"] for r in said["refused"]}
    assert "tp 4 x pp 1 x cp 1 x dp 4 = 16 chips, but n_chips is 8" in reasons["odd"]
    assert "faster than the chips' data sheets allow" in reasons["warp"]
    assert said["ranking"]["pairs"] == 1
    assert said["memory"]["by_metric"]["peak_memory"]["rows"] == 1
    assert {"mape", "macro_mape", "coverage_80", "rows", "predicted"} <= set(said["overall"])
    assert {"mape", "false_oom"} <= set(said["memory"])
    assert set(said["by_source"]) == {"us"}
    assert set(said["by_chip"]) == {"h100-sxm"}
    for row in said["predictions"]:
        assert row["error"] == pytest.approx(row["expected"] / row["measured"] - 1)
        if row["unit"] == "s":
            assert sum(row["terms_s"].values()) == pytest.approx(row["expected"])
            assert row["bound"] <= row["low_80"] <= row["expected"] <= row["high_80"]


def test_the_verb_in_words_fits_80_columns(file, capsys):
    assert main(["score", str(file)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("3 of 5 rows predicted: mean error ")
    for word in ("Not predicted:", "odd: tp 4", "worst rows", "slow and 2 more: zero is not said", "Not modelled:"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_picture(file, tmp_path, capsys):
    picture = tmp_path / "a.svg"
    assert main(["score", str(file), "--svg", str(picture)]) == 0
    assert picture.read_text(encoding="utf-8").lstrip().startswith("<?xml")
    assert main(["score", str(file), "--svg", str(tmp_path / "no" / "a.svg")]) == 2
    assert "--svg" in capsys.readouterr().err


def test_the_python_verb(file):
    found = meshwise.score(file)
    assert found.overall.rows == 2
    with pytest.raises(meshwise.MeshwiseError, match="unknown calibration 'best'"):
        meshwise.score(file, calibration="best")
    with pytest.raises(meshwise.MeshwiseError, match="No such file"):
        meshwise.score("missing.csv")


def test_no_calibration_is_the_data_sheet():
    plain = predict_training(RUNS["T-vtrain-0056"], "none")
    fitted = predict_training(RUNS["T-vtrain-0056"])
    assert isinstance(plain, TrainingPrediction)
    assert plain.expected < fitted.expected
    assert plain.bound == pytest.approx(fitted.bound)


def test_a_run_faster_than_physics_is_refused():
    import dataclasses  # noqa: PLC0415

    run = dataclasses.replace(RUNS["T-vtrain-0056"], measured_value=1.0)
    assert isinstance(predict_training(run), Refusal)


@pytest.mark.parametrize("name", ["T-bloomprequel-0232", "T-maxtext-0005", "T-maxtext-0089"])
def test_runs_that_ran_are_not_said_not_to_fit(name):
    assert not predict_training(RUNS[name]).false_oom


def test_recomputation_that_was_looked_up_elsewhere_gives_way_to_memory():
    found = predict_training(RUNS["T-mbridge-0333"])
    assert "recompute" not in found.scenario.layout.choices
    assert found.estimate.fits
    assert "remat" in found.scenario.open
    assert any("does not fit in memory, so is of another run" in note for note in found.scenario.assumed)


def test_memory_that_was_measured_apart():
    """Korthikanti et al. 2022, figure 1: state of layers alone, and activations with dropout, which we have none of."""
    rows = [predict_training(run) for run in RUNS.values() if run.source == "korthikanti" and run.is_memory]
    assert len(rows) == 16
    for p in rows:
        assert abs(p.error) < 0.12
    assert sum(abs(p.error) for p in rows) / 16 < 0.10


def test_intervals_grow_with_what_is_not_known():
    terms = {"forward": 1.0, "backward": 2.0, "data": 1.0}
    plain, open_ = likely_interval(4.0, 1.0, terms), likely_interval(4.0, 1.0, terms, ("remat",))
    assert open_.low < plain.low < 4.0 < plain.high < open_.high
    assert likely_interval(4.0, 3.9, terms).low == 3.9
    spread = relative_spread({"forward": 1.0})
    stated = math.hypot(SPREADS["software"].sigma, SPREADS["compute"].sigma)
    assert spread == pytest.approx(WIDTH * stated)
    engine = relative_spread({"matmuls": 1.0}, ("engine",))
    assert engine == pytest.approx(SERVING_WIDTH * math.hypot(stated, SPREADS["engine"].sigma))
