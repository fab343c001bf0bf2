"""Tells the wire of a collective from waiting for others, over several devices of one job.

Clocks of processes differ, ends of a collective do not: the device that arrives last waits least, so that the shortest
run of a collective is what the wire takes, and what a device's run is longer is waiting. Not here: which device came
last and why (`causes`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshwise.profile.intervals import Intervals
from meshwise.profile.steps import Steps
from meshwise.profile.trace import SECOND, Activity, Device, OpKind

#: (device, start, duration) of one device's run of a collective.
_Run = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Lane:
    """One device of the job, with its steps."""

    device: Device
    ops: Sequence[OpKind]
    steps: Steps


@dataclass(frozen=True, slots=True)
class Waiting:
    """How long each device waited in collectives.

    Args:
        intervals: when each device waited; None for one that has no partner.
        matched, total: runs of collectives in steps that had a partner, and all.
        blame: picoseconds that others waited for each device, on average over the others.
        steps: of each device.
        waited: picoseconds that each device waited.
        wire: picoseconds on the wire by device.
    """

    intervals: tuple[Intervals | None, ...]
    matched: int
    total: int
    blame: tuple[float, ...]
    waited: tuple[float, ...]
    wire: tuple[float, ...]
    steps: tuple[int, ...]

    def blame_s(self, place: int) -> float:
        """Seconds of a step that others wait for a device, on average over the others."""
        return self.blame[place] / SECOND / max(self.steps[place], 1)


@dataclass(slots=True)
class _Sums:
    waits: list[list[tuple[int, int]]]
    blame: list[float]
    waited: list[float]
    wire: list[float]
    matched: int = field(default=0)


def find_waiting(lanes: Sequence[Lane]) -> Waiting:
    """Match the collectives of all devices and divide each into waiting and wire."""
    number = len(lanes)
    runs: dict[Hashable, list[_Run]] = defaultdict(list)
    alike: dict[Hashable, int] = {}
    total = 0
    for place, lane in enumerate(lanes):
        for key, run in _collectives(place, lane, alike):
            runs[key].append(run)
            total += 1
    sums = _Sums([[] for _ in lanes], [0.0] * number, [0.0] * number, [0.0] * number)
    for found in runs.values():
        if len(found) > 1:
            _divide(found, sums)
    partners = {place for found in runs.values() if len(found) > 1 for place, _, _ in found}
    intervals = tuple(_union(sums.waits[place]) if place in partners else None for place in range(number))
    return Waiting(intervals, sums.matched, total, tuple(sums.blame), tuple(sums.waited), tuple(sums.wire),
                   tuple(len(lane.steps) for lane in lanes))  # fmt: skip


def _divide(found: Sequence[_Run], sums: _Sums) -> None:
    """One collective on all its devices."""
    wire = min(duration for _, _, duration in found)
    last = min(found, key=lambda run: (run[2], run[0]))[0]
    sums.matched += len(found)
    for place, start, duration in found:
        sums.wire[place] += wire
        if duration > wire:
            sums.waits[place].append((start, start + duration - wire))
            sums.waited[place] += duration - wire
            sums.blame[last] += (duration - wire) / (len(found) - 1)


def _union(waits: Sequence[tuple[int, int]]) -> Intervals:
    columns = np.array(waits, dtype=np.int64).reshape(-1, 2)
    return Intervals.of(columns[:, 0], columns[:, 1])


def _collectives(place: int, lane: Lane, alike: dict[Hashable, int]) -> list[tuple[Hashable, _Run]]:
    """Each run of a collective in a step, with what is equal on all devices that take part in it (`alike` numbers it).

    The step is counted from the last one, or named by its marker where all names differ; in a step the n-th run of one
    kind, size and group meets the n-th of others.
    """
    steps, named = lane.steps, len(set(lane.steps.names)) == len(lane.steps) and "#" in "".join(lane.steps.names)
    ops = [_matched(op, lane.device.rank, alike) for op in lane.ops]
    matched = np.array([number is not None for number in ops], dtype=bool)
    rows = []
    for stream in lane.device.streams:
        chosen = matched[stream.op] & (stream.duration > 0)
        step = steps.at(stream.start)
        inside = chosen & (step >= 0)
        columns = (stream.start[inside], stream.duration[inside], stream.op[inside], step[inside])
        rows += list(zip(*(c.tolist() for c in columns), strict=True))
    seen: Counter[Hashable] = Counter()
    found: list[tuple[Hashable, _Run]] = []
    for start, duration, op, step in sorted(rows):
        key = steps.names[step] if named else step - len(steps), ops[op]
        found.append(((*key, seen[key]), (place, start, duration)))
        seen[key] += 1
    return found


def _matched(kind: OpKind, rank: int | None, alike: dict[Hashable, int]) -> int | None:
    """A number for what is equal on all devices that take part in a collective; None if it is none of a group."""
    sent = kind.collective
    if kind.activity != Activity.COLLECTIVE or sent is None:
        return None
    if sent.kind in ("send-recv", "collective-permute", "barrier"):
        return None
    key = kind.name, kind.program, sent.kind, sent.num_bytes, sent.group_size, sent.group_of(rank)
    return alike.setdefault(key, len(alike))
