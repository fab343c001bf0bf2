"""The answers of `plan train` and `estimate train`: the layouts, where their time and memory go, why others lose.

Takes plain numbers, so that it need not know how they were found. Not here: finding them (`planning`, `costs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshwise.explanation import Explanation
from meshwise.report.report import Report
from meshwise.report.table import table
from meshwise.units import format_bytes, format_count, format_duration, format_money, format_percent, format_time

__all__ = ["PlanRow", "Rejected", "SearchStats", "Training", "estimate_report", "plan_report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A whole training run: steps, days, chip-hours, dollars and energy; None where no price or power is known."""

    steps: float
    days: float
    chip_hours: float
    cost_usd: float | None
    energy_kwh: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One layout with its numbers, in base units.

    Args:
        layout: mesh axis -> size, outermost last; axes of one included.
        choices: zero, remat, micro_batch, ...: what a layout has besides sizes.
        wires: mesh axis -> where it lies, in words.
        num_chips: that it uses.
        tokens_per_step: after rounding the batch.
        lower, expected, upper: seconds of a step.
        terms: exposed seconds by name; they add up to `expected`.
        hidden: seconds of communication that are hidden.
        mfu, hfu: shares of the peak, expected; `peak_words` names the denominator.
        memory: class -> bytes, without their sum.
        capacity: bytes of HBM of a chip.
        bound: what binds.
        training: the run, when a token budget was given.
        explanations: its workings.
    """

    layout: Mapping[str, int]
    choices: Mapping[str, Any]
    wires: Mapping[str, str]
    num_chips: int
    tokens_per_step: float
    lower: float
    expected: float
    upper: float
    terms: Mapping[str, float]
    hidden: Mapping[str, float]
    mfu: float
    hfu: float
    peak_words: str
    memory: Mapping[str, float]
    capacity: float
    bound: str
    training: Training | None
    explanations: tuple[Explanation, ...] = ()

    @property
    def memory_total(self) -> float:
        """Bytes of all classes."""
        return sum(self.memory.values())

    def words(self) -> str:
        """Say the layout as `--layout` reads it: the axes longer than one."""
        return ",".join(f"{axis}={size}" for axis, size in self.layout.items() if size > 1) or "one chip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A well-known rival and why it loses, with its number."""

    name: str
    reason: str
    step_time_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStats:
    """What the search did."""

    strategies: int
    covered: int
    infeasible: int
    cpu_s: float
    front: tuple[PlanRow, ...] = field(default=())


def plan_report(
    rows: Sequence[PlanRow],
    rejected: Sequence[Rejected],
    search: SearchStats,
    *,
    subject: str,
    inputs: Mapping[str, Any],
    assumed: tuple[str, ...] = (),
    not_modelled: tuple[str, ...] = (),
    next_steps: tuple[str, ...] = (),
) -> Report:
    """Say which layout is best and why the others lose.

    Args:
        rows: plans, best first; at least one.
        rejected: rivals that lose.
        search: what was searched.
        subject: the model and the cluster in words, "llama-3-70b on 8,960 x TPU v5p".
        inputs: what was asked, with defaults.
        assumed: what was assumed, one sentence each.
        not_modelled: what the numbers leave out.
        next_steps: commands or changes to try.
    """
    best = rows[0]
    body: list[RenderableType] = [Text(subject), _ranking(rows), _terms(best), _memory(best)]
    if rejected:
        body.append(table(("!not chosen", "because"), ((r.name, r.reason) for r in rejected)))
    if len(search.front) > 1:
        body.append(_front(search.front))
    body.append(
        Text(
            f"{search.strategies:,} layouts priced ({search.infeasible:,} do not fit) in {search.cpu_s:.2f} CPU-seconds"
        )
    )
    return Report(
        command="plan train",
        inputs=inputs,
        answer=f"Best: {_answer(best)}",
        data={
            "plans": [_plan_data(row) for row in rows],
            "rejected": [{"name": r.name, "reason": r.reason, "step_time_s": r.step_time_s} for r in rejected],
            "pareto_front": [_plan_data(row) for row in search.front],
            "search": {
                "strategies": search.strategies,
                "covered": search.covered,
                "infeasible": search.infeasible,
                "cpu_s": search.cpu_s,
            },
        },
        body=tuple(body),
        assumed=assumed,
        not_modelled=not_modelled,
        next_steps=next_steps,
        explanations=best.explanations,
    )


def estimate_report(
    row: PlanRow,
    *,
    subject: str,
    inputs: Mapping[str, Any],
    assumed: tuple[str, ...] = (),
    not_modelled: tuple[str, ...] = (),
    next_steps: tuple[str, ...] = (),
) -> Report:
    """Say what one layout would do; arguments as in `plan_report`."""
    return Report(
        command="estimate train",
        inputs=inputs,
        answer=_answer(row),
        data={"plans": [_plan_data(row)]},
        body=(Text(subject), _terms(row), _memory(row)),
        assumed=assumed,
        not_modelled=not_modelled,
        next_steps=next_steps,
        explanations=row.explanations,
    )


