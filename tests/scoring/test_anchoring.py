"""Anchored predictions: the factor that measured steps give, which rows count, and the option of the verbs."""

import math
from dataclasses import replace

import pytest

import meshwise
from meshwise.cli.main import main
from meshwise.core.errors import MeshwiseError
from meshwise.costs.spread import SPREADS, WIDTH, shared_spread
from meshwise.scoring import TrainingRun, predict_training, shipped_rows
from meshwise.scoring.anchoring import anchor, anchor_each, shared_factor
from meshwise.scoring.score import ranking_of

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


def followed(*ratios, **of):
    """What other layouts are taken to be off by, in logarithms."""
    return math.log(shared_factor(off_by(*ratios, **of)))


def test_a_row_is_followed_up_to_what_layouts_share():
    terms = off_by(1)[0].estimate.terms
    compute = 0.06 * sum(terms[name] for name in ("forward", "backward", "recompute")) / sum(terms.values())
    shared = WIDTH * math.hypot(0.04, compute) / 2  # such software has few errors that layouts share
    assert followed(1.01) == pytest.approx(math.log(1.01)), "whole"
    assert followed(1.5) == pytest.approx(shared) == pytest.approx(-followed(0.7)), "no further"
    assert followed(1.5, 1.4) == pytest.approx(2 * shared), "as far again with each row that agrees"
    assert followed(*[1.5] * 200) == pytest.approx(math.log(1.5))
    assert followed(0.8, 1.25) == pytest.approx(0)
    assert followed(1.01, 1.01, 1.9) == pytest.approx(math.log(1.01)), "one that is far off hardly counts"


def test_what_is_followed_is_the_likeliest():
    """Of a normal distribution for what layouts share, and Laplace's for what each is off by alone."""
    ratios, spread = (1.02, 1.3, 0.9, 1.04), SPREADS["anchored"].sigma * WIDTH
    rows = off_by(*ratios, run="T-mbridge-0201")  # of a mixture, whose layouts share more than each has of its own
    shared = shared_spread(rows[0].estimate.terms, rows[0].scenario.causes)
    assert shared > spread

    def unlikely(x):
        return x**2 / (2 * shared**2) + sum(abs(math.log(r) - x) for r in ratios) / spread

    best = min((n / 1e4 for n in range(-3000, 3000)), key=unlikely)
    assert math.log(shared_factor(rows)) == pytest.approx(best, abs=1e-4)


def test_what_is_less_known_is_followed_further():
    """Software without more releases, software that has some, a mixture: the wider an interval, the more is learnt."""
    runs = ("T-sc21-0001", "T-nemo2407-0001", "T-mbridge-0201")
    known, releases, mixture = (followed(1.5, run=run) for run in runs)
    assert 0 < known < releases < mixture < math.log(1.5)


def test_one_factor_ranks_as_none_does():
    """Rows of one machine; the second and third are ranked wrong, whichever of the others was measured."""
    four = [replace(p, measured=t, scenario=replace(p.scenario, run=replace(p.scenario.run, micro_batch=n + 1)))
            for n, (p, t) in enumerate(zip(off_by(1, 1, 1, 1), (1.0, 1.2, 1.1, 1.3), strict=True))]  # fmt: skip
    four = [replace(p, expected=t) for p, t in zip(four, (1.0, 1.1, 1.2, 1.3), strict=True)]
    assert anchor_each(four).pairwise == pytest.approx(ranking_of(four).pairwise) == pytest.approx(5 / 6)
    assert anchor_each(off_by(1.0, 1.0, 1.0, 1.0)).pairwise is None


def test_errors_that_layouts_share_cancel():
    """Rows of one machine, made half as slow again: what one of them does not say is all that is left of it."""
    four = off_by(1.5, 1.53, 1.47, 1.5)
    found = anchor_each(four)
    assert found.groups == 1
    assert found.plain == pytest.approx(1 / 3, rel=0.02)
    assert found.mape == pytest.approx(1 - math.exp(followed(1.5)) / 1.5, rel=0.05)
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
