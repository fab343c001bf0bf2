"""Places of a step that take long: a gap, a run of a collective, step by step on all devices; steps that stand out.

Not here: whether a place is a cause of slowness (`causes`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwise.profile.idle import LONG
from meshwise.profile.profile import DeviceTimes, Profile
from meshwise.profile.trace import SECOND, Activity, OpKind

#: Steps stand out by this share of a step, and by this factor of how much the usual ones differ: many of them; two tell
#: less, and the factor is three times that.
_UNUSUAL_SHARE, _UNUSUAL_FACTOR, _MOST_UNUSUAL = 0.01, 4.0, 3
#: A gap's places in two steps are one if they lie within this share of a step's operations (or two of them) of each
#: other, and lengths differ by less than this factor; so many of the longest are compared.
_NEAR, _ALIKE, _MOST_COMPARED = 0.02, 1.5, 200
#: A gap that is longer by this factor than another may be another's, though both are after one operation.
_FAR = 3.0
#: A step stands out if it is longer than the shortest other step by at least this share of what takes longer in it.
_LONGER = 0.5
#: A step stands out by itself if it is longer than the others by this share, and by this factor of how much they
#: differ, which is no more than this share; a place explains it if it takes longer by at least this share of that.
_LONG_STEP, _LONG_FACTOR, _STEADY, _EXPLAINS = 0.02, 3.0, 0.1, 0.5

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Place:
    """One place of a step.

    Args:
        name: the operation, or the one before a gap.
        between: whether a gap reaches the end of its step.
        seconds: [devices, steps], 0 where nothing is long there.
        longest: (device, start, end) in picoseconds of the longest.
    """

    name: str
    between: bool
    seconds: Seconds
    longest: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Unusual:
    """A place that takes longer in few steps: seconds more there, which of all steps, the device if it is one alone."""

    place: Place
    seconds: float
    at: npt.NDArray[np.bool_]
    device: int | None

    @property
    def share(self) -> float:
        """Of the steps."""
        return float(self.at.mean())

    @property
    def steps(self) -> str:
        """How many steps, in words."""
        return f"{int(self.at.sum())} of {len(self.at)} steps"


def standing_out(profile: Profile, places: Sequence[Place]) -> tuple[list[Unusual], list[Seconds]]:
    """The places that make few steps longer by most, and seconds [devices, steps] of each place as if they did not.

    A place that differs from step to step at will makes a step longer if it explains why that step stands out. If a
    step without what takes longer there would be far shorter than all others, it does something else less: the place
    makes it no longer.
    """
    steps = np.array([device.lane.steps.duration for device in profile.devices]) / SECOND
    more_s = _longer_by(steps.mean(axis=0))
    found = []
    for number, place in enumerate(places):
        own = place.seconds.max(axis=0)
        at = unusual_steps(own, profile.step_s)
        if not at.any() and more_s.any():
            at = (more_s > 0) & (own - np.median(own[more_s == 0]) >= _EXPLAINS * more_s)
        if at.any():
            middle = np.median(place.seconds[:, ~at], axis=1, keepdims=True)
            usual = np.where(at, np.minimum(place.seconds, middle), place.seconds)
            longer = (place.seconds - usual)[:, at]
            more = float(longer.max(axis=0).mean())
            if (steps[:, at].mean(axis=1) - more >= steps[:, ~at].min(axis=1) - _LONGER * more).any():
                late = np.flatnonzero(2 * longer.sum(axis=1) > longer.sum(axis=1).max())
                device = int(late[0]) if len(late) == 1 else None
                found.append((Unusual(place, more, at, device), number, usual))
    chosen = sorted(found, key=lambda item: (-item[0].seconds, item[1]))[:_MOST_UNUSUAL]
    seconds = [place.seconds for place in places]
    for _, number, usual in chosen:
        seconds[number] = usual
    return [unusual for unusual, _, _ in chosen], seconds


def _longer_by(seconds: Seconds) -> Seconds:
    """Seconds by which few steps are longer than the others; 0 for these, or if none stands out."""
    usual = np.sort(seconds)[: len(seconds) // 2 + 1]
    more, differ = seconds - np.median(usual), float(usual[-1] - usual[0])
    least = max(LONG, _LONG_STEP * float(usual[-1]), _LONG_FACTOR * differ)
    steady = len(seconds) >= 3 and differ <= _STEADY * float(usual[-1])
    return np.where((more >= least) & steady, more, 0.0)


def unusual_steps(seconds: Seconds, step_s: float) -> npt.NDArray[np.bool_]:
    """Which of some steps take longer than more than half of them, out of proportion to how much those differ.

    >>> unusual_steps(np.array([2.0, 2.1, 7.0, 2.0]), 100.0).tolist()
    [False, False, True, False]
    >>> unusual_steps(np.array([2.0, 4.0, 7.0]), 100.0).tolist()
    [False, False, False]
    """
    if len(seconds) < 3:
        return np.zeros(len(seconds), dtype=bool)
    usual = np.sort(seconds)[: len(seconds) // 2 + 1]
    factor = _UNUSUAL_FACTOR * (1 + 2 / (len(usual) - 1))
    least = max(LONG, _UNUSUAL_SHARE * step_s, factor * float(usual[-1] - usual[0]))
    found: npt.NDArray[np.bool_] = seconds - np.median(usual) >= least
    return found


@dataclass(frozen=True, slots=True)
class _Gap:
    """A long gap: what it follows, the n-th run of that; operations of the step before it, and in all (1 or more)."""

    device: int
    step: int
    start: int
    end: int
    after: str
    run: int
    before: int
    operations: int
    between: bool


def gap_places(profile: Profile) -> tuple[Place, ...]:
    """Long gaps of all devices by place, the longest in all first."""
    shape = len(profile.devices), len(profile.devices[0].lane.steps)
    gaps = [gap for place, device in enumerate(profile.devices) for gap in _long_gaps(place, device)]
    named = _by_name(gaps)
    whole = [found for found in named if len(found) >= shape[0] * shape[1] and len(_parts(found)) == 1]
    parts = [part for found in named if found not in whole for part in _parts(found)]
    places = [_place(found, shape) for found in (*whole, *_joined(parts))]
    return tuple(sorted(places, key=lambda p: (-p.seconds.sum(), p.name, p.longest)))


def _by_name(gaps: Iterable[_Gap]) -> list[list[_Gap]]:
    """Gaps after the same run of an operation together."""
    named: dict[tuple[str, int, bool], list[_Gap]] = defaultdict(list)
    for gap in gaps:
        named[gap.after, gap.run, gap.between].append(gap)
    return list(named.values())


def _parts(gaps: Sequence[_Gap]) -> list[list[_Gap]]:
    """Gaps of one name as one part, or those that are far longer than the rest apart: they may be others'."""
    longest = max(g.end - g.start for g in gaps)
    parts: tuple[list[_Gap], list[_Gap]] = [], []
    for gap in gaps:
        parts[_FAR * (gap.end - gap.start) < longest].append(gap)
    return [part for part in parts if part]


