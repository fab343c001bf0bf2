"""Two profiles beside each other. Not here: comparing (`profile.compare`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import RenderableType

from meshwise.core.units import format_time
from meshwise.profile.compare import Change, Comparison
from meshwise.report.table import Columns, tabulate, words

_MOST, _NAMED, _LEAST = 15, 3, 0.01


def signed_time(seconds: float) -> str:
    """A difference.

    >>> signed_time(0.005), signed_time(-0.0012)
    ('+5 ms', '-1.20 ms')
    """
    return f"{'-' if seconds < 0 else '+'}{format_time(abs(seconds))}"


def compared_line(comparison: Comparison) -> str:
    """The first line: both steps, and what changed most."""
    step, least = comparison.step, _LEAST * comparison.step.after
    moved = [c for c in comparison.causes if abs(c.difference) >= least] or list(comparison.operations)
    named = ", ".join(f"{c.name} {signed_time(c.difference)}" for c in moved[:_NAMED])
    share = f" ({step.difference / step.before:+.1%})" if step.before else ""
    against = ", ".join(trace.source for trace in comparison.before.traces)
    return (
        f"{format_time(step.after)} a step, {signed_time(step.difference)}{share} against {against}"
        f"{f': {named}' if named else ''}"
    )


def compared_tables(comparison: Comparison | None) -> tuple[RenderableType, ...]:
    """Parts, causes and operations before and after."""
    if comparison is None:
        return ()
    parts = tuple(replace(c, name=words(c.name)) for c in (comparison.step, *comparison.parts))
    return (
        _table("part", parts, "against the other trace"),
        _table("cause", comparison.causes[:_MOST], "causes"),
        _table("operation", comparison.operations[:_MOST], "operations that changed most"),
    )


def _table(what: str, changes: tuple[Change, ...], title: str) -> RenderableType:
    columns: Columns = {
        what: lambda c: c.name[:38],
        ">before": lambda c: format_time(c.before),
        ">after": lambda c: format_time(c.after),
        ">difference": lambda c: signed_time(c.difference),
    }
    return tabulate(columns, changes, title=title)


def compared_data(comparison: Comparison | None) -> dict[str, Any] | None:
    """The JSON fields."""
    if comparison is None:
        return None
    rows = {"parts": comparison.parts, "causes": comparison.causes, "operations": comparison.operations}
    return {
        "sources": [trace.source for trace in comparison.before.traces],
        "step_s": comparison.step.before,
        "difference_s": comparison.step.difference,
        "partition_s": dict(comparison.before.partition_s),
        **{name: [_row(c) for c in changes] for name, changes in rows.items()},
    }


def _row(change: Change) -> dict[str, Any]:
    return {"name": change.name, "before_s": change.before, "after_s": change.after, "difference_s": change.difference}
