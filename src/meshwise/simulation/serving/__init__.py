"""Serving over time: requests, replicas that batch them, what users notice. Not here: what a step takes (`costs`)."""

from meshwise.simulation.serving.recording import Sample, Span
from meshwise.simulation.serving.results import Aims, LatencyTarget, Quantiles, ReplicaSummary, ServingResult, Targets
from meshwise.simulation.serving.routing import ROUTERS
from meshwise.simulation.serving.scheduling import POLICIES, PREEMPTIONS, Scheduling, Speculation
from meshwise.simulation.serving.simulate import Capacity, find_capacity, simulate_serving
from meshwise.simulation.serving.system import Autoscaling, PrefillPool, ServingSystem

__all__ = [
    "POLICIES",
    "PREEMPTIONS",
    "ROUTERS",
    "Aims",
    "Autoscaling",
    "Capacity",
    "LatencyTarget",
    "PrefillPool",
    "Quantiles",
    "ReplicaSummary",
    "Sample",
    "Scheduling",
    "ServingResult",
    "ServingSystem",
    "Span",
    "Speculation",
    "Targets",
    "find_capacity",
    "simulate_serving",
]
