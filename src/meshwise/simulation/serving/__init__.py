"""Serving over time: requests, replicas that batch them, what users notice. Not here: what a step takes (`costs`)."""

from meshwise.scheduling import POLICIES, PREEMPTIONS, Scheduling, Speculation
from meshwise.simulation.serving.recording import Activity, Sample
from meshwise.simulation.serving.results import LatencyTarget, LatencyTargets, Quantiles, ServingResult, Targets
from meshwise.simulation.serving.simulate import (
    Capacity,
    find_capacity,
    joined,
    keeps_targets,
    part_tasks,
    simulate_part,
    simulate_serving,
)
from meshwise.simulation.serving.system import (
    Autoscaling,
    PrefillPool,
    ServingSystem,
)

__all__ = [
    "POLICIES",
    "PREEMPTIONS",
    "Activity",
    "Autoscaling",
    "Capacity",
    "LatencyTarget",
    "LatencyTargets",
    "PrefillPool",
    "Quantiles",
    "Sample",
    "Scheduling",
    "ServingResult",
    "ServingSystem",
    "Speculation",
    "Targets",
    "find_capacity",
    "joined",
    "keeps_targets",
    "part_tasks",
    "simulate_part",
    "simulate_serving",
]
