"""What a trace holds, whatever tool wrote it: devices, their streams as columns, one `OpKind` a distinct operation.

Times are whole picoseconds since the trace's own beginning, so that sums are exact. Not here: files (`reading`), what
the times mean (`partition`, `steps`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

#: Picoseconds in a second.
SECOND = 10**12

Times = npt.NDArray[np.int64]


class Activity(IntEnum):
    """What an operation keeps busy; `CONTROL` holds others (a loop, a call) and counts where none of them runs."""

    COMPUTE = 0
    COLLECTIVE = 1
    COPY = 2
    CONTROL = 3


@dataclass(frozen=True, slots=True)
class Array:
    """One array that an operation reads or writes: sizes, and the element type in short (`bf16`)."""

    dims: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Collective:
    """What a collective sends.

    Args:
        kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`, `broadcast`, `send-recv`, ...
        num_bytes: of the larger of input and output on one device, None where the trace does not say.
        group_size: devices that take part, None where the trace does not say.
        groups: they themselves, group by group, where the trace says; Kineto knows only the group of its own rank.
        group: name of the group, where it has one.
        placed: whether groups are of devices; if not, of their places in the program, which may be in another order.
    """

    kind: str
    num_bytes: float | None = None
    group_size: int | None = None
    groups: tuple[tuple[int, ...], ...] = ()
    group: str = ""
    placed: bool = False

    def group_of(self, rank: int | None) -> tuple[int, ...]:
        """The group that a rank sends in, () if unknown."""
        if len(self.groups) == 1:
            return self.groups[0]
        return next((g for g in self.groups if rank in g), ())


@dataclass(frozen=True, slots=True)
class OpKind:
    """One distinct operation: all its runs are alike.

    Args:
        name: as the trace has it.
        activity: what it keeps busy.
        category: `matmul`, `attention`, `elementwise`, ... (`kinds.CATEGORIES`).
        scope: the path of named scopes (JAX), the module or the annotation (PyTorch), "" if unknown.
        parent: the framework's operation that launched it (`aten::mm`), "" if unknown.
        phase: `forward`, `backward`, `recompute`, `optimizer`, or "" if unknown.
        operands, results: arrays that it reads and writes; empty if unknown.
        matmul: (batch, m, k, n) of a product, None if it is none or unknown.
        flops, num_bytes: of one run, None if unknown.
        collective: what it sends.
        program: the XLA module that it is part of.
        label: the category as the profiler's own tools call it.
        source: where shapes, FLOPs and bytes come from: `trace`, `HLO`, `shapes`, or "" if unknown.
    """

    name: str
    activity: Activity
    category: str
    scope: str = ""
    parent: str = ""
    phase: str = ""
    operands: tuple[Array, ...] = ()
    results: tuple[Array, ...] = ()
    matmul: tuple[int, int, int, int] | None = None
    flops: float | None = None
    num_bytes: float | None = None
    collective: Collective | None = None
    program: str = ""
    label: str = ""
    source: str = ""

    def __hash__(self) -> int:
        """Of what tells nearly all operations apart: all fields would be looked through each time."""
        return hash((self.name, self.program, self.scope))

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """Orders operations, whatever the order of events was."""
        return self.name, self.program, self.scope, self.parent, repr(self)


@dataclass(frozen=True, slots=True)
class Stream:
    """Operations of one queue of a device, by start.

    Args:
        name: as the trace has it.
        start, duration: picoseconds.
        op: indices into the trace's operations.
        launch: when the host launched each, -1 where unknown.
        run: which run of its program each is part of, -1 where unknown.
        nested: whether operations hold others (loops, calls).
    """

    name: str
    start: Times
    duration: Times
    op: npt.NDArray[np.int32]
    launch: Times
    run: Times
    nested: bool = False

    @property
    def end(self) -> Times:
        """When each operation ends."""
        return self.start + self.duration


@dataclass(frozen=True, slots=True)
class Marker:
    """A named range: a step that a program marked, a profiler's annotation; `device` is -1 for a host's."""

    name: str
    start: int
    duration: int
    device: int = -1

    @property
    def end(self) -> int:
        """When it ends."""
        return self.start + self.duration


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator (or a CPU that XLA runs on) and what ran on it.

    Args:
        name: `rank 0`, `TPU:0`.
        chip: as the trace calls it, "" if it does not.
        rank: number among the processes or devices of the job, None where the trace does not say; of TPUs the device's.
        clock: devices of one clock can be compared in absolute time.
        streams: its queues.
        memory: (time, bytes allocated) where the trace has it.
    """

    name: str
    chip: str
    rank: int | None
    clock: str
    streams: tuple[Stream, ...]
    memory: tuple[Times, Times] | None = None

    @property
    def num_ops(self) -> int:
        """How many operations ran."""
        return sum(len(s.op) for s in self.streams)


@dataclass(frozen=True, slots=True)
class HostThread:
    """What one thread of the host did: starts, durations and names' indices, by start."""

    name: str
    start: Times
    duration: Times
    text: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Trace:
    """What was read from one file or folder, or from several of one job.

    Args:
        source: its path.
        format: `xplane`, `kineto`, `chrome`, `nsys-jax`, `nsys`.
        ops: the distinct operations; streams hold indices.
        devices: those with operations.
        markers: named ranges that may be steps.
        host: threads that launch work; `texts` are their names.
        world_size: devices of the whole job, None where the trace does not say.
        missing: what the trace does not say, in words.
        host_only: whether no accelerator was traced, and the host's operations stand for one.
    """

    source: str
    format: str
    ops: tuple[OpKind, ...]
    devices: tuple[Device, ...]
    markers: tuple[Marker, ...] = ()
    host: tuple[HostThread, ...] = ()
    texts: tuple[str, ...] = field(default=(), repr=False)
    world_size: int | None = None
    missing: tuple[str, ...] = ()
    host_only: bool = False

    @property
    def num_events(self) -> int:
        """Operations of all devices."""
        return sum(device.num_ops for device in self.devices)


class OpTable:
    """Interns operations while a trace is read."""

    def __init__(self) -> None:
        self._index: dict[OpKind, int] = {}
        self._ops: list[OpKind] = []

    def index(self, op: OpKind) -> int:
        """The operation's number, a new one the first time."""
        number = self._index.setdefault(op, len(self._ops))
        if number == len(self._ops):
            self._ops.append(op)
        return number

    def __getitem__(self, number: int) -> OpKind:
        return self._ops[number]

    @property
    def ops(self) -> tuple[OpKind, ...]:
        """All operations by number."""
        return tuple(self._ops)


class StreamBuilder:
    """Collects the events of one stream in any order."""

    def __init__(self, name: str, *, nested: bool = False) -> None:
        self.name, self.nested = name, nested
        self.start, self.duration, self.op = array("q"), array("q"), array("i")
        self.launch, self.run = array("q"), array("q")

    def add(self, start: int, duration: int, op: int, launch: int = -1, run: int = -1) -> None:
        """Add one event."""
        self.start.append(start)
        self.duration.append(duration)
        self.op.append(op)
        self.launch.append(launch)
        self.run.append(run)

    def extend(self, start: Times, duration: Times, op: Times, launch: Times, run: Times) -> None:
        """Add many events."""
        columns = (self.start, start), (self.duration, duration), (self.op, op), (self.launch, launch), (self.run, run)
        for own, more in columns:
            own.frombytes(more.astype(own.typecode).tobytes())

    def build(self) -> Stream:
        """The stream, by start; of those that start together the longest first."""
        start, duration = np.array(self.start, dtype=np.int64), np.array(self.duration, dtype=np.int64)
        op = np.array(self.op, dtype=np.int32)
        order = np.lexsort((op, -duration, start))
        columns = (np.array(c, dtype=np.int64)[order] for c in (self.launch, self.run))
        launch, run = columns
        return Stream(self.name, start[order], duration[order], op[order], launch, run, self.nested)


def device_ops(device: Device) -> Iterator[tuple[Stream, Times]]:
    """Each stream with the ends of its operations."""
    for stream in device.streams:
        yield stream, stream.end
