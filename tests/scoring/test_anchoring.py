"""Anchored predictions: the factor that measured steps give, which rows count, and the option of the verbs."""

import math
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


def off_by(*ratios, run="T-sc21-0001"):
    """A row as often as there are ratios, measured so many times as long as expected."""
    found = predict_training(RUNS[run])
    return [replace(found, measured=found.expected * ratio) for ratio in ratios]


def share(ratio, rows=1, **of):
    """What of a ratio other layouts follow, in logarithms."""
    return math.log(shared_factor(off_by(*[ratio] * rows, **of))) / math.log(ratio)


def test_a_ratio_counts_as_far_as_layouts_share_it():
    assert share(1.05) == pytest.approx(share(1.5)) == pytest.approx(share(0.7)), "of what it is, not how large"
    terms = off_by(1)[0].estimate.terms
    compute = 0.06 * sum(terms[name] for name in ("forward", "backward", "recompute")) / sum(terms.values())
    shared = (0.04**2 + compute**2) / 4  # such software has few errors that layouts share
    assert share(1.05) == pytest.approx(1 / (1 + 0.09**2 / shared))
    assert share(1.04) < share(1.04, rows=2) < share(1.04, rows=20) < 1
    assert share(1.04, rows=200) > 0.9
    assert shared_factor(off_by(0.8, 1.25)) == pytest.approx(1)


def test_what_is_less_known_follows_a_measurement_further():
    """Software without more releases, software that has some, a mixture: the wider an interval, the more is learnt."""
    known, releases, mixture = (share(1.1, run=run) for run in ("T-sc21-0001", "T-nemo2407-0001", "T-mbridge-0201"))
    assert known < releases < mixture < 1


def test_errors_that_layouts_share_cancel():
    """Rows of one machine, made half as slow again: what one of them does not say is all that is left of it."""
    four = off_by(1.5, 1.53, 1.47, 1.5)
    found = anchor_each(four)
    assert found.groups == 1
    assert found.plain == pytest.approx(1 / 3, rel=0.02)
    assert found.mape == pytest.approx(1 - 1.5 ** (share(1.5) - 1), rel=0.05)
    assert (found.coverage, anchor_each(off_by(1.05, 1.04, 1.06, 1.05)).coverage) == (0, 1)
    assert shared_factor(off_by(*[1.5] * 200)) == pytest.approx(1.5, rel=0.05)
    assert anchor_each(four[:3]) is None


def test_the_verb_follows_a_measured_step_and_is_surer(tmp_path, capsys):
    file = tmp_path / "mine.csv"
    file.write_text(f"{HEADER}\n{row()}\n")
    plain = meshwise.estimate_train("llama-3-8b", **ASKED).plans[0]
    found = meshwise.estimate_train("llama-3-8b", **ASKED, anchor=str(file)).plans[0]
    assert plain.estimate.step_time.expected < 2.5
    assert found.estimate.step_time.expected == pytest.approx(3.0, rel=0.001), "its own layout was measured"
    other = {"layout": "fsdp=32,data=2,remat=none"}
    before, after = (meshwise.estimate_train("llama-3-8b", **ASKED | other, **a).plans[0].estimate.step_time.expected
                     for a in ({}, {"anchor": str(file)}))  # fmt: skip
    assert before < after < before * 3.0 / plain.estimate.step_time.expected, (
        "others follow as far as errors are shared"
    )
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
    assert now / found.rows[0].expected == pytest.approx(shared_factor(found.rows), rel=0.01)
