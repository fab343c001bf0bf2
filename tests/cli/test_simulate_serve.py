"""`meshwise simulate serve`: JSON, pictures, capacity, files of requests, and what is refused."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import meshwise
from meshwise.cli import output
from meshwise.cli.main import main

ENGINE = str(Path(__file__).parents[1] / "data" / "serving" / "engine.json")

FEW = ("--rate", "4", "--requests", "300")


def test_json_has_the_names_that_are_promised(run):
    done = run("simulate", "serve", ENGINE, *FEW, "--ttft", "80ms", "--tpot", "30ms", "--json")
    assert done.code == 0
    told = done.json
    for name in ("ttft_s", "tpot_s", "end_to_end_s", "queueing_s"):
        found = told[name]
        assert 0 < found["p50"] <= found["p90"] <= found["p99"] <= found["max"]
    assert told["requests"] == 300
    assert told["goodput"] == pytest.approx(told["kept_share"] * told["requests_per_s"])
    assert told["simulated_requests_per_s"] > 0
    assert told["inputs"]["load"]["arrivals"] == "poisson"
    assert told["replicas"][0]["over_time"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(output, "PATIENCE", 0.0)
    monkeypatch.setattr(output, "PACE", 0.0)
    return monkeypatch


MANY = ("simulate", "serve", ENGINE, "--rate", "4", "--requests", "1200")


def test_a_terminal_is_told_how_many_requests_are_done(impatient, capsys):
    impatient.setattr("sys.stderr", Terminal())
    assert main(MANY) == 0
    told = sys.stderr.getvalue().split("\r\x1b[K")
    assert told == ["", "500 of 1,200 requests are done", "1,000 of 1,200 requests are done", ""]
    assert "requests are done" not in capsys.readouterr().out


def test_a_terminal_is_told_of_every_rate_that_a_capacity_is_sought_at(impatient):
    impatient.setattr("sys.stderr", Terminal())
    assert main((*MANY, "--capacity", "--max-ttft", "500ms", "--max-tpot", "30ms")) == 0
    told = sys.stderr.getvalue()
    assert "rate 1, 4 requests/s: 500 of 1,200 requests are done" in told
    assert "rate 2, " in told


@pytest.mark.parametrize("words", [(), ("--json",)], ids=["piped", "json"])
def test_nobody_else_is_told(impatient, run, words):
    if words:
        impatient.setattr("sys.stderr", Terminal())
    done = run(*MANY, *words)
    assert done.code == 0
    assert done.err == ""
    assert not words or sys.stderr.getvalue() == ""


def test_the_verb_in_python_gives_the_same(run):
    done = run("simulate", "serve", ENGINE, *FEW, "--policy", "chunked", "--seed", "7", "--json")
    served = meshwise.simulate_serve(ENGINE, rate=4.0, requests=300, policy="chunked", seed=7)
    assert done.json["ttft_s"]["mean"] == served.result.ttft_s.mean()
    assert done.json["duration_s"] == served.result.end


def test_pictures(run, tmp_path):
    svg, trace = tmp_path / "load.svg", tmp_path / "load.json"
    done = run(
        "simulate", "serve", ENGINE, *FEW, "--prefill-replicas", "1", "--svg", str(svg), "--trace", str(trace), "--json"
    )
    assert done.code == 0
    assert svg.read_text().startswith("<?xml")
    events = json.loads(trace.read_text())["traceEvents"]
    steps = [e for e in events if e["ph"] == "X"]
    assert {e["name"] for e in steps} == {"prefill", "decode"}
    tokens = sum(e["args"]["decoding"] * e["args"]["steps"] for e in steps)
    assert tokens == 300 * 255
    begun, ended = (sum(e["ph"] == phase for e in events) for phase in "be")
    assert begun == ended == 3 * 300


def test_capacity_is_a_rate_that_keeps_the_targets(run):
    done = run(
        "simulate",
        "serve",
        ENGINE,
        "--capacity",
        "--requests",
        "400",
        "--max-ttft",
        "200ms",
        "--max-tpot",
        "25ms",
        "--json",
    )
    assert done.code == 0
    rate = done.json["capacity_requests_per_s"]
    assert done.json["inputs"]["load"]["rate_per_s"] == rate
    kept = {t["rate_per_s"]: t["kept"] for t in done.json["tried"]}
    assert kept[rate]
    assert not any(ok for other, ok in kept.items() if other > rate)
    above = min(other for other in kept if other > rate)
    assert above < 1.011 * rate


def test_a_file_of_requests(run, tmp_path):
    file = tmp_path / "requests.csv"
    file.write_text("arrival,prompt,output\n0,100,10\n0.5,200,20\n2,300,1\n")
    done = run("simulate", "serve", ENGINE, "--csv", str(file), "--json")
    assert done.json["requests"] == 3
    file.write_text("arrival,prompt,output\n0,100,10\n0.5,2\n")
    done = run("simulate", "serve", ENGINE, "--csv", str(file))
    assert done.code == 2
    assert "requests.csv, line 3: expected 3 values" in done.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "--rate is missing: requests per second, or a file of requests (--csv), or --capacity"),
        (("--rate", "0"), 2, "--rate: expected more than 0"),
        (("--rate", "1", "--prompt", "long"), 2, "--prompt: expected a number such as"),
        (("--rate", "1", "--max-ttft", "5"), 2, "has no unit"),
        (("--rate", "1", "--speculate", "0.7"), 2, "--speculate: expected ACCEPTANCE:DRAFTS"),
        (("--rate", "1", "--autoscale", "5:1"), 2, "--autoscale: expected REQUESTS:LEAST-MOST"),
        (("--rate", "1", "--prefill-costs", "x.json"), 2, "Give --prefill-replicas"),
        (("--rate", "1", "--policy", "chunked", "--max-step-tokens", "64"), 2, "leaves none for prompts"),
        (("--csv", "none.csv", "--prompt", "5"), 2, "--csv has its own requests: leave out --prompt"),
        (("--csv", "none.csv"), 2, "none.csv"),
        (("--capacity",), 2, "needs a target"),
        (("--capacity", "--max-ttft", "1ms", "--requests", "50"), 3, "the targets are missed at any rate"),
        (("--rate", "1", "--prompt", "1M"), 3, "no request fits"),
    ],
)
def test_what_cannot_be_is_said(run, words, code, said):
    done = run("simulate", "serve", ENGINE, *words)
    assert done.code == code
    assert said in " ".join(done.err.split())
    assert not done.out


def test_no_costs(run, tmp_path):
    done = run("simulate", "serve", str(tmp_path / "none.json"), "--rate", "1")
    assert done.code == 2
    assert "docs/simulation.md shows such a file" in done.err


def test_an_estimated_engine_does_what_was_estimated(run, tmp_path):
    """At the rate that keeps a batch of 32, with even arrivals, tokens come as `estimate serve` says in closed form."""
    engine = tmp_path / "engine.json"
    asked = ("llama-3-8b", "--on", "h100:1", "--prompt", "1024", "--output", "257", "--batch", "32")
    estimated = run("estimate", "serve", *asked, "--layout", "tensor=1", "--engine", str(engine))
    assert estimated.code == 0
    estimate = meshwise.estimate_serve("llama-3-8b", on="h100:1", prompt=1024, output=257, batch=32, layout="tensor=1")
    rate = 32 / (256 * estimate.tpot.expected)
    lengths = {"prompt": "1024", "output": "257", "arrivals": "constant", "requests": 2000}
    result = meshwise.simulate_serve(engine, rate=rate, **lengths).result
    assert float(np.median(result.tpot_s)) == pytest.approx(estimate.tpot.expected, rel=0.05)
    refused = run("estimate", "serve", *asked, "--layout", "tensor=1", "--prefill-engine", str(engine))
    assert refused.code == 2
    assert "--engine has both" in refused.err


def test_the_best_plan_serves(run, tmp_path):
    engine = tmp_path / "engine.json"
    asked = ("llama-3-8b", "--on", "h100:8", "--prompt", "1024", "--output", "256", "--max-tpot", "20ms")
    planned = run("plan", "serve", *asked, "--mode", "aggregated", "--engine", str(engine))
    assert planned.code == 0
    served = run("simulate", "serve", str(engine), "--rate", "2", "--requests", "300", "--tpot", "20ms", "--json")
    assert served.json["kept_share"] > 0.99
