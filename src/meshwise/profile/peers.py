"""How much slower each device of one job computes than the others, by the operations that all run equally often.

Not here: who waits for whom (`ranks`), whether it is a cause (`causes`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwise.profile.profile import DeviceTimes
from meshwise.profile.trace import SECOND, Activity, OpKind

#: Operations that all devices run must be this share of what a device computes, to speak for the rest.
_SHARED = 0.25


def slower_by(devices: Sequence[DeviceTimes]) -> tuple[float, ...]:
    """Seconds of a step that each device computes longer than the median of the others would, like for like.

    The ratio is the middle one (by time) of operations that all devices run equally often; others are other work. It
    is taken to hold for all that a device computes. 0 where too little is shared to tell.
    """
    if len(devices) < 2:
        return (0.0,) * len(devices)
    sums = [_computing(device) for device in devices]
    shared = [op for op, (runs, _) in sums[0].items() if all(op in s and s[op][0] == runs for s in sums[1:])]
    times = np.array([[found[op][1] for op in shared] for found in sums])  # [devices, operations]
    least = [_SHARED * sum(seconds for _, seconds in found.values()) for found in sums]
    if (times.sum(axis=1) <= least).any():
        return (0.0,) * len(devices)
    found = []
    for place, device in enumerate(devices):
        usual = np.median(np.delete(times, place, axis=0), axis=0)
        known = (usual > 0) & (times[place] > 0)
        own, others = times[place][known], usual[known]
        ratio = _middle(own / others, np.sqrt(own * others))  # neither side's noise weighs more
        found.append(device.mean("compute") * (1 - 1 / ratio))
    return tuple(found)


def _middle(values: np.ndarray, weights: np.ndarray) -> float:
    """The weighted median: half of the weight lies on either side."""
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])


def _computing(device: DeviceTimes) -> dict[OpKind, tuple[float, float]]:
    """Runs and seconds of each operation that computes, in an average step."""
    lane = device.lane
    computes = np.array([op.activity == Activity.COMPUTE for op in lane.ops], dtype=bool)
    runs, length = np.zeros(len(lane.ops)), np.zeros(len(lane.ops))
    for stream in lane.device.streams:
        inside = (lane.steps.at(stream.start) >= 0) & computes[stream.op]
        runs += np.bincount(stream.op[inside], minlength=len(runs))
        length += np.bincount(stream.op[inside], weights=stream.duration[inside], minlength=len(runs))
    number = len(lane.steps)
    return {
        lane.ops[n]: (float(runs[n]) / number, float(length[n]) / SECOND / number)
        for n in np.flatnonzero(runs).tolist()
    }
