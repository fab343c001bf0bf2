"""What is asked of a serving system: requests over time, drawn by a seed or recorded. Not here: how they are served."""

from meshwise.jobs.traffic.lengths import Lognormal, Uniform, parse_lengths
from meshwise.jobs.traffic.load import (
    Arrivals,
    Demand,
    DrawnLoad,
    Load,
    SharedPrefixes,
    Trace,
    parse_arrivals,
    read_trace,
)
from meshwise.jobs.traffic.mix import mix_lengths, mix_trace

__all__ = [
    "Arrivals",
    "Demand",
    "DrawnLoad",
    "Load",
    "Lognormal",
    "SharedPrefixes",
    "Trace",
    "Uniform",
    "mix_lengths",
    "mix_trace",
    "parse_arrivals",
    "parse_lengths",
    "read_trace",
]
