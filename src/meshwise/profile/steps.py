"""Finds the steps of each device: by markers, by runs of a program, else by what repeats.

A step lasts from its first operation to that of the next, so that what lies between two steps belongs to the earlier.
Not here: where the time of a step went (`partition`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from meshwise.core.errors import ConfigError
from meshwise.profile.trace import Device, Marker, Times, Trace

#: Markers that are steps, the surest first; digits in names count the steps.
_MARKED = (
    re.compile(r"ProfilerStep#\d+"),
    re.compile(r"(?!.*dummy).*\bstep[ _#:=]*\d+", re.IGNORECASE),
    re.compile(r"(?!.*(layer|block|expert|head|micro|chunk|stage|bucket)).+ \d+$", re.IGNORECASE),
    re.compile(r"(step\[|decode|prefill|forward_batch|iteration).*", re.IGNORECASE),
    re.compile(r"execute_.*"),
    re.compile(r"(gpu_)?model_runner: forward|run_batch"),
)
#: Kinds of steps that a server's markers tell apart: vLLM's say how many requests are prefilled and decoded.
_KINDS = tuple(
    (re.compile(rf"execute_.*({vllm}).*|(step\[)?({sglang}).*", re.IGNORECASE), kind)
    for kind, vllm, sglang in (
        ("decode", r"context_0\(.*generation_[1-9]|new_0_cached_[1-9]", "decode"),
        ("prefill", r"context_[1-9].*generation_0\(|new_[1-9]\d*_cached_0", "prefill|extend"),
        ("mixed", r"context_[1-9].*generation_[1-9]|new_[1-9]\d*_cached_[1-9]", "mixed"),
    )
)
#: A first step longer than the median of the others by this factor was no steady one. Profilers that warm up by
#: themselves (markers of Kineto) are believed more.
_WARM_UP, _WARM_UP_MARKED = 1.05, 2.0
_REPEATED_SHARE, _ONCE_SHARE = 0.9, 0.01


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of one device.

    Args:
        start, end: picoseconds, by start.
        names: of their markers, or their numbers.
        how: how they were found, in words.
        left_out: how many at the beginning were not steady.
    """

    start: Times
    end: Times
    names: tuple[str, ...]
    how: str
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.start)

    @property
    def duration(self) -> Times:
        """Of each step."""
        return self.end - self.start

    def chosen(self, kept: Sequence[bool]) -> Steps:
        """Some of them."""
        mask = np.array(kept, dtype=bool)
        names = tuple(name for name, keep in zip(self.names, kept, strict=True) if keep)
        return Steps(self.start[mask], self.end[mask], names, self.how, self.left_out + int(mask.argmax()))

    def at(self, times: Times) -> Times:
        """The step of each time, -1 where there is none."""
        place = np.searchsorted(self.start, times, side="right") - 1
        found: Times = np.where(times < self.end[np.maximum(place, 0)], place, -1)
        return found


def same_steps(devices: Sequence[Steps]) -> list[Steps]:
    """Steps of several devices of a job that all of them have: by their markers' names, else the last ones of each."""
    names = [set(steps.names) for steps in devices]
    common = {name for name in set.intersection(*names) if not name.isdigit()}
    if common and all(len(own) == len(steps) for own, steps in zip(names, devices, strict=True)):
        return [steps.chosen([name in common for name in steps.names]) for steps in devices]
    shortest = min(map(len, devices))
    return [steps.chosen([place >= len(steps) - shortest for place in range(len(steps))]) for steps in devices]


def find_steps(trace: Trace, place: int, pattern: str | None = None) -> Steps:
    """Find the steps of a trace's device.

    Args:
        trace: with markers.
        place: of the device.
        pattern: of the markers' names; None tries all ways.

    Raises:
        ConfigError: no marker has such a name, or nothing ran in those that have.
    """
    device = trace.devices[place]
    if pattern is not None:
        found = _by_pattern(trace, place, pattern)
        return _steady(device, found, _WARM_UP_MARKED)
    for marked in _MARKED:
        steps = _marked(device, [m for m in trace.markers if marked.fullmatch(m.name)], place)
        if steps is not None:
            return _steady(device, _of_one_kind(steps), _WARM_UP_MARKED if trace.format == "kineto" else _WARM_UP)
    steps = _by_runs(trace, device) or _by_period(device)
    return _steady(device, steps, _WARM_UP) if steps else _whole(device)


