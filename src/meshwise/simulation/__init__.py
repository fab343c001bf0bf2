"""Things that happen over time: the work of a pipeline, event by event. Not here: closed forms (`costs`)."""

from meshwise.simulation.events import Event, Timeline, run_schedule
from meshwise.simulation.orders import Task, Work, work_orders

__all__ = ["Event", "Task", "Timeline", "Work", "run_schedule", "work_orders"]
