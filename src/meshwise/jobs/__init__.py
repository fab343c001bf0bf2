"""What is wanted: a training job, its precision, optimizer, what is trained; or a serving load. Requests: `traffic`."""

from meshwise.jobs.adapters import trainable_parameters, with_adapters
from meshwise.jobs.fine_tuning import FineTuning, parse_fine_tuning
from meshwise.jobs.narrowing import narrowed
from meshwise.jobs.optimizer import OPTIMIZERS, Optimizer, newton_schulz_flops, parse_optimizer
from meshwise.jobs.precision import PRECISIONS, Precision, Recipe, parse_precision
from meshwise.jobs.serving import ServingConditions, ServingLoad
from meshwise.jobs.serving_precision import (
    SERVING_PRECISIONS,
    ServingPrecision,
    parse_serving_precision,
    quantised,
)
from meshwise.jobs.serving_requests import computed_lengths, drawn_requests, output_lengths
from meshwise.jobs.training import TrainingJob

__all__ = [
    "OPTIMIZERS",
    "PRECISIONS",
    "SERVING_PRECISIONS",
    "FineTuning",
    "Optimizer",
    "Precision",
    "Recipe",
    "ServingConditions",
    "ServingLoad",
    "ServingPrecision",
    "TrainingJob",
    "computed_lengths",
    "drawn_requests",
    "narrowed",
    "newton_schulz_flops",
    "output_lengths",
    "parse_fine_tuning",
    "parse_optimizer",
    "parse_precision",
    "parse_serving_precision",
    "quantised",
    "trainable_parameters",
    "with_adapters",
]
