"""Files of measured runs: what is read, and what is refused with the line and the column."""

from dataclasses import fields
from pathlib import Path

import pytest

from meshwise.core.errors import MeshwiseError
from meshwise.scoring import TrainingRun, read_rows, score_training, shipped_rows
from meshwise.scoring.rows import UnreadRow

HEADER = "id,chip,model,n_chips,global_batch_seqs,seq_len,measured_metric,measured_value,unit"
ROW = "a,h100-sxm,llama-3-8b,8,64,8192,step_time,2.5,s"


def read(*rows, header=HEADER):
    return read_rows("\n".join([header, *rows]) + "\n", "runs.csv", TrainingRun)


def test_what_is_left_out_is_unknown():
    (run,) = read(ROW)
    assert (run.n_chips, run.measured_value, run.tp, run.recompute, run.primary) == (8, 2.5, None, "", "yes")
    assert run.tokens == 64 * 8192


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (ROW.replace("2.5", "-1"), "runs.csv, line 2, column measured_value: expected a number above 0, found '-1'"),
        (ROW.replace(",8,", ",8.5,"), "line 2, column n_chips: expected a whole number of at least 1, found '8.5'"),
        (ROW.replace("64", ""), "line 2, column global_batch_seqs: expected a value, found a blank cell"),
        (ROW.replace("step_time", "stepp"), "line 2, column measured_metric: expected one of step_time, "),
        (ROW + ",x", "line 2: expected 9 cells, found 10"),
    ],
)
def test_a_bad_row_is_refused_with_line_and_column_and_leaves_the_others(row, words):
    bad, good = read(row, ROW.replace("a,", "b,", 1))
    assert isinstance(bad, UnreadRow)
    assert words in bad.reason
    assert good.id == "b"
    score = score_training((bad, good))
    assert bad.reason in [r.reason for r in score.refusals]
    assert score.rows == 2
    assert score.set_aside == ()


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (HEADER.replace("seq_len", "seq_length"), "did you mean 'seq_len'?"),
        (HEADER.removesuffix(",unit"), "the header lacks unit"),
        (HEADER + ",chip", "'chip' stands twice"),
        ("id,engine,phase", "measurements of serving"),
        ("id,category,op", "single operations .* expected training runs: one row a run"),
    ],
)
def test_a_bad_header_is_refused(header, words):
    with pytest.raises(MeshwiseError, match=words.replace("?", r"\?")):
        read(ROW, header=header)


def test_a_file_of_nothing_is_refused():
    with pytest.raises(MeshwiseError, match="found none"):
        read()


def test_a_cell_that_is_too_long_is_said_with_its_line():
    with pytest.raises(MeshwiseError, match=r"runs.csv, line 2: expected CSV: field larger than field limit"):
        read("x" * 200_000)


def test_the_second_row_of_an_id_is_refused():
    first, second = read(ROW, ROW)
    assert first.id == "a"
    assert second.reason == "runs.csv, line 3: two rows have the id 'a'; give each its own"


def test_the_shipped_runs_are_read_and_name_their_sources():
    runs = shipped_rows(TrainingRun)
    assert len(runs) == 706
    assert all(run.source and run.source_url_or_repo_path for run in runs)
    assert {run.measured_metric for run in runs} <= {*TrainingRun.TIMES, *TrainingRun.MEMORY}
    assert sum(run.counts for run in runs) == 413


def test_the_page_describes_every_column_and_metric():
    page = (Path(__file__).parents[2] / "docs" / "measurements.md").read_text()
    section = page.partition("## Training runs")[2].partition("\n## ")[0]
    for name in (*(f.name for f in fields(TrainingRun)), *TrainingRun.TIMES, *TrainingRun.MEMORY):
        assert f"| `{name}` |" in section
