"""The answers of `plan train` and `estimate train`, for layouts written down here."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from meshwise.core.units import format_count, format_money
from meshwise.costs.calibration import IDENTITY
from meshwise.costs.calibration_files import calibration_text
from meshwise.costs.fabric import Fabric
from meshwise.costs.fitted import find_calibration
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.spread import WIDTH
from meshwise.hardware import load_chip, parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.report.plan import estimate_report, plan_report
from meshwise.search import Baseline, Found, Plan, PlanResult, SearchResult
from meshwise.sharding.layout import Layout

REASON = "468 tokens per chip is under the 850 this network needs"


def make(tensor: int, fsdp: int, *, tokens: str | None = "15T") -> Plan:
    """LLaMA-3-8B on 64 TPU v5p: tensor along z, fsdp along x, y and what is left of z."""
    cluster = parse_cluster("v5p:4x4x4")
    job = TrainingJob(batch_tokens="1Mi", seq_len="4096", tokens=tokens)
    wires = (("tensor", (1, 1, tensor)), ("fsdp", (4, 4, 4 // tensor)))
    layout = Layout(tensor=tensor, fsdp=fsdp, micro_batch=256 // fsdp, wires=wires)
    return Plan.of(TrainingProblem(load_model("llama-3-8b"), job, cluster, IDENTITY), layout, Fabric.of(cluster))


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return [make(1, 64), make(4, 16)]


def shown(report, *, explain: bool = False, whole: bool = False) -> str:
    console = Console(file=io.StringIO(), width=80, markup=False, highlight=False, color_system=None)
    console.print(report.renderable(explain=explain, whole=whole))
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def planning(plans) -> PlanResult:
    found = tuple(
        Found(p.layout, p.fabric, 1.0, p.estimate.step_time.expected / p.estimate.tokens, p.estimate.memory["total"])
        for p in plans
    )
    search = SearchResult(found, found, 123456, 65432, 234567, 1000, 1e9, 0.61)
    baselines = (
        Baseline("FSDP alone", REASON, 1.5, 2e10, True),
        Baseline("nothing", "cannot run", float("inf"), 9e99, False),
    )
    return PlanResult(plans=tuple(plans), reasons=("it has enough tokens per chip",), rejected=baselines, search=search)


def planned(plans):
    return plan_report(planning(plans), {})


def test_the_first_line_is_the_answer(plans):
    first = shown(planned(plans)).splitlines()[0]
    best = plans[0]
    assert first.startswith("Best: fsdp=64: ")
    assert f"{100 * best.estimate.mfu:.1f} % MFU, " in first
    assert first.count("$") == 1
    without = shown(estimate_report(planning([make(1, 64, tokens=None)]), {})).splitlines()[0]
    assert without.startswith("fsdp=64: ")
    assert without.endswith("-bound")


def test_everything_fits_80_columns(plans):
    text = shown(planned(plans), explain=True)
    assert max(map(len, text.splitlines())) <= 80


def test_reasons_memory_terms_wires_and_search_are_shown(plans):
    text = shown(planned(plans), whole=True)
    for words in (
        "- FSDP alone: 468 tokens per chip is under the 850 this network needs",
        "llama-3-8b on 64 x TPU v5p, 15T tokens",
        "- it has enough tokens per chip",
        "v5p:4x4x4 -> 64 x TPU v5p, 4x4x4 torus (all axes wrap), 16 hosts",
        "123,456 layouts examined, 65,432 priced (1,000 do not fit) in 0.61 CPU-seconds",
        "on x 4 x y 4 x z 4",
        "of 459 TFLOP/s x 64 chips",
        "remat=full, 1 microbatch of 4",
        "optimizer",
    ):
        assert words in text


def test_the_promised_names(plans):
    told = json.loads(json.dumps(planned(plans).envelope(), allow_nan=False))
    for plan, one in zip(plans, told["plans"], strict=True):
        assert one["layout"] == dict(plan.layout.sizes)
        estimate = one["estimate"]
        assert estimate["step_time_s"] == {
            "lower": plan.estimate.step_time.lower,
            "expected": plan.estimate.step_time.expected,
            "upper": plan.estimate.step_time.upper,
        }
        assert sum(estimate["terms"].values()) == pytest.approx(estimate["step_time_s"]["expected"], rel=1e-12)
        classes = {k: v for k, v in estimate["memory_bytes"].items() if k != "total"}
        assert sum(classes.values()) == pytest.approx(estimate["memory_bytes"]["total"], rel=1e-12)
        assert estimate["mfu"] == plan.estimate.mfu
        assert estimate["bound"] == plan.estimate.bound
        run = one["training"]
        assert run["chip_hours"] == pytest.approx(24 * 64 * run["days"], rel=1e-12)
        assert run["cost_usd"] == pytest.approx(run["chip_hours"] * plan.problem.cluster.price_per_chip_hour, rel=1e-12)
    assert [(r["name"], r["reason"]) for r in told["rejected"]] == [("FSDP alone", REASON), ("nothing", "cannot run")]
    assert told["rejected"][1]["slowdown"] is None  # JSON has no infinity
    assert told["search"]["strategies"] == 123456
    assert told["search"]["cpu_s"] == 0.61


def test_what_is_assumed_of_context_and_left_out_of_the_model_is_said(plans):
    words = "causal attention is dealt out evenly over the context shards"
    row = plans[0]
    wires = (("context", (1, 1, 4)), ("fsdp", (4, 4, 1)))
    layout = Layout(context=4, fsdp=16, micro_batch=16, wires=wires)
    cut = Plan.of(row.problem, layout, row.fabric)
    for report in (plan_report, estimate_report):
        assert sum(line.startswith(words) for line in report(planning([cut]), {}).assumed) == 1
        assert not any(line.startswith(words) for line in report(planning([row]), {}).assumed)
        left_out = report(planning([row]), {}).not_modelled
        assert "sends between stages that wait for other traffic on their links" in left_out
        assert not any("expert" in line or "schedule" in line or "ring" in line for line in left_out)


def test_the_least_cost_is_said_without_a_token_budget():
    row = make(4, 16, tokens=None)
    price = row.problem.cluster.price_per_chip_hour
    seconds = 1e9 / row.estimate.tokens * row.estimate.step_time.expected
    dollars = 64 * price * seconds / 3600
    told = plan_report(planning([row]), {"objective": "cost"}).envelope()
    assert told["plans"][0]["cost_usd_per_billion_tokens"] == pytest.approx(dollars, rel=1e-12)
    assert told["answer"].endswith(f", {format_money(dollars)} a billion tokens")
    assert any(line.startswith(f"{format_money(price)} a chip-hour: ") for line in told["assumed"])
    assert "a billion tokens" not in plan_report(planning([row]), {"objective": "time"}).answer
    run = make(4, 16)
    assert run.training.cost_usd == pytest.approx(15e12 / 1e9 * run.cost_usd_per_billion_tokens, rel=1e-12)


def test_without_a_price_cost_is_said_in_chip_hours():
    row = make(4, 16, tokens=None)
    cluster = row.problem.cluster
    free = cluster.replace(chip=cluster.chip.replace(price_per_chip_hour=None))
    row = Plan.of(replace(row.problem, cluster=free), row.layout, row.fabric)
    told = plan_report(planning([row]), {"objective": "cost"}).envelope()
    assert told["plans"][0]["cost_usd_per_billion_tokens"] is None
    hours = 64 * row.estimate.step_time.expected / row.estimate.tokens * 1e9 / 3600
    assert told["answer"].endswith(f", {format_count(hours)} chip-hours a billion tokens")


def test_all_of_the_memory_is_filled_where_nothing_fits_in_less(plans):
    assert planning(plans).memory_share == 1.0
    assert "plans may fill all of the HBM: none was found in 90.0 % of it" in " ".join(planned(plans).assumed)


def test_without_a_token_budget_there_is_no_run():
    told = estimate_report(planning([make(4, 16, tokens=None)]), {}).envelope(explain=True)
    assert told["command"] == "estimate train"
    assert told["plans"][0]["training"] is None
    assert "days" not in [e["name"] for e in told["explanations"]]


def test_workings_name_every_term_that_takes_time(plans):
    explanations = planned(plans).details().explanations
    names = [e.name for e in explanations]
    assert {name for name, seconds in plans[0].estimate.terms.items() if seconds} < set(names)
    assert {"expected step time", "lower bound", "MFU", "memory", "days", "chip-hours", "cost"} < set(names)
    assert all(e.formula and e.substitution and e.result and e.source for e in explanations)


def fitted(on: str, model: str, calibration: str = "fitted") -> Plan:
    """One layout under a calibration that was compared with measured steps."""
    cluster = parse_cluster(on)
    job = TrainingJob(batch_tokens="1Mi", seq_len="4096")
    layout = Layout(fsdp=8, micro_batch=1, wires=(("fsdp", (8,)),))
    problem = TrainingProblem(load_model(model), job, cluster, find_calibration(calibration, cluster.chip))
    return Plan.of(problem, layout, Fabric.of(cluster))


def test_a_calibration_that_was_compared_with_steps_gives_an_interval():
    dense, mixture = fitted("h100-sxm:8", "llama-3-8b"), fitted("h100-sxm:8", "mixtral-8x7b")
    inherited = fitted("mi300x:8", "llama-3-8b")
    widths = []
    for plan in (dense, mixture, inherited):
        told = json.loads(json.dumps(estimate_report(planning([plan]), {}).envelope(), allow_nan=False))
        step = told["plans"][0]["estimate"]["step_time_s"]
        low, high = step["interval_80"]
        assert step["lower"] <= low < step["expected"] < high
        assert low * high == pytest.approx(step["expected"] ** 2), "a factor, both ways"
        widths.append(high / low)
    assert widths[0] < min(widths[1:]), "mixtures and families that were not measured are less sure"
    text = shown(estimate_report(planning([mixture]), {}), whole=True)
    assert "Four of five such steps take" in text
    assert "no overlap, expected rates" in text
    assert f"software {9 * WIDTH:.1f} %" in text
    assert f"mixture {14 * WIDTH:.1f} %" in text
    assert "launches" in text
    assert "launches" not in shown(estimate_report(planning([dense]), {}), whole=True)
    assert f"family {14 * WIDTH:.1f} %" in shown(estimate_report(planning([inherited]), {}), whole=True)


def test_explain_lists_the_constants_of_such_a_calibration():
    report = estimate_report(planning([fitted("h100-sxm:8", "llama-3-8b", "fitted+eager-2023")]), {})
    told = json.loads(json.dumps(report.envelope(explain=True), allow_nan=False))
    constants = {c["name"]: c for c in told["calibration"]["constants"]}
    used = find_calibration("fitted+eager-2023", load_chip("h100-sxm"))
    assert constants["elementwise_passes"]["value"] == pytest.approx(used.elementwise_passes, rel=0.005)  # 3 digits
    assert constants["hbm_efficiency"]["unit"] == "share of HBM bandwidth"
    assert "Dao 2023" in constants["attention_efficiency"]["source"]
    assert all(c["unit"] and c["source"] for c in constants.values())
    assert "80 % interval of the step time" in [e["name"] for e in told["explanations"]]
    text = shown(report, explain=True)
    assert "constant of fitted+eager-2023" in text
    assert "e^(1.28 x sqrt(" in text
    assert f"{0.04 * WIDTH:.3f}^2" in text, "a generation without more releases"


def test_other_calibrations_have_no_interval(plans):
    report = planned(plans)
    assert "such steps take" not in shown(report, explain=True)
    assert "calibration" not in report.envelope(explain=True)
    assert "interval_80" not in json.dumps(report.envelope())


def test_constants_of_own_measurements_say_so(tmp_path):
    chip, file = parse_cluster("h100-sxm:8").chip, tmp_path / "ours.json"
    base = find_calibration("fitted", chip)
    refined = replace(base, matmul_efficiency=0.6, attention_efficiency=0.6)
    document = json.loads(calibration_text(chip.name, base, refined, {"rows": 4}))
    del document["constants"]["attention_efficiency"]  # as much as matmuls at most, whatever the base's
    file.write_text(json.dumps(document), encoding="utf-8")
    report = estimate_report(planning([fitted("h100-sxm:8", "llama-3-8b", str(file))]), {})
    told = report.envelope(explain=True)
    constants = {c["name"]: c for c in told["calibration"]["constants"]}
    assert constants["matmul_efficiency"]["value"] == 0.6
    assert constants["matmul_efficiency"]["source"] == "your own measurements"
    assert constants["gap"]["source"] != "your own measurements"
    assert len(told["plans"][0]["estimate"]["step_time_s"]["interval_80"]) == 2
