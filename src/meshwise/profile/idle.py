"""When a device was idle, and what its host did meanwhile.

Not here: whether that is a cause of slowness (`causes`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from meshwise.profile.intervals import Intervals
from meshwise.profile.partition import Busy
from meshwise.profile.ranks import Lane
from meshwise.profile.trace import SECOND, Trace

Sums: TypeAlias = "defaultdict[str, float]"

#: Gaps shorter than this (picoseconds) are what the device needs between two kernels.
SHORT = 10_000_000
#: Gaps shorter than this (seconds) are no places of their own.
LONG = 0.5e-3


@dataclass(frozen=True, slots=True)
class Idle:
    """Idle time of an average step on an average device, in seconds.

    Args:
        total: all of it.
        long, short: in gaps longer than 10 us, and in the others.
        num_long, num_short: how many gaps.
        longest: the longest gap.
        after: operations before the longest gaps, with seconds of them.
        late: seconds in which the next operation had not been launched yet; None where launches are unknown.
        late_short: of gaps that are no places of their own; None likewise.
        replayed: of these gaps seconds between two operations of one launch: kernels of a graph.
        host: what the host did meanwhile, with seconds.
        num_ops: operations of a step.
    """

    total: float
    long: float
    short: float
    num_long: float
    num_short: float
    longest: float
    after: tuple[tuple[str, float], ...]
    late: float | None
    late_short: float | None
    replayed: float
    host: tuple[tuple[str, float], ...]
    num_ops: float


def find_idle(traces: Sequence[Trace], lanes: Sequence[Lane], busy: Sequence[Busy], owners: Sequence[int]) -> Idle:
    """Find the gaps of all devices.

    Args:
        traces: with hosts.
        lanes, busy: devices.
        owners: of each device its trace.
    """
    sums: Sums = defaultdict(float)
    after: Sums = defaultdict(float)
    host: Sums = defaultdict(float)
    longest, known = 0, False
    for lane, when, owner in zip(lanes, busy, owners, strict=True):
        weight = SECOND * len(lane.steps) * len(lanes)
        gaps = when.any.gaps_within(lane.steps.start, lane.steps.end)
        length = gaps.end - gaps.start
        long = length > SHORT
        for name, part in (("long", long), ("short", ~long)):
            sums[name] += float(length[part].sum()) / weight
            sums[f"num_{name}"] += float(part.sum()) * SECOND / weight
        longest = max(longest, int(length.max(initial=0)))
        known |= _before_and_late(lane, gaps, after, sums, weight)
        _host(traces[owner], Intervals(gaps.start[long], gaps.end[long]), host, weight)
    return Idle(
        sums["long"] + sums["short"], sums["long"], sums["short"], sums["num_long"], sums["num_short"],
        longest / SECOND, _top(after), sums["late"] if known else None, sums["late_short"] if known else None,
        sums["replayed"], _top(host), sums["ops"],
    )  # fmt: skip


def _top(found: Sums) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(found.items(), key=lambda item: (-item[1], item[0]))[:5])


def _before_and_late(lane: Lane, gaps: Intervals, after: Sums, sums: Sums, weight: float) -> bool:
    """Which operations ended before the gaps, and how much of the gaps passed before the next was launched."""
    start = np.concatenate([s.start for s in lane.device.streams])
    end, op = np.concatenate([s.end for s in lane.device.streams]), np.concatenate([s.op for s in lane.device.streams])
    launch = np.concatenate([s.launch for s in lane.device.streams])
    inside = lane.steps.at(start) >= 0
    sums["ops"] += float(inside.sum()) * SECOND / weight
    ends, starts = np.argsort(end, kind="stable"), np.argsort(start, kind="stable")
    before = np.searchsorted(end[ends], gaps.start, side="right") - 1
    following = np.searchsorted(start[starts], gaps.end, side="left")
    length = gaps.end - gaps.start
    for place in np.argsort(-length, kind="stable")[:64].tolist():
        if before[place] >= 0 and length[place] > SHORT:
            name = lane.ops[int(op[ends[before[place]]])].name
            after[name] += float(length[place]) / weight
    valid = following < len(starts)
    launched = launch[starts[following[valid]]]
    known = launched >= 0
    length, short = length[valid], length[valid] < LONG * SECOND
    same = known & (before[valid] >= 0) & (launch[ends[before[valid]]] == launched)
    late = np.where(known, np.clip(launched - gaps.start[valid], 0, length), 0)
    for name, spent in (("late", late), ("late_short", late[short]), ("replayed", length[short & same])):
        sums[name] += float(spent.sum()) / weight
    return bool(known.any())


_DULL = re.compile(r"ProfilerStep|^\[|PyTorch Profiler|^execute_|thread|Thread(pool)?|^train \d")


def _host(trace: Trace, gaps: Intervals, host: Sums, weight: float) -> None:
    """What threads of the host did in gaps: innermost operations, by the time that they overlap with them."""
    if not len(gaps.start) or trace.host_only:
        return
    for thread in trace.host:
        end = thread.start + thread.duration
        leaf = np.ones(len(end), dtype=bool)
        leaf[:-1] = ~((thread.start[1:] < end[:-1]) & (end[1:] <= end[:-1]))
        overlap = gaps.within(thread.start, end)
        chosen = leaf & (overlap > 0)
        for text, length in zip(thread.text[chosen].tolist(), overlap[chosen].tolist(), strict=True):
            name = trace.texts[text]
            if not _DULL.search(name):
                host[name] += length / weight
