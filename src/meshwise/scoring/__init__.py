"""Predictions scored against measurements: rows read, understood as scenarios, predicted, compared. Renders nothing."""

from __future__ import annotations

from meshwise.scoring.prediction import Prediction, Refusal
from meshwise.scoring.reading import is_operations, is_serving, read_rows, read_text, shipped_rows
from meshwise.scoring.rows import ServingRun, TrainingRun
from meshwise.scoring.score import (
    Errors,
    Score,
    ServingScore,
    TrainingScore,
    score_serving,
    score_training,
)
from meshwise.scoring.serving import ServingPrediction, predict_serving
from meshwise.scoring.training import TrainingPrediction, predict_training

__all__ = [
    "Errors",
    "Prediction",
    "Refusal",
    "Score",
    "ServingPrediction",
    "ServingRun",
    "ServingScore",
    "TrainingPrediction",
    "TrainingRun",
    "TrainingScore",
    "is_operations",
    "is_serving",
    "predict_serving",
    "predict_training",
    "read_rows",
    "read_text",
    "score_serving",
    "score_training",
    "shipped_rows",
]
