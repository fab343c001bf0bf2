"""The calibrate verb's answer: error before and after, the constants that moved, rows refused.

Not here: fitting (`scoring`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import RenderableType

from meshwise.report.report import Report, listed
from meshwise.report.table import Columns, picked, said, signed_percent, tabulate
from meshwise.scoring import ServingPrediction
from meshwise.scoring.fitting import Refined, mean_error
from meshwise.scoring.operations import OperationPrediction


def calibrate_report(refined: Refined, inputs: Mapping[str, Any]) -> Report:
    """What was refined, and how much better it is."""
    data = _data(refined)
    unused = listed("Not used", (f"{r.run.id}: {r.reason}" for r in refined.refusals))
    return Report(
        command="calibrate",
        inputs=inputs,
        answer=_answer(refined),
        data=data,
        body=said(_constants(refined), _rows(data["rows"]), unused),
        assumed=tuple(dict.fromkeys(f"{p.run.id}: {note}" for p in refined.rows for note in p.assumed)),
        not_modelled=(
            "what rows do not show: constants that they do not depend on stay as they were",
            *_short(refined),
        ),
        next_steps=_next(refined, inputs),
    )


def _short(refined: Refined) -> tuple[str, ...]:
    if not isinstance(refined.rows[0], OperationPrediction):
        return ()
    return ("single operations: clocks that fall over minutes, the host, and what hides behind what stay as they were",)


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
    values, spreads = refined.fit.values, refined.fit.spreads
    columns: Columns = {
        "constant": "name",
        ">before": ("prior", "{:.3g}".format),
        ">after": lambda c: f"{values[c.name]:.3g}",
        ">known to": lambda c: f"{100 * spreads[c.name]:.0f} %",
        "unit": "unit",
    }
    return tabulate(columns, refined.constants)


def _rows(data: Iterable[Mapping[str, Any]]) -> RenderableType:
    columns: Columns = {
        "row": "id",
        ">measured": ("measured_s", "{:.4g} s".format),
        ">error before": ("error_before", signed_percent),
        ">after": ("error_after", signed_percent),
        ">left out": ("error_left_out", signed_percent),
    }
    return tabulate(columns, data, missing="")


def _next(refined: Refined, inputs: Mapping[str, Any]) -> tuple[str, ...]:
    if inputs.get("save"):
        served = isinstance(refined.rows[0], ServingPrediction)
        verbs = "plan serve, estimate serve, simulate serve" if served else "plan, estimate, score, run"
        return (f"--calibration {inputs['save']}: with {verbs}",)
    return ("--save ours.json: a file that --calibration takes",)


def _data(refined: Refined) -> dict[str, Any]:
    left = refined.left_out or (None,) * len(refined.rows)
    values, spreads = refined.fit.values, refined.fit.spreads
    return {
        "chip": refined.chip.name,
        "base": refined.base.name,
        "constants": [
            picked(c, "name unit before=prior") | {"after": values[c.name], "relative_spread": spreads[c.name]}
            for c in refined.constants
        ],
        "mape": {
            "before": mean_error(refined.before),
            "after": mean_error(refined.after),
            "left_out": mean_error(refined.left_out) if refined.left_out else None,
        },
        "rows": [
            picked(p, "id=run.id measured_s=measured")
            | {"error_before": before, "error_after": after, "error_left_out": out}
            for p, before, after, out in zip(refined.rows, refined.before, refined.after, left, strict=True)
        ],
        "refused": [picked(r, "id=run.id reason") for r in refined.refusals],
    }
