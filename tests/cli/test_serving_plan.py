"""Serving plans as files: what is saved is estimated, simulated, and refused when it is something else."""

import contextlib
import io
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import meshwise
from meshwise.cli.main import main
from meshwise.commands.plan_files import read_plan
from meshwise.search.serving import ServingPlan

ASKED = ("plan", "serve", "llama-3-8b", "--on", "h100:4", "--prompt", "1024", "--output", "128", "--max-batch", "32")


@cache
def planned(mode):
    """What the command says and saves, for all tests of it."""
    with TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
        file = Path(folder) / "plan.json"
        assert main([*ASKED, "--mode", mode, "--save", str(file), "--json"]) == 0
        return out.getvalue(), file.read_text()


@pytest.fixture(params=["aggregated", "disaggregated"])
def saved(request, tmp_path):
    said, text = planned(request.param)
    file = tmp_path / "plan.json"
    file.write_text(text)
    return json.loads(said)["plans"][0], file


def test_a_saved_plan_is_estimated_again(saved, run):
    best, file = saved
    plan = read_plan(file, ServingPlan)
    assert ServingPlan.from_json(plan.to_json()) == plan
    (again,) = run("estimate", "serve", str(file), "--json").json["plans"]
    for name in ("mode", "batch", "ttft_s", "tpot_s", "throughput_tokens_per_s_per_chip", "memory_bytes"):
        assert again[name] == best[name]
    assert again["decode"]["layout_fields"] == best["decode"]["layout_fields"]


def test_a_saved_plan_is_simulated_with_its_own_load(saved, run):
    best, file = saved
    rate = str(0.3 * best["requests_per_s"])
    told = run("simulate", "serve", str(file), "--rate", rate, "--requests", "400", "--json")
    assert told.code == 0, told.err
    assert told.json["inputs"]["load"]["prompt_tokens"] == "1024"
    assert told.json["inputs"]["load"]["output_tokens"] == "128"
    # Below its capacity it serves what arrives, no faster than a request alone and not much slower than the estimate.
    assert told.json["requests_per_s"] == pytest.approx(float(rate), rel=0.2)
    assert told.json["tpot_s"]["mean"] < 1.1 * best["tpot_s"]
    there = sum(r["replica"] >= 0 for r in told.json["replicas"])
    assert there * best["decode"]["layout_fields"]["tensor"] <= 4


def test_requests_longer_than_the_model_reads_are_refused_with_its_plan(saved, run, tmp_path):
    told = run("simulate", "serve", str(saved[1]), "--rate", "2", "--requests", "9", "--output", "uniform:1-9000")
    assert told.code == 2
    assert "llama-3-8b was made for 8,192 tokens, found requests of up to 10,024, prompt and output" in told.err
    recorded = tmp_path / "requests.csv"
    recorded.write_text("arrival,prompt,output\n0,8000,10\n1,8000,193\n")
    told = run("simulate", "serve", str(saved[1]), "--csv", str(recorded))
    assert "found requests of up to 8,193" in told.err


def test_python_simulates_plans(saved):
    plan = read_plan(saved[1], ServingPlan)
    served = meshwise.simulate_serve(plan, rate=2.0, requests=100, output="uniform:1-64")
    assert served.result.requests == 100
    assert served.result.columns["output"].max() <= 64


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(kind="training"), "expected a plan of serving, as 'meshwise plan serve"),
        (lambda d: d.update(schema_version="9"), "plan again with this one"),
        (lambda d: d.pop("load"), "expected the keys"),
        (lambda d: d["setup"].update(batch=0), "setup: batch: expected a whole number, at least 1, found 0"),
        (lambda d: d["setup"].update(mode="both"), "expected aggregated or disaggregated, found 'both'"),
        (lambda d: d["load"].update(precision="fp7"), "unknown serving precision 'fp7'"),
        (lambda d: d["load"].update(prompt="x"), "expected"),
        (
            lambda d: d["load"].update(prompt=8000, output=193),
            "prompt: llama-3-8b was made for 8,192 tokens, found 8,000",
        ),
    ],
)
def test_what_is_no_serving_plan_is_said(saved, run, tmp_path, change, said):
    document = json.loads(saved[1].read_text())
    change(document)
    file = tmp_path / "changed.json"
    file.write_text(json.dumps(document))
    told = run("estimate", "serve", str(file))
    assert told.code == 2
    assert said in told.err


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    (plan,) = meshwise.estimate_train(
        "llama-3-8b", on="h100:8", batch_tokens="64Ki", seq_len=4096, layout="fsdp=8,remat=full"
    ).plans
    file = tmp_path_factory.mktemp("plans") / "trained.json"
    file.write_text(plan.to_json())
    return str(file)


OF_SERVING = "this is a plan of serving, which 'meshwise estimate serve', 'simulate serve' and 'export' read"
OF_TRAINING = "this is a plan of training, which 'meshwise simulate train', 'verify', 'run' and 'export' read"


@pytest.mark.parametrize("saved", ["aggregated"], indirect=True)
@pytest.mark.parametrize("command", [("simulate", "train"), ("verify",), ("run",)])
def test_a_serving_plan_says_what_reads_it(saved, run, command):
    told = run(*command, str(saved[1]))
    assert told.code == 2
    assert OF_SERVING in told.err
    assert "expected one of training, as 'meshwise plan train ... --save'" in told.err
    assert "schema_version" not in told.err


@pytest.mark.parametrize(
    "command", [("estimate", "serve"), ("simulate", "serve"), ("simulate", "serve", "--rate", "2")]
)
def test_a_training_plan_says_what_reads_it(trained, run, command):
    told = run(*command[:2], trained, *command[2:])
    assert told.code == 2
    assert OF_TRAINING in told.err
    assert "expected one of serving, as 'meshwise plan serve ... --save'" in told.err


@pytest.mark.parametrize("saved", ["aggregated"], indirect=True)
@pytest.mark.parametrize("verb", ["train", "serve"])
def test_a_plan_is_no_model(saved, trained, run, verb):
    for command, file, kind in (("estimate", str(saved[1]), "serving"), ("plan", trained, "training")):
        told = run(command, verb, file, "--on", "h100:8")
        assert told.code == 2
        assert "this is a plan that --save wrote, not a model" in told.err
        assert f"(of {kind}: " in told.err
        assert "missing" not in told.err


def test_files_that_are_not_there_are_said(run, tmp_path):
    told = run("estimate", "serve", str(tmp_path / "none.json"))
    assert "'meshwise plan serve ... --save plan.json' writes one" in told.err
    told = run(*ASKED, "--save", str(tmp_path / "none" / "plan.json"))
    assert "there is no folder" in told.err


def test_what_a_plan_has_decided_is_not_asked_again(saved, run):
    best, file = saved
    told = run("simulate", "serve", str(file), "--rate", "2", "--speculate", "0.7:4")
    assert "--speculate: the plan" in told.err
    told = run("simulate", "serve", str(file), "--rate", "2", "--prefill-replicas", "2", "--requests", "50")
    if best["mode"] == "aggregated":
        assert "prefill themselves" in told.err
    else:
        assert told.code == 0
