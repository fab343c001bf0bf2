"""What workings print is true: formulas with numbers in them, worked out from the text, give the estimate's numbers."""

import io
import json
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

import meshwise
from meshwise.core.units import parse_duration
from meshwise.costs.calibration import IDENTITY, default_calibration
from meshwise.costs.explain import collectives_of, paddings, work_out
from meshwise.costs.fabric import Fabric
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.report.bounds import explain_lower, explain_upper, upper_parts
from meshwise.report.formulas import explain_time, leg_formula
from meshwise.report.memory import explain_memory, padding_words
from meshwise.report.plan import estimate_report
from meshwise.report.serve_breakdown import serve_explanations
from meshwise.search import Plan, PlanResult, SearchResult
from meshwise.sharding.layout import MESH_AXES, Layout

#: Three digits are printed of each number; a product of three is good to this.
PRINTED = {"rel": 0.015}
UNITS = {
    "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "%": 0.01,
    "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "GB/s": 1e9, "TB/s": 1e12, "FLOP/s": 1.0,
    **{f"{p}FLOP{s}": 10.0**n for p, n in zip("MGTPE", (6, 9, 12, 15, 18), strict=True) for s in ("s", "/s")},
}  # fmt: skip


def plan(
    on="v5p:4x4x4", model="llama-3-8b", *, calibrated=True, seq_len=4096, precision="bf16", changes=None, **layout
) -> Plan:
    """A layout along the dimensions of a network: `tensor=(1, 1, 4)` gives the extents."""
    wires = tuple((axis, value) for axis, value in layout.items() if axis in MESH_AXES)
    sizes = {axis: math.prod(extents) for axis, extents in wires}
    choices = {name: value for name, value in layout.items() if name not in MESH_AXES}
    whole = Layout(**sizes, **choices, wires=wires)
    job = TrainingJob(
        batch_tokens=str(whole.sequences * seq_len), seq_len=str(seq_len), precision=precision, **(changes or {})
    )
    cluster = parse_cluster(on)
    calibration = default_calibration(cluster.chip) if calibrated else IDENTITY
    return Plan.of(TrainingProblem(load_model(model), job, cluster, calibration), whole, Fabric.of(cluster))


PLANS = {
    "torus": lambda: plan(fsdp=(4, 4, 1), tensor=(1, 1, 4), remat="attention"),
    "pipeline": lambda: plan(
        fsdp=(2, 1, 1), data=(2, 1, 1), tensor=(1, 4, 1), stage=(1, 1, 4),
        zero=1, num_microbatches=8, remat="full", precision="mixed", calibrated=False,
    ),
    "lines": lambda: plan("v5e:4x4", fsdp=(4, 2), tensor=(1, 2)),
    "slices": lambda: plan("v5p:4x4x4*2", fsdp=(4, 4, 4, 1), data=(1, 1, 1, 2)),
    "one group over two slices": lambda: plan("v5e:4x4*2", fsdp=(4, 4, 2)),
    "switches": lambda: plan("h100:64", tensor=(4, 2), fsdp=(2, 4), seq_len=8192),
    "switches that add": lambda: plan("h100:64+sharp", data=(2, 8), tensor=(4, 1)),
    "heads": lambda: plan("h100:16", tensor=(8, 2), calibrated=False),
    "fp8 and Muon": lambda: plan(
        "h100:8", fsdp=(4,), tensor=(2,), remat="matmuls", precision="fp8-block", changes={"optimizer": "muon"}
    ),
    "fp8 in a pipeline": lambda: plan("h100:8", stage=(4,), fsdp=(2,), num_microbatches=8, precision="fp8"),
    "some layers recompute": lambda: plan("h100:8", fsdp=(8,), remat="attention", remat_layers=20),
    "all on the host": lambda: plan(
        "h100:8", stage=(2,), fsdp=(4,), remat="matmuls", num_microbatches=4, precision="mixed",
        offload=("optimizer", "parameters", "activations"), offload_layers=20,
    ),
    "optimizer on the host": lambda: plan("v5p:4x4x4", fsdp=(4, 4, 4), offload=("optimizer",)),
    "experts over nodes": lambda: plan(
        "h100:32", "mixtral-8x7b", expert=(4, 2), data=(2, 2), zero=1, fully_sharded=False, remat="matmuls"
    ),
    "experts bounded": lambda: plan("h100:64", "mixtral-8x7b", expert=(2, 4), fsdp=(4, 2), calibrated=False),
    "experts on a node each": lambda: plan("a100:16", "mixtral-8x7b", expert=(1, 2), fsdp=(8, 1), remat="attention"),
    "experts in DualPipe": lambda: plan(
        "h100:64", "mixtral-8x7b", expert=(8, 1), stage=(1, 8), schedule="dualpipe", num_microbatches=16, seq_len=2048,
        precision="fp8-block", fully_sharded=False, remat="attention",
    ),
    "QLoRA": lambda: plan("h100:8", fsdp=(8,), remat="full", changes={"fine_tune": "qlora", "optimizer": "adafactor"}),
}  # fmt: skip


