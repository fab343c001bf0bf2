"""Predictions of serving scored against measured rows: read, set up as loads and layouts, estimated, compared."""

from __future__ import annotations

from meshwise.scoring.serving.columns import SERVING_COLUMNS, SERVING_METRICS
from meshwise.scoring.serving.prediction import ServedPrediction, predict_served
from meshwise.scoring.serving.reading import ServedRun, is_serving, served_runs_of, shipped_served_runs
from meshwise.scoring.serving.score import ServedScore, score_served

__all__ = [
    "SERVING_COLUMNS",
    "SERVING_METRICS",
    "ServedPrediction",
    "ServedRun",
    "ServedScore",
    "is_serving",
    "predict_served",
    "score_served",
    "served_runs_of",
    "shipped_served_runs",
]
