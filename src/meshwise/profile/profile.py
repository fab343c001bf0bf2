"""A profile: traces, their steps, and where the time of an average step on an average device went.

Not here: why (`causes`), beside what plan (`beside`), words (`report`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from meshwise.core.errors import ConfigError
from meshwise.hardware import Chip
from meshwise.profile.chips import chip_of
from meshwise.profile.idle import Idle, find_idle
from meshwise.profile.kinds import short_name
from meshwise.profile.optimes import OpTime, op_times, peak_of
from meshwise.profile.partition import PARTS, Busy, Partition, busy_times, partition
from meshwise.profile.ranks import Lane, Waiting, find_waiting
from meshwise.profile.steps import find_steps, same_steps
from meshwise.profile.trace import SECOND, Activity, Trace

#: Operations of no known kind are said from this share of busy time on.
_UNKNOWN = 0.01
#: Devices with less than this share of the usual number of steps, and with more than one step less, are left out.
_FEWER = 0.75


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """One device: its steps and where their time went."""

    lane: Lane
    trace: Trace
    busy: Busy
    partition: Partition

    @property
    def step_s(self) -> float:
        """Seconds of an average step."""
        return float(self.lane.steps.duration.mean()) / SECOND

    def mean(self, part: str) -> float:
        """Seconds of a part in an average step."""
        return float(self.partition.parts[part].mean()) / SECOND


@dataclass(frozen=True, slots=True)
class Profile:
    """Where the time of an average step on an average device went.

    Args:
        traces: what was read.
        devices: those on which steps were found.
        partition_s: seconds of each part (`partition.PARTS`); they add up to `step_s`.
        step_s: seconds.
        steps_s: seconds of every step of every device, by start.
        ops: operations, the longest first.
        waiting: what several devices told of waiting.
        idle: gaps.
        chip: of the catalog, None if it is not known.
        missing: what the traces do not say.
    """

    traces: tuple[Trace, ...]
    devices: tuple[DeviceTimes, ...]
    partition_s: Mapping[str, float]
    step_s: float
    steps_s: tuple[float, ...]
    ops: tuple[OpTime, ...] = field(repr=False)
    waiting: Waiting
    idle: Idle
    chip: Chip | None
    missing: tuple[str, ...]

    @property
    def steps_found(self) -> str:
        """How the steps were found."""
        return self.devices[0].lane.steps.how

    @property
    def whole_ops(self) -> tuple[OpTime, ...]:
        """Operations without what starts and waits for collectives that stand there in flight, too."""
        return tuple(t for t in self.ops if t.kind.collective is not None or t.kind.activity != Activity.COLLECTIVE)

    @property
    def flops(self) -> float:
        """FLOPs of a step on a device, as far as they are known."""
        return sum((t.kind.flops or 0.0) * t.runs for t in self.ops)

    @property
    def flops_utilization(self) -> float | None:
        """Known FLOPs over what the chip could do in the step, in each operation's format; None if nothing is known."""
        if self.chip is None or not self.flops:
            return None
        floor = 0.0
        for time in self.ops:
            if time.kind.flops and time.kind.category in ("matmul", "attention", "convolution"):
                peak = peak_of(self.chip, time.kind)
                floor += time.kind.flops * time.runs / peak if peak else 0.0
        return floor / self.step_s if floor else None

    @property
    def memory_peak(self) -> float | None:
        """Bytes allocated at most on a device, None where no trace says."""
        found = [d.lane.device.memory for d in self.devices]
        return max((float(m[1].max()) for m in found if m is not None), default=None)


