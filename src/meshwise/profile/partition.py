"""Where the time of each step went: every instant of a device belongs to exactly one part.

In this order: compute, if any operation computes; else exposed collective, if one is on the wire; else waiting for
others, if one waits for the last to arrive; else exposed copy; else compute again, if only a loop or a call is open;
else idle. Sums are of whole picoseconds: the parts of a step add up to it. Not here: steps (`steps`), how waiting is
told from wire (`ranks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.profile.intervals import Intervals
from meshwise.profile.steps import Steps
from meshwise.profile.trace import Activity, Device, OpKind, Stream, Times

#: Names of the parts, in the order of reports.
PARTS = ("compute", "exposed_collective", "exposed_copy", "waiting", "idle")


@dataclass(frozen=True, slots=True)
class Busy:
    """When a device did what; sets overlap."""

    compute: Intervals
    wire: Intervals
    waiting: Intervals
    copy: Intervals
    control: Intervals

    @property
    def any(self) -> Intervals:
        """When it did anything."""
        return Intervals.union((self.compute, self.wire, self.waiting, self.copy, self.control))


@dataclass(frozen=True, slots=True)
class Partition:
    """Picoseconds of each part (`PARTS`) in each step."""

    parts: Mapping[str, Times]

    @property
    def steps(self) -> Times:
        """Length of each step: the sum of its parts."""
        total: Times = np.sum([self.parts[name] for name in PARTS], axis=0)
        return total


def busy_times(device: Device, ops: Sequence[OpKind], waiting: Intervals | None = None) -> Busy:
    """When a device did what.

    Args:
        device: with its streams.
        ops: the trace's operations.
        waiting: when its collectives waited for others; None if that is not known.
    """
    activity = np.array([op.activity for op in ops], dtype=np.int8)
    sets = {kind: [] for kind in Activity}  # type: dict[Activity, list[Intervals]]
    for stream in device.streams:
        own = activity[stream.op]
        if stream.nested:
            own = np.where(holders(stream), Activity.CONTROL, own)
        for kind in Activity:
            chosen = own == kind
            if chosen.any():
                sets[kind].append(Intervals.of(stream.start[chosen], stream.end[chosen]))
    unions = {kind: Intervals.union(found) for kind, found in sets.items()}
    waited = waiting if waiting is not None else Intervals.union(())
    wire = unions[Activity.COLLECTIVE].minus(waited)
    return Busy(unions[Activity.COMPUTE], wire, waited, unions[Activity.COPY], unions[Activity.CONTROL])


def holders(stream: Stream) -> np.ndarray:
    """Which operations of a stream hold the next one: loops, calls, and what the host calls inside of others."""
    end = stream.end
    holds = np.zeros(len(end), dtype=bool)
    holds[:-1] = (stream.start[1:] < end[:-1]) & (end[1:] <= end[:-1]) & (stream.duration[1:] > 0)
    return holds


def partition(busy: Busy, steps: Steps) -> Partition:
    """Divide each step."""
    layers = (busy.compute, busy.wire, busy.waiting, busy.copy, busy.control)
    covered, union = [], Intervals.union(())
    for layer in layers:
        union = Intervals.union((union, layer))
        covered.append(union.within(steps.start, steps.end))
    compute, wire, waiting, copy, control = np.diff(np.array([np.zeros_like(steps.start), *covered]), axis=0)
    return Partition({
        "compute": compute + control,
        "exposed_collective": wire,
        "exposed_copy": copy,
        "waiting": waiting,
        "idle": steps.duration - covered[-1],
    })  # fmt: skip


def self_time(stream: Stream) -> Times:
    """Time of each operation without those that it holds."""
    if not stream.nested:
        return stream.duration
    holds = holders(stream)
    if not holds.any():
        return stream.duration
    leaves = Intervals.of(stream.start[~holds], stream.end[~holds])
    own = stream.duration.copy()
    places = np.flatnonzero(holds)
    inside = leaves.within(stream.start[places], stream.end[places])
    ends = stream.end
    stack: list[int] = []
    spent = dict(zip(places.tolist(), inside.tolist(), strict=True))
    for place in places.tolist():
        while stack and ends[stack[-1]] <= stream.start[place]:
            _close(stack, own, spent)
        stack.append(place)
    while stack:
        _close(stack, own, spent)
    return own


def _close(stack: list[int], own: Times, spent: dict[int, int]) -> None:
    """An operation that holds others ends: its own time is taken from the one that holds it."""
    place = stack.pop()
    own[place] = max(int(own[place]) - spent[place], 0)
    if stack:
        spent[stack[-1]] += int(own[place])