def _answer(row: PlanRow) -> str:
    """Answer in one line: the layout, the time, the share of the peak, then the run, or what binds."""
    parts = [f"{row.words()}: {format_time(row.expected)} a step, {format_percent(row.mfu)} MFU"]
    if row.training is None:
        parts.append(row.bound)
    else:
        parts.append(format_duration(86400 * row.training.days))
        if row.training.cost_usd is not None:
            parts.append(format_money(row.training.cost_usd))
    return ", ".join(parts)


def _ranking(rows: Sequence[PlanRow]) -> RenderableType:
    return table(
        (">#", "layout", ">step", ">MFU", ">memory", ">time", "bound"),
        (
            (
                str(number),
                f"{row.words()} {_choices(row)}".rstrip(),
                format_time(row.expected),
                format_percent(row.mfu),
                format_bytes(row.memory_total),
                "-" if row.training is None else format_duration(86400 * row.training.days),
                row.bound,
            )
            for number, row in enumerate(rows, 1)
        ),
    )


def _choices(row: PlanRow) -> str:
    """Say the choices in few words: "remat=full mb=2x4"."""
    shown = [f"{name}={value}" for name, value in row.choices.items() if name in ("zero", "remat") and value]
    micro, number = row.choices.get("micro_batch"), row.choices.get("num_microbatches")
    return " ".join([*shown, *([f"mb={micro}x{number}"] if micro and number else [])])


def _terms(row: PlanRow) -> RenderableType:
    """Show where the expected time goes, then its bounds."""
    rows = [
        (name.replace("_", " "), format_time(seconds), format_percent(seconds / row.expected), _hidden(row, name))
        for name, seconds in row.terms.items()
        if seconds or row.hidden.get(name)
    ]
    bounds = (
        (" lower bound", row.lower, "perfect overlap, data-sheet rates"),
        (" upper bound", row.upper, "no overlap"),
    )
    rows += [
        ("step, expected", format_time(row.expected), "100.0 %", f"{format_count(row.tokens_per_step)} tokens"),
        *((name, format_time(seconds), format_percent(seconds / row.expected), note) for name, seconds, note in bounds),
        ("MFU / HFU", format_percent(row.mfu), format_percent(row.hfu), f"of {row.peak_words}"),
    ]
    return table(("!time of a step", ">exposed", ">share", ""), rows)


def _hidden(row: PlanRow, name: str) -> str:
    seconds = row.hidden.get(name, 0.0)
    return f"{format_time(seconds)} more are hidden" if seconds else ""


def _memory(row: PlanRow) -> RenderableType:
    rows = [
        (name.replace("_", " "), format_bytes(held), format_percent(held / row.capacity))
        for name, held in row.memory.items()
        if held
    ]
    total = ("total", format_bytes(row.memory_total), format_percent(row.memory_total / row.capacity))
    return table(("!memory of a chip", ">bytes", ">of HBM"), [*rows, total])


def _front(rows: Sequence[PlanRow]) -> RenderableType:
    """Show at most eight layouts that nothing undercuts in both time and memory, spread over the front."""
    step = max(1, -(-len(rows) // 8))
    return table(
        ("faster needs more memory", ">us a token", ">memory"),
        (
            (f"{r.words()} {_choices(r)}", f"{1e6 * r.expected / r.tokens_per_step:.4g}", format_bytes(r.memory_total))
            for r in rows[::step]
        ),
    )


def _plan_data(row: PlanRow) -> dict[str, Any]:
    """One plan as JSON values, under the names that are promised."""
    return {
        "layout": dict(row.layout),
        "choices": dict(row.choices),
        "wires": dict(row.wires),
        "num_chips": row.num_chips,
        "tokens_per_step": row.tokens_per_step,
        "estimate": {
            "step_time_s": {"lower": row.lower, "expected": row.expected, "upper": row.upper},
            "terms": dict(row.terms),
            "hidden_s": dict(row.hidden),
            "mfu": row.mfu,
            "hfu": row.hfu,
            "mfu_denominator": row.peak_words,
            "memory_bytes": {"total": row.memory_total, **row.memory},
            "memory_capacity_bytes": row.capacity,
            "bound": row.bound,
        },
        "training": None
        if row.training is None
        else {
            "steps": row.training.steps,
            "days": row.training.days,
            "chip_hours": row.training.chip_hours,
            "cost_usd": row.training.cost_usd,
            "energy_kwh": row.training.energy_kwh,
        },
    }