@pytest.fixture(scope="module", params=PLANS)
def any_plan(request) -> Plan:
    return PLANS[request.param]()


TOKEN = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?|[A-Za-z_]+(?:/s)?|%|[-+/(),]")


def evaluated(text: str) -> float:
    """Work out `80 layer x 2.5 ms (remark) + 2 x (4 - 1) x 3 ms; remarks`; V is 1, names are left out."""
    out: list[str] = []
    operand, remark = False, 0  # whether a value stands before; open brackets of a remark
    for word in TOKEN.findall(text.split(";", maxsplit=1)[0]):
        if remark or (word == "(" and operand):
            remark += {"(": 1, ")": -1}.get(word, 0)
        elif word == "x" or word in "-+/(),":
            out.append("*" if word == "x" else word)
            operand = word == ")"
        elif word[0].isdigit():
            out.append(word.rstrip(",").replace(",", "") + ("," if word.endswith(",") else ""))
            operand = True
        elif word in UNITS:
            out[-1] = f"({out[-1]}*{UNITS[word]!r})"
        elif word in {"max", "V"}:
            out.append({"max": "max", "V": "1.0"}[word])
            operand = word == "V"
    return float(eval("".join(out), {"max": max}))  # noqa: S307  # of the tokens above


def workings_of(row: Plan):
    return work_out(row.problem, row.fabric, row.layout)


def test_every_term_follows_from_its_substitution(any_plan):
    terms = any_plan.estimate.terms
    shown = {e.name: e for e in explain_time(workings_of(any_plan), terms)}
    assert {name for name, seconds in terms.items() if seconds} <= set(shown)
    for name, seconds in terms.items():
        if seconds:
            assert evaluated(shown[name].substitution.replace("bytes", "")) == pytest.approx(seconds, **PRINTED), name


def test_every_memory_class_follows_from_its_substitution(any_plan):
    memory = any_plan.estimate.memory
    shown = explain_memory(workings_of(any_plan), memory, paddings(any_plan.problem, any_plan.layout))
    names = [name for name, size in memory.items() if size and name != "total"]
    assert [e.name for e in shown] == [name.replace("_", " ") for name in names]
    for name, e in zip(names, shown, strict=True):
        assert evaluated(e.substitution) == pytest.approx(memory[name], **PRINTED), e


def test_the_upper_bound_is_the_sum_of_its_parts(any_plan):
    w, upper = workings_of(any_plan), any_plan.estimate.step_time.upper
    assert sum(upper_parts(w).values()) == pytest.approx(upper, rel=1e-9)
    assert evaluated(explain_upper(w, upper).substitution) == pytest.approx(upper, **PRINTED)


def test_every_resource_follows_from_its_substitution(any_plan):
    resources = {name: seconds for name, seconds in any_plan.estimate.resources.items() if seconds}
    shown = explain_lower(workings_of(any_plan), resources)
    assert len(shown) == len(resources) >= 2
    for e, (name, seconds) in zip(shown, resources.items(), strict=True):
        assert name in e.name
        assert evaluated(e.substitution) == pytest.approx(seconds, **PRINTED), e


