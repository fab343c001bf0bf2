"""The answers of `plan train` and `estimate train`: the layouts, where their time and memory go, why others lose.

Not here: finding layouts (`planning`) and pricing them (`costs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshwise.core.units import (
    format_bytes,
    format_count,
    format_duration,
    format_flops_per_s,
    format_money,
    format_percent,
    format_time,
)
from meshwise.costs.explain import paddings
from meshwise.costs.hidden import named_overlap
from meshwise.exports import runs_in
from meshwise.report.attention import dealt_out, plan_notes
from meshwise.report.breakdown import plan_data
from meshwise.report.chart import Bars, Beside, bars_svg
from meshwise.report.collective import wire_words
from meshwise.report.diagnosis import (
    change_data,
    change_words,
    crossing_words,
    measured_data,
    measured_table,
    why_too_large,
)
from meshwise.report.likely import likely_range, likely_words
from meshwise.report.memory import padding_words, stage_words
from meshwise.report.model import length_words, rounded_words, tuning_words
from meshwise.report.plan_details import (
    headroom_words,
    interrupted_words,
    offload_words,
    plan_details,
    sensitivity_data,
    sensitivity_table,
)
from meshwise.report.report import Report, listed
from meshwise.report.searched import how_good
from meshwise.report.table import Columns, counted, picked, plain, said, spaced, table, tabulate, words
from meshwise.search import Found, Plan, PlanResult
from meshwise.search.diagnosis import Change, Measured
from meshwise.sharding.layout import choice_list, choice_words, layout_words


def plan_report(planning: PlanResult, inputs: Mapping[str, Any]) -> Report:
    """Which layout is best and why the others lose.

    Args:
        planning: what the planner found.
        inputs: what was asked, with defaults.
    """
    plans, search = planning.plans, planning.search
    best = plans[0]
    cost_matters = inputs.get("objective") == "cost" and best.training is None
    cost = cost_words(best.cost_usd_per_billion_tokens, best.chip_hours_per_billion_tokens)
    counts = f"{search.strategies:,} layouts examined, {search.priced:,} priced ({search.infeasible:,} do not fit)"
    return Report(
        command="plan train",
        inputs=inputs,
        answer=f"{how_good(search.gap, complete=search.complete)}: {_answer(best)}"
        + (f", {cost} a billion tokens" if cost_matters else ""),
        data={
            "plans": [plan_data(plan) for plan in plans],
            "reasons": list(planning.reasons),
            "rejected": [picked(r, "name reason slowdown memory_bytes fits") for r in planning.rejected],
            **({"sensitivity": sensitivity_data(planning.sensitivity)} if planning.sensitivity else {}),
            "pareto_front": [_found_data(found, best) for found in search.front],
            "search": picked(search, "strategies priced covered infeasible complete gap")
            | {"interrupted_on_chips": search.interrupted_on or None, "most_speedup": plain(planning.most_speedup)}
            | picked(search, "cpu_s"),
        },
        brief=said(
            *_subject_of(best, inputs),
            *_stopped(planning),
            _short_ranking(plans),
            Beside(*_bars(best)),
            *_asked_for(planning),
        ),
        reasons=planning.reasons,
        body=said(
            Text(_subject(best)),
            *_stopped(planning),
            _ranking(plans),
            *_estimate_tables(best),
            listed("Why", planning.reasons),
            listed("Not chosen", (f"{r.name}: {r.reason}" for r in planning.rejected)),
            *_asked_for(planning),
            Text(f"{counts} in {search.cpu_s:.2f} CPU-seconds"),
        ),
        assumed=said(
            *_assumed(best),
            _price(best) if cost_matters else None,
            headroom_words(planning),
            offload_words(planning),
        ),
        not_modelled=_NOT_MODELLED,
        next_steps=_next_steps(best, front=planning.constraints.front),
        details=lambda: plan_details(best),
    )


def _stopped(planning: PlanResult) -> tuple[RenderableType, ...]:
    return () if planning.search.complete else (Text(interrupted_words(planning), style="bold"),)


def _asked_for(planning: PlanResult) -> tuple[RenderableType, ...]:
    """What options of their own ask for."""
    front, sensitive = planning.search.front, planning.sensitivity
    return said(
        _front(front) if len(front) > 1 else None,
        sensitivity_table(sensitive) if sensitive else None,
    )


def estimate_report(
    planning: PlanResult,
    inputs: Mapping[str, Any],
    changes: Sequence[Change[Plan]] = (),
    measured: Measured | None = None,
) -> Report:
    """What one layout would do.

    Args:
        planning, inputs: as in `plan_report`.
        changes: single ones that gain, or with which it fits.
        measured: a measured step of it.
    """
    plan = planning.plans[0]
    seen = None if measured is None else measured_table(measured)
    large = () if plan.estimate.fits else (why_too_large(plan),)
    why = (*large, *crossing_words(plan), *planning.reasons)
    fits = "" if plan.estimate.fits else "does not fit in memory: "
    return Report(
        command="estimate train",
        inputs=inputs,
        answer=f"{fits}{_answer(plan)}",
        data={
            "plans": [plan_data(plan)],
            "reasons": list(why),
            "changes": change_data(changes),
            **({} if measured is None else {"measured": measured_data(measured)}),
        },
        brief=said(*_subject_of(plan, inputs), Beside(*_bars(plan)), seen),
        reasons=why,
        body=said(Text(_subject(plan)), *_estimate_tables(plan), seen, listed("Why", why)),
        assumed=_assumed(plan),
        not_modelled=_NOT_MODELLED,
        next_steps=(
            *change_words(changes, fits=plan.estimate.fits),
            "the best layouts, and why others lose: meshwise plan train with the same options",
        ),
        details=lambda: plan_details(plan),
    )


_NOT_MODELLED = (
    "input pipeline, checkpoints, failures and restarts, stragglers, other users of the network",
    "sends between stages that wait for other traffic on their links",
    "energy of hosts and cooling",
)


def _subject_of(plan: Plan, inputs: Mapping[str, Any]) -> tuple[RenderableType, ...]:
    """Name what is planned, who runs it, how sure the time is, and what a user has to know of the model.

    Where a tool was asked for, also what it hides.
    """
    notes = plan_notes(plan.problem, plan.layout)
    more = f" (and {counted(len(notes) - 1, 'note')} more: --details)" if len(notes) > 1 else ""
    takers = f"runs in {', '.join(runs_in(plan)) or 'no tool yet'}"
    asked = set(inputs.get("tool") or ()) - {"none"}
    overlap = named_overlap(plan.problem.on_slices, plan.layout) if asked else None
    lines = "; ".join(said(takers, likely_range(plan))), overlap, f"note: {notes[0]}{more}" if notes else None
    return (Text("\n".join(said(_subject(plan), *lines))),)


def _short_ranking(plans: Sequence[Plan]) -> RenderableType | None:
    """The plans in few lines: of each but the first, in which choices and tools it differs."""
    if len(plans) == 1:
        return None
    best, takers = choice_list(plans[0].layout), runs_in(plans[0])

    def differs(row: Mapping[str, Any]) -> str:
        plan = row["plan"]
        tools = "" if runs_in(plan) == takers else f"; runs in {', '.join(runs_in(plan)) or 'no tool yet'}"
        own = ", ".join(c for c in choice_list(plan.layout) if c not in best)
        return "" if row["number"] == 1 else f"{own}{tools}".removeprefix("; ")

    columns = {**_numbers(plans), "layout": lambda row: layout_words(row["plan"].layout)}
    return tabulate(columns, _numbered(plans), note=differs)


def plan_svg(plan: Plan) -> str:
    """Draw where the time of a step and the memory of a chip go, and how the mesh lies on the network.

    Raises:
        MissingDependencyError: when matplotlib is absent.
    """
    mesh: dict[str, dict[str, int]] = {}
    for number, dimension in enumerate(plan.fabric.dimensions):
        ways = {axis: int(extents[number]) for axis, extents in plan.layout.wires or ()}
        mesh[f"{dimension.name} {dimension.size}"] = {a: n for a, n in ways.items() if n > 1}
    title = f"{plan.problem.model.name} on {plan.problem.cluster.name}: {layout_words(plan.layout)}"
    return bars_svg(title, _bars(plan), mesh)


def _bars(plan: Plan) -> tuple[Bars, Bars]:
    """Where the expected time and the memory of a chip go."""
    e = plan.estimate
    total, time = e.memory["total"], e.step_time.expected
    held = {name: b for name, b in e.memory.items() if name != "total"}
    of = f"{format_bytes(total)} ({format_percent(total / e.hbm_capacity)})"
    return (
        Bars(f"time of a step: {format_time(time)}", e.terms, time, format_time),
        Bars(f"memory of a chip: {of}", held, max(total, e.hbm_capacity), format_bytes),
    )


def _subject(plan: Plan) -> str:
    """Name what is planned, and the whole layout."""
    job, cluster = plan.problem.job, plan.problem.cluster
    tokens = "" if job.tokens is None else f", {format_count(job.tokens)} tokens"
    lines = [
        f"{plan.problem.model.name} on {plan.estimate.num_chips:,} x {cluster.chip.title}{tokens}",
        f"layout: {spaced(plan.line)}",
    ]
    if rounded := rounded_words(job, plan.estimate.tokens):
        lines.append(rounded)
    if left := cluster.num_chips - plan.estimate.num_chips:
        lines.append(f"left out: {counted(left, 'chip')} of {cluster.num_chips:,}; the rest does better without")
    return "\n".join(lines)


#: What MFU counts, by whether everything is trained.
_COUNTED = {
    True: "6 x active parameters x tokens",
    False: "matmuls forward and for each gradient needed (of a token, 4 FLOPs a frozen parameter, 6 a trained one)",
}


def _assumed(plan: Plan) -> tuple[str, ...]:
    """What was taken for granted, and what was changed."""
    problem, estimate = plan.problem, plan.estimate
    job, cluster, calibration = problem.job, problem.cluster, problem.calibration
    formats = dict.fromkeys((job.formats.compute, job.formats.other_compute))
    shares = {f"{f.value} peak in matmuls": calibration.matmul(f) for f in formats}
    if calibration.attention_efficiency is not None:
        shares[f"{job.formats.other_compute.value} peak in attention"] = calibration.attention_efficiency
    shares |= {"HBM": calibration.hbm_efficiency, "links": calibration.link_efficiency}
    achieved = ", ".join(f"{format_percent(share)} of {what}" for what, share in shares.items())
    rounded = job.rounding(estimate.tokens)
    return said(
        cluster.describe(),
        *cluster.notes,
        "the batch may be rounded so that it divides; --batch-slack 0 forbids it" if rounded else None,
        f"formats: {job.formats.meaning}; optimizer: {job.optimizer_kind.meaning}",
        tuning_words(problem),
        f"expected time: calibration {calibration.name}, {achieved} ({calibration.source})",
        named_overlap(problem.on_slices, plan.layout),
        f"MFU counts {_COUNTED[job.tuning.full]}, causal attention as computed, no recomputation",
        dealt_out(plan.layout),
        *length_words(problem.model, job.seq_len),
        *plan_notes(problem, plan.layout),
        *(padding_words(p) for p in paddings(problem, plan.layout)),
        stage_words(problem.model.num_layers, plan.layout.stage),
        _price(plan) if plan.training is not None else None,
    )


def _price(plan: Plan) -> str | None:
    """What a chip-hour costs and by whom, where that is known."""
    cluster = plan.problem.cluster
    if cluster.price_per_chip_hour is None:
        return None
    source = cluster.chip.price_source
    by = f": {source.title}{', ' + source.date if source.date else ''}" if source else ""
    return f"{format_money(cluster.price_per_chip_hour)} a chip-hour{by}"


def _next_steps(plan: Plan, *, front: bool) -> tuple[str, ...]:
    """Suggest what would change the answer."""
    bound, tokens = plan.estimate.bound, plan.problem.job.tokens
    binds = None
    if bound not in ("compute", "hbm"):
        binds = "the network binds: a larger --batch-tokens gives it more to hide behind"
    elif plan.estimate.terms.get("recompute"):
        binds = "recomputation costs time for memory: chips with more memory, or more chips, need less of it"
    return said(
        binds,
        "days and dollars of a whole run: --tokens 15T" if tokens is None else None,
        None if front else "the fastest plans that hold less memory: --front, which takes longer",
    )


def _found_data(found: Found, best: Plan) -> dict[str, Any]:
    return {
        "layout": dict(found.layout.sizes),
        "layout_text": found.layout.line(experts=bool(best.problem.model.mixtures)),
        **picked(found, "num_chips=layout.num_chips time_s_per_token=seconds_per_token memory_bytes"),
    }


def _wires(plan: Plan) -> dict[str, str]:
    """Where each mesh axis lies on the network."""
    used = {axis: extents for axis, extents in plan.layout.wires or () if plan.layout.sizes[axis] > 1}
    return {axis: wire_words(plan.fabric, extents) for axis, extents in used.items()}


def _bound_words(plan: Plan) -> str:
    """What binds."""
    known = {"compute": "compute-bound", "hbm": "HBM-bound"}
    return known.get(plan.estimate.bound, f"{plan.estimate.bound.split()[0]}-bound")


def _answer(row: Plan) -> str:
    """Answer in one line: the layout, the time, the share of the peak, then the run, or what binds."""
    estimate = row.estimate
    time = format_time(estimate.step_time.expected)
    parts = (f"{layout_words(row.layout)}: {time} a step", f"{format_percent(estimate.mfu)} MFU")
    run = row.training
    if run is None:
        return ", ".join((*parts, _bound_words(row)))
    return ", ".join(
        said(*parts, run_words(run.days.expected), None if run.cost_usd is None else format_money(run.cost_usd))
    )


def cost_words(dollars: float | None, chip_hours: float) -> str:
    """Dollars, or chip-hours where there is no price."""
    return f"{format_count(chip_hours)} chip-hours" if dollars is None else format_money(dollars)


def _ranking(rows: Sequence[Plan]) -> RenderableType:
    """Compare the plans, by tokens where their batches differ; the run has a column where a token budget was given."""
    number, *numbers = _numbers(rows).items()
    columns: Columns = dict([number, ("layout", ("plan", _layout_cell)), *numbers])
    return tabulate(columns, _numbered(rows))


def _numbered(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    return [{"number": number, "plan": plan} for number, plan in enumerate(plans, 1)]


def _numbers(rows: Sequence[Plan]) -> Columns:
    """Columns of what plans are compared by."""
    by_tokens = len({row.estimate.tokens for row in rows}) > 1
    speed: Columns = {">tokens/s": ("plan.estimate.tokens_per_s", format_count)}
    time: Columns = {">step": ("plan.estimate.step_time.expected", format_time)}
    run: Columns = {">run": ("plan.training.days.expected", run_words)}
    return {
        ">#": "number",
        **(speed if by_tokens else time),
        ">MFU": ("plan.estimate.mfu", format_percent),
        ">memory": ("plan.estimate.memory.total", format_bytes),
        **(run if all(row.training is not None for row in rows) else {}),
    }


def run_words(days: float) -> str:
    """How long a run takes."""
    return format_duration(86400 * days)


def _layout_cell(row: Plan) -> str:
    takers = ", ".join(runs_in(row)) or "no tool yet"
    return f"{layout_words(row.layout)}\n  {choice_words(row.layout)}\n  runs in {takers}"


def _estimate_tables(row: Plan) -> tuple[RenderableType, ...]:
    """Where time and memory go."""
    likely = likely_words(row)
    return said(_terms(row), Text(likely) if likely else None, _memory(row))


def _terms(row: Plan) -> RenderableType:
    """Show where the expected time goes, then its bounds."""
    estimate, time = row.estimate, row.estimate.step_time
    wires = _wires(row)
    rows = [
        (words(name), format_time(seconds), format_percent(seconds / time.expected), _note(row, name, wires))
        for name, seconds in estimate.terms.items()
        if seconds or estimate.hidden.get(name)
    ]
    bounds = (
        (" lower bound", time.lower, f"perfect overlap, data-sheet rates; {_bound_words(row)}"),
        (" upper bound", time.upper, "no overlap, expected rates"),
    )
    peak = f"{format_flops_per_s(estimate.peak_flops_per_s)} x {counted(estimate.num_chips, 'chip')}"
    rows.append(("step, expected", format_time(time.expected), "100.0 %", f"{format_count(estimate.tokens)} tokens"))
    rows += [(name, format_time(t), format_percent(t / time.expected), note) for name, t, note in bounds]
    rows += [
        ("MFU", "", format_percent(estimate.mfu), f"of {peak}"),
        ("HFU", "", format_percent(estimate.hfu), "recomputed FLOPs counted"),
    ]
    return table(("!time of a step", ">exposed", ">share", ""), rows)


def _note(row: Plan, name: str, wires: Mapping[str, str]) -> str:
    """How much of an axis's communication is hidden, and where the axis lies."""
    seconds = row.estimate.hidden.get(name, 0.0)
    parts = [f"{format_time(seconds)} more hidden"] if seconds else []
    return "; ".join([*parts, *([f"on {wires[name]}"] if wires.get(name) else [])])


def _memory(row: Plan) -> RenderableType:
    """Show the classes that hold anything."""
    e = row.estimate
    rows = [(words(name), b, e.hbm_capacity, "") for name, b in e.memory.items()]
    rows += [(f"on the host: {words(name)}", b, e.host_capacity or b, " of host") for name, b in e.host_memory.items()]
    cells = ((name, format_bytes(b), f"{format_percent(b / of)}{where}") for name, b, of, where in rows if b)
    return table(("!memory of a chip", ">bytes", ">of HBM"), cells)


def _front(front: Sequence[Found]) -> RenderableType:
    """Show at most eight layouts that nothing undercuts in both time and memory, spread over the front."""
    step = max(1, -(-len(front) // 8))
    columns: Columns = {
        "fastest with so little memory": lambda f: f"{layout_words(f.layout)} {choice_words(f.layout)}",
        ">a token": ("seconds_per_token", format_time),
        ">memory": ("memory_bytes", format_bytes),
    }
    return tabulate(columns, front[::step])
