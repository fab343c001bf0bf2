"""What is wanted: a training job, its precision, optimizer, what is trained; or a serving load. Requests: `traffic`."""

from meshwise.jobs.fine_tuning import FineTuning, parse_fine_tuning, trainable_parameters, with_adapters
from meshwise.jobs.precision import PRECISIONS, Precision, narrowed, parse_precision
from meshwise.jobs.serving import ServingConditions, ServingLoad, computed_lengths, drawn_requests, output_lengths
from meshwise.jobs.serving_precision import (
    SERVING_PRECISIONS,
    ServingPrecision,
    parse_serving_precision,
    quantised,
)
from meshwise.jobs.training import OPTIMIZERS, Optimizer, TrainingJob, newton_schulz_flops, parse_optimizer

__all__ = [
    "OPTIMIZERS",
    "PRECISIONS",
    "SERVING_PRECISIONS",
    "FineTuning",
    "Optimizer",
    "Precision",
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