def test_whole_sums_are_shown_whole_and_bounded_by_what_each_replica_needs():
    """ZeRO in DeepSpeed: the table has the sum that all replicas get, the bound the ReduceScatter that would do."""
    for whole, zero in ((1, 1), (2, 2), (0, 1), (1, 2)):
        row = plan("h100:8", data=(8,), zero=zero)
        calibration = replace(row.problem.calibration, whole_sums=whole)
        row = Plan.of(replace(row.problem, calibration=calibration), row.layout, row.fabric)
        table = next(c for c in workings_of(row).collectives if c.block == "embed" and "d_w_embed" in c.tensors)
        assert table.moves == (f"d_w_embed[V, D]{{U_data}} -> d_w_embed[V, D{'' if whole >= zero else '_data'}]",)
        term = "data" if zero == 1 else "fsdp"
        (network,) = explain_lower(workings_of(row), {term: row.estimate.resources[term]})
        assert ("ReduceScatter" in network.formula) == (whole >= zero)
        assert evaluated(network.substitution) == pytest.approx(row.estimate.resources[term], **PRINTED)


def test_model_flops_and_utilisation_follow_from_their_substitutions(any_plan):
    shown = {e["name"]: e for e in told(any_plan, explain=True)["explanations"]}
    flops, mfu = shown["model FLOPs"], shown["MFU"]
    assert evaluated(flops["substitution"]) == pytest.approx(any_plan.estimate.model_flops, **PRINTED)
    assert evaluated(mfu["substitution"]) == pytest.approx(any_plan.estimate.mfu, **PRINTED)


def test_every_leg_follows_from_its_formula(any_plan):
    rows = collectives_of(any_plan.problem, any_plan.fabric, any_plan.layout)
    assert rows
    for c in rows:
        for leg in c.path.legs:
            text = leg_formula(c.kind, leg, c.path)
            assert evaluated(text) == pytest.approx(leg.seconds_per_byte, rel=0.01), text


def test_every_explanation_has_a_source_and_sheets_have_dates(any_plan):
    w, e = workings_of(any_plan), any_plan.estimate
    shown = [*explain_time(w, e.terms), *explain_memory(w, e.memory, ())]
    assert all(x.name and x.formula and x.substitution and x.result and x.source for x in shown)
    chip = any_plan.problem.cluster.chip
    forward = next(x for x in shown if x.name == "forward")
    for field in ("flops_per_s.bf16", "hbm_bandwidth"):
        assert f"{chip.source(field).title}, {chip.source(field).date}" in forward.source


def test_exposed_shares_follow_from_what_covers_them():
    shown = [e for e in explain_time(workings_of(PLANS["torus"]()), {}) if e.name.startswith("exposed share")]
    assert any("rule 2" in e.source for e in shown)
    assert any("rule 3" in e.source for e in shown)
    for e in shown:
        exposed = evaluated(e.substitution)
        assert exposed == pytest.approx(float(e.result.split()[0]) / 100, abs=0.02), e


def told(row: Plan, *, explain: bool):
    found = PlanResult(plans=(row,), reasons=("so",), rejected=(), search=SearchResult((), (), 1, 1, 1, 0, 1.0, 0.0))
    return estimate_report(found, {}).envelope(explain=explain)


