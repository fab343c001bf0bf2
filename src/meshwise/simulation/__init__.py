"""Things that happen over time: the work of a pipeline, event by event. Not here: closed forms (`costs`)."""

from meshwise.simulation.step import STREAMS, Span, StepTimeline, simulate_training_step

__all__ = ["STREAMS", "Span", "StepTimeline", "simulate_training_step"]
