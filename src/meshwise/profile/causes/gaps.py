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
from meshwise.profile.causes.stragglers import device_name
from meshwise.profile.idle import SHORT
from meshwise.profile.kinds import short_name
from meshwise.profile.places import Place, Seconds, gap_places, standing_out
from meshwise.profile.profile import DeviceTimes, Profile
from meshwise.profile.trace import SECOND

_LOADING = re.compile(
    r"data_?load|dataloader|get_next|next_batch|iterator|infeed|collate|h5|tfrecord|grain", re.IGNORECASE
)
_COMPILING = re.compile(r"(?i)XlaCompile|backend_compile|compile_or_get|inductor|dynamo.*compil|nvrtc|autotun")
#: A share of gaps that is few, and a share of their time for which what the host does is said.
_FEW, _HOST = 0.1, 0.25
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
    unusual, usual = standing_out(profile, places)
    for found in unusual:
        host = host_during(profile, found.place)
        where = f"nothing runs for {format_time(found.seconds)} longer {_where(profile, found.place)}"
        name, change = _why(host)
        what = f"{_WHAT.get(name, 'waiting for the host')} in {found.steps}"
        evidence = f"in {found.steps} {where}{_host_words(host)}"
        yield Cause(name, found.seconds, evidence, change, what, found.share, device=found.device)
    gaps = _together(profile, list(zip(places, usual, strict=True)))
    named = [gap for gap in gaps[:_MOST_GAPS] if gap.seconds >= LEAST * profile.step_s]
    yield from (_gap_cause(profile, gap) for gap in named)
    yield from _other_gaps(profile, gaps[len(named) :])
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


def _where(profile: Profile, place: Place) -> str:
    """After what, and on which device if it is one of several."""
    name = short_name(place.name)
    after = f"between steps, after {name[:50]}" if place.between else f"after {name[:60]}"
    idle = np.flatnonzero(place.seconds.any(axis=1))
    return (
        f"{after} on {device_name(profile.devices, int(idle[0]))}" if len(idle) == 1 < len(profile.devices) else after
    )


def _host_words(host: str) -> str:
    return f"; the host is in {host[:60]}" if host else ""


def _gap_cause(profile: Profile, gap: _Gap) -> Cause:
    """A gap that is named by itself."""
    steps = len(profile.devices[0].lane.steps)
    often = f" in {gap.steps} of {steps} steps" if gap.steps < steps else ""
    times = f" at {gap.number} places" if gap.number > 1 else ""
    evidence = f"nothing runs for {format_time(gap.seconds)} a step {_where(profile, gap.place)}{times}{often}"
    name, change = _why(gap.host)
    what = _WHAT.get(name) or ("idle between steps" if gap.place.between else "the device waits for the host")
    return Cause(name, gap.seconds, f"{evidence}{_host_words(gap.host)}", change, what)


def _other_gaps(profile: Profile, gaps: Sequence[_Gap]) -> Iterator[Cause]:
    """Further long gaps, those of one name together."""
    named: dict[str, list[_Gap]] = {}
    for gap in gaps:
        named.setdefault(_why(gap.host)[0], []).append(gap)
    for name, found in named.items():
        seconds, first = sum(g.seconds for g in found), found[0]
        host = f", where the host is in {first.host[:60]}" if first.host else ""
        evidence = (
            f"other gaps at {sum(g.number for g in found):,} places, {format_time(seconds)} a step in all, the most of "
            f"it {_where(profile, first.place)} ({format_time(first.seconds)}){host}"
        )
        what = _WHAT.get(name) or "gaps of over 0.5 ms"
        yield Cause(name, seconds, evidence, _why(first.host)[1], what, weight=SPREAD)


def _launches(profile: Profile, places: Sequence[Place]) -> Iterator[Cause]:
    """Gaps that are not long: how many, how many of them make up most, and what the host does meanwhile."""
    idle = profile.idle
    long = sum(float(p.seconds.mean()) for p in places)
    named = sum(float((p.seconds > 0).mean()) for p in places)
    rest, number = idle.total - long, idle.num_long + idle.num_short - named
    if rest <= 0 or number <= 0:
        return
    few, most = idle.num_long - named, idle.long - long
    each = f"{format_time(rest / number)} each"
    if few < _FEW * number and most > 0.5 * rest:
        each = f"of which {few:,.0f} of over {format_time(SHORT / SECOND)} take {format_time(most)}"
    late = f"; for {format_time(idle.late_short)} of it the next was not launched yet" if idle.late_short else ""
    host, seconds = idle.host[0] if idle.host and not places else ("", 0.0)
    busy = f"; the host is in {host[:60]} for {format_time(seconds)}" if seconds > _HOST * rest else ""
    change, graph = _LAUNCHED, idle.replayed > 0.5 * rest
    ahead = idle.late_short is not None and idle.late_short < _FEW * rest
    if busy and "GraphLaunch" in host:
        change = _GRAPHS_LAUNCHED
    elif graph:
        change, late = _REPLAYED, f"; {format_time(min(idle.replayed, rest))} of it between kernels of one graph"
    elif ahead:
        change, late = _PAUSES, "; the host is ahead of the device"
    evidence = (
        f"{number:,.0f} gaps a step between {idle.num_ops:,.0f} operations, {format_time(rest)} in all, {each}"
        f"{late}{busy}"
    )
    what = f"many short gaps between {'kernels' if graph or ahead else 'launches'}"
    # One change, launching graphs or launching earlier, gains all that the host is late.
    weight = SPREAD + (1 - SPREAD) * min((idle.late_short or 0.0) / rest, 1.0)
    yield Cause("launch-bound", rest, evidence, change, what, weight=weight)


_LAUNCHED = "fewer, larger operations: compile or fuse them, replay them as a CUDA graph (command buffers in XLA)"
_PAUSES = (
    "fewer, larger operations: the device pauses between any two, however early they are launched; compile or fuse "
    "them, a CUDA graph (command buffers in XLA) shortens the pauses"
)
_REPLAYED = (
    "fewer, larger kernels: they are replayed as a graph already, and each waits for the one before; fuse norms, "
    "rotations and cache writes (torch.compile), let the next start early (programmatic dependent launch on NVIDIA)"
)
_GRAPHS_LAUNCHED = (
    "launching graphs takes the host this long: launch the next before this one ends (SGLang's overlap scheduler, "
    "vLLM's --async-scheduling), upload graphs ahead, fewer kernels in each"
)


def _why(host: str) -> tuple[str, str]:
    """The cause's name and the change to make, from what the host does."""
    if _LOADING.search(host):
        return "data-loading", "load ahead of the step: more workers, prefetching to the device, faster storage"
    if _COMPILING.search(host):
        return "recompile", "keep shapes fixed (pad or bucket them), so that no step compiles"
    return "host-gap", next((change for does, change in _CHANGES if does.search(host)), _AHEAD)


_AHEAD = "launch ahead: no synchronisation, logging or transfer of results in each step; dispatch the next step early"
#: What the host does in a gap -> what to change.
_CHANGES = (
    (
        re.compile(r"(cuda|hip)(Malloc|Free|HostAlloc)|cuMem(Alloc|Free|Create|Map)"),
        "allocate before the step: warm the allocator up, keep shapes and buffers, expandable_segments in PyTorch",
    ),
    (
        re.compile(r"Synchronize|(cuda|hip)Memcpy|aten::(item|_local_scalar_dense|nonzero)|block_until_ready"),
        "do not wait for the device there: no .item(), .cpu() or printing, no masks that become indices, pinned memory",
    ),
)


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