def _place(gaps: Sequence[_Gap], shape: tuple[int, int]) -> Place:
    seconds = np.zeros(shape)
    for gap in gaps:
        seconds[gap.device, gap.step] += (gap.end - gap.start) / SECOND
    first = max(gaps, key=lambda g: (g.end - g.start, -g.device, -g.step))
    return Place(first.after, first.between, seconds, (first.device, first.start, first.end))


def _joined(found: Sequence[list[_Gap]]) -> Iterator[list[_Gap]]:
    """Gaps after different operations are one place if they lie near each other in different steps."""

    def length(gaps: Sequence[_Gap]) -> float:
        return sum(g.end - g.start for g in gaps) / len(gaps)

    rest = sorted(found, key=lambda gaps: (-length(gaps), gaps[0].after, gaps[0].run))
    rest, alone = rest[:_MOST_COMPARED], rest[_MOST_COMPARED:]
    while rest:
        own = rest.pop(0)
        steps = {(g.device, g.step) for g in own}
        kept = []
        for other in rest:
            places = {(g.device, g.step) for g in other}
            apart = abs(own[0].before / own[0].operations - other[0].before / other[0].operations)
            near = apart <= max(2 / own[0].operations, _NEAR) and length(own) < _ALIKE * length(other)
            if near and own[0].between == other[0].between and not places & steps:
                own, steps = own + other, steps | places
            else:
                kept.append(other)
        rest = kept
        if len({(g.after, g.run) for g in own}) > 1:
            yield own
        else:
            alone.append(own)
    yield from _by_name(gap for own in alone for gap in own)