def profile_traces(traces: Sequence[Trace], *, chip: Chip | None = None, step: str | None = None) -> Profile:
    """Find the steps of all devices, and where their time went.

    Args:
        traces: of one job.
        chip: the accelerator, instead of what the traces say.
        step: regular expression of the markers that are steps.

    Raises:
        ConfigError: no device has a step; no marker matches.
    """
    lanes, owners = _lanes(traces, step)
    waiting = find_waiting(lanes)
    busy = [busy_times(lane.device, lane.ops, wait) for lane, wait in zip(lanes, waiting.intervals, strict=True)]
    devices = tuple(
        DeviceTimes(lane, traces[owner], when, partition(when, lane.steps))
        for lane, owner, when in zip(lanes, owners, busy, strict=True)
    )
    parts = {name: sum(d.mean(name) for d in devices) / len(devices) for name in PARTS}
    names = (d.lane.device.chip for d in devices)
    chip = chip or next((c for name in names if (c := chip_of(name)) is not None), None)
    ops = op_times(lanes, busy)
    return Profile(
        traces=tuple(traces),
        devices=devices,
        partition_s=parts,
        step_s=sum(parts.values()),
        steps_s=tuple(float(s) / SECOND for d in devices for s in d.lane.steps.duration),
        ops=ops,
        waiting=waiting,
        idle=find_idle(traces, lanes, busy, owners),
        chip=chip,
        missing=(*_missing(traces, lanes, waiting, chip), *_unknown(ops)),
    )


def _lanes(traces: Sequence[Trace], step: str | None) -> tuple[list[Lane], list[int]]:
    """Devices with steps, and the trace of each; those with far fewer steps than others are left out.

    All have the same steps: those that any of them leaves out as not steady are left out of all.
    """
    every = [
        (Lane(device, trace.ops, find_steps(trace, place, step)), owner)
        for owner, trace in enumerate(traces) for place, device in enumerate(trace.devices)
    ]  # fmt: skip
    numbers = Counter(len(lane.steps) for lane, _ in every if len(lane.steps))
    usual = max(numbers, key=lambda n: (numbers[n], n), default=0)
    kept = [(lane, owner) for lane, owner in every if len(lane.steps) >= max(min(_FEWER * usual, usual - 1), 1)]
    if not kept:
        raise ConfigError(f"{traces[0].source}: no step was found; --step REGEX names the markers that are steps")
    steps = same_steps([lane.steps for lane, _ in kept])
    return [replace(lane, steps=own) for (lane, _), own in zip(kept, steps, strict=True)], [o for _, o in kept]


def _missing(traces: Sequence[Trace], lanes: Sequence[Lane], waiting: Waiting, chip: Chip | None) -> tuple[str, ...]:
    """What nobody said, each once."""
    said = dict.fromkeys(words for trace in traces for words in trace.missing)
    if chip is not None:
        said = {words: None for words in said if not words.startswith("the name of the chip")}
    if waiting.total and not waiting.matched:
        said["how much of a collective is waiting for others: that takes traces of several ranks"] = None
    size = traces[0].world_size or 0
    if waiting.matched and size > len(lanes):
        said[f"the other {size - len(lanes):,} ranks: waiting is told among {len(lanes)} of {size:,}"] = None
    devices = sum(len(trace.devices) for trace in traces)
    if devices > len(lanes):
        said[f"steps of {devices - len(lanes):,} of {devices:,} devices, which are left out"] = None
    if not np.any([len(lane.steps) > 1 for lane in lanes]):
        said["more than one step"] = None
    return tuple(said)


def _unknown(ops: Sequence[OpTime]) -> Iterator[str]:
    """How much time goes into operations whose names tell nothing."""
    unknown = [time for time in ops if time.kind.category in ("other", "custom")]
    seconds, busy = sum(time.seconds for time in unknown), sum(time.seconds for time in ops)
    if seconds >= _UNKNOWN * busy > 0:
        names = ", ".join(dict.fromkeys(short_name(time.kind.parent or time.kind.name)[:40] for time in unknown[:3]))
        more = f" and {len(unknown) - 3:,} more" if len(unknown) > 3 else ""
        yield f"the kind of operations that take {seconds / busy:.1%} of busy time: {names}{more}"
