"""`plan serve` on several clusters, in several precisions: which is best of all, what formats buy, and the picture."""

import re
from dataclasses import replace
from itertools import permutations

import pytest

import meshwise
from meshwise.search.serving.alternatives import Alternative, plan_alternatives

LOAD = ("--prompt", "512", "--output", "128", "--max-batch", "16")
MODEL = ("plan", "serve", "llama-3-8b")


def test_plans_are_ranked_over_clusters_by_what_tokens_cost(run):
    told = run(*MODEL, "--on", "h100:2,v5e:2x2", *LOAD, "--top", "6", "--json").json
    costs = [p["cost_usd_per_million_output_tokens"] for p in told["plans"]]
    assert all(cost <= 1.01 * min(costs[i:]) for i, cost in enumerate(costs))
    assert told["ranked_by"] == "dollars for output tokens"
    assert {p["cluster"] for p in told["plans"]} <= {"h100:2", "v5e:2x2"}
    alone = [run(*MODEL, "--on", name, *LOAD, "--json").json for name in ("h100:2", "v5e:2x2")]
    assert costs[0] <= 1.01 * min(a["plans"][0]["cost_usd_per_million_output_tokens"] for a in alone)
    assert len(told["pareto"]) == sum(len(a["pareto"]) for a in alone)
    assert told["search"]["configurations"] == sum(a["search"]["configurations"] for a in alone)


def test_without_prices_throughput_decides_and_a_rate_asks_for_the_cheapest_chips(run):
    told = run(*MODEL, "--on", "a100:1,h100:1", *LOAD, "--json").json
    priced = all(a["plan"]["cost_usd_per_million_output_tokens"] is not None for a in told["alternatives"])
    assert told["ranked_by"] == ("dollars for output tokens" if priced else "output tokens per second and chip")
    told = run(*MODEL, "--on", "h100:2,v5e:2x2", *LOAD, "--rate", "2", "--json").json
    assert told["ranked_by"] == "dollars a second for all chips"
    assert all(p["requests_per_s"] >= 2 for p in told["plans"])


def test_formats_are_chosen_among_and_what_they_buy_is_said(run):
    told = run(*MODEL, "--on", "h100:1", "--precision", "bf16,fp8;weights=int8,kv=int8", *LOAD, "--json").json
    assert told["plans"][0]["precision"] != "bf16"
    steps = {f["precision"]: f["plan"]["decode"]["seconds"]["expected"] for f in told["formats"]}
    assert list(steps) == ["bf16", "fp8", "weights=int8,kv=int8"]
    assert steps["fp8"] < steps["bf16"]
    assert len({(f["plan"]["decode"]["layout"], f["plan"]["batch"]) for f in told["formats"]}) == 1


def test_a_format_in_which_the_best_plan_would_not_fit_says_so(run):
    words = ("--on", "h100:1", "--precision", "bf16,fp8", "--prompt", "2048", "--output", "512")
    told = run(*MODEL, *words, "--json").json
    fits = {f["precision"]: f["plan"]["fits"] for f in told["formats"]}
    assert fits == {"bf16": False, "fp8": True}
    assert "bf16, does not fit" in run(*MODEL, *words).out


def test_what_cannot_be_is_left_out_with_its_reason(run):
    told = run(*MODEL, "--on", "v5e:1,h100:1", "--precision", "bf16,fp8", *LOAD)
    assert told.code == 0
    text = re.sub(r"\s+", " ", told.out)
    assert "v5e:1, fp8: precision fp8: needs fp8 matrix units" in text
    assert "v5e:1, bf16: nothing fits" in text
    none = run("plan", "serve", "llama-3-70b", "--on", "v5e:1,v5e:2x2", *LOAD)
    assert none.code == 3
    assert "v5e:2x2, bf16: nothing fits" in none.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--on", "h100:1,h100:1"), "--on: h100:1 is named twice"),
        (("--on", "h100:1", "--precision", "fp8,fp8"), "--precision: fp8 is named twice"),
        (("--on", "h100:1,nochip:4"), "nochip"),
        (("--on", "h100:1,,h100:2"), "--on: expected something on both sides of each ',', found 'h100:1,,h100:2'"),
        (("--on", "h100:1", "--precision", "bf16,,fp8"), "--precision: expected something on both sides of each ','"),
        (("--on", "h100:1", "--chunks", "256,"), "--chunk: expected something on both sides of each ','"),
        (("--on", "h100:1", "--precision", "bf16,fp7"), "unknown serving precision 'fp7'"),
    ],
)
def test_what_is_wrong_is_said(run, words, said):
    told = run(*MODEL, *words, *LOAD)
    assert told.code == 2
    assert said in told.err


@pytest.mark.parametrize("clusters", ["h100:2", "h100:2,v5e:2x2"])
def test_fronts_are_drawn(run, tmp_path, clusters):
    file, plan = tmp_path / "front.svg", tmp_path / "plan.json"
    told = run(*MODEL, "--on", clusters, *LOAD, "--svg", str(file), "--save", str(plan), "--json")
    assert told.code == 0
    svg = file.read_text()
    assert svg.startswith("<?xml")
    assert ("v5e:2x2, bf16" in svg) == ("," in clusters)
    again = run("estimate", "serve", str(plan), "--json").json["plans"][0]
    assert again["tpot_s"] == told.json["plans"][0]["tpot_s"]
    gone = run(*MODEL, "--on", clusters, *LOAD, "--svg", str(tmp_path / "none" / "front.svg"))
    assert "--svg" in gone.err


def test_python_compares_what_the_command_line_compares(run):
    found = meshwise.compare_serve("llama-3-8b", on=["h100:2", "v5e:2x2"], prompt=512, output=128, max_batch=16)
    told = run(*MODEL, "--on", "h100:2,v5e:2x2", *LOAD, "--json").json
    assert found.ranked[0][1].estimate.tpot.expected == told["plans"][0]["tpot_s"]
    with pytest.raises(meshwise.MeshwiseError, match="compare_serve"):
        meshwise.plan_serve("llama-3-8b", on="h100:1,h100:2", prompt=512, output=128)


def test_of_clusters_that_are_nearly_as_good_the_better_is_first_and_plans_of_one_stay_in_its_order():
    """Half a percent more throughput comes before half the time of a token, in whatever order clusters are given."""
    plain = meshwise.plan_serve("llama-3-8b", on="v5e:2x2", prompt=512, output=128, max_batch=16)
    best, *others = plain.plans
    assert others
    more = best.output_tokens_per_s * 1.005
    worse = replace(best, output_tokens_per_s=more / 1.2)  # first in its own ranking all the same
    sooner = replace(best, tpot=replace(best.tpot, expected=best.tpot.expected / 2))
    found = {
        "sooner": (sooner,),
        "more": (replace(best, output_tokens_per_s=more), *others),
        "own order": (worse, best),
    }
    for names in permutations(found):
        problems = {Alternative(name, "bf16"): plain.problem for name in names}
        plans = iter([replace(plain, plans=found[name], simulated=()) for name in names])
        ranked = plan_alternatives(problems, lambda *_, plans=plans: next(plans), 10).ranked
        assert list(dict.fromkeys(which.cluster for which, _ in ranked)) == ["more", "sooner", "own order"]
        for name, own in found.items():
            assert [p.estimate for which, p in ranked if which.cluster == name] == list(own)
