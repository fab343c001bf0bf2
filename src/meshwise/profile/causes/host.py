"""Causes outside of computation and communication: gaps, launches, data loading, copies.

Not here: collectives (`network`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.core.units import format_bytes, format_time
from meshwise.profile.causes.cause import Cause
from meshwise.profile.kinds import short_name
from meshwise.profile.profile import DeviceTimes, Profile
from meshwise.profile.trace import SECOND, Activity, Times

#: A gap of this length (picoseconds) is one of its own, shorter ones are launches.
_LONG_GAP = 500_000_000
_LOADING = re.compile(
    r"data_?load|dataloader|get_next|next_batch|iterator|infeed|collate|h5|tfrecord|grain", re.IGNORECASE
)
_COMPILING = re.compile(r"(?i)XlaCompile|backend_compile|compile_or_get|inductor|dynamo.*compil|nvrtc|autotun")
_MOST_GAPS = 3
_WHAT = {"data-loading": "waiting for data", "recompile": "programs are compiled in the step"}


def host_causes(profile: Profile) -> Iterator[Cause]:
    """All of them."""
    yield from _gaps(profile)
    yield from _copies(profile)


@dataclass(frozen=True, slots=True)
class _Gap:
    """Long gaps after one operation, or between steps."""

    after: str
    between: bool
    seconds: float
    number: int
    steps: int
    host: str


def _gaps(profile: Profile) -> Iterator[Cause]:
    """Long gaps by what they follow, each with what the host did; other long ones together, and the short ones."""
    found = _long_gaps(profile)
    yield from map(_gap_cause, found[:_MOST_GAPS])
    yield from _other_gaps(found[_MOST_GAPS:])
    rest = profile.idle.total - sum(g.seconds for g in found)
    number = profile.idle.num_long + profile.idle.num_short - sum(g.number / g.steps for g in found)
    if rest > 0 and number > 0:
        late = profile.idle.late
        launched = f"; for {format_time(late)} of it the next was not launched yet" if late else ""
        evidence = (
            f"{number:,.0f} gaps a step between {profile.idle.num_ops:,.0f} operations, {format_time(rest / number)} "
            f"each, {format_time(rest)} in all{launched}"
        )
        change = "fewer, larger operations: compile or fuse them, replay them as a CUDA graph (command buffers in XLA)"
        yield Cause("launch-bound", rest, evidence, change, "many short gaps between launches")


def _gap_cause(gap: _Gap) -> Cause:
    """A gap that is named by itself."""
    where = (
        f"between steps, after {short_name(gap.after)[:50]}" if gap.between else f"after {short_name(gap.after)[:60]}"
    )
    often = f" in {gap.number} of {gap.steps} steps" if gap.number < gap.steps else ""
    host = f"; the host is in {gap.host[:60]}" if gap.host else ""
    evidence = f"nothing runs for {format_time(gap.seconds)} a step {where}{often}{host}"
    name, change = _why(gap)
    what = _WHAT.get(name) or ("idle between steps" if gap.between else "the device is idle for the host")
    return Cause(name, gap.seconds, evidence, change, what)


def _other_gaps(gaps: Sequence[_Gap]) -> Iterator[Cause]:
    """Further long gaps, those of one name together."""
    named: dict[str, list[_Gap]] = {}
    for gap in gaps:
        named.setdefault(_why(gap)[0], []).append(gap)
    for name, found in named.items():
        seconds, first = sum(g.seconds for g in found), found[0]
        runs = sum(g.number for g in found) / first.steps
        host = f", where the host is in {first.host[:60]}" if first.host else ""
        evidence = (
            f"{runs:,.1f} other gaps a step, {format_time(seconds)} in all, the most of it after "
            f"{short_name(first.after)[:60]} ({format_time(first.seconds)}){host}"
        )
        yield Cause(name, seconds, evidence, _why(first)[1], _WHAT.get(name) or "gaps of over 0.5 ms")


def _why(gap: _Gap) -> tuple[str, str]:
    if _LOADING.search(gap.host):
        return "data-loading", "load ahead of the step: more workers, prefetching to the device, faster storage"
    if _COMPILING.search(gap.host):
        return "recompile", "keep shapes fixed (pad or bucket them), so that no step compiles"
    change = (
        "launch ahead: no synchronisation, logging or transfer of results in each step; dispatch the next step early"
    )
    return "host-gap", change


def _long_gaps(profile: Profile) -> list[_Gap]:
    """Long gaps of all devices, together where they follow the same operation, the longest first."""
    total: dict[tuple[str, bool], list[float]] = {}
    host: dict[tuple[str, bool], str] = {}
    weight = sum(len(d.lane.steps) for d in profile.devices)
    for device in profile.devices:
        start, end, names = _long(device)
        for begin, finish, (after, between) in zip(start.tolist(), end.tolist(), names, strict=True):
            total.setdefault((after, between), []).append((finish - begin) / SECOND)
            host.setdefault((after, between), host_during(device, begin, finish))
    gaps = [
        _Gap(after, between, sum(lengths) / weight, len(lengths), weight, host[after, between])
        for (after, between), lengths in total.items()
    ]
    return sorted(gaps, key=lambda g: (-g.seconds, g.after))


def _long(device: DeviceTimes) -> tuple[Times, Times, list[tuple[str, bool]]]:
    """Long gaps of one device, and the operation before each."""
    lane, busy = device.lane, device.busy.any
    found = []
    for begin, finish in zip(lane.steps.start.tolist(), lane.steps.end.tolist(), strict=True):
        gaps = busy.gaps(begin, finish)
        chosen = gaps.end - gaps.start >= _LONG_GAP
        found += [
            (a, b, b == finish) for a, b in zip(gaps.start[chosen].tolist(), gaps.end[chosen].tolist(), strict=True)
        ]
    ends = np.concatenate([s.end for s in lane.device.streams])
    op = np.concatenate([s.op for s in lane.device.streams])
    order = np.lexsort((op, ends))
    places = np.searchsorted(ends[order], [a for a, _, _ in found], side="right") - 1
    names = [
        (lane.ops[int(op[order[place]])].name if place >= 0 else "", between)
        for place, (_, _, between) in zip(places.tolist(), found, strict=True)
    ]
    columns = np.array([(a, b) for a, b, _ in found], dtype=np.int64).reshape(-1, 2)
    return columns[:, 0], columns[:, 1], names


def host_during(device: DeviceTimes, start: int, end: int) -> str:
    """The innermost thing that a thread of the host did for most of a gap, "" if nothing."""
    best: tuple[float, float, str] | None = None
    for thread in device.trace.host if not device.trace.host_only else ():
        overlap = np.minimum(thread.start + thread.duration, end) - np.maximum(thread.start, start)
        for place in np.flatnonzero(overlap > 0.5 * (end - start)).tolist():
            name = device.trace.texts[int(thread.text[place])]
            rank = (-float(thread.duration[place]), float(overlap[place]), name)
            if not re.match(r"ProfilerStep|execute_|train \d|step\[", name) and (best is None or rank > best):
                best = rank
    return best[2] if best else ""


def _copies(profile: Profile) -> Iterator[Cause]:
    exposed = profile.partition_s["exposed_copy"]
    copies = [t for t in profile.ops if t.kind.activity == Activity.COPY]
    total = sum(t.exposed for t in copies)
    if not exposed or not total:
        return
    host = [t for t in copies if re.search(r"HtoD|DtoH|H2D|D2H|infeed|outfeed|host", t.kind.name)]
    moved = sum((t.kind.num_bytes or 0.0) * t.runs for t in copies)
    first = max(copies, key=lambda t: (t.exposed, t.kind.key)).kind
    size = f", {format_bytes(moved)}" if moved else ""
    evidence = (
        f"{sum(t.runs for t in copies):,.0f} copies a step{size}, {format_time(exposed)} of them not hidden, most in "
        f"{short_name(first.name)[:60]}{f' of {first.parent}' if first.parent else ''}"
    )
    both = [any(re.search(way, t.kind.name) for t in host) for way in ("HtoD|H2D", "DtoH|D2H")]
    if all(both) and sum(t.seconds for t in host) > 0.1 * profile.step_s:
        change = "prefetch what is offloaded one layer ahead, or offload less"
        yield Cause("offload-bound", exposed, evidence, change, "offloading is not hidden")
        return
    pageable = any("Pageable" in t.kind.name for t in host)
    change = (
        "copy from pinned memory with non_blocking=True" if pageable else "copy on a stream of its own, ahead of need"
    )
    yield Cause("exposed-copy", exposed, evidence, change, "copies are not hidden")
