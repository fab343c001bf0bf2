"""The score verb's answer for serving: errors, memory, what was refused or not counted, the worst rows.

Not here: predicting (`scoring`), and what training's answer shares (`report.scored`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwise.report.report import Report
from meshwise.report.scored import (
    NEXT_STEPS,
    assumptions,
    errors_table,
    memory_tables,
    overall_data,
    refused_data,
    row_data,
    score_words,
    unfit,
    unpredicted,
    worst_tables,
)
from meshwise.scoring import ServingPrediction, ServingScore


def served_report(score: ServingScore, inputs: Mapping[str, Any], *, worst: int = 5) -> Report:
    """How far predictions of serving are from measurements."""
    return Report(
        command="score",
        inputs=inputs,
        answer=score_words(score),
        data=_data(score),
        body=(
            errors_table(score),
            *memory_tables(score),
            *unpredicted("Not predicted", score.refusals),
            *unpredicted("Not counted", score.set_aside),
            *unfit(score.false_oom),
            *worst_tables(score.worst(worst), _words),
        ),
        assumed=assumptions((note, p.run.id) for p in score.predictions for note in p.scenario.assumed),
        not_modelled=(
            "releases of an engine: what the host adds to a step is one number for all of them",
            "queueing, and lengths that vary between requests: meshwise simulate serve",
        ),
        next_steps=NEXT_STEPS,
    )


def _words(p: ServingPrediction) -> str:
    setup = p.estimate.setup
    return f"{p.compared}, {setup.decode}, batch {setup.batch}"


def _data(score: ServingScore) -> dict[str, Any]:
    """The JSON fields."""
    return {
        **overall_data(score),
        "not_counted": refused_data(score.set_aside),
        "predictions": [_row(p) for p in score.predictions],
    }


def _row(p: ServingPrediction) -> dict[str, Any]:
    setup = p.estimate.setup
    return {
        **row_data(p),
        "phase": p.scenario.run.steps,
        "compared": p.compared,
        "low_80": None if p.likely is None else p.likely.low,
        "high_80": None if p.likely is None else p.likely.high,
        "calibration": p.scenario.problem.calibration.name,
        "layout": str(setup.decode),
        "batch": setup.batch,
        "precision": p.scenario.problem.load.precision,
        "fits": p.estimate.fits,
    }
