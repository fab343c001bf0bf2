"""A profile beside its plan: terms, operations, and what was joined. Not here: joining (`profile.beside`)."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshwise.core.units import format_time
from meshwise.profile.beside import Beside
from meshwise.report.table import Columns, spaced, tabulate

_ROWS = 20
_HOW = {
    "scope": "by scope", "shapes": "by shapes", "collective": "as collectives", "category": "by kind of operation",
}  # fmt: skip


def terms_table(beside: Beside | None) -> RenderableType | None:
    """Terms of the step: planned (lower and expected) beside measured."""
    if beside is None:
        return None
    columns: Columns = {
        "term": lambda t: t.name.replace("_", " "),
        ">lower": lambda t: format_time(t.lower) if t.lower else "-",
        ">planned": lambda t: format_time(t.predicted) if t.predicted else "-",
        ">measured": lambda t: format_time(t.measured),
        ">difference": lambda t: f"{'+' if t.difference > 0 else '-'}{format_time(abs(t.difference))}",
    }
    return tabulate(columns, beside.terms, title=f"beside the plan, {spaced(beside.plan.text)}")


def joined_line(beside: Beside | None) -> RenderableType | None:
    """How much of busy time was joined to the plan, and how."""
    if beside is None:
        return None
    parts = sorted(beside.joined.items(), key=lambda item: -item[1])
    how = ", ".join(f"{share:.1%} {_HOW[name]}" for name, share in parts if share >= 0.0005)
    return Text(f"{beside.joined_share:.1%} of busy time is joined to the plan{f': {how}' if how else ''}")


def rows_table(beside: Beside | None) -> RenderableType | None:
    """Operations of the plan that differ most."""
    if beside is None or not beside.rows:
        return None
    columns: Columns = {
        "block": "block",
        "operation": lambda r: (r.operation or "(all)")[:30],
        "pass": "when",
        ">planned": lambda r: format_time(r.predicted),
        ">measured": lambda r: format_time(r.measured),
    }
    return tabulate(columns, beside.rows[:_ROWS], title="operations that differ most from the plan")


def beside_data(beside: Beside | None) -> dict[str, Any]:
    """The JSON fields."""
    if beside is None:
        return {"joined_share": None, "joined": {}, "terms": [], "plan": None, "blocks": []}
    step = beside.plan.step
    return {
        "joined_share": beside.joined_share,
        "joined": dict(beside.joined),
        "terms": [
            {"name": t.name, "lower_s": t.lower, "predicted_s": t.predicted, "measured_s": t.measured,
             "difference_s": t.difference} for t in beside.terms
        ],
        "plan": {
            "layout": beside.plan.text, "step_s": step.expected, "lower_s": step.lower, "upper_s": step.upper,
        },
        "blocks": [
            {"block": r.block, "operation": r.operation, "when": r.when, "predicted_s": r.predicted,
             "measured_s": r.measured} for r in beside.rows
        ],
    }  # fmt: skip