def test_json_has_the_collectives_of_every_plan_and_workings_on_demand(any_plan):
    plain = json.loads(json.dumps(told(any_plan, explain=False), allow_nan=False))
    assert "workings" not in plain
    estimate = plain["plans"][0]["estimate"]
    for term in ("tensor", "context", "fsdp", "data"):
        rows = [c for c in estimate["collectives"] if c["term"] == term]
        assert sum(c["exposed_s"] for c in rows) == pytest.approx(estimate["terms"][term], rel=1e-9, abs=1e-15)
        assert sum(c["hidden_s"] for c in rows) == pytest.approx(estimate["hidden_s"][term], rel=1e-9, abs=1e-15)
    promised = {
        "pass",
        "kind",
        "mesh_axes",
        "tensors",
        "bytes",
        "count_per_step",
        "seconds_per_step",
        "exposed_s",
        "hidden_s",
    }
    assert all(promised < set(c) for c in estimate["collectives"])
    workings = json.loads(json.dumps(told(any_plan, explain=True), allow_nan=False))["workings"]
    assert len(workings["collectives"]) == len(estimate["collectives"])
    forward = sum(b["copies"] * b["num_microbatches"] * b["passes"]["forward"]["seconds"] for b in workings["blocks"])
    assert forward == pytest.approx(estimate["terms"]["forward"], rel=1e-9)


def test_tables_fit_80_columns_and_name_operations_and_moves(any_plan):
    console = Console(file=io.StringIO(), width=80, markup=False, highlight=False, color_system=None)
    found = PlanResult(
        plans=(any_plan,), reasons=("so",), rejected=(), search=SearchResult((), (), 1, 1, 1, 0, 1.0, 0.0)
    )
    console.print(estimate_report(found, {}).renderable(explain=True))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    rows = collectives_of(any_plan.problem, any_plan.fabric, any_plan.layout)
    for c in rows:
        assert any(
            line.startswith(f"{c.when.value} {c.kind.value} ") and line.endswith(str(c.rule))
            for line in map(str.rstrip, lines)
        )
    together = " ".join(" ".join(lines).split())
    for c in rows:
        assert c.moves[0] in together
    inside = "" if any_plan.problem.routing is None else "expert."
    for name in ("q", "attention", f"{inside}gate", f"{inside}down"):
        assert any(line.startswith(f"{name} ") for line in lines)


def test_padding_and_copied_heads_are_said_where_assumptions_are():
    row = PLANS["heads"]()
    (heads,) = [p for p in paddings(row.problem, row.layout) if p.repeated]
    words = padding_words(heads)
    assert words.startswith("K = 8 over 16 (tensor): each key/value head is held by 2 chips (+100 %): ")
    assert words in told(row, explain=False)["assumed"]


def test_layers_that_do_not_divide_over_stages_are_said():
    """26 layers over 4 stages: the slowest has 7."""
    row = plan(model="gemma-3-1b", fsdp=(4, 4, 1), stage=(1, 1, 4), num_microbatches=4)
    words = "26 layers over 4 stages: 7 on the slowest, 6.5 on average (+7.7 %)"
    assert words in told(row, explain=False)["assumed"]
    assert not any("on the slowest" in line for line in told(PLANS["pipeline"](), explain=False)["assumed"])


def test_what_only_the_first_stage_does_is_not_in_the_slowest_stage(any_plan):
    rows = collectives_of(any_plan.problem, any_plan.fabric, any_plan.layout)
    assert all(c.count_per_step > 0 for c in rows)
    both_ends = any_plan.layout.stage == 1 or any_plan.layout.schedule == "dualpipe"  # on one device
    assert any(c.block == "embed" for c in rows) == both_ends


def test_an_operation_of_a_served_step_is_the_sum_that_is_shown():
    """The longer of two, and what its kernel waits for: on H100s some operations wait and some do not."""
    answer = meshwise.estimate_serve("llama-3-8b", on="h100:8", prompt=1024, output=256, layout="tensor=8", batch=16)
    told = serve_explanations(answer.problem, answer)
    shown = [e for e in told if e.formula.startswith("the longer of FLOPs / rate")]
    assert {"+" in e.substitution for e in shown} == {True, False}
    for each in shown:
        times = re.findall(r"in ([\d.]+ \w+)", each.substitution)
        waits = re.findall(r"\+ ([\d.]+ \w+)$", each.substitution)
        total = max(map(parse_duration, times)) + sum(map(parse_duration, waits))
        assert total == pytest.approx(parse_duration(each.result.split(",")[0]), rel=0.01)
