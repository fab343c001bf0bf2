"""Anchored predictions: the factor that measured steps give, which rows count, and the option of the verbs."""

from dataclasses import replace

import pytest

import meshwise
from meshwise.cli.main import main
from meshwise.core.errors import MeshwiseError
from meshwise.scoring import TrainingRun, predict_training, shipped_rows
from meshwise.scoring.anchoring import anchor, anchor_each, shared_factor

RUNS = {run.id: run for run in shipped_rows(TrainingRun)}
GROUP = [RUNS[f"T-bloomprequel-{n}"] for n in ("0100", "0104", "0232")]
HEADER = (
    "id,chip,model,n_chips,dtype,recompute,fsdp_or_zero_stage,micro_batch,global_batch_seqs,seq_len,"
    "measured_metric,measured_value,unit,software"
)


def row(model="llama-3-8b", chip="h100-sxm", seconds=3.0):
    return f"mine,{chip},{model},64,bf16,none,FSDP,1,128,8192,step_time,{seconds},s,NeMo 2025"


ASKED = {"on": "h100:64", "batch_tokens": "1Mi", "seq_len": 8192, "layout": "fsdp=64,remat=none"}


def test_a_ratio_counts_as_far_as_layouts_share_it():
    assert 1.02 < shared_factor([1.05]) < 1.04
    assert shared_factor([1.5]) == pytest.approx(1.5, rel=0.02), "no layout alone is off by half"
    assert shared_factor([1.04]) < shared_factor([1.04] * 5) < 1.04
    assert shared_factor([0.8, 1.25]) == pytest.approx(1)


def test_errors_that_layouts_share_cancel():
    """Rows of one machine, made half as slow again: each is predicted by the others as well as before."""
    rows = [predict_training(run) for run in shipped_rows(TrainingRun) if run.id.startswith("T-sc21")][:1]
    four = [replace(rows[0], measured=rows[0].expected * m) for m in (1.5, 1.53, 1.47, 1.5)]
    found = anchor_each(four)
    assert found.groups == 1
    assert found.plain == pytest.approx(1 / 3, rel=0.02)
    assert found.mape < 0.05
    assert anchor_each(four[:3]) is None


def test_the_verb_follows_a_measured_step_and_is_surer(tmp_path, capsys):
    file = tmp_path / "mine.csv"
    file.write_text(f"{HEADER}\n{row()}\n")
    plain = meshwise.estimate_train("llama-3-8b", **ASKED).plans[0]
    found = meshwise.estimate_train("llama-3-8b", **ASKED, anchor=str(file)).plans[0]
    assert plain.estimate.step_time.expected < 2.5
    assert found.estimate.step_time.expected == pytest.approx(3.0, rel=0.03)
    assert found.estimate.step_time.lower == plain.estimate.step_time.lower
    name = found.problem.calibration.name
    assert name.startswith("fitted*1.")
    again = meshwise.Plan.from_json(found.to_json())
    assert again.estimate.step_time == found.estimate.step_time
    words = ["estimate", "train", "llama-3-8b", "--on", "h100:64", "--batch-tokens", "1Mi", "--seq-len", "8192"]
    words += ["--layout", "fsdp=64,remat=full", "--no-changes", "--anchor", str(file)]
    assert main(words) == 0
    assert "80 % of such" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (row("llama-3-70b"), "another model"),
        (row(chip="h200-sxm"), "another chip"),
        (row(seconds=0.1), "faster than"),
    ],
)
def test_rows_of_something_else_are_refused_with_the_reason(text, words, tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text(f"{HEADER}\n{text}\n")
    with pytest.raises(MeshwiseError, match=f"--anchor .*{words}"):
        meshwise.estimate_train("llama-3-8b", **ASKED, anchor=str(file))


def test_a_file_with_other_rows_beside_is_taken():
    problem = predict_training(GROUP[0]).scenario.problem
    found = anchor(problem, [*GROUP[:1], RUNS["T-llmfoundry-0001"]], "rows")
    assert [p.run.id for p in found.rows] == [GROUP[0].id]
    now = found.rows[0].seconds_under(found.calibration)
    assert now / found.rows[0].expected == pytest.approx(
        shared_factor([found.rows[0].measured / found.rows[0].expected]), rel=0.01
    )
