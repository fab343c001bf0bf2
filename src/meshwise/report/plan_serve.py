"""The answer of `plan serve`: the best plans, where the best one's time and memory go, the front, why others lose.

Not here: finding plans (`planning.serving`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwise.core.units import format_money, format_time
from meshwise.costs.serving.answer import ServingEstimate
from meshwise.exports.serving import serving_runs_in
from meshwise.report.chart import Chart, Drawing, new_figure, svg_of
from meshwise.report.report import Details, Report, listed
from meshwise.report.searched import how_good
from meshwise.report.serve import (
    NOT_MODELLED,
    RANKED,
    Served,
    assumed,
    brief_subject,
    definitions,
    idle_words,
    latency_table,
    layouts_words,
    memory_table,
    serving_bars,
    serving_plan_data,
    serving_words,
    subject,
    term_table,
)
from meshwise.report.serve_breakdown import serve_explanations
from meshwise.report.serving import quantiles_data
from meshwise.report.table import Columns, counted, or_dash, pick, picked, said, table, tabulate
from meshwise.search.plan import SimulatedPlan
from meshwise.search.serving import ServingPlanResult
from meshwise.search.serving.planner import FrontPoint
from meshwise.simulation.serving import LatencyTargets, Quantiles


def front_svg(fronts: Mapping[str, Sequence[FrontPoint]], best: ServingEstimate, title: str) -> str:
    """Draw output tokens per second against time per output token, a line for each front.

    Args:
        fronts: name -> its points, least time first; filled where engines prefill and decode, hollow where apart.
        best: the plan that was chosen.
        title: above the picture.

    Raises:
        MissingDependencyError: when matplotlib is absent.
    """
    figure = new_figure(7.5, 4.8)
    axes = figure.subplots()
    for name, front in fronts.items():
        x, y = [1e3 * p.tpot for p in front], [p.tokens for p in front]
        (line,) = axes.plot(x, y, drawstyle="steps-post", linewidth=1, label=name or "the front")
        for filled, mode in ((True, "aggregated"), (False, "disaggregated")):
            points = [(px, py) for px, py, p in zip(x, y, front, strict=True) if p.setup.mode == mode]
            face = line.get_color() if filled else "white"
            axes.plot(*zip(*points, strict=True) if points else ((), ()), "o", markersize=4, color=line.get_color(),
                      markerfacecolor=face)  # fmt: skip
    axes.plot(
        [1e3 * best.tpot.expected], [best.output_tokens_per_s], "*", markersize=13, color="black", label="the plan"
    )
    x_title = "time per output token, ms (filled: engines do both; hollow: apart)"
    axes.set(xscale="log", yscale="log", xlabel=x_title, ylabel="output tokens/s, all chips")
    axes.set_title(title, fontsize="medium")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize="small")
    return svg_of(figure)


#: Rows of the front that a terminal shows.
_SHOWN = 8


def plan_serve_report(planning: ServingPlanResult, inputs: Mapping[str, Any]) -> Report:
    """Which plan is best and why the others lose.

    Args:
        planning: what the planner found.
        inputs: what was asked, with defaults.
    """
    best, problem, search = planning.plans[0], planning.problem, planning.search
    idle = idle_words(problem, best.setup, searched=True, rate=planning.constraints.rate)
    rises = len(planning.pareto) > 1
    front: tuple[RenderableType, ...] = said(_front(planning.pareto), _drawn(planning.pareto)) if rises else ()
    stopped = None if search.complete else Text(_stopped_words(planning), style="bold")
    counts = f"{search.configurations:,} layouts with batches priced, {search.pairs:,} pairs of prefill and generation"
    return Report(
        command="plan serve",
        inputs=inputs,
        answer=f"{how_good(search.gap, complete=search.complete)}: {serving_words(best)}"
        f"{simulated_words(planning, best)}",
        data={
            "plans": [plan_data(planning, e) for e in planning.plans],
            "neighbours": [picked(n, "name reason") for n in planning.neighbours],
            "pareto": list(front_data(planning)),
            "search": picked(search, "configurations pairs complete gap cpu_s"),
        },
        brief=said(
            brief_subject(problem, best, idle),
            stopped,
            _ranking(planning, planning.plans[:_BRIEFLY], known=best),
            _columns(planning),
            _cheaper([Served.of(e, planning.simulated) for e in planning.plans[:_BRIEFLY]]),
            *serving_bars(best),
        ),
        reasons=tuple(f"{n.name}: {n.reason}" for n in planning.neighbours),
        body=said(
            Text(subject(problem, best.setup)),
            Text(idle) if idle else None,
            stopped,
            latency_table(best),
            _ranking(planning, planning.plans),
            _columns(planning),
            _simulated(planning.simulated) if planning.simulated else None,
            *(term_table(best), memory_table(best)),
            listed("Not chosen", (f"{n.name}: {n.reason}" for n in planning.neighbours)),
            *front,
            listed("Definitions", definitions(best.setup)),
            Text(f"{counts} in {search.cpu_s:.2f} CPU-seconds"),
        ),
        assumed=(*assumed(problem, best.setup), *simulated_assumed(planning)),
        not_modelled=NOT_MODELLED,
        next_steps=_next(planning),
        details=lambda: Details(explanations=serve_explanations(problem, best)),
    )


def _stopped_words(planning: ServingPlanResult) -> str:
    """What an interrupted search did not look at."""
    gap, simulated = planning.search.gap, planning.simulated
    left = "Plans that were not simulated" if simulated else "Layouts that were not searched"
    most = f"at most {1 / (1 - gap):.3g} times as good" if gap < 1 else "by how much is not known"
    return f"The search ended early. {left} may be better, {most}."


#: Plans of the short form.
_BRIEFLY = 3


def _ranking(
    planning: ServingPlanResult, plans: Sequence[ServingEstimate], known: ServingEstimate | None = None
) -> RenderableType:
    """Compare plans; `known`: one whose layouts are shown elsewhere."""
    names = ("", ">tokens/s", ">TPOT", ">TTFT", ">chips", ">batch", ">$/M out")
    columns: Columns = {
        **{name: RANKED[name] for name in names},
        ">GiB": lambda row: f"{max(x.memory['total'] for x in (row['plan'].prefill, row['plan'].decode)) / 2**30:.1f}",
    }

    def note(row: Mapping[str, Any]) -> str:
        if row["plan"] is known:
            return ""
        setup = row["plan"].setup
        prompts = f"; {setup.prefill_batch} prompts together" if setup.prefill_batch > 1 else ""
        prompts += f"; prompts in chunks of {setup.chunk:,}" if setup.chunk is not None else ""
        takers = ", ".join(serving_runs_in(planning.problem, setup)) or "no tool yet"
        return f"{layouts_words(setup)}{prompts}; runs in {takers}"

    rows = [
        {"sign": number, "plan": e, "served": Served.of(e, planning.simulated)} for number, e in enumerate(plans, 1)
    ]
    return tabulate(columns, rows, note=note)


def _columns(planning: ServingPlanResult) -> Text | None:
    """What the numbers of a ranking are, where plans were simulated."""
    rate = planning.constraints.rate
    sent = f"each at {rate:.4g} requests/s" if rate else "each at the highest rate found for it"
    return Text(f"simulated, {sent}; times are p99") if planning.simulated else None


#: What is costly beside another: so many times its TTFT, for no more than this share of tokens.
_LONGER, _GAIN = 3.0, 0.15


def _paid(ttft: float, tokens: float, other_ttft: float, other_tokens: float) -> str:
    """How many times another TTFT is paid for how much throughput, "" where that is not costly."""
    if ttft < _LONGER * other_ttft or not other_tokens < tokens <= (1 + _GAIN) * other_tokens:
        return ""
    return f"{ttft / other_ttft:.2g} x the TTFT of {{}} for {100 * (tokens / other_tokens - 1):.2g} % more tokens/s"


def _cheaper(plans: Sequence[Served]) -> Text | None:
    """What the first of some plans pays for being first, beside the next that is far quicker to answer."""
    seen = [(p.ttft or 0.0, p.tokens) for p in plans]
    found = [(number, _paid(*seen[0], *other)) for number, other in enumerate(seen[1:], 2)]
    words = next((words.format(f"row {number}") for number, words in found if words), "")
    return Text(f"row 1 pays {words} (--max-ttft limits it)") if words else None


def _front(front: tuple[FrontPoint, ...]) -> RenderableType:
    step = max(1, -(-len(front) // _SHOWN))
    shown = sorted({*range(0, len(front), step), len(front) - 1})
    columns: Columns = {
        ">TPOT": ("tpot", format_time),
        ">tokens/s": ("tokens", "{:,.0f}".format),
        ">TTFT": ("ttft", format_time),
        ">batch": ("setup.batch", "{:,}".format),
        "decode": lambda p: str(p.setup.decode) + (" (apart)" if p.setup.mode == "disaggregated" else ""),
    }
    before = {front[i]: front[j] for j, i in pairwise(shown)}

    def costly(p: FrontPoint) -> str:
        last = before.get(p)
        return "" if last is None else _paid(p.ttft, p.tokens, last.ttft, last.tokens).format("the row above")

    rows = tabulate(columns, (front[i] for i in shown), note=costly)
    return Group(Text("Latency against throughput", style="bold"), rows)


def _drawn(front: tuple[FrontPoint, ...]) -> RenderableType | None:
    """Tokens per second over time per output token, both logarithmic."""
    x = (front[0].tpot, front[-1].tpot)
    y = (min(p.tokens for p in front), max(p.tokens for p in front))
    if x[0] == x[1] or y[0] == y[1]:
        return None
    chart = Chart(x, y, rows=8)
    chart.curve(lambda tpot: max(p.tokens for p in front if p.tpot <= tpot * (1 + 1e-9)))
    ticks = [(x[0], format_time(x[0])), (x[1], format_time(x[1]))]
    lines = chart.lines("{:,.0f}".format, ticks)
    return Drawing("\n".join(("tokens/s over TPOT", *lines)))


def front_data(planning: ServingPlanResult) -> tuple[dict[str, Any], ...]:
    """The front of latency and throughput as JSON values."""
    return tuple(_point(p) for p in planning.pareto)


def plan_serve_svg(planning: ServingPlanResult) -> str:
    """Draw the front of latency and throughput.

    Raises:
        MissingDependencyError: when matplotlib is absent.
    """
    problem = planning.problem
    title = f"{problem.model.name} on {problem.cluster.name}, {problem.load.precision}"
    return front_svg({"": planning.pareto}, planning.plans[0], title)


def plan_data(planning: ServingPlanResult, e: ServingEstimate) -> dict[str, Any]:
    """A plan as JSON values, with the requests that it was sent where targets are percentiles."""
    sent = _sent(planning, e)
    return serving_plan_data(planning.problem, e) | (
        {} if sent is None else {"simulated": _simulated_data(sent, planning.targets)}
    )


def _sent(planning: ServingPlanResult, e: ServingEstimate) -> SimulatedPlan | None:
    return next((p for p in planning.simulated if p.estimate is e), None)


def _simulated_data(p: SimulatedPlan, targets: LatencyTargets) -> dict[str, Any]:
    kept = {"max_ttft": targets.ttft, "max_tpot": targets.tpot}
    return {
        "rate_requests_per_s": p.rate,
        **picked(p.result, "requests utilisation"),
        "parts_of_the_plan": p.parts,
        "targets": {name: str(target) for name, target in kept.items() if target is not None},
        "share_within_targets": p.share,
        "throughput_tokens_per_s_per_chip": p.tokens_per_chip,
        "cost_usd_per_million_output_tokens": p.usd_per_million_output_tokens,
        **{name: quantiles_data(Quantiles.of(getattr(p.result, name))) for name in ("ttft_s", "tpot_s")},
    }


def simulated_words(planning: ServingPlanResult, e: ServingEstimate) -> str:
    """What a plan did with the requests that it was sent; where there were none, that targets are means."""
    sent, asked = _sent(planning, e), planning.constraints
    if sent is None:
        means = asked.rate or asked.max_ttft or asked.max_tpot
        return "; not simulated: targets are means without queues" if means else ""
    ttft, tpot = Quantiles.of(sent.result.ttft_s), Quantiles.of(sent.result.tpot_s)
    later = "" if tpot is None else f", TPOT p99 {format_time(tpot.p99)}"
    first = "" if ttft is None else f"TTFT p99 {format_time(ttft.p99)}"
    kept = f"{_percent(sent.share)} of {sent.result.requests:,} requests within the targets, "
    within = kept if planning.targets.any else f"{sent.result.requests:,} requests, "
    dollars = sent.usd_per_million_output_tokens
    cost = "" if dollars is None else f", {format_money(dollars)}"
    return f"; simulated at {sent.rate:.4g} requests/s: {within}{first}{later}, {sent.tokens_per_s:,.0f} tokens/s{cost}"


def _percent(share: float) -> str:
    """A share of requests; one that a few miss is not said to be all.

    >>> _percent(0.99996), _percent(1.0)
    ('99.9 %', '100 %')
    """
    return "100 %" if share == 1 else f"{math.floor(1000 * share) / 10:.1f} %"


def simulated_assumed(planning: ServingPlanResult) -> tuple[str, ...]:
    """How percentiles came about."""
    if not planning.simulated:
        return ()
    first = planning.simulated[0]
    sent = counted(first.result.requests, "request")
    arrive = "recorded arrivals" if planning.problem.load.mix and not planning.problem.load.mix.prompt else "Poisson"
    which = f"{sent} ({arrive}), and of their second half, sent to plans that closed forms propose, each with some room"
    part = f"; one of {first.parts} equal parts of the plan was simulated" if first.parts > 1 else ""
    return (f"percentiles: of {which}; other plans were not simulated{part}",)


def _simulated(simulated: tuple[SimulatedPlan, ...]) -> RenderableType:
    """Lay out what became of the requests that plans were sent."""
    rows = []
    for number, p in enumerate(simulated, 1):
        found = [Quantiles.of(values) for values in (p.result.ttft_s, p.result.tpot_s)]
        times = [or_dash(pick(q, share), format_time) for q in found for share in ("p50", "p99")]
        cost = or_dash(p.usd_per_million_output_tokens, format_money)
        rows.append((str(number), f"{p.rate:.4g}", *times, f"{p.tokens_per_s:,.0f}", cost))
    columns = ("", ">requests/s", ">TTFT p50", ">p99", ">TPOT p50", ">p99", ">tokens/s", ">$/M out")
    return table(columns, rows, title="Simulated requests")


def _point(p: FrontPoint) -> dict[str, Any]:
    known = picked(p, "tpot_s=tpot ttft_s=ttft output_tokens_per_s=tokens")
    known["throughput_tokens_per_s_per_chip"] = p.tokens / p.setup.num_chips
    layouts = {"prefill_layout": str(p.setup.prefill), "decode_layout": str(p.setup.decode)}
    return known | picked(p.setup, "mode batch num_chips") | layouts


def _next(planning: ServingPlanResult) -> tuple[str, ...]:
    setup, asked = planning.plans[0].setup, planning.constraints
    means = not planning.simulated and (asked.rate or asked.max_ttft or asked.max_tpot)
    options = said(
        f"--layout {setup.decode} --batch {setup.batch}",
        None if setup.one_layout else f"--prefill-layout {setup.prefill}",
        "--mode disaggregated" if setup.mode == "disaggregated" else None,
        f"--prefill-batch {setup.prefill_batch}" if setup.prefill_batch > 1 else None,
        None if setup.chunk is None else f"--chunk {setup.chunk}",
    )
    return said(
        "without --no-simulate and mean:, requests are simulated and targets are percentiles" if means else None,
        f"'meshwise estimate serve ... {' '.join(options)}' says what else would fit",
    )