def _by_pattern(trace: Trace, place: int, pattern: str) -> Steps:
    try:
        wanted = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"--step: expected a regular expression, found {pattern!r}: {error}") from None
    chosen = [m for m in trace.markers if wanted.search(m.name)]
    if not chosen:
        names = sorted({re.sub(r"\d+", "#", m.name) for m in trace.markers})
        known = ", ".join(names[:8]) or "none"
        raise ConfigError(f"--step: no marker of {trace.source} matches {pattern!r}; there are: {known}")
    steps = _marked(trace.devices[place], chosen, place)
    if steps is None:
        raise ConfigError(f"--step: nothing ran on {trace.devices[place].name} in markers that match {pattern!r}")
    return steps


def _marked(device: Device, markers: Sequence[Marker], place: int) -> Steps | None:
    """Steps by markers: those of the host by what was launched in them, else those on the device itself."""
    host = _outermost([m for m in markers if m.device < 0])
    if host:
        return _by_launch(device, host)
    own = _outermost([m for m in markers if m.device == place])
    if not own:
        return None
    start = np.array([m.start for m in own], dtype=np.int64)
    end = np.append(start[1:], own[-1].end)
    return Steps(
        start,
        np.maximum(end, start),
        tuple(m.name for m in own),
        f"by {len(own)} marker{'s' if len(own) > 1 else ''} on the device",
    )


def _outermost(markers: Sequence[Marker]) -> list[Marker]:
    """Markers by start, without those that lie in others."""
    found: list[Marker] = []
    for marker in sorted(markers, key=lambda m: (m.start, -m.duration, m.name)):
        if not found or marker.start >= found[-1].end:
            found.append(marker)
    return found


def _by_launch(device: Device, markers: Sequence[Marker]) -> Steps | None:
    """Steps on the device, from when the host launched each operation."""
    start, end, launch = _columns(device)
    if not len(start):
        return None
    if (launch >= 0).any():  # what was launched before the trace began is in no step
        start, end, launch = (column[launch >= 0] for column in (start, end, launch))
    edges = np.array([m.start for m in markers], dtype=np.int64)
    when = np.where(launch >= 0, launch, start)
    step = np.searchsorted(edges, when, side="right") - 1
    step = np.where((step == len(edges) - 1) & (when > markers[-1].end), len(edges), step)
    begins, names = [], []
    last = 0
    for number, marker in enumerate(markers):
        inside = step == number
        if inside.any():
            begins.append(int(start[inside].min()))
            names.append(marker.name)
            last = int(end[inside].max())
    if not begins:
        return None
    order = np.argsort(np.array(begins, dtype=np.int64), kind="stable")
    sorted_begins = np.array(begins, dtype=np.int64)[order]
    family = re.sub(r"#?\d+", "#", markers[0].name)
    how = f"by {len(begins)} marker{'s' if len(begins) > 1 else ''} {family[:40]}"
    ends = np.append(sorted_begins[1:], max(last, int(sorted_begins[-1])))
    return Steps(sorted_begins, ends, tuple(names[n] for n in order), how)


def _of_one_kind(steps: Steps) -> Steps:
    """Of a server's steps those of one kind: decoding, say. Of several, that on which most time is spent."""
    kinds = [next((kind for pattern, kind in _KINDS if pattern.fullmatch(name)), "") for name in steps.names]
    spent = Counter[str]()
    for kind, duration in zip(kinds, steps.duration.tolist(), strict=True):
        spent[kind] += duration
    if len(spent) == 1:
        return steps
    most = max(sorted(spent), key=lambda kind: spent[kind])
    kept = np.array([kind == most for kind in kinds], dtype=bool)
    others = ", ".join(f"{kinds.count(kind)} {kind or 'other'}" for kind in sorted(spent) if kind != most)
    found = steps.chosen(kept.tolist())
    how = f"{steps.how}: {len(found)} of {most or 'no known kind'} ({others} left out; --step REGEX chooses)"
    return replace(found, how=how, left_out=steps.left_out)


def _columns(device: Device) -> tuple[Times, Times, Times]:
    """Start, end and launch of all operations."""
    empty = np.zeros(0, dtype=np.int64)
    return (
        np.concatenate([empty, *(s.start for s in device.streams)]),
        np.concatenate([empty, *(s.end for s in device.streams)]),
        np.concatenate([empty, *(s.launch for s in device.streams)]),
    )


