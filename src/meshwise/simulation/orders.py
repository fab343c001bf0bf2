"""The order of work of every pipeline schedule, and running it: a task starts when its device and its inputs are ready.

Orders are as the papers draw them; nothing is left to a runtime. Not here: closed forms (`costs.makespans`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from meshwise.core.errors import LayoutError
from meshwise.costs.arithmetic import Num
from meshwise.costs.makespans import PipelineShape, StageTimes
from meshwise.costs.schedules import find_schedule


class Task(StrEnum):
    """What is done with one microbatch in one chunk of the model."""

    FORWARD = "forward"
    BACKWARD = "backward"  # gradients of activations and of weights in one pass
    ACTIVATIONS = "activation gradients"
    WEIGHTS = "weight gradients"


@dataclass(frozen=True, slots=True)
class Work:
    """One task of one microbatch.

    Args:
        task: what is done.
        microbatch: 0, 1, ...
        chunk: of the model, in its order: 0 has the embedding.
        upwards: whether the microbatch entered at the last device and goes towards the first (DualPipe).
    """

    task: Task
    microbatch: int
    chunk: int
    upwards: bool = False


#: Task -> the passes that it makes, by their names in `StageTimes`.
PASSES = {
    Task.FORWARD: ("forward",),
    Task.BACKWARD: ("backward", "weights"),
    Task.ACTIVATIONS: ("backward",),
    Task.WEIGHTS: ("weights",),
}


#: What one device runs: each entry is one task, or a forward and a backward task run together.
Order = tuple[tuple[Work, ...], ...]


def work_orders(schedule: str, shape: PipelineShape) -> tuple[Order, ...]:
    """The order of work of every device.

    >>> orders = work_orders("1f1b", PipelineShape(2, 2))
    >>> [[f"{run[0].task[0]}{run[0].microbatch}" for run in order] for order in orders]
    [['f0', 'f1', 'b0', 'b1'], ['f0', 'b0', 'f1', 'b1']]

    Args:
        schedule: a key of `costs.schedules.SCHEDULES`.
        shape: stages, microbatches, virtual stages: whole numbers.

    Raises:
        LayoutError: where the schedule cannot run so.
        UnknownNameError: for an unknown schedule.
    """
    reason = find_schedule(schedule).why_not(shape)
    if reason is not None:
        raise LayoutError(reason)
    order = _ORDERS[schedule]
    return tuple(tuple(order(d, shape)) for d in range(shape.stages))


def _passes(task: Task, d: int, shape: PipelineShape) -> Iterator[tuple[Work, ...]]:
    """The task of every microbatch, on a device that holds one chunk."""
    return ((Work(task, m, d),) for m in range(shape.num_microbatches))


def _alternate(
    forward: Iterator[tuple[Work, ...]], backward: Iterator[tuple[Work, ...]], ahead: int
) -> Iterator[tuple[Work, ...]]:
    """Some forward passes `ahead`, then a backward pass after each forward pass, then the other backward passes."""
    yield from islice(forward, ahead)
    for work in forward:
        yield work
        yield next(backward)
    yield from backward


def _gpipe(d: int, shape: PipelineShape) -> Iterator[tuple[Work, ...]]:
    forward, backward = _passes(Task.FORWARD, d, shape), _passes(Task.BACKWARD, d, shape)
    return _alternate(forward, backward, shape.num_microbatches)


def _1f1b(d: int, shape: PipelineShape) -> Iterator[tuple[Work, ...]]:
    forward, backward = _passes(Task.FORWARD, d, shape), _passes(Task.BACKWARD, d, shape)
    return _alternate(forward, backward, shape.stages - 1 - d)


def _interleaved(d: int, shape: PipelineShape) -> Iterator[tuple[Work, ...]]:
    """Rounds of p microbatches through the first chunk, then through the second, ...; backward from the last."""
    p, M, v = shape.stages, shape.num_microbatches, shape.virtual_stages

    def rounds(task: Task, chunks: range) -> Iterator[tuple[Work, ...]]:
        for begin in range(0, M, p):
            for chunk in chunks:
                yield from ((Work(task, m, chunk * p + d),) for m in range(begin, begin + p))

    forward, backward = rounds(Task.FORWARD, range(v)), rounds(Task.BACKWARD, range(v - 1, -1, -1))
    return _alternate(forward, backward, 2 * (p - 1 - d) + (v - 1) * p)


def _zb_h1(d: int, shape: PipelineShape) -> Iterator[tuple[Work, ...]]:
    """The device d delays d gradients of weights, so that every device holds p microbatches."""
    p, M = shape.stages, shape.num_microbatches
    tasks = (Task.FORWARD, Task.ACTIVATIONS, Task.WEIGHTS)
    forward, activations, weights = (_passes(task, d, shape) for task in tasks)
    yield from islice(forward, p - 1 - d)
    for m in range(M):
        yield from islice(forward, 1)
        yield from islice(activations, 1)
        if m >= d:
            yield from islice(weights, 1)
    yield from weights


class _Fold:
    """The two chunks of a device, and how many microbatches each of them has had."""

    def __init__(
        self, chunks: tuple[int, int], upwards: tuple[bool, bool] = (False, False), begin: tuple[int, int] = (0, 0)
    ) -> None:
        self.chunks = chunks
        self.upwards = upwards
        self.begin = begin
        self._next = {(task, k): begin[k] for task in (Task.FORWARD, Task.BACKWARD, Task.WEIGHTS) for k in (0, 1)}

    def done(self, task: Task, k: int) -> int:
        """Microbatches that had the task in chunk `k`."""
        return self._next[task, k] - self.begin[k]

    def work(self, task: Task, k: int) -> Work:
        """The task for the next microbatch in chunk `k`."""
        counted = Task.BACKWARD if task is Task.ACTIVATIONS else task  # whole or not, one after another
        m = self._next[counted, k]
        self._next[counted, k] = m + 1
        return Work(task, m, self.chunks[k], self.upwards[k])


def _zb_v(d: int, shape: PipelineShape) -> Iterator[tuple[Work, ...]]:
    p, M = shape.stages, shape.num_microbatches
    fold = _Fold((d, 2 * p - 1 - d))
    F, A, W = Task.FORWARD, Task.ACTIVATIONS, Task.WEIGHTS

    def run(*what: tuple[Task, int]) -> Iterator[tuple[Work, ...]]:
        yield from ((fold.work(task, k),) for task, k in what)

    yield from run(*[(F, 0)] * (2 * (p - d) - 1))
    yield from run(*[(F, 1), (F, 0)] * d)
    yield from run(*[(F, 1), (A, 1), (W, 1)] * (p - d))
    while fold.done(F, 1) < M:
        if fold.done(F, 0) < M:
            yield from run((F, 0))
        yield from run((A, 0), (W, 0), (F, 1), (A, 1), (W, 1))
    yield from run(*[(A, 0), (A, 1)] * d)
    yield from run(*[(A, 0), (W, 0)] * (p - d))
    yield from run(*[(W, 1)] * (M - fold.done(W, 1)), *[(W, 0)] * (M - fold.done(W, 0)))


def _dualpipe(d: int, shape: PipelineShape) -> Iterator[tuple[Work, ...]]:
    """Half of the microbatches enter at the first device, half at the last; a device has a stage of both ways."""
    p, M = shape.stages, shape.num_microbatches
    upper = d >= p // 2
    stages, begin = (d, p - 1 - d), (0, M // 2)
    near = (1, 0) if upper else (0, 1)  # the direction whose entry is nearer comes first
    fold = _Fold((stages[near[0]], stages[near[1]]), (near[0] == 1, near[1] == 1), (begin[near[0]], begin[near[1]]))
    return _bidirectional(fold, min(d, p - 1 - d), p // 2, M // 2)


def _dualpipe_v(d: int, shape: PipelineShape) -> Iterator[tuple[Work, ...]]:
    p, M = shape.stages, shape.num_microbatches
    return _bidirectional(_Fold((d, 2 * p - 1 - d)), d, p, M)


def _bidirectional(fold: _Fold, d: int, half: int, n: int) -> Iterator[tuple[Work, ...]]:
    """The order of a device `d` from the nearer end, where `half` devices lie between an end and the middle.

    Args:
        fold: its chunks: 0 is the one that microbatches of the nearer end reach first.
        d, half: as above.
        n: microbatches of either chunk.
    """
    F, B, A, W = Task.FORWARD, Task.BACKWARD, Task.ACTIVATIONS, Task.WEIGHTS
    delayed: list[Work] = []

    def one(task: Task, k: int) -> tuple[Work, ...]:
        work = fold.work(task, k)
        if task is A:
            delayed.append(Work(W, work.microbatch, work.chunk, work.upwards))
        return (work,)

    def pair(forward: int, backward: int) -> tuple[Work, ...]:
        return fold.work(F, forward), fold.work(B, backward)

    inner = half - d - 1
    yield from (one(F, 0) for _ in range(2 * inner))
    for _ in range(d + 1):
        yield one(F, 0)
        yield one(F, 1)
    for _ in range(inner):
        yield one(A, 1)
        yield (delayed.pop(0),)
        yield one(F, 1)
    for i in range(n - 2 * half + d + 1):
        if i == 0 and inner == 0:  # in the middle these two wait less when they run apart
            yield one(F, 0)
            yield one(B, 1)
        else:
            yield pair(0, 1)
        yield pair(1, 0)
    for _ in range(inner):
        yield one(B, 1)
        yield pair(1, 0)
    # From the second half of what is left, gradients of weights wait.
    for i in range(2 * (d + 1)):
        yield one(A if i >= d + 1 else B, 1 - i % 2)
    for _ in range(inner):
        yield (delayed.pop(0),)
        yield one(A, 0)
    yield from ((work,) for work in delayed)


_ORDERS: dict[str, Callable[[int, PipelineShape], Iterator[tuple[Work, ...]]]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
    "zb-v": _zb_v,
    "dualpipe": _dualpipe,
    "dualpipe-v": _dualpipe_v,
}


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
                ended.update({(PASSES[w.task][0], w.microbatch, w.chunk): (free[device], device) for w in works})
                moved = True
            if len(done) == len(order):
                waiting.remove(device)
        assert moved or not waiting, f"{schedule}: devices {waiting} wait for one another"
    return Timeline(tuple(event for own in events for event in own), stages)


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
    total: Num = 0.0
    for work in works:
        t = times(work.chunk)
        total = total + sum(getattr(t, name) for name in PASSES[work.task])
        total = total - t.saved / 2 * (len(works) > 1)
    return float(total)
