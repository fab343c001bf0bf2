"""The answer of `plan serve` for several clusters or precisions. Not here: one of each (`plan_serve`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwise.core.units import format_money, format_time
from meshwise.costs.serving.answer import ServingEstimate
from meshwise.report.plan_serve import front_data, front_svg, plan_data, simulated_assumed, simulated_words
from meshwise.report.report import Report, listed
from meshwise.report.serve import NOT_MODELLED, assumed, definitions, serving_data, serving_words, subject
from meshwise.report.table import noted_table, table
from meshwise.search.serving import ServingPlanResult
from meshwise.search.serving.studies import Alternative, ServingAlternatives


def alternatives_report(found: ServingAlternatives, inputs: Mapping[str, Any]) -> Report:
    """Which plan is best of all, on which cluster, in which formats.

    Args:
        found: what the planner found.
        inputs: what was asked, with defaults.
    """
    which, best = found.ranked[0]
    planned = _planned(found)
    body: list[RenderableType] = [Text(subject(best.problem, best.setup)), _ranking(found)]
    body.append(_each(found))
    if found.formats:
        body.append(_formats(found.formats, which))
    without = {name: reason for name, reason in found.found.items() if isinstance(reason, str)}
    if without:
        body.append(listed("Without a plan", (f"{name}: {reason}" for name, reason in without.items())))
    body.append(listed("Definitions", definitions(best.setup)))
    searches = [p.search for p in planned.values()]
    return Report(
        command="plan serve",
        inputs=inputs,
        answer=f"Best: {which}: {serving_words(best.estimate)}{simulated_words(planned[which], best.estimate)}",
        data={
            "plans": [{**_named(name), **plan_data(planned[name], p.estimate)} for name, p in found.ranked],
            "ranked_by": found.by,
            "alternatives": [
                {
                    **_named(name),
                    "plan": None if isinstance(p, str) else plan_data(p, p.plans[0]),
                    "reason": p if isinstance(p, str) else None,
                }
                for name, p in found.found.items()
            ],
            "formats": [
                {"precision": name, "plan": None if e is None else serving_data(e)} for name, e in found.formats.items()
            ],
            "pareto": [{**_named(name), **point} for name, p in planned.items() for point in front_data(p)],
            "search": {
                "configurations": sum(s.configurations for s in searches),
                "pairs": sum(s.pairs for s in searches),
                "cpu_s": sum(s.cpu_s for s in searches),
            },
        },
        body=tuple(body),
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


def _named(which: Alternative) -> dict[str, str]:
    return {"cluster": which.cluster, "precision": which.precision}


_COLUMNS = ("", ">$/M out", ">tokens/s/chip", ">TPOT", ">TTFT", ">chips", ">batch")


def _cells(sign: str, e: ServingEstimate) -> tuple[str, ...]:
    dollars = e.usd_per_million_output_tokens
    return (
        sign,
        "-" if dollars is None else format_money(dollars),
        f"{e.throughput_per_chip:,.1f}",
        format_time(e.tpot.expected),
        format_time(e.ttft.expected),
        f"{e.setup.num_chips:,}",
        f"{e.setup.batch:,}",
    )


def _ranking(found: ServingAlternatives) -> RenderableType:
    rows = []
    for number, (which, plan) in enumerate(found.ranked, 1):
        setup = plan.setup
        layouts = f"{setup.decode}" if setup.one_layout else f"prefill {setup.prefill}; decode {setup.decode}"
        words = f"{which}: {setup.mode}: {layouts.replace(',', ', ')}"
        words += simulated_words(_planned(found)[which], plan.estimate)
        rows.append((_cells(str(number), plan.estimate), words))
    return Group(Text(f"The best of all, by {found.by}", style="bold"), noted_table(list(_COLUMNS), rows))


def _each(found: ServingAlternatives) -> RenderableType:
    rows = [_cells(str(name), p.plans[0]) for name, p in _planned(found).items()]
    return table(_COLUMNS, rows, title="The best of each")


def _formats(formats: Mapping[str, ServingEstimate | None], which: Alternative) -> RenderableType:
    columns = ("!", ">step", ">TPOT", ">tokens/s/chip", ">weights", ">cache", ">at most")
    rows = []
    for name, e in formats.items():
        if e is None:
            rows.append((name, *("-" for _ in columns[1:])))
            continue
        gib = (f"{e.memory[part] / 2**30:.1f} GiB" for part in ("weights", "kv_cache"))
        latencies = (format_time(t.expected) for t in (e.decode.seconds, e.tpot))
        rows.append(
            (
                name if e.fits else f"{name}, does not fit",
                *latencies,
                f"{e.throughput_per_chip:,.1f}",
                *gib,
                f"{e.largest_batch or 0:,}",
            )
        )
    title = f"What formats buy on {which.cluster}, with the best plan's layouts and batch (at most: requests that fit)"
    return table(columns, rows, title=title)
