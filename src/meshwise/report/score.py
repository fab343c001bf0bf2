"""The score verb's answer for training: errors, ranking, memory, what was refused, the worst rows.

Not here: predicting (`scoring`), and what serving's answer shares (`report.scored`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshwise.report.report import Report
from meshwise.report.scored import (
    NEXT_STEPS,
    assumptions,
    errors_table,
    memory_tables,
    overall_data,
    row_data,
    score_words,
    unfit,
    unpredicted,
    worst_tables,
)
from meshwise.scoring import TrainingPrediction, TrainingScore
from meshwise.scoring.score import SAME


def score_report(score: TrainingScore, inputs: Mapping[str, Any], *, worst: int = 5) -> Report:
    """How far predictions are from measurements."""
    return Report(
        command="score",
        inputs=inputs,
        answer=score_words(score),
        data=_data(score),
        body=(
            errors_table(score),
            *_ranking(score),
            *memory_tables(score),
            *unpredicted("Not predicted", score.refusals),
            *unfit(score.false_oom),
            *worst_tables(score.worst(worst), lambda p: f"{p.run.n_chips:,} chips, {p.layout}"),
        ),
        assumed=assumptions((note, p.run.id) for p in score.predictions for note in _read_into(p)),
        not_modelled=(
            "stragglers, checkpoints, input pipelines, and other users of the network",
            "what a release of software changes: one calibration stands for all years",
        ),
        next_steps=NEXT_STEPS,
    )


def _ranking(score: TrainingScore) -> list[RenderableType]:
    """How often the faster of two layouts was predicted to be."""
    found = score.ranking
    if found.pairwise is None:
        return []
    words = f"{100 * found.pairwise:.1f} % of {found.pairs:,} pairs of layouts of one model on one machine"
    return [Text(f"Ranked right: {words}")]


def _read_into(p: TrainingPrediction) -> Iterator[str]:
    """What was read into a row."""
    yield from p.scenario.assumed
    for name in p.scenario.open:
        yield f"{name.replace('_', ' ')} is not said: {getattr(p.layout, name)} taken, the fastest that fits"


def _data(score: TrainingScore) -> dict[str, Any]:
    """The JSON fields."""
    return {
        **overall_data(score),
        "ranking": {**asdict(score.ranking), "smallest_difference": SAME},
        "predictions": [_row(p) for p in score.predictions],
    }


def _row(p: TrainingPrediction) -> dict[str, Any]:
    return {
        **row_data(p),
        "low_80": None if p.likely is None else p.likely.low,
        "high_80": None if p.likely is None else p.likely.high,
        "layout": str(p.layout),
        "fits": p.estimate.fits,
        "open": list(p.scenario.open),
    }
