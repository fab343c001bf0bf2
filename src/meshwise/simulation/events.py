"""Run a pipeline's order of work: each task starts when its device is free and what it needs has arrived.

A small event simulation with nothing in closed form; it checks the closed forms of `costs`. Not here: the orders
(`orders`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwise.costs.makespans import PipelineShape, StageTimes
from meshwise.costs.schedules import find_schedule
from meshwise.simulation.orders import Task, Work, work_orders


@dataclass(frozen=True, slots=True)
class Event:
    """Work of one device.

    Args:
        device: 0, 1, ...
        works: one task, or two that ran together.
        start, end: seconds.
    """

    device: int
    works: tuple[Work, ...]
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What every device did when.

    Args:
        events: of all devices, each device's in order.
        stages: devices.
    """

    events: tuple[Event, ...]
    stages: int

    @property
    def makespan(self) -> float:
        """Seconds until the last event is over."""
        return max(e.end for e in self.events)

    def busy(self, device: int) -> float:
        """Seconds that a device works."""
        return sum(e.end - e.start for e in self.events if e.device == device)

    def idle(self, device: int) -> float:
        """Seconds that a device waits."""
        return self.makespan - self.busy(device)

    def peak_in_flight(self, device: int, chunk: int | None = None) -> int:
        """Chunks' activations that a device holds at most, from a forward pass to the gradients of weights.

        Args:
            device: which.
            chunk: count this one only.
        """
        held = peak = 0
        for event in self.events:
            if event.device != device:
                continue
            works = [w for w in event.works if chunk is None or w.chunk == chunk]
            held += sum(w.task is Task.FORWARD for w in works)
            peak = max(peak, held)
            held -= sum(w.task in (Task.BACKWARD, Task.WEIGHTS) for w in works)
        return peak


def run_schedule(
    schedule: str, shape: PipelineShape, times: Callable[[int], StageTimes], send: float = 0.0
) -> Timeline:
    """Simulate a step of a pipeline.

    Args:
        schedule: a key of `costs.schedules.SCHEDULES`.
        shape: its sizes: whole numbers.
        times: chunk of the model -> its seconds.
        send: seconds from one device to another; it delays what waits for it and keeps no device busy.

    Raises:
        LayoutError: where the schedule cannot run so.
        UnknownNameError: for an unknown schedule.
    """
    orders, stages = work_orders(schedule, shape), shape.stages
    last = int(find_schedule(schedule).num_chunks(shape)) - 1
    ended: dict[tuple[str, int, int], tuple[float, int]] = {}
    free = [0.0] * stages
    events: list[list[Event]] = [[] for _ in range(stages)]
    waiting = list(range(stages))
    while waiting:
        moved = False
        for device in list(waiting):
            order, done = orders[device], events[device]
            while len(done) < len(order):
                works = order[len(done)]
                needs = [need for work in works if (need := _needs(work, last)) is not None]
                if not all(need in ended for need in needs):
                    break
                arrivals = [ended[n][0] + send * (ended[n][1] != device) for n in needs]
                start = max([free[device], *arrivals])
                free[device] = start + _seconds(works, times)
                done.append(Event(device, works, start, free[device]))
                ended.update({_result(w): (free[device], device) for w in works})
                moved = True
            if len(done) == len(order):
                waiting.remove(device)
        assert moved or not waiting, f"{schedule}: devices {waiting} wait for one another"
    return Timeline(tuple(event for own in events for event in own), stages)


def _result(work: Work) -> tuple[str, int, int]:
    """What the work makes: activations, their gradients, or gradients of weights."""
    kind = {Task.FORWARD: "forward", Task.WEIGHTS: "weights"}.get(work.task, "backward")
    return kind, work.microbatch, work.chunk


def _needs(work: Work, last: int) -> tuple[str, int, int] | None:
    """What must have arrived before: of the chunk before, of the chunk after, or of its own."""
    if work.task is Task.FORWARD:
        return ("forward", work.microbatch, work.chunk - 1) if work.chunk else None
    if work.task is Task.WEIGHTS:
        return "backward", work.microbatch, work.chunk
    if work.chunk == last:
        return "forward", work.microbatch, work.chunk
    return "backward", work.microbatch, work.chunk + 1


def _seconds(works: tuple[Work, ...], times: Callable[[int], StageTimes]) -> float:
    """How long it takes; two tasks that run together save half of what either chunk says."""
    total = 0.0
    for work in works:
        t = times(work.chunk)
        total += {
            Task.FORWARD: t.forward,
            Task.BACKWARD: t.backward + t.weights,
            Task.ACTIVATIONS: t.backward,
            Task.WEIGHTS: t.weights,
        }[work.task]
        total -= t.saved / 2 * (len(works) > 1)
    return total
