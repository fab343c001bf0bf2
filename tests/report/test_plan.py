"""The answers of `plan train` and `estimate train`, from numbers made up here."""

import io
import json

import pytest
from rich.console import Console

from meshwise.report.plan import PlanRow, Rejected, SearchStats, Training, estimate_report, plan_report


def row(fsdp: int = 1120, tensor: int = 8, step: float = 3.0, training: Training | None = None) -> PlanRow:
    return PlanRow(
        layout={"tensor": tensor, "context": 1, "fsdp": fsdp, "data": 1, "stage": 1},
        choices={"zero": 0, "remat": "full", "micro_batch": 1, "num_microbatches": 1},
        wires={"tensor": "x 8", "fsdp": "x 2 x y 20 x z 28"},
        num_chips=fsdp * tensor,
        tokens_per_step=4194304.0,
        lower=0.8 * step,
        expected=step,
        upper=1.5 * step,
        terms={"forward": 0.25 * step, "backward": 0.5 * step, "recompute": 0.25 * step, "fsdp": 0.0, "data": 0.0},
        hidden={"fsdp": 0.4},
        mfu=0.41,
        hfu=0.55,
        peak_words="459 TFLOP/s bf16 x 8,960 chips",
        memory={"parameters": 1.6e9, "optimizer": 6.4e9, "logits": 0.0},
        capacity=102e9,
        bound="compute-bound",
        training=training,
    )


RUN = Training(steps=3.6e6, days=44.1, chip_hours=9.5e6, cost_usd=39.8e6, energy_kwh=None)
STATS = SearchStats(strategies=123456, covered=234567, infeasible=1000, cpu_s=0.61)


def shown(report) -> str:
    console = Console(file=io.StringIO(), width=80, markup=False, highlight=False, color_system=None)
    console.print(report.renderable())
    return console.file.getvalue()


def plan(**more):
    rejected = [Rejected(name="pure FSDP", reason="468 tokens per chip is under the 850 this network needs")]
    rows = [row(training=RUN), row(2240, 4, 3.1, RUN)]
    return plan_report(rows, rejected, STATS, subject="llama-3-70b on 8,960 x TPU v5p", inputs={}, **more)


def test_the_first_line_is_the_answer():
    first = shown(plan()).splitlines()[0].rstrip()
    assert first == "Best: tensor=8,fsdp=1120: 3 s a step, 41.0 % MFU, 44.1 days, $39.8M"
    assert shown(estimate_report(row(), subject="", inputs={})).splitlines()[0].rstrip() == (
        "tensor=8,fsdp=1120: 3 s a step, 41.0 % MFU, compute-bound"
    )


def test_reasons_memory_terms_and_search_are_shown_within_80_columns():
    text = shown(plan())
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    for words in (
        "468 tokens per chip is under the 850 this network needs",
        "123,456 layouts priced (1,000 do not fit) in 0.61 CPU-seconds",
        "optimizer",
        "400 ms more are hidden",
        "of 459 TFLOP/s bf16 x 8,960 chips",
        "remat=full mb=1x1",
    ):
        assert words in text
    assert "logits" not in text  # a class that holds nothing


def test_the_promised_names():
    told = plan().envelope()
    json.dumps(told, allow_nan=False)
    best = told["plans"][0]
    assert best["layout"] == {"tensor": 8, "context": 1, "fsdp": 1120, "data": 1, "stage": 1}
    estimate = best["estimate"]
    assert estimate["step_time_s"] == {"lower": pytest.approx(2.4), "expected": 3.0, "upper": 4.5}
    assert estimate["mfu"] == 0.41
    assert estimate["memory_bytes"]["total"] == sum(v for k, v in estimate["memory_bytes"].items() if k != "total")
    assert estimate["bound"] == "compute-bound"
    assert sum(estimate["terms"].values()) == pytest.approx(estimate["step_time_s"]["expected"])
    assert {k: best["training"][k] for k in ("days", "chip_hours", "cost_usd")} == {
        "days": 44.1, "chip_hours": 9.5e6, "cost_usd": 39.8e6,
    }  # fmt: skip
    assert told["rejected"][0]["name"] == "pure FSDP"
    assert told["rejected"][0]["reason"].startswith("468 tokens")
    assert told["search"]["strategies"] == 123456
    assert told["search"]["cpu_s"] == 0.61


def test_without_a_token_budget_there_is_no_training():
    told = estimate_report(row(), subject="", inputs={}).envelope()
    assert told["command"] == "estimate train"
    assert told["plans"][0]["training"] is None