def _by_runs(trace: Trace, device: Device) -> Steps | None:
    """Each run of the program that takes longest."""
    start, end, run, op = (
        np.concatenate([getattr(s, name)[s.run >= 0] for s in device.streams]) for name in ("start", "end", "run", "op")
    )
    if not len(run):
        return None
    programs = sorted({op.program for op in trace.ops})
    number = {name: n for n, name in enumerate(programs)}
    program = np.array([number[op.program] for op in trace.ops])[op]
    most = int(np.bincount(program, weights=end - start).argmax())
    runs, place = np.unique(run[program == most], return_inverse=True)
    first, last = np.full(len(runs), np.iinfo(np.int64).max), end[program == most].max()
    np.minimum.at(first, place, start[program == most])
    start = np.sort(first)
    longest, end = programs[most], np.append(start[1:], last)
    names = tuple(str(n) for n in range(len(runs)))
    return Steps(start, end, names, f"by {len(runs)} runs of {longest or 'its longest program'}")


def _by_period(device: Device) -> Steps | None:
    """Steps from what repeats: an operation that runs once in each of them.

    The smallest number of steps is taken for which what does not repeat is negligible, so that layers are no steps.
    """
    start = np.concatenate([s.start for s in device.streams])
    end, op = np.concatenate([s.end for s in device.streams]), np.concatenate([s.op for s in device.streams])
    order = np.lexsort((op, start))
    start, end, op = start[order], end[order], op[order]
    kinds, place, counts = np.unique(op, return_inverse=True, return_counts=True)
    busy = np.bincount(place, weights=(end - start).astype(float), minlength=len(kinds))
    total = busy.sum()
    for number in sorted({int(c) for c in counts if c >= 2}):
        rare, repeated = busy[counts < number].sum(), busy[counts % number == 0].sum()
        if rare > _ONCE_SHARE * total:
            return None
        if repeated >= _REPEATED_SHARE * total:
            steps = _anchored(start, end, place, np.flatnonzero(counts == number))
            if steps is not None:
                return steps
    return None


def _anchored(start: Times, end: Times, place: Times, anchors: Times) -> Steps | None:
    """Steps that begin at the earliest operation that runs once in each, if these are alike."""
    first = {int(kind): int(np.flatnonzero(place == kind)[0]) for kind in anchors}
    for kind in sorted(first, key=lambda k: first[k])[:4]:
        at = np.flatnonzero(place == kind)
        bounds = np.append(at, len(place))
        parts = [np.bincount(place[a:b], minlength=int(place.max()) + 1) for a, b in pairwise(bounds.tolist())]
        alike = all(np.minimum(p, parts[0]).sum() >= _REPEATED_SHARE * max(p.sum(), parts[0].sum()) for p in parts)
        if alike:
            ends = np.append(start[at[1:]], end.max())
            names = tuple(str(n) for n in range(len(at)))
            return Steps(start[at], ends, names, f"by what repeats {len(at)} times, for want of markers")
    return None


def _whole(device: Device) -> Steps:
    """All that was recorded as one step."""
    start, end, _ = _columns(device)
    return Steps(
        start[[int(np.argmin(start))]], end[[int(np.argmax(end))]], ("0",), "the whole trace, for want of markers"
    )


def _steady(device: Device, steps: Steps, factor: float) -> Steps:
    """Leave out first steps that are not steady; end the last where the next operation begins, if one follows soon."""
    steps = _closed(device, steps)
    duration = steps.duration
    first = 0  # compared with later steps but the last, which may lack what follows it; some may have been held up
    while len(duration) - first > 2 and duration[first] > factor * np.quantile(
        duration[first + 1 : -1], 0.5, method="lower"
    ):
        if first and duration[first] > duration[first - 1]:  # it warms up no more
            break
        first += 1
    if len(duration) == 2 and duration[0] > max(1.5, factor) * duration[1]:
        first = 1
    last = len(duration)
    if last - first >= 5 and not _follows(device, steps):
        last -= 1  # what lies between it and the next is not known
    return Steps(steps.start[first:last], steps.end[first:last], steps.names[first:last], steps.how, first)


def _follows(device: Device, steps: Steps) -> bool:
    start, _, _ = _columns(device)
    return bool((start >= steps.end[-1]).any())


def _closed(device: Device, steps: Steps) -> Steps:
    """The last step ends where the next operation begins, if it is then no longer than others."""
    if len(steps) < 3:
        return steps
    start, _, _ = _columns(device)
    later = start[start >= steps.end[-1]]
    if not len(later):
        return steps
    end = steps.end.copy()
    closing = int(later.min())
    if closing - int(steps.start[-1]) <= 1.2 * float(np.median(steps.duration[:-1])):
        end[-1] = closing
    return Steps(steps.start, end, steps.names, steps.how, steps.left_out)
