"""What a plan is sensitive to, what its search left open, and what `--explain` adds: how each number comes about.

Not here: terms, bounds and memory in words (`formulas`, `bounds`, `memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType

from meshwise.core.explanation import Explanation
from meshwise.core.units import format_bytes, format_flops, format_money, format_percent, format_time
from meshwise.costs.breakdown import Breakdown
from meshwise.costs.estimate import tuned_flops
from meshwise.costs.explain import paddings, work_out
from meshwise.report.bounds import explain_lower, explain_upper
from meshwise.report.breakdown import breakdown_data, breakdown_tables
from meshwise.report.formats import explain_formats
from meshwise.report.formulas import explain_time
from meshwise.report.likely import constants_data, constants_table, explain_likely
from meshwise.report.memory import explain_memory
from meshwise.report.report import Details
from meshwise.report.table import Columns, counted, or_dash, picked, signed_percent, tabulate, words
from meshwise.search import MAX_MEMORY, Plan, PlanResult, Sensitivity
from meshwise.sharding.layout import layout_words


def plan_details(plan: Plan) -> Details:
    """Work out what the numbers of a plan are made of."""
    workings = work_out(plan.problem, plan.fabric, plan.layout)
    return Details(
        explanations=_explanations(plan, workings),
        tables=(*constants_table(plan.problem.calibration), *breakdown_tables(workings)),
        data={"workings": breakdown_data(workings), **constants_data(plan.problem.calibration)},
    )


_RULE = "rule of the expected time, meshwise.costs.step; the book, Training"


def _explanations(row: Plan, workings: Breakdown) -> tuple[Explanation, ...]:
    """Show how the headline numbers of a plan come about."""
    e, time = row.estimate, row.estimate.step_time
    exposed = {name: seconds for name, seconds in e.terms.items() if seconds}
    busy = {name: seconds for name, seconds in e.resources.items() if seconds}
    held = {name: b for name, b in e.memory.items() if b and name != "total"}
    peak = row.problem.cluster.chip.source(f"flops_per_s.{row.problem.job.formats.compute.value}")
    return (
        Explanation(
            "expected step time",
            " + ".join(exposed),
            " + ".join(format_time(seconds) for seconds in exposed.values()),
            format_time(time.expected),
            _RULE,
        ),
        *explain_likely(row),
        *explain_formats(row.problem.job),
        *explain_time(workings, e.terms),
        Explanation(
            "lower bound",
            f"max({', '.join(busy)})",
            f"max({', '.join(format_time(s) for s in busy.values())})",
            format_time(time.lower),
            "the book, All About Rooflines: the busiest resource, at data-sheet rates",
        ),
        *explain_lower(workings, e.resources),
        explain_upper(workings, time.upper),
        _model_flops(row),
        Explanation(
            "MFU",
            "model FLOPs / (step time x chips x peak)",
            f"{e.model_flops:.4g} / ({time.expected:.4g} s x {e.num_chips:,} x {e.peak_flops_per_s:.4g} FLOP/s)",
            format_percent(e.mfu),
            f"PaLM (2022), appendix B; peak: {peak.title}, {peak.date}",
        ),
        Explanation(
            "memory",
            " + ".join(words(name) for name in held),
            " + ".join(format_bytes(b) for b in held.values()),
            format_bytes(e.memory["total"]),
            "the fullest chip; the book, Training",
        ),
        *explain_memory(workings, e.memory, paddings(row.problem, row.layout)),
        *_run_explanations(row),
    )


def _run_explanations(row: Plan) -> tuple[Explanation, ...]:
    """Show how the run's numbers come about."""
    run, e = row.training, row.estimate
    if run is None:
        return ()
    days = f"{run.days.expected:.4g}"
    steps = f"{run.steps:,.0f} x {e.step_time.expected:.4g} s / 86,400 s"
    hours, of = f"{run.chip_hours:,.0f}", f"{days} x 24 x {e.num_chips:,}"
    rows = (
        Explanation("days", "steps x step time / 86,400 s", steps, f"{days} days", "arithmetic"),
        Explanation("chip-hours", "days x 24 x chips", of, hours, "arithmetic"),
    )
    if run.cost_usd is None:
        return rows
    paid = f"{hours} x {format_money(run.cost_usd / run.chip_hours)}"
    source = "the catalog's price, or --price; 'meshwise chips' names its source"
    return (*rows, Explanation("cost", "chip-hours x price", paid, format_money(run.cost_usd), source))


