"""`meshwise estimate serve` and `plan serve`, end to end: what it answers, and what it says of what cannot be."""

import contextlib
import io
import math
import re

import pytest

import meshwise
from meshwise.cli.main import main
from meshwise.cli.output import to_text
from meshwise.report.plan_serve import plan_serve_report
from tests.cli.conftest import Ran

SERVE = ("llama-3-70b", "--on", "h100:8", "--prompt", "1024", "--output", "256", "--precision", "fp8")
ESTIMATE = ("estimate", "serve", *SERVE, "--batch", "64", "--layout", "tensor=8")


def test_the_first_line_answers(run):
    told = run(*ESTIMATE)
    assert told.code == 0
    assert told.first_line.startswith("TTFT ")
    assert "TPOT" in told.first_line
    assert "Definitions:" not in told.out
    assert "Definitions:" in run(*ESTIMATE, "--details").out


def test_numbers_hang_together(run):
    (plan,) = run(*ESTIMATE, "--json").json["plans"]
    for step in ("prefill", "decode"):
        engine = plan[step]
        assert math.fsum(engine["terms"].values()) == pytest.approx(engine["seconds"]["expected"], rel=1e-12)
        assert engine["seconds"]["lower"] <= engine["seconds"]["expected"] <= engine["seconds"]["upper"]
    assert plan["tpot_s"] == pytest.approx(
        plan["decode"]["seconds"]["expected"] + 63 / 255 * plan["prefill"]["seconds"]["expected"]
    )
    assert plan["throughput_tokens_per_s_per_chip"] * 8 == pytest.approx(plan["throughput_tokens_per_s"])
    memory = plan["memory_bytes"]
    assert math.fsum(v for k, v in memory.items() if k != "total") == pytest.approx(memory["total"])


def test_python_gives_what_the_command_line_says(run):
    estimate = meshwise.estimate_serve(
        "llama-3-70b", on="h100:8", prompt=1024, output=256, batch=64, layout="tensor=8", precision="fp8"
    )
    (plan,) = run(*ESTIMATE, "--json").json["plans"]
    assert (estimate.ttft.expected, estimate.tpot.expected) == (plan["ttft_s"], plan["tpot_s"])


def test_what_does_not_fit_says_what_would(run):
    told = run("estimate", "serve", *SERVE, "--batch", "4000", "--layout", "tensor=8")
    assert told.code == 3
    assert told.first_line.startswith("does not fit in memory: ")
    most = run(*ESTIMATE, "--json").json["plans"][0]["largest_batch"]
    assert f"--batch {most}: fits" in told.out
    assert run("estimate", "serve", *SERVE, "--batch", str(most), "--layout", "tensor=8").code == 0
    wide = run(
        "estimate", "serve", "llama-3-70b", "--on", "h100:8", "--prompt", "64", "--output", "8", "--batch", "1",
        "--layout", "tensor=1",
    )  # fmt: skip
    assert wide.code == 3
    assert "tensor=2: fits" in wide.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--prompt", "8192"),
            "llama-3-70b was made for 8,192 tokens, found 8,192 of the prompt and 256 of the output",
        ),
        (("--prompt", "8192"), "use a prompt of 7,936 or less"),
        (("--layout", "tensor=16"), "layout 'tensor=16' needs 16 chips, the cluster has 8"),
        (("--layout", "expert=8"), "has none; for engines that work apart write replicas=8"),
        (("--mode", "disaggregated"), "--prefill-layout"),
        (("--precision", "fp7"), "unknown serving precision 'fp7'"),
        (("--precision", "weights=fp8,act=fp8"), "write compute=fp8 for narrow operands"),
        (("--precision", "compute=fp8"), "write weights=fp8"),
        (("--precision", "fp4"), "needs fp4 matrix units"),
        (("--cached-prefix", "1024"), "expected fewer tokens than the prompt's 1024"),
        (("--prompt", "0"), "--prompt: "),
        (("--batch", "0"), "--batch: "),
    ],
)
def test_what_is_wrong_is_said(run, words, said):
    told = run(*ESTIMATE, *words)
    assert told.code == 2
    assert said in told.err


def test_engines_apart_use_their_own_chips(run):
    words = ("--mode", "disaggregated", "--prefill-layout", "tensor=2,replicas=2", "--layout", "tensor=4")
    (plan,) = run(*ESTIMATE, *words, "--json").json["plans"]
    assert plan["num_chips"] == 8
    assert plan["handover_s"] > 0
    too_many = run(*ESTIMATE, "--mode", "disaggregated", "--prefill-layout", "tensor=8")
    assert "need 16 chips, the cluster has 8; use fewer replicas" in too_many.err


def test_encoder_decoders_are_refused(run):
    from meshwise.models import load_model, model_names  # noqa: PLC0415

    name = next((n for n in model_names() if load_model(n).spec.encoder is not None), None)
    if name is not None:
        told = run("estimate", "serve", name, "--on", "h100:1", "--prompt", "64", "--output", "8", "--batch", "1",
                   "--layout", "tensor=1")  # fmt: skip
        assert told.code == 2
        assert "cannot be served yet" in told.err


