"""Causes in gaps: the device is idle while its host is late, waits for data, or compiles.

Not here: where gaps are (`places`), copies (`copies`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.core.units import format_time
from meshwise.profile.causes.cause import LEAST, SPREAD, Cause
from meshwise.profile.kinds import short_name
from meshwise.profile.places import Place, Seconds, gap_places, standing_out
from meshwise.profile.profile import DeviceTimes, Profile

_LOADING = re.compile(
    r"data_?load|dataloader|get_next|next_batch|iterator|infeed|collate|h5|tfrecord|grain", re.IGNORECASE
)
_COMPILING = re.compile(r"(?i)XlaCompile|backend_compile|compile_or_get|inductor|dynamo.*compil|nvrtc|autotun")
#: No more gaps than this are named each.
_MOST_GAPS = 24
#: Gaps after one operation are named together unless one is longer than another by more than this.
_ALIKE = 2.0
_WHAT = {"data-loading": "waiting for data", "recompile": "programs are compiled in the step"}


@dataclass(frozen=True, slots=True)
class _Gap:
    """Gaps after one operation: seconds of a step, how many there, in how many steps, and what the host did."""

    place: Place
    seconds: float
    number: int
    steps: int
    host: str


def gap_causes(profile: Profile) -> Iterator[Cause]:
    """Gaps that few steps have; long ones by what they follow; other long ones together; the short ones."""
    places = gap_places(profile)
    unusual, usual = standing_out(places, profile.step_s)
    for found in unusual:
        host = host_during(profile, found.place)
        where = f"nothing runs for {format_time(found.seconds)} longer {_where(found.place)}{_host_words(host)}"
        name, change = _why(host)
        what = f"{_WHAT.get(name, 'idle for the host')} in {found.steps}"
        yield Cause(name, found.seconds, f"in {found.steps} {where}", change, what, found.share)
    gaps = _together(profile, list(zip(places, usual, strict=True)))
    named = [gap for gap in gaps[:_MOST_GAPS] if gap.seconds >= LEAST * profile.step_s]
    yield from (_gap_cause(profile, gap) for gap in named)
    yield from _other_gaps(gaps[len(named) :])
    yield from _launches(profile, places)


def _together(profile: Profile, places: Sequence[tuple[Place, Seconds]]) -> list[_Gap]:
    """Gaps after one operation together, those out of proportion by themselves; the longest first."""
    named: dict[tuple[str, bool], list[tuple[float, Place, Seconds]]] = defaultdict(list)
    for place, seconds in places:
        if seconds.any():
            named[place.name, place.between].append((float(seconds.mean()), place, seconds))
    found = []
    for same in named.values():
        rest = sorted(same, key=lambda item: (-item[0], item[1].longest))
        while rest:
            together = [item for item in rest if _ALIKE * item[0] > rest[0][0]]
            steps = int(np.any([seconds.any(axis=0) for _, _, seconds in together], axis=0).sum())
            total, place = sum(mean for mean, _, _ in together), together[0][1]
            found.append(_Gap(place, total, len(together), steps, host_during(profile, place)))
            rest = rest[len(together) :]
    return sorted(found, key=lambda g: (-g.seconds, g.place.name, g.place.longest))


def _where(place: Place) -> str:
    after = short_name(place.name)
    return f"between steps, after {after[:50]}" if place.between else f"after {after[:60]}"


def _host_words(host: str) -> str:
    return f"; the host is in {host[:60]}" if host else ""


def _gap_cause(profile: Profile, gap: _Gap) -> Cause:
    """A gap that is named by itself."""
    steps = len(profile.devices[0].lane.steps)
    often = f" in {gap.steps} of {steps} steps" if gap.steps < steps else ""
    times = f" at {gap.number} places" if gap.number > 1 else ""
    evidence = f"nothing runs for {format_time(gap.seconds)} a step {_where(gap.place)}{times}{often}"
    name, change = _why(gap.host)
    what = _WHAT.get(name) or ("idle between steps" if gap.place.between else "the device is idle for the host")
    return Cause(name, gap.seconds, f"{evidence}{_host_words(gap.host)}", change, what)


def _other_gaps(gaps: Sequence[_Gap]) -> Iterator[Cause]:
    """Further long gaps, those of one name together."""
    named: dict[str, list[_Gap]] = {}
    for gap in gaps:
        named.setdefault(_why(gap.host)[0], []).append(gap)
    for name, found in named.items():
        seconds, first = sum(g.seconds for g in found), found[0]
        host = f", where the host is in {first.host[:60]}" if first.host else ""
        evidence = (
            f"other gaps at {sum(g.number for g in found):,} places, {format_time(seconds)} a step in all, the most of "
            f"it {_where(first.place)} ({format_time(first.seconds)}){host}"
        )
        what = _WHAT.get(name) or "gaps of over 0.5 ms"
        yield Cause(name, seconds, evidence, _why(first.host)[1], what, weight=SPREAD)


def _launches(profile: Profile, places: Sequence[Place]) -> Iterator[Cause]:
    """Gaps that are not long."""
    idle = profile.idle
    rest = idle.total - sum(float(p.seconds.mean()) for p in places)
    number = idle.num_long + idle.num_short - sum(float((p.seconds > 0).mean()) for p in places)
    if rest > 0 and number > 0:
        launched = f"; for {format_time(idle.late)} of it the next was not launched yet" if idle.late else ""
        evidence = (
            f"{number:,.0f} gaps a step between {idle.num_ops:,.0f} operations, {format_time(rest / number)} "
            f"each, {format_time(rest)} in all{launched}"
        )
        change = "fewer, larger operations: compile or fuse them, replay them as a CUDA graph (command buffers in XLA)"
        yield Cause("launch-bound", rest, evidence, change, "many short gaps between launches", weight=SPREAD)


def _why(host: str) -> tuple[str, str]:
    """The cause's name and the change to make, from what the host does."""
    if _LOADING.search(host):
        return "data-loading", "load ahead of the step: more workers, prefetching to the device, faster storage"
    if _COMPILING.search(host):
        return "recompile", "keep shapes fixed (pad or bucket them), so that no step compiles"
    change = (
        "launch ahead: no synchronisation, logging or transfer of results in each step; dispatch the next step early"
    )
    return "host-gap", change


def host_during(profile: Profile, place: Place) -> str:
    """The innermost thing that a thread of the host did for most of a place's longest gap, "" if nothing."""
    number, start, end = place.longest
    device: DeviceTimes = profile.devices[number]
    best: tuple[float, float, str] | None = None
    for thread in device.trace.host if not device.trace.host_only else ():
        overlap = np.minimum(thread.start + thread.duration, end) - np.maximum(thread.start, start)
        for at in np.flatnonzero(overlap > 0.5 * (end - start)).tolist():
            name = device.trace.texts[int(thread.text[at])]
            rank = (-float(thread.duration[at]), float(overlap[at]), name)
            if not re.match(r"ProfilerStep|execute_|train \d|step\[", name) and (best is None or rank > best):
                best = rank
    return best[2] if best else ""
