"""How long each operation takes in a step, and how near it comes to what the chip can do.

Not here: which instants are exposed (`partition`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.hardware import Chip
from meshwise.profile.partition import Busy, self_time
from meshwise.profile.ranks import Lane
from meshwise.profile.trace import SECOND, Activity, OpKind

#: Share of a memory's rate above which bytes cannot have come from it: catalogs round, and caches help a little.
_MOST_OF_HBM = 1.1


@dataclass(frozen=True, slots=True)
class OpTime:
    """One operation in an average step on an average device.

    Args:
        kind: the operation.
        runs: how often it runs in a step.
        seconds: busy in a step, without what it holds.
        exposed: seconds of it in which nothing computes (of operations that compute: all).
        longest: seconds of its longest run.
    """

    kind: OpKind
    runs: float
    seconds: float
    exposed: float
    longest: float

    @property
    def flops_per_s(self) -> float | None:
        """Achieved rate, None if its FLOPs are not known."""
        return self._rate(self.kind.flops)

    @property
    def bytes_per_s(self) -> float | None:
        """Achieved rate of what it must read and write, None if its bytes are not known."""
        return self._rate(self.kind.num_bytes)

    def _rate(self, amount: float | None) -> float | None:
        return None if not amount or not self.seconds else amount * self.runs / self.seconds


@dataclass(frozen=True, slots=True)
class Roofline:
    """How near an operation comes to its bound: `compute` or `memory`, and the share of that peak."""

    bound: str
    share: float
    floor: float


def op_times(lanes: Sequence[Lane], busy: Sequence[Busy]) -> tuple[OpTime, ...]:
    """Each operation's time in an average step, the longest first."""
    sums: dict[OpKind, np.ndarray] = {}
    for lane, when in zip(lanes, busy, strict=True):
        weight = len(lane.steps) * len(lanes)
        total = _device_times(lane, when)
        for number in np.flatnonzero(total[:, 0]).tolist():
            op = lane.ops[number]
            row = total[number] / (weight, weight * SECOND, weight * SECOND, SECOND)
            before = sums.get(op)
            sums[op] = row if before is None else np.append(before[:3] + row[:3], max(before[3], row[3]))
    found = [OpTime(op, *map(float, row)) for op, row in sums.items()]
    alike = Counter(t.seconds for t in found)
    return tuple(sorted(found, key=lambda t: (-t.seconds, t.kind.key if alike[t.seconds] > 1 else ())))


def _device_times(lane: Lane, busy: Busy) -> np.ndarray:
    """(runs, busy, exposed, longest run) of each operation in all steps of one device, in picoseconds."""
    steps, number = lane.steps, len(lane.ops)
    computes = np.array([op.activity in (Activity.COMPUTE, Activity.CONTROL) for op in lane.ops], dtype=bool)
    total = np.zeros((number, 4))
    for stream in lane.device.streams:
        inside = steps.at(stream.start) >= 0
        if not inside.any():
            continue
        op, own = stream.op[inside], self_time(stream)[inside]
        hidden = busy.compute.within(stream.start[inside], stream.end[inside])
        exposed = np.where(computes[op], own, np.maximum(own - hidden, 0))
        total[:, 0] += np.bincount(op, minlength=number)
        total[:, 1] += np.bincount(op, weights=own, minlength=number)
        total[:, 2] += np.bincount(op, weights=exposed, minlength=number)
        np.maximum.at(total[:, 3], op, own)
    return total


def peak_of(chip: Chip, op: OpKind) -> float | None:
    """FLOP/s that the chip has for an operation's operands, None if it has no such format."""
    narrow = next((a.dtype for a in (*op.operands, *op.results) if a.dims), "bf16")
    try:
        return chip.peak(DType(narrow))
    except (ValueError, MeshwiseError):
        return None


def roofline_of(time: OpTime, chip: Chip | None) -> Roofline | None:
    """How near an operation comes to the roofline; None if its work or the chip is not known.

    A kernel that reads some pages of a pool is told to read all of it. Bytes that the memory could not have moved in
    this time were not moved, and count as not known.
    """
    op = time.kind
    if chip is None or op.activity != Activity.COMPUTE or not time.seconds:
        return None
    peak = peak_of(chip, op) if op.category in ("matmul", "attention", "convolution") else chip.vector_flops_per_s
    compute = (op.flops or 0.0) / peak if peak else 0.0
    memory = (op.num_bytes or 0.0) / chip.hbm_bandwidth
    if memory * time.runs > _MOST_OF_HBM * time.seconds:
        memory = 0.0
    floor = max(compute, memory) * time.runs
    if not floor:
        return None
    return Roofline("compute" if compute >= memory else "memory", floor / time.seconds, floor)