def _model_flops(row: Plan) -> Explanation:
    e, model = row.estimate, row.problem.model
    source = "the book, Transformers; PaLM (2022), appendix B, with causal attention counted as computed"
    if row.problem.job.tuning.full:
        active = model.parameters.active_in_mfu
        attention = (e.model_flops - 6 * active * e.tokens) / 3
        formula = "6 x active parameters x tokens + 3 x causal attention"
        substitution = f"6 x {active:,} x {e.tokens:,.0f} + 3 x {format_flops(attention)}"
    else:
        one_pass = [format_flops(f) for f in tuned_flops(row.problem, e.tokens)]
        formula = "2 x matmuls with frozen weights + 3 x those with adapters + 3 x causal attention, each of one pass"
        substitution = f"2 x {one_pass[0]} + 3 x {one_pass[1]} + 3 x {one_pass[2]}"
        source += "; Hu et al. 2021, LoRA"
    return Explanation("model FLOPs", formula, substitution, format_flops(e.model_flops), source)


def sensitivity_table(found: Sequence[Sensitivity]) -> RenderableType:
    """Show what each thing that is less does to the time per token, and to the plan."""
    columns: Columns = {
        "!sensitivity": lambda s: f"{-100 * s.change:.0f} % less {s.name}",
        ">this plan": lambda s: or_dash(s.kept_slowdown, _more, missing=""),
        ">best plan": lambda s: "none" if s.best is None else _more(s.slowdown),
        "the plan": _changed,
    }
    return tabulate(columns, found)


def _more(slowdown: float) -> str:
    return signed_percent(slowdown - 1)


def _changed(s: Sensitivity) -> str:
    """What becomes of the plan."""
    if s.best is None or s.same_plan:
        return s.reason if s.best is None else "stays"
    num_chips = s.best.estimate.num_chips
    chips = f" on {num_chips:,} chips" if num_chips < s.best.problem.cluster.num_chips else ""
    return f"changes to {layout_words(s.best.layout)} remat={s.best.layout.remat}{chips}"


def sensitivity_data(found: Sequence[Sensitivity]) -> list[dict[str, Any]]:
    """The same as JSON values."""
    return [
        {
            **picked(s, "name change slowdown kept_slowdown same_plan"),
            "layout_text": None if s.best is None else s.best.line,
            "reason": s.reason,
        }
        for s in found
    ]


def interrupted_words(planning: PlanResult) -> str:
    """What an interrupted search did not look at."""
    search = planning.search
    return (
        f"The search ended early, while it searched {counted(search.interrupted_on, 'chip')}, after "
        f"{search.strategies:,} layouts: there and on smaller parts of the cluster better ones may be left, "
        f"at most {1 / max(1 - search.gap, 1 / planning.most_speedup):.3g} x as good as this one."
    )


def headroom_words(planning: PlanResult) -> str:
    """How full plans may fill a chip."""
    share = format_percent(planning.memory_share)
    if planning.memory_asked:
        return f"plans fill at most {share} of the HBM, as --max-memory asks; activations are known to about 15 %"
    if planning.memory_share >= 1:
        usual = format_percent(MAX_MEMORY)
        return f"plans may fill all of the HBM: none was found in {usual} of it; activations are known to about 15 %"
    return f"plans fill at most {share} of the HBM (--max-memory), because activations are known to about 15 %"


def offload_words(planning: PlanResult) -> str:
    """Whether plans that offload were looked at."""
    if planning.constraints.offload or "offload" in planning.constraints.fixed:
        return "plans that keep a part in the host's memory were looked at, too (--offload)"
    if planning.plans[0].layout.offload:
        return "without keeping a part in the host's memory nothing fits"
    return "nothing is kept in the host's memory, as plans fit without (--offload lets such plans compete)"
