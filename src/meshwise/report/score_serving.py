"""The score verb's answer for serving: errors by source, chip, family, phase and engine; refused rows; the worst.

Not here: predicting (`scoring.serving`), and training runs (`report.score`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType

from meshwise.report.report import Report, listed
from meshwise.report.score import error_cells, some
from meshwise.report.table import noted_table, table
from meshwise.scoring import Errors
from meshwise.scoring.serving import ServedPrediction, ServedRefusal, ServedScore
from meshwise.units import format_bytes, format_time

__all__ = ["served_report"]

_COLUMNS = (">rows", ">mean", ">median", ">bias", ">≤10 %", ">≤20 %", ">in 80 %", ">bound")


def served_report(score: ServedScore, inputs: Mapping[str, Any], *, worst: int = 5) -> Report:
    """Say how far predictions of serving are from measurements."""
    body: list[RenderableType] = [_errors_table(score)]
    if score.memory:
        errors = [p.error for p in score.memory]
        cells = ["gpu_memory", f"{len(errors):,}", f"{100 * (score.memory_mape or 0):.1f} %",
                 f"{100 * statistics.fmean(errors):+.1f} %"]  # fmt: skip
        body.append(table(("memory", ">rows", ">mean error", ">bias"), [cells]))
    for title, rows in (("Not predicted", score.refusals), ("Not counted", score.set_aside)):
        if rows:
            body.append(listed(title, (f"{some(ids)}: {reason}" for reason, ids in _reasons(rows).items())))
    if score.false_oom:
        body.append(listed("Said not to fit, though it ran", (_too_large(p) for p in score.false_oom)))
    if worst and score.times:
        body.append(_worst_table(score.worst(worst)))
    assumed: dict[str, list[str]] = {}
    for p in score.predictions:
        for note in p.setup.assumed:
            assumed.setdefault(note, []).append(p.run.id)
    return Report(
        command="score",
        inputs=inputs,
        answer=_answer(score),
        data=_data(score),
        body=tuple(body),
        assumed=tuple(f"{some(ids)}: {note}" for note, ids in assumed.items()),
        not_modelled=(
            "what the host adds to each step (scheduling, sampling, launches), which differs by engine and release",
            "queueing, and lengths that vary between requests: meshwise simulate serve",
        ),
        next_steps=("--svg accuracy.svg: predicted against measured", "--json: every row with its terms"),
    )


def _answer(score: ServedScore) -> str:
    first = f"{len(score.predictions):,} of {score.rows:,} rows predicted"
    if score.overall is None or score.macro_mape is None:
        return first
    return (
        f"{first}: mean error {100 * score.overall.mape:.1f} %, {100 * score.macro_mape:.1f} % averaged over sources, "
        f"bias {100 * score.overall.bias:+.1f} %"
    )


def _errors_table(score: ServedScore) -> RenderableType:
    rows: list[list[str]] = []
    for title, group in score.groups.items():
        rows.append([title, *[""] * len(_COLUMNS)])
        rows += [[f"  {name}", *error_cells(errors)] for name, errors in group.items()]
    if score.overall is not None:
        rows.append(["all", *error_cells(score.overall)])
    return table(("!error of times", *_COLUMNS), rows)


def _reasons(rows: Sequence[ServedRefusal]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for r in rows:
        found.setdefault(r.reason, []).append(r.run.id)
    return found


def _too_large(p: ServedPrediction) -> str:
    memory = p.estimate.memory
    parts = sorted(((v, k) for k, v in memory.items() if k not in ("total", "reserve")), reverse=True)[:2]
    largest = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for size, name in parts)
    return f"{p.run.id}: {largest} of {format_bytes(p.estimate.hbm_capacity)}"


def _worst_table(rows: Sequence[ServedPrediction]) -> RenderableType:
    """The rows with the largest errors, the terms of their steps below each."""

    def note(p: ServedPrediction) -> str:
        total = sum(p.terms.values())
        parts = sorted(((s, n) for n, s in p.terms.items() if s > 0.005 * total), reverse=True)
        terms = ", ".join(f"{name.replace('_', ' ')} {100 * s / total:.0f} %" for s, name in parts)
        setup = p.estimate.setup
        return f"{p.run.model or 'dimensions'}, {p.compared}, {setup.generate}, batch {setup.batch}: {terms}"

    columns = ("worst rows", "chip", ">measured", ">predicted", ">error")
    cells = (
        ((p.run.id, p.setup.problem.cluster.chip.name, format_time(p.measured), format_time(p.expected),
          f"{100 * p.error:+.1f} %"), note(p))
        for p in rows
    )  # fmt: skip
    return noted_table(columns, cells)


def _data(score: ServedScore) -> dict[str, Any]:
    """The JSON fields."""
    overall = {} if score.overall is None else asdict(score.overall)
    return {
        "overall": {
            **{name: overall.get(name) for name in Errors.__dataclass_fields__},
            "macro_mape": score.macro_mape,
            "rows": score.rows,
            "predicted": len(score.predictions),
            "not_counted": len(score.set_aside),
        },
        **{f"by_{name}": {k: asdict(e) for k, e in group.items()} for name, group in score.groups.items()},
        "memory": {
            "rows": len(score.memory),
            "mape": score.memory_mape,
            "false_oom": len(score.false_oom),
            "false_oom_rows": [p.run.id for p in score.false_oom],
        },
        "refused": [{"id": r.run.id, "reason": r.reason} for r in score.refusals],
        "not_counted": [{"id": r.run.id, "reason": r.reason} for r in score.set_aside],
        "predictions": [_row(p) for p in score.predictions],
    }


def _row(p: ServedPrediction) -> dict[str, Any]:
    setup = p.estimate.setup
    return {
        "id": p.run.id,
        "source": p.run.source,
        "chip": p.setup.problem.cluster.chip.name,
        "family": p.family,
        "phase": p.run.steps,
        "metric": p.run.measured_metric,
        "compared": p.compared,
        "unit": "bytes" if p.run.is_memory else "s",
        "measured": p.measured,
        "expected": p.expected,
        "error": p.error,
        "bound": None if p.run.is_memory else p.bound,
        "layout": str(setup.generate),
        "batch": setup.batch,
        "precision": p.setup.problem.load.precision,
        "fits": p.estimate.fits,
        "terms_s": p.terms,
        "assumed": list(p.setup.assumed),
    }
