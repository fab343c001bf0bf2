"""The calibrate verb's answer: error before and after, the constants that moved, rows refused.

Not here: fitting (`scoring`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType

from meshwise.report.report import Report, listed
from meshwise.report.table import table
from meshwise.scoring.fitting import Refined, mean_error


def calibrate_report(refined: Refined, inputs: Mapping[str, Any]) -> Report:
    """What was refined, and how much better it is."""
    body: list[RenderableType] = [_constants(refined), _rows(refined)]
    if refined.refusals:
        body.append(listed("Not used", (f"{r.run.id}: {r.reason}" for r in refined.refusals)))
    return Report(
        command="calibrate",
        inputs=inputs,
        answer=_answer(refined),
        data=_data(refined),
        body=tuple(body),
        assumed=tuple(dict.fromkeys(f"{p.run.id}: {note}" for p in refined.rows for note in p.scenario.assumed)),
        not_modelled=("what rows do not show: constants that they do not depend on stay as they were",),
        next_steps=_next(inputs),
    )


def _answer(refined: Refined) -> str:
    rows = len(refined.rows)
    said = (
        f"{refined.chip.title}: mean error of {rows:,} row{'s' * (rows > 1)} {100 * mean_error(refined.before):.1f} % "
        f"before, {100 * mean_error(refined.after):.1f} % after"
    )
    if refined.left_out:
        said += f", {100 * mean_error(refined.left_out):.1f} % of rows left out of the fit in turn"
    return said


def _constants(refined: Refined) -> RenderableType:
    rows = []
    for c in refined.constants:
        value, spread = refined.fit.values[c.name], refined.fit.spreads[c.name]
        rows.append([c.name, _number(c.prior), _number(value), f"{100 * spread:.0f} %", c.unit])
    return table(("constant", ">before", ">after", ">known to", "unit"), rows)


def _number(value: float) -> str:
    return f"{value:.3g}"


def _rows(refined: Refined) -> RenderableType:
    left = refined.left_out or (None,) * len(refined.rows)
    rows = [
        [p.run.id, f"{p.measured:.4g} s", *(f"{100 * e:+.1f} %" for e in (before, after)),
         "" if out is None else f"{100 * out:+.1f} %"]
        for p, before, after, out in zip(refined.rows, refined.before, refined.after, left, strict=True)
    ]  # fmt: skip
    return table(("row", ">measured", ">error before", ">after", ">left out"), rows)


def _next(inputs: Mapping[str, Any]) -> tuple[str, ...]:
    if inputs.get("save"):
        return (f"--calibration {inputs['save']}: with plan, estimate, score, run",)
    return ("--save ours.json: a file that --calibration takes",)


def _data(refined: Refined) -> dict[str, Any]:
    left = refined.left_out
    return {
        "chip": refined.chip.name,
        "base": refined.base.name,
        "constants": [
            {
                "name": c.name,
                "unit": c.unit,
                "before": c.prior,
                "after": refined.fit.values[c.name],
                "relative_spread": refined.fit.spreads[c.name],
            }
            for c in refined.constants
        ],
        "mape": {
            "before": mean_error(refined.before),
            "after": mean_error(refined.after),
            "left_out": mean_error(left) if left else None,
        },
        "rows": [
            {
                "id": p.run.id,
                "measured_s": p.measured,
                "error_before": before,
                "error_after": after,
                "error_left_out": left[i] if left else None,
            }
            for i, (p, before, after) in enumerate(zip(refined.rows, refined.before, refined.after, strict=True))
        ],
        "refused": [{"id": r.run.id, "reason": r.reason} for r in refined.refusals],
    }
