"""Targets that are percentiles: plans are sent requests, and the answer is what `simulate serve` says of the plan."""

import pytest

MODEL = ("plan", "serve", "llama-3-8b", "--on", "h100:2")
DRAWN = ("--prompt", "uniform:256-1792", "--output", "uniform:32-224", "--max-batch", "32")


def test_with_a_rate_the_answer_is_the_simulators(run, tmp_path):
    plan = str(tmp_path / "plan.json")
    words = ("--rate", "8", "--max-ttft", "p99:400ms", "--max-tpot", "p90:20ms", "--save", plan)
    told = run(*MODEL, *DRAWN, *words, "--json")
    assert told.code == 0, told.err
    best = told.json["plans"][0]["simulated"]
    assert best["rate_requests_per_s"] == 8
    assert best["ttft_s"]["p99"] <= 0.4
    assert best["tpot_s"]["p90"] <= 0.02
    chips = [p["num_chips"] for p in told.json["plans"]]
    assert chips == sorted(chips)
    again = run("simulate", "serve", plan, "--rate", "8", "--requests", str(best["requests"]), "--json").json
    for name in ("ttft_s", "tpot_s"):
        assert again[name] == best[name]
    assert any("percentiles: of " in line for line in told.json["assumed"])


def test_without_a_rate_it_is_the_most_that_keeps_the_targets(run):
    load = ("--prompt", "1024", "--output", "64", "--max-batch", "16", "--mode", "aggregated")
    told = run(*MODEL, *load, "--max-tpot", "p99:12ms", "--within", "0", "--json")
    assert told.code == 0, told.err
    plans = told.json["plans"]
    rates = [p["simulated"]["throughput_tokens_per_s_per_chip"] for p in plans]
    assert rates == sorted(rates, reverse=True)
    for p in plans:
        assert p["simulated"]["rate_requests_per_s"] * 64 / p["num_chips"] == pytest.approx(
            p["simulated"]["throughput_tokens_per_s_per_chip"]
        )
    for words in (("mean:12ms",), ("12ms", "--no-simulate")):
        mean = run(*MODEL, *load, "--max-tpot", *words, "--json").json
        assert "simulated" not in mean["plans"][0]
        assert "not simulated: targets are means" in mean["answer"]
    # A queue counts as one that grows from 2 % on, and capacities are found to 1 %.
    assert rates[0] < 1.03 * mean["plans"][0]["throughput_tokens_per_s_per_chip"]


def test_recorded_requests_are_sent_as_they_came(run, tmp_path):
    file = tmp_path / "requests.csv"
    lines = [f"{0.1 * i},{400 + 10 * (i % 60)},{32 + i % 64}" for i in range(600)]
    file.write_text("\n".join(("arrival,prompt,output", *lines)))
    words = ("--csv", str(file), "--rate", "8", "--max-ttft", "p95:400ms", "--max-batch", "32", "--json")
    told = run("plan", "serve", "llama-3-8b", "--on", "h100:2", *words)
    assert told.code == 0, told.err
    assert told.json["plans"][0]["simulated"]["requests"] == 600


@pytest.mark.slow
def test_clusters_are_ranked_by_what_was_simulated(run):
    """Slow: plans of two clusters are simulated. The ranking over clusters takes what came of it."""
    words = ("--prompt", "512", "--output", "64", "--max-batch", "16", "--max-ttft", "p99:600ms", "--rate", "4")
    told = run("plan", "serve", "llama-3-8b", "--on", "h100:2,v5e:2x2", *words, "--json").json
    assert all("simulated" in p for p in told["plans"])
    assert {p["cluster"] for p in told["plans"]} == {"h100:2", "v5e:2x2"}
    assert told["inputs"]["max_ttft_of"] == "p99"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--rate", "8", "--max-ttft", "p99:1us"), 3, "TTFT within 1 us (the least is"),
        (("--rate", "1e6", "--max-tpot", "p99:20ms"), 3, "requests/s (the most is"),
        (("--max-tpot", "p99:20"), 2, "--max-tpot: "),
        (("--max-tpot", "p0:20ms"), 2, "expected a percentile between 0 and 100, found 0 in 'p0:20ms'"),
        (("--max-tpot", "worst:20ms"), 2, "expected a time such as 50ms, p95:50ms or mean:50ms, found 'worst:20ms'"),
        (("--max-tpot", "0ms"), 2, "expected more than zero"),
        (("--max-tpot", "p99:20ms", "--no-simulate"), 2, "a percentile needs simulated requests, found 'p99:20ms'"),
    ],
)
def test_what_cannot_be_is_said(run, words, code, said):
    told = run(*MODEL, *DRAWN, *words)
    assert told.code == code
    assert said in told.err