PLAN = ("plan", "serve", *SERVE, "--max-ttft", "500ms", "--max-tpot", "30ms")


@pytest.fixture(scope="module")
def planned():
    """What `PLAN --json` says."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*PLAN, "--json"]) == 0
    return Ran(0, out.getvalue(), "").json


def test_the_best_plan_is_estimated_alike(run, planned):
    told = planned
    best = told["plans"][0]
    assert told["search"]["configurations"] > 1000
    assert best["tpot_s"] <= 0.03
    assert best["ttft_s"] <= 0.5
    words = ["--layout", best["decode"]["layout"], "--prefill-layout", best["prefill"]["layout"]]
    words += ["--mode", best["mode"], "--batch", str(best["batch"]), "--prefill-batch", str(best["prefill"]["batch"])]
    (plan,) = run("estimate", "serve", *SERVE, *words, "--json").json["plans"]
    for name in ("tpot_s", "ttft_s", "throughput_tokens_per_s_per_chip", "memory_bytes"):
        assert plan[name] == pytest.approx(best[name])
    assert (
        max(p["throughput_tokens_per_s_per_chip"] for p in told["pareto"]) >= plan["throughput_tokens_per_s_per_chip"]
    )


def test_a_plan_says_why_others_lose(run):
    told = run(*PLAN, "--details")
    assert told.code == 0
    assert told.first_line.startswith("Best: TTFT ")
    for words in ("Not chosen:", "Latency against throughput", "Definitions:", "CPU-seconds"):
        assert words in told.out


def test_a_best_plan_that_answers_late_for_little_throughput_says_so():
    asked = {"on": "h100:24", "prompt": 1000, "output": 400}
    found = meshwise.plan_serve("llama-3.1-405b", **asked)
    said = re.search(r"row 1 pays (\d+) x the TTFT of row (\d) for ([\d.]+) %", shown(found))
    times, row, more = float(said[1]), int(said[2]), float(said[3])
    best, other = found.plans[0], found.plans[row - 1]
    assert times >= 3
    assert best.ttft.expected / other.ttft.expected == pytest.approx(times, rel=0.05)
    assert 100 * (best.output_tokens_per_s / other.output_tokens_per_s - 1) == pytest.approx(more, rel=0.05)
    quick = meshwise.plan_serve("llama-3.1-405b", **asked, max_ttft="2s", simulate=False)
    assert "row 1 pays" not in shown(quick)


def shown(found):
    """What a terminal shows of a search, in one line."""
    return " ".join(to_text(plan_serve_report(found, {}).renderable()).split())


def test_an_impossible_target_says_what_is_possible(run):
    told = run("plan", "serve", *SERVE, "--max-tpot", "100us")
    assert told.code == 3
    assert "nothing keeps TPOT within 100 us (the least is " in told.err
    told = run("plan", "serve", *SERVE, "--forbid", "zero")
    assert told.code == 2
    assert "unknown serving mesh axis 'zero'" in told.err


def test_requests_of_different_lengths_are_planned_for(run, tmp_path):
    drawn = ("llama-3-8b", "--on", "h100:2", "--prompt", "uniform:512-1536", "--output", "lognormal:128:0.5:512")
    told = run("plan", "serve", *drawn, "--max-batch", "16", "--save", str(tmp_path / "plan.json"), "--json")
    assert told.code == 0, told.err
    assert told.json["inputs"]["prompt_tokens"] == 1024
    assert told.json["inputs"]["prompt_lengths"] == "uniform:512-1536"
    assert any("root mean square" in line for line in told.json["assumed"])
    (again,) = run("estimate", "serve", str(tmp_path / "plan.json"), "--json").json["plans"]
    assert again["tpot_s"] == told.json["plans"][0]["tpot_s"]
    served = run("simulate", "serve", str(tmp_path / "plan.json"), "--rate", "2", "--requests", "200", "--json")
    assert served.json["inputs"]["load"]["prompt_tokens"] == "uniform:512-1536"


def test_recorded_requests_are_planned_for(run, tmp_path):
    file, plan = tmp_path / "requests.csv", str(tmp_path / "plan.json")
    file.write_text("arrival,prompt,output\n" + "".join(f"{i},{500 + 100 * (i % 9)},{64 + i}\n" for i in range(90)))
    words = ("plan", "serve", "llama-3-8b", "--on", "h100:1", "--csv", str(file), "--max-batch", "16")
    told = run(*words, "--save", plan, "--json")
    assert told.json["inputs"]["prompt_tokens"] == 900
    assert any("90 requests of requests.csv" in line for line in told.json["assumed"])
    assert "give the file (--csv)" in run("simulate", "serve", plan, "--rate", "1").err
    assert run("simulate", "serve", plan, "--csv", str(file), "--json").json["requests"] == 90
    both = run(*words, "--prompt", "100")
    assert "--csv has its own requests: leave out --prompt" in both.err
    file.write_text("arrival,prompt,output\n0,500,64\n1,50")
    torn = run(*words)
    assert torn.code == 2
    assert "requests.csv, line 3: expected 3 values (arrival, prompt, output), found 2: a torn line?" in torn.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--prompt", "lognormal:1024:1", "--output", "64"), "write lognormal:1024:1:"),
        (("--prompt", "uniform:1024-9000", "--output", "64"), "found requests of up to 9,064"),
        (("--prompt", "uniform:2048-1024", "--output", "64"), "write uniform:1024-2048"),
        (("--prompt", "long", "--output", "64"), "--prompt: expected"),
        (("--output", "64"), "--prompt is missing: tokens of requests, 1024 or uniform:128-2048"),
    ],
)
def test_lengths_that_cannot_be_are_said(run, words, said):
    told = run("plan", "serve", "llama-3-8b", "--on", "h100:1", *words)
    assert told.code == 2
    assert said in told.err


def test_json_has_the_names_that_are_promised(planned):
    told = planned
    for plan in told["plans"]:
        assert plan["prefill"]["layout"]
        assert plan["decode"]["layout"]
        assert plan["mode"] in ("aggregated", "disaggregated")
        assert plan["batch"] >= 1
        assert plan["bound"] in ("compute", "hbm") or plan["bound"].endswith(" communication")
        for name in ("ttft_s", "tpot_s", "throughput_tokens_per_s_per_chip", "cost_usd_per_million_output_tokens"):
            assert plan[name] > 0
        assert plan["memory_bytes"]["total"] > plan["memory_bytes"]["weights"] > 0
    points = [(p["tpot_s"], p["throughput_tokens_per_s_per_chip"]) for p in told["pareto"]]
    assert points == sorted(points)
    assert [y for _, y in points] == sorted(y for _, y in points)
    assert told["search"]["configurations"] > 1000
    assert told["search"]["cpu_s"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("llama-3-70b", "--on", "h100:1", "--prompt", "64"), "the leanest needs 1"),
        (("llama-3-8b", "--on", "h100:1", "--prompt", "64", "--mode", "disaggregated"), "h100:1 has one chip"),
        (
            ("llama-3-8b", "--on", "h100:2", "--prompt", "64", "--output", "1", "--mode", "disaggregated"),
            "an output of one token needs no other engine",
        ),
        (("llama-3-8b", "--on", "h100:1", "--prompt", "64", "--rate", "1e6"), "1e+06 requests/s (the most is"),
    ],
)
def test_what_cannot_be_served_says_what_would_help(run, words, said):
    told = run("plan", "serve", "--output", "8", *words)
    assert told.code == 3
    assert said in told.err


def test_chunks_are_those_of_the_engine_asked_for(run):
    """Of the longest request that fits, and of prompts that are longer than the engine's chunk; short ones go whole."""
    asked = ("estimate", "serve", "llama-3-8b", "--on", "h100:1", "--batch", "1", "--layout", "tensor=1")

    def told(prompt, *words):
        return run(*asked, "--no-changes", "--prompt", prompt, "--output", "64", *words, "--json").json

    def chunk(prompt, *words):
        return told(prompt, *words)["plans"][0]["prefill"]["chunk_tokens"]

    def longest(*words):
        return told("512", *words)["frontier"][0]["longest_request_tokens"]

    assert chunk("8128") is None
    assert chunk("100", "--chunk", "50") == 50
    assert longest() == longest("--tool", "sglang") > longest("--chunk", "none") == longest("--tool", "tensorrt-llm")
    assert "expected whole numbers" in run(*asked, "--prompt", "64", "--output", "8", "--chunk", "0.5").err


def test_a_longer_context_is_asked_for_and_warned_of(run, tmp_path):
    asked = ["--on", "h100:2", "--prompt", "6000", "--output", "256", "--batch", "4", "--layout", "tensor=2"]
    refused = run("estimate", "serve", "llama-2-13b", *asked)
    assert refused.code == 2
    assert "or --context 6256 to serve it beyond that all the same" in " ".join(refused.err.split())
    saved = str(tmp_path / "plan.json")
    told = run("estimate", "serve", "llama-2-13b", *asked, "--context", "6256", "--save", saved)
    words = " ".join(told.out.split())
    assert "note: requests of 6,256 tokens exceed the 4,096 that the model was made for" in words
    assert "runs in vllm, sglang, tensorrt-llm bounds" in words, "our own engine reads no further"
    assert "--max-model-len 6256" in run("export", saved, "--to", "vllm").out
    assert run("simulate", "serve", saved, "--rate", "1", "--requests", "20").code == 0
    learned = run("estimate", "serve", "gpt2-xl", *asked, "--context", "8192")
    assert "gpt2-xl was made for 1,024 tokens" in learned.err, "learned positions end with their table"
