"""`meshwise simulate`: of a saved plan, or of a layout as `estimate train` takes it."""

import json
from pathlib import Path

import pytest

LAYOUT = ["--batch-tokens", "1Mi", "--seq-len", "4096", "--layout", "stage=4,fsdp=4,tensor=4,schedule=1f1b"]


def test_a_layout_is_simulated_as_it_is_estimated(run, tmp_path):
    trace = tmp_path / "step.json"
    asked = ["llama-3-8b", "--on", "v5p:4x4x4", *LAYOUT]
    done = run("simulate", *asked, "--trace", str(trace), "--json")
    estimate = run("estimate", "train", *asked, "--json").json
    assert done.code == 0
    expected = estimate["plans"][0]["estimate"]["step_time_s"]["expected"]
    assert done.json["step_time_s"] == pytest.approx(expected, rel=1e-12)  # added up in another order
    assert done.json["inputs"]["layout"] == LAYOUT[-1]
    assert len(done.json["stages"]) == 4
    assert {e["pid"] for e in json.loads(trace.read_text())["traceEvents"]} == set(range(4))


def test_what_does_not_fit_is_shown_and_said(run):
    done = run("simulate", "llama-3-70b", "--on", "v5e:4x4", *LAYOUT[:-1], "data=16,zero=0,micro_batch=1,remat=full")
    assert done.code == 3
    assert done.first_line.startswith("Does not fit in memory.")


def test_without_options_it_is_a_plan(run):
    done = run("simulate", "llama-3-8b")
    assert done.code != 0
    assert "plan 'llama-3-8b'" in done.err


def test_a_job_needs_its_layout(run):
    done = run("simulate", "llama-3-8b", "--on", "v5p:4x4x4", "--batch-tokens", "1Mi", "--seq-len", "4096")
    assert done.code != 0
    assert "--layout is missing" in done.err


def test_a_plan_without_a_verb_is_a_training_plan(run):
    plan = str(Path(__file__).parents[1] / "data" / "export" / "plan.json")
    told = run("simulate", "train", plan, "--json").json
    for words in ((plan, "--json"), ("--json", plan)):
        assert run("simulate", *words).json == told
    assert "serve" in run("simulate", "--help").out
    assert run("simulate").code == 2
