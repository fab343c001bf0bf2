"""What a plan is sensitive to, as a table and as JSON. Not here: the searches (`planning.sensitivity`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType

from meshwise.report.layouts import layout_words
from meshwise.report.table import table
from meshwise.search import Plan, Sensitivity


def sensitivity_table(found: Sequence[Sensitivity]) -> RenderableType:
    """Show what each thing that is less does to the time per token, and to the plan."""
    return table(
        ("!sensitivity", ">this plan", ">best plan", "the plan"),
        (
            (
                f"{-100 * s.change:.0f} % less {s.name}",
                "" if s.kept_slowdown is None else _more(s.kept_slowdown),
                "none" if s.best is None else _more(s.slowdown),
                s.reason if s.best is None else "stays" if s.same_plan else f"changes to {_changed_words(s.best)}",
            )
            for s in found
        ),
    )


def _more(slowdown: float) -> str:
    return f"{100 * (slowdown - 1):+.1f} %"


def _changed_words(plan: Plan) -> str:
    chips = f" on {plan.estimate.num_chips:,} chips" if plan.estimate.num_chips < plan.problem.cluster.num_chips else ""
    return f"{layout_words(plan.layout)} remat={plan.layout.remat}{chips}"


def sensitivity_data(found: Sequence[Sensitivity]) -> list[dict[str, Any]]:
    """The same as JSON values."""
    return [
        {
            "name": s.name,
            "change": s.change,
            "slowdown": s.slowdown if math.isfinite(s.slowdown) else None,
            "kept_slowdown": s.kept_slowdown,
            "same_plan": s.same_plan,
            "layout_text": None if s.best is None else str(s.best.layout),
            "reason": s.reason,
        }
        for s in found
    ]
