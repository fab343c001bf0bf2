"""The answer of `plan serve` for several clusters or precisions. Not here: one of each (`plan_serve`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwise.core.units import format_time
from meshwise.costs.serving.answer import ServingEstimate
from meshwise.report.plan_serve import front_data, front_svg, plan_data, simulated_assumed, simulated_words
from meshwise.report.report import Report, listed, reasons
from meshwise.report.searched import incomplete_words
from meshwise.report.serve import (
    NOT_MODELLED,
    RANKED,
    Served,
    assumed,
    definitions,
    layouts_words,
    serving_data,
    serving_words,
    subject,
)
from meshwise.report.table import Columns, or_dash, picked, said, tabulate
from meshwise.search.plan import NOT_SEARCHED
from meshwise.search.serving import ServingPlanResult
from meshwise.search.serving.alternatives import Alternative, ServingAlternatives

_WHICH = "cluster precision"


def alternatives_report(found: ServingAlternatives, inputs: Mapping[str, Any]) -> Report:
    """Which plan is best of all, on which cluster, in which formats.

    Args:
        found: what the planner found.
        inputs: what was asked, with defaults.
    """
    which, best = found.ranked[0]
    planned = _planned(found)
    without = {str(name): reason for name, reason in found.found.items() if isinstance(reason, str)}
    searches = [p.search for p in planned.values()]
    stopped = incomplete_words(
        [str(name) for name, p in planned.items() if not p.search.complete],
        [name for name, reason in without.items() if reason == NOT_SEARCHED],
    )
    return Report(
        command="plan serve",
        inputs=inputs,
        answer=f"Best{' so far' if stopped else ''}: {which}: {serving_words(best.estimate)}"
        f"{simulated_words(planned[which], best.estimate)}",
        data={
            "plans": [{**picked(name, _WHICH), **plan_data(planned[name], p.estimate)} for name, p in found.ranked],
            "ranked_by": found.by,
            "alternatives": [
                {
                    **picked(name, _WHICH),
                    "plan": None if isinstance(p, str) else plan_data(p, p.plans[0]),
                    "reason": p if isinstance(p, str) else None,
                }
                for name, p in found.found.items()
            ],
            "complete": not stopped,
            "formats": [
                {"precision": name, "plan": None if e is None else serving_data(e)} for name, e in found.formats.items()
            ],
            "pareto": [{**picked(name, _WHICH), **point} for name, p in planned.items() for point in front_data(p)],
            "search": {name: sum(getattr(s, name) for s in searches) for name in ("configurations", "pairs", "cpu_s")},
        },
        body=said(
            stopped,
            Text(subject(best.problem, best.setup)),
            _ranking(found),
            _each(found),
            _formats(found.formats, which) if found.formats else None,
            reasons("Without a plan", without),
            listed("Definitions", definitions(best.setup)),
        ),
        assumed=(*assumed(best.problem, best.setup), *simulated_assumed(planned[which])),
        not_modelled=NOT_MODELLED,
        next_steps=(f"all about the best: the same command with --on {which.cluster} --precision {which.precision}",),
    )


def alternatives_svg(found: ServingAlternatives) -> str:
    """Draw all fronts in one picture.

    Raises:
        MissingDependencyError: when matplotlib is absent.
    """
    which, best = found.ranked[0]
    fronts = {str(name): p.pareto for name, p in _planned(found).items()}
    return front_svg(fronts, best.estimate, f"{best.problem.model.name}; the plan: {which}")


def _planned(found: ServingAlternatives) -> dict[Alternative, ServingPlanResult]:
    return {name: p for name, p in found.found.items() if isinstance(p, ServingPlanResult)}


def _ranking(found: ServingAlternatives) -> RenderableType:
    planned = _planned(found)

    def note(row: Mapping[str, Any]) -> str:
        which, plan = row["which"], row["plan"]
        sent = next((p for p in planned[which].simulated if p.estimate is plan), None)
        simulated = f"; simulated at {sent.rate:.4g} requests/s, times are p99" if sent else ""
        simulated = simulated or simulated_words(planned[which], plan)
        return f"{which}: {layouts_words(plan.setup)}{simulated}"

    rows = [
        {"sign": n, "which": which, "plan": p.estimate, "served": Served.of(p.estimate, planned[which].simulated)}
        for n, (which, p) in enumerate(found.ranked, 1)
    ]
    return Group(Text(f"The best of all, by {found.by}", style="bold"), tabulate(RANKED, rows, note=note))


def _each(found: ServingAlternatives) -> RenderableType:
    rows = (
        {"sign": name, "plan": p.plans[0], "served": Served.of(p.plans[0], p.simulated)}
        for name, p in _planned(found).items()
    )
    return tabulate(RANKED, rows, title="The best of each")


def _formats(formats: Mapping[str, ServingEstimate | None], which: Alternative) -> RenderableType:
    columns: Columns = {
        "!": lambda row: row["name"] if row["plan"] is None or row["plan"].fits else f"{row['name']}, does not fit",
        ">step": ("plan.decode.seconds.expected", format_time),
        ">TPOT": ("plan.tpot.expected", format_time),
        ">tokens/s/chip": ("plan.throughput_per_chip", "{:,.1f}".format),
        ">weights": ("plan.memory.weights", _gib),
        ">cache": ("plan.memory.kv_cache", _gib),
        ">at most": lambda row: or_dash(row["plan"], lambda e: f"{e.largest_batch or 0:,}"),
    }
    rows = ({"name": name, "plan": e} for name, e in formats.items())
    title = f"What formats buy on {which.cluster}, with the best plan's layouts and batch (at most: requests that fit)"
    return tabulate(columns, rows, title=title)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