def _long_gaps(place: int, device: DeviceTimes) -> list[_Gap]:
    """Long gaps of one device, each with what ran before it."""
    lane, busy = device.lane, device.busy.any
    ends = np.concatenate([s.end for s in lane.device.streams])
    op = np.concatenate([s.op for s in lane.device.streams])
    order = np.lexsort((op, ends))
    ends, op = ends[order], op[order]
    runs: dict[str, npt.NDArray[np.intp]] = {}
    numbers: dict[str, list[int]] = defaultdict(list)
    for number, kind in enumerate(lane.ops):
        numbers[kind.name].append(number)
    steps = lane.steps
    gaps = busy.gaps_within(steps.start, steps.end)
    long = gaps.end - gaps.start >= LONG * SECOND
    found = []
    for start, end in zip(gaps.start[long].tolist(), gaps.end[long].tolist(), strict=True):
        step = int(np.searchsorted(steps.start, start, side="right")) - 1
        low, last, high = np.searchsorted(ends, (steps.start[step], start, steps.end[step]), side="right").tolist()
        after = lane.ops[int(op[last - 1])].name if last else ""
        if after not in runs:
            runs[after] = np.flatnonzero(np.isin(op, numbers[after]))
        run = int(np.searchsorted(runs[after], last - 1) - np.searchsorted(runs[after], low))
        operations = max(high - low, 1)  # none may end in a step
        found.append(_Gap(place, step, start, end, after, run, last - low, operations, end == steps.end[step]))
    return found


def collective_places(profile: Profile) -> Mapping[OpKind, tuple[Place, ...]]:
    """Of each collective its runs in a step, with the time of each that nothing hides, waiting for others left out."""
    shape = len(profile.devices), len(profile.devices[0].lane.steps)
    found: dict[OpKind, list[Place]] = {}
    for number, device in enumerate(profile.devices):
        own = [found.setdefault(op, []) if op.activity == Activity.COLLECTIVE else [] for op in device.lane.ops]
        for step, op, run, start, end, exposed in _collective_runs(device):
            if run >= len(own[op]):  # runs of an operation are counted from 0 in each step
                own[op].append(Place(device.lane.ops[op].name, False, np.zeros(shape), (number, start, end)))
            own[op][run].seconds[number, step] += exposed
    return {kind: tuple(places) for kind, places in found.items()}


def _collective_runs(device: DeviceTimes) -> Iterator[tuple[int, int, int, int, int, float]]:
    """(step, operation, which run in the step, start, end, seconds that are not hidden) of each run."""
    lane, free = device.lane, device.busy.wire.minus(device.busy.compute)
    sends = np.array([op.activity == Activity.COLLECTIVE for op in lane.ops], dtype=bool)
    rows = []
    for stream in lane.device.streams:
        step = lane.steps.at(stream.start)
        inside = sends[stream.op] & (step >= 0)
        exposed = free.within(stream.start[inside], stream.end[inside])
        columns = (stream.start[inside], stream.end[inside], step[inside], stream.op[inside], exposed)
        rows += list(zip(*(c.tolist() for c in columns), strict=True))
    seen: dict[tuple[int, int], int] = defaultdict(int)
    for start, end, step, op, exposed in sorted(rows):
        yield step, op, seen[step, op], start, end, exposed / SECOND
        seen[step, op] += 1
