"""Things that happen over time: the work of a pipeline, event by event. Not here: closed forms (`costs`)."""

from meshwise.simulation.orders import Event, Task, Timeline, Work, run_schedule, work_orders
from meshwise.simulation.step import STREAMS, Span, StepTimeline, simulate_training_step

__all__ = [
    "STREAMS",
    "Event",
    "Span",
    "StepTimeline",
    "Task",
    "Timeline",
    "Work",
    "run_schedule",
    "simulate_training_step",
    "work_orders",
]
