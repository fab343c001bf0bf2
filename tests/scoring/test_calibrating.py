"""A user's rows refine a chip's calibration; the file goes to other verbs; bad rows and files are refused."""

import json
from dataclasses import replace

import pytest

import meshwise
from meshwise.cli.main import main
from meshwise.core.errors import MeshwiseError
from meshwise.costs.fitted import calibration_text, find_calibration, fitted_calibration
from meshwise.hardware import load_chip
from meshwise.scoring import TrainingRun, predict_training, shipped_rows
from meshwise.scoring.calibrating import mean_error, refine

RUNS = {run.id: run for run in shipped_rows(TrainingRun)}
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
        ("x", "not JSON"),
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
