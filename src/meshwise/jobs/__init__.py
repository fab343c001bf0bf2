"""What is wanted: a training job, its precision, optimizer, and what is trained. Serving loads are in `traffic`."""

from meshwise.jobs.adapters import trainable_parameters, with_adapters
from meshwise.jobs.fine_tuning import FineTuning, parse_fine_tuning
from meshwise.jobs.narrowing import narrowed
from meshwise.jobs.optimizer import OPTIMIZERS, Optimizer, newton_schulz_flops, parse_optimizer
from meshwise.jobs.precision import PRECISIONS, Precision, Recipe, parse_precision
from meshwise.jobs.training import TrainingJob

__all__ = [
    "OPTIMIZERS",
    "PRECISIONS",
    "FineTuning",
    "Optimizer",
    "Precision",
    "Recipe",
    "TrainingJob",
    "narrowed",
    "newton_schulz_flops",
    "parse_fine_tuning",
    "parse_optimizer",
    "parse_precision",
    "trainable_parameters",
    "with_adapters",
]
