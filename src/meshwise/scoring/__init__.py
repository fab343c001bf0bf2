"""Predictions scored against measured runs: rows read, set up as plans, predicted, compared. Renders nothing."""

from __future__ import annotations

from meshwise.scoring.outcomes import Refusal
from meshwise.scoring.prediction import Prediction, predict
from meshwise.scoring.rows import COLUMNS, METRICS, MeasuredRun, UnreadRow, read_runs, runs_of
from meshwise.scoring.score import Score, score_runs, shipped_runs
from meshwise.scoring.statistics import Errors, Ranking

__all__ = [
    "COLUMNS",
    "METRICS",
    "Errors",
    "MeasuredRun",
    "Prediction",
    "Ranking",
    "Refusal",
    "Score",
    "UnreadRow",
    "predict",
    "read_runs",
    "runs_of",
    "score_runs",
    "shipped_runs",
]
