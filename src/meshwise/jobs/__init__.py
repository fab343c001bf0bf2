"""What is wanted: a training job, its precision and optimizer. Serving loads come with serving."""

from meshwise.jobs.precision import (
    OPTIMIZERS,
    PRECISIONS,
    Optimizer,
    Precision,
    parse_optimizer,
    parse_precision,
)
from meshwise.jobs.training import TrainingJob

__all__ = [
    "OPTIMIZERS",
    "PRECISIONS",
    "Optimizer",
    "Precision",
    "TrainingJob",
    "parse_optimizer",
    "parse_precision",
]
