"""What is wanted: a training job, its precision and optimizer. Serving loads come with serving."""

from meshwise.jobs.narrowing import narrowed
from meshwise.jobs.optimizer import OPTIMIZERS, Optimizer, newton_schulz_flops, parse_optimizer
from meshwise.jobs.precision import PRECISIONS, Precision, Recipe, parse_precision
from meshwise.jobs.training import TrainingJob

__all__ = [
    "OPTIMIZERS",
    "PRECISIONS",
    "Optimizer",
    "Precision",
    "Recipe",
    "TrainingJob",
    "narrowed",
    "newton_schulz_flops",
    "parse_optimizer",
    "parse_precision",
]
