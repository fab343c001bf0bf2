"""Causes in waiting: one device that the others wait for, or devices that wait for each other.

Not here: the wire (`network`), what each device does longer like for like (`peers`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import numpy as np

from meshwise.core.units import format_time
from meshwise.profile.causes.cause import SPREAD, Cause
from meshwise.profile.peers import slower_by
from meshwise.profile.profile import DeviceTimes, Profile
from meshwise.profile.trace import SECOND

#: A straggler costs at least this share of a step.
LATE = 0.01
#: It costs more than the next by this factor. What it computes longer explains waits that differ by less.
_FACTOR = 2.0


def straggler_causes(profile: Profile) -> Iterator[Cause]:
    """One device that the others wait for, and what it does meanwhile; what else devices wait."""
    devices = profile.devices
    if len(devices) < 2:
        return
    slower = slower_by(devices)
    late = [_lateness(profile, place, computes) for place, computes in enumerate(slower)]
    worst = max(range(len(devices)), key=lambda place: (late[place], -place))
    waited = profile.partition_s["waiting"]
    seconds = late[worst]
    next_worst = max(*late[:worst], *late[worst + 1 :], 0.0)
    if seconds > _FACTOR * next_worst and seconds > LATE * profile.step_s:
        what = f"{device_name(devices, worst)} is slower than the others"
        evidence = _slow_words(devices, worst, seconds, slower[worst])
        change = _replace_words(devices, worst, slower[worst])
        idle = worst if seconds > slower[worst] else None  # what it computes longer, it does in every step
        yield Cause("straggler", seconds, evidence, change, what, device=idle)
        waited -= min(seconds, profile.waiting.blame_s(worst)) * (len(devices) - 1) / len(devices)
    if waited > 0:
        evidence = (
            f"{format_time(waited)} of a step on average, in {profile.waiting.matched:,} runs of collectives that "
            f"{len(devices)} devices recorded; the last to arrive is not always the same"
        )
        change = "even out work: sequence lengths, experts, pipeline stages; pin host threads"
        yield Cause("waiting", waited, evidence, change, "waiting for each other", weight=SPREAD)


def _lateness(profile: Profile, place: int, computes: float) -> float:
    """Seconds a step that a device costs the others.

    What it computes longer like for like (`computes`), unless that explains less than half of how much its steps are
    longer, or of how long the others wait for it more than for each other, if that is most of what they wait: no more
    than is exposed of their collectives, since waits may be hidden. Steps that are longer by far more than they differ
    count, however long devices wait at will. Devices that exchange nothing do not wait for each other: there only
    slower computation counts.
    """
    devices, waiting = profile.devices, profile.waiting
    others = [number for number in range(len(devices)) if number != place]
    if not waiting.total:
        return computes
    steps = devices[place].step_s - statistics.median(devices[n].step_s for n in others)
    usual = statistics.mean(waiting.blame_s(n) for n in others)
    exposed = statistics.mean(devices[n].mean("waiting") + devices[n].mean("exposed_collective") for n in others)
    more = waiting.blame_s(place) - usual
    late = max(steps, min(more, exposed)) if max(steps, more) >= usual else 0.0
    if steps > _FACTOR * _spread(devices) > 0:
        late = max(late, steps)
    return computes if (computes >= steps or not late) and _FACTOR * computes >= late else late


def _spread(devices: Sequence[DeviceTimes]) -> float:
    """Seconds by which the steps of one device differ at most."""
    return max(float(np.ptp(device.lane.steps.duration)) for device in devices) / SECOND


def _slow_words(devices: tuple[DeviceTimes, ...], worst: int, seconds: float, computes: float) -> str:
    """What the slow device does longer."""
    own, others = devices[worst], devices[:worst] + devices[worst + 1 :]
    usual = statistics.median(d.mean("idle") for d in others)
    waits = statistics.mean(d.mean("waiting") for d in others)
    compute = own.mean("compute")
    more = f"{computes / (compute - computes):+.1%}" if compute > computes else "as long"
    return (
        f"{device_name(devices, worst)} costs the others {format_time(seconds)} a step: the same operations take it "
        f"{more}, it is idle {format_time(max(own.mean('idle'), 0))} (others {format_time(max(usual, 0))}); the others "
        f"wait {format_time(waits)} in collectives"
    )


def device_name(devices: tuple[DeviceTimes, ...], place: int) -> str:
    """A device's name; its file's where all have one name."""
    own = devices[place]
    return own.lane.device.name if len({d.lane.device.name for d in devices}) > 1 else own.trace.source


def _replace_words(devices: tuple[DeviceTimes, ...], worst: int, computes: float) -> str:
    own, others = devices[worst], devices[:worst] + devices[worst + 1 :]
    idle = own.mean("idle") - statistics.median(d.mean("idle") for d in others)
    if computes >= idle:
        return "look at this device's clocks, temperature and power cap, and at whether it gets more tokens than others"
    return "look at this device's host: data loading, logging, garbage collection, other processes"
