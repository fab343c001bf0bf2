"""The answers about several plans: clusters compared, and strong scaling.

Not here: one plan (`plan`), and finding them (`planning`).
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshwise.core.units import format_count, format_duration, format_money, format_percent, format_time
from meshwise.report.breakdown import plan_data
from meshwise.report.chart import Drawing, terminal_chart, write_svg
from meshwise.report.plan import cost_words, run_words
from meshwise.report.report import Report, reasons
from meshwise.report.searched import incomplete_words
from meshwise.report.table import Columns, counted, said, tabulate
from meshwise.search import NOT_SEARCHED, Plan, PlanResult, Scaling
from meshwise.sharding.layout import layout_words


def comparison_report(found: Mapping[str, PlanResult | str], inputs: Mapping[str, Any]) -> Report:
    """Compare clusters.

    Args:
        found: cluster -> its plans, or why there is none.
        inputs: what was asked.
    """
    plans = {name: p.plans[0] for name, p in found.items() if isinstance(p, PlanResult)}
    without = {name: p for name, p in found.items() if isinstance(p, str)}
    run = all(p.training is not None for p in plans.values())
    fastest = min(plans, key=lambda n: 1 / plans[n].estimate.tokens_per_s)
    cheapest = min(plans, key=lambda n: _cost(plans[n]))
    signs = dict(zip(plans, string.ascii_uppercase, strict=False))
    days: Columns = {">run": ("plan.training.days.expected", run_words)}
    columns: Columns = {
        "": "sign",
        "cluster": lambda row: f"{row['name']}\n  {layout_words(row['plan'].layout)}",
        ">chips": ("plan.estimate.num_chips", "{:,}".format),
        ">step": ("plan.estimate.step_time.expected", format_time),
        ">tok/s": ("plan.estimate.tokens_per_s", format_count),
        ">MFU": ("plan.estimate.mfu", format_percent),
        **(days if run else {}),
        ">cost" if run else ">1B tokens": ("plan", _cost_words),
    }
    rows = ({"sign": signs.get(name, ""), "name": name, "plan": plan} for name, plan in plans.items())
    stopped = incomplete_words(
        [name for name, p in found.items() if isinstance(p, PlanResult) and p.search.interrupted_on],
        [name for name, reason in without.items() if reason == NOT_SEARCHED],
    )
    body: tuple[RenderableType, ...] = said(stopped, tabulate(columns, rows), reasons("Without a plan", without))
    if len(plans) > 1:
        points, (x_title, y_title) = _cost_against_time(plans)
        up, right = format_money if _priced(plans) else format_count, format_duration if run else format_time
        drawn = terminal_chart(points, "".join(signs[n] for n in plans), up, right)
        body += (Drawing(f"{y_title} (up) against {x_title} (right)\n{drawn}"),)
    return Report(
        command="plan train",
        inputs=inputs,
        answer=f"Fastest{' so far' if stopped else ''}: {fastest}, {_cost_words(plans[fastest])}; "
        f"cheapest: {cheapest}, {_cost_words(plans[cheapest])}",
        data={
            "clusters": [
                {
                    "cluster": name,
                    "plan": plan_data(p.plans[0]) if isinstance(p, PlanResult) else None,
                    "reason": p if isinstance(p, str) else None,
                }
                for name, p in found.items()
            ],
            "complete": all(p != NOT_SEARCHED if isinstance(p, str) else p.search.complete for p in found.values()),
        },
        body=body,
        assumed=tuple(p.problem.cluster.describe() for p in plans.values()),
        next_steps=("all about one of them: the same command with it alone",),
    )


def _priced(plans: Mapping[str, Plan]) -> bool:
    return all(p.cost_usd_per_billion_tokens is not None for p in plans.values())


def _cost(plan: Plan) -> float:
    """Dollars, or chip-hours where there is no price, of so many tokens."""
    dollars = plan.cost_usd_per_billion_tokens
    return plan.chip_hours_per_billion_tokens if dollars is None else dollars


def _cost_words(plan: Plan) -> str:
    if plan.training is not None:
        return cost_words(plan.training.cost_usd, plan.training.chip_hours)
    return cost_words(plan.cost_usd_per_billion_tokens, plan.chip_hours_per_billion_tokens)


def _cost_against_time(plans: Mapping[str, Plan]) -> tuple[list[tuple[float, float]], tuple[str, str]]:
    """Points (seconds, cost) of the run, or of a billion tokens, and what the axes are."""
    tokens = next(iter(plans.values())).problem.job.tokens
    of, many = ("the run", tokens) if tokens is not None else ("1B tokens", 1e9)
    dollars = _priced(plans)
    costs = {name: _cost(p) if dollars else p.chip_hours_per_billion_tokens for name, p in plans.items()}
    points = [(many / p.estimate.tokens_per_s, costs[name] * many / 1e9) for name, p in plans.items()]
    return points, (f"time of {of}", f"{'dollars' if dollars else 'chip-hours'} of {of}")


def comparison_svg(found: Mapping[str, PlanResult | str]) -> str:
    """Draw cost against time, a point a cluster."""
    plans = {name: p.plans[0] for name, p in found.items() if isinstance(p, PlanResult)}
    points, (x_title, y_title) = _cost_against_time(plans)
    return write_svg([(x / 86400, y) for x, y in points], list(plans), f"{x_title}, days", y_title)


def scaling_report(scaling: Scaling, inputs: Mapping[str, Any]) -> Report:
    """How MFU and step time go with the number of chips.

    Args:
        scaling: what was found.
        inputs: what was asked.
    """
    plans = [p.plan for p in scaling.points if p.plan is not None]
    first = plans[0].estimate
    columns: Columns = {
        ">chips": ("num_chips", "{:,}".format),
        ">step": ("plan.estimate.step_time.expected", format_time),
        ">MFU": ("plan.estimate.mfu", format_percent),
        ">speed": ("plan.estimate.tokens_per_s", lambda rate: f"{rate / first.tokens_per_s:.3g}"),
        "layout": lambda p: p.reason if p.plan is None else layout_words(p.plan.layout),
    }
    points = _mfu(plans)
    drawn = terminal_chart(points, "o" * len(points), format_percent, lambda n: f"{n:,.0f}", joined=True)
    return Report(
        command="plan train",
        inputs=inputs,
        answer=_scaling_answer(scaling, plans),
        data={
            "scaling": [
                {
                    "num_chips": p.num_chips,
                    "plan": None if p.plan is None else plan_data(p.plan),
                    "reason": p.reason or None,
                }
                for p in scaling.points
            ],
            "strong_scaling_ends_at_chips": scaling.end,
            "strong_scaling_ends_because": scaling.why or None,
            "complete": scaling.complete,
        },
        body=said(
            None
            if scaling.complete
            else Text("Interrupted, or out of time: larger numbers of chips were not searched."),
            tabulate(columns, scaling.points, missing=""),
            Text(f"MFU (up) against chips (right)\n{drawn}"),
        ),
        assumed=(
            f"the batch stays {plans[0].problem.job.batch_words}, rounded to what divides",
            "strong scaling ends where more chips give less than half of the speed that they could add",
            f"speed is tokens/s over that of {counted(first.num_chips, 'chip')}",
        ),
    )


def _scaling_answer(scaling: Scaling, plans: Sequence[Plan]) -> str:
    if scaling.end is None:
        last = plans[-1].estimate
        beyond = " there" if scaling.complete else " there, and more chips were not searched"
        return f"Strong scaling goes on to {counted(last.num_chips, 'chip')}: {format_percent(last.mfu)} MFU{beyond}"
    grows = " grows" if any(scaling.why in p.estimate.terms for p in plans) else ""
    return f"Strong scaling ends at {counted(scaling.end, 'chip')}: {scaling.why.replace('_', ' ')}{grows}"


def _mfu(plans: Sequence[Plan]) -> list[tuple[float, float]]:
    return [(float(p.estimate.num_chips), p.estimate.mfu) for p in plans]


def scaling_svg(scaling: Scaling) -> str:
    """Draw MFU against chips."""
    plans = [p.plan for p in scaling.points if p.plan is not None]
    points = [(x, 100 * y) for x, y in _mfu(plans)]
    names = [format_time(p.estimate.step_time.expected) for p in plans]
    return write_svg(points, names, "chips", "MFU, %", joined=True)
