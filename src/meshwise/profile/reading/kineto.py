"""Traces of PyTorch's profiler (Kineto; also vLLM, SGLang): GPU events joined to what launched them.

Not here: decoding JSON (`chrome`), the host's tree of operations (`host_tree`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from meshwise.profile.kinds import (
    collective_kind,
    dtype_bytes,
    is_collective,
    kernel_activity,
    kernel_category,
    short_dtype,
)
from meshwise.profile.reading.chrome import (
    DeviceProperties,
    Distributed,
    Document,
    Event,
    complete,
    decoded,
    first_time,
    picoseconds,
)
from meshwise.profile.reading.host_tree import LIBRARIES, HostOp, HostTree
from meshwise.profile.trace import (
    Activity,
    Array,
    Collective,
    Device,
    Marker,
    OpKind,
    OpTable,
    StreamBuilder,
    Times,
    Trace,
)
from meshwise.profile.work import operation_work

#: Category of an event, as older versions called it -> as it is called now.
_FORMER = {
    "Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset", "Operator": "cpu_op", "Runtime": "cuda_runtime",
    "hip_runtime": "cuda_runtime", "cuda_driver": "cuda_runtime", "hip_driver": "cuda_runtime",
    "xpu_runtime": "cuda_runtime", "mtia_runtime": "cuda_runtime",
}  # fmt: skip
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_ON_HOST = frozenset({"cpu_op", "user_annotation"})
#: Events that make a file one of this profiler.
CATEGORIES = frozenset({*_ON_DEVICE, *_ON_HOST, "cuda_runtime", *_FORMER})


class GpuArguments(msgspec.Struct, gc=False):
    """What is read of a GPU event's arguments."""

    external: int | None = msgspec.field(name="External id", default=None)
    device: int | None = None
    stream: int | str | None = None
    correlation: int | None = None
    num_bytes: float | None = msgspec.field(name="bytes", default=None)
    collective: str | None = msgspec.field(name="Collective name", default=None)
    elements_in: float | None = msgspec.field(name="In msg nelems", default=None)
    elements_out: float | None = msgspec.field(name="Out msg nelems", default=None)
    group_size: int | None = msgspec.field(name="Group size", default=None)
    dtype: str | None = None
    ranks: str | tuple[int, ...] | None = msgspec.field(name="Process Group Ranks", default=None)
    group: str | None = msgspec.field(name="Process Group Name", default=None)


class RuntimeArguments(msgspec.Struct, gc=False):
    """What is read of a call of the CUDA or HIP runtime."""

    correlation: int | None = None
    external: int | None = msgspec.field(name="External id", default=None)


class MemoryArguments(msgspec.Struct, gc=False):
    """An allocation."""

    allocated: int | None = msgspec.field(name="Total Allocated", default=None)
    device: int | None = msgspec.field(name="Device Id", default=None)
    kind: int | None = msgspec.field(name="Device Type", default=None)


@dataclass
class _Events:
    """Events of one file by what they are; times are picoseconds since `base` microseconds."""

    base: float
    gpu: list[tuple[Event, str, int, int]] = field(default_factory=list)
    launches: dict[int, tuple[int, object, str]] = field(default_factory=dict)  # correlation -> start, thread, name
    memory: list[tuple[int, MemoryArguments]] = field(default_factory=list)
    markers: list[Marker] = field(default_factory=list)


def is_kineto(events: tuple[Event, ...]) -> bool:
    """Whether a file was written by PyTorch's profiler."""
    return any(e.cat in CATEGORIES for e in events)


def read_kineto(document: Document, source: str) -> Trace:
    """Make a trace of a file's events."""
    events = document.traceEvents or ()
    found, tree = _sorted_events(events)
    info = decoded(document.distributedInfo, Distributed, Distributed())
    reader = _Reader(tree, found, info or Distributed(), _chips(document))
    return reader.trace(source)


def _chips(document: Document) -> dict[int, str]:
    properties = decoded(document.deviceProperties, tuple[DeviceProperties, ...], ())
    return {p.id: p.name for p in properties}


def _sorted_events(events: tuple[Event, ...]) -> tuple[_Events, HostTree]:
    """Sort a file's events by kind; Python frames and flows are dropped."""
    found = _Events(first_time(events))
    tree = HostTree()
    for event, length in complete(events):
        category = _FORMER.get(event.cat or "", event.cat)
        if category in (None, "python_function", "Trace", "ac2g", "fwdbwd"):
            continue
        start, duration = picoseconds(event.ts, found.base), picoseconds(length, 0.0)
        if start is None or duration is None or duration < 0:
            continue
        name = event.name or ""
        if category in _ON_DEVICE:
            found.gpu.append((event, str(category), start, duration))
        elif category == "cuda_runtime":
            called = decoded(event.args, RuntimeArguments, RuntimeArguments())
            if called.correlation is not None:
                found.launches[called.correlation] = start, event.tid, name
            tree.add_call(event.tid, start, duration, name)
        elif category in _ON_HOST:
            tree.add(event.tid, HostOp(name, start, duration, event.args, annotation=category == "user_annotation"))
            if category == "user_annotation":
                found.markers.append(Marker(name, start, duration))
        elif category == "gpu_user_annotation":
            device = decoded(event.args, GpuArguments, GpuArguments()).device
            found.markers.append(Marker(name, start, duration, _number(device if device is not None else event.pid)))
    for event in events:
        if event.cat == "cpu_instant_event" and event.name == "[memory]":
            start = picoseconds(event.ts, found.base)
            found.memory.append((start or 0, decoded(event.args, MemoryArguments, MemoryArguments())))
    return found, tree


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _ranks(value: str | tuple[int, ...] | None) -> tuple[int, ...]:
    """Ranks of a group: a list, or its text; long ones are abbreviated in the file, and then unknown."""
    if isinstance(value, str):
        return () if "..." in value else decoded(value.encode(), tuple[int, ...], ())
    return value or ()


class _Reader:
    """Builds the trace of one file."""

    def __init__(self, tree: HostTree, events: _Events, info: Distributed, chips: dict[int, str]) -> None:
        self.tree, self.events, self.info, self.chips = tree, events, info, chips
        self.ops = OpTable()
        self.known: dict[tuple[object, ...], int] = {}
        self.unlaunched = 0
        self.graphs = 0
        self.shapeless = 0

    def trace(self, source: str) -> Trace:
        """The trace."""
        self.tree.build()
        builders: dict[int, dict[str, StreamBuilder]] = {}
        for event, category, start, duration in self.events.gpu:
            args = decoded(event.args, GpuArguments, GpuArguments())
            device = args.device if args.device is not None else _number(event.pid)
            stream = str(args.stream if args.stream is not None else event.tid)
            launch = self.events.launches.get(args.correlation) if args.correlation is not None else None
            parent = self.tree.find(launch[1], launch[0]) if launch else None
            if parent is None and args.external is not None:
                parent = self.tree.by_external(args.external)
            if args.collective is None and is_collective(event.name or ""):
                args = _noted(args, parent)
            self.unlaunched += launch is None
            self.graphs += launch is not None and "Graph" in launch[2]
            op = self._op(event.name or "", category, args, parent)
            builder = builders.setdefault(device, {}).setdefault(stream, StreamBuilder(stream))
            builder.add(start, duration, op, launch[0] if launch else -1)
        devices = tuple(self._device(number, streams) for number, streams in sorted(builders.items()))
        if not devices:
            return self._host_only(source)
        numbers = {number: place for place, number in enumerate(sorted(builders))}
        markers = tuple(
            Marker(m.name, m.start, m.duration, numbers.get(m.device, -1) if m.device >= 0 else -1)
            for m in self.events.markers
        )
        threads, texts = self.tree.threads()
        return Trace(
            source, "kineto", self.ops.ops, devices, markers, threads, texts, self.info.world_size, self._missing()
        )

    def _device(self, number: int, streams: dict[str, StreamBuilder]) -> Device:
        chip = self.chips.get(number) or next(iter(self.chips.values()), "")
        rank = self.info.rank
        name = f"GPU {number}" if rank is None else f"rank {rank}"
        built = tuple(builder.build() for _, builder in sorted(streams.items()))
        return Device(name, chip, rank, self._clock(), built, self._memory(number))

    def _clock(self) -> str:
        return f"process {self.info.rank}" if self.info.rank is not None else "process"

    def _memory(self, number: int) -> tuple[Times, Times] | None:
        """Bytes allocated over time; device type 0 is the host."""
        every = [(t, a) for t, a in self.events.memory if a.allocated is not None and a.kind not in (0, None)]
        found = [(t, a.allocated) for t, a in every if a.device == number] or [(t, a.allocated) for t, a in every]
        if not found:
            return None
        columns = np.array(sorted(found), dtype=np.int64)
        return columns[:, 0], columns[:, 1]

    def _op(self, name: str, category: str, args: GpuArguments, parent: HostOp | None) -> int:
        """The number of the operation that an event is a run of."""
        shapes = parent.operands if parent else ()
        phase = parent.phase if parent else ""
        if category == "kernel" and not shapes:
            self.shapeless += 1
        key: tuple[object, ...] = (
            name,
            category,
            parent.name if parent else "",
            shapes,
            phase,
            parent.scope if parent else "",
        )
        key += (args.collective, args.elements_in, args.elements_out, args.group, args.group_size, args.dtype)
        key += (args.num_bytes,) if category != "kernel" else ()
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self.ops.index(gpu_kind(name, category, args, parent))
        return found

    def _missing(self) -> tuple[str, ...]:
        total = len(self.events.gpu)
        said = []
        if self.unlaunched == total:
            said.append("which host calls launched the kernels")
        elif self.graphs:
            said.append(f"shapes of {self.graphs:,} of {total:,} kernels: they were replayed from a graph")
        if not self.graphs and self.shapeless > 0.5 * total:
            said.append("shapes of most operations (record_shapes=True records them)")
        if not self.chips:
            said.append("the name of the chip (--on names it)")
        return tuple(said)

    def _host_only(self, source: str) -> Trace:
        """Without an accelerator the host's operations stand for one device."""
        streams = self.tree.streams(self.ops, _host_kind)
        threads, texts = self.tree.threads()
        missing = ("accelerator events: operations of the host stand for them",)
        rank = self.info.rank
        name = "host" if rank is None else f"rank {rank} (host)"
        devices = (Device(name, "CPU", rank, self._clock(), streams),) if streams else ()
        markers = tuple(m for m in self.events.markers if m.device < 0)
        return Trace(
            source, "kineto", self.ops.ops, devices, markers, threads, texts, self.info.world_size, missing, True
        )


def _host_kind(op: HostOp) -> OpKind:
    """An operation of the host; those of gloo and of MPI are collectives, those of `c10d` wait for them."""
    activity = Activity.COLLECTIVE if op.name.startswith(LIBRARIES) else Activity.COMPUTE
    category = "collective" if activity == Activity.COLLECTIVE else kernel_category("", op.name)
    work = operation_work(op.name, op.operands)
    sent = sum(float(np.prod(a.dims)) * (dtype_bytes(a.dtype) or 0) for a in op.operands if a.dims)
    collective = Collective(collective_kind(op.name), sent or None) if activity == Activity.COLLECTIVE else None
    return OpKind(
        name=op.name, activity=activity, category="host" if category == "other" else category, scope=op.scope,
        phase=op.phase, operands=op.operands, matmul=work.matmul, flops=work.flops, num_bytes=work.num_bytes,
        collective=collective, source="shapes" if op.operands else "",
    )  # fmt: skip


def gpu_kind(name: str, category: str, args: GpuArguments, parent: HostOp | None) -> OpKind:
    """The operation of a GPU event."""
    activity = Activity.COLLECTIVE if args.collective else kernel_activity(name, category)
    parent_name = parent.name if parent else ""
    operands: tuple[Array, ...] = parent.operands if parent else ()
    base = OpKind(name, activity, "other", parent.scope if parent else "", parent_name, parent.phase if parent else "")
    if activity == Activity.COLLECTIVE:
        told = "trace" if args.collective else ""
        return replace(base, category="collective", collective=_collective(name, args, parent), source=told)
    if activity == Activity.COPY:
        kind = "memset" if category == "gpu_memset" or "ill" in name[:24] else "copy"
        return replace(base, category=kind, num_bytes=args.num_bytes, source="trace" if args.num_bytes else "")
    group = kernel_category(name, parent_name)
    base = replace(base, category=group, operands=operands)
    work = operation_work(parent_name, operands) if group in ("matmul", "attention") else None
    helps = group in ("matmul", "attention") and kernel_category(name) not in (group, "other")
    part = work is not None and group == "matmul" and work.matmul is None  # of an attention that is not fused
    if work is None or helps or part:  # only the kernel that does the product carries its FLOPs
        return base
    told = "shapes" if work.flops else ""
    return replace(base, matmul=work.matmul, flops=work.flops, num_bytes=work.num_bytes, source=told)


def _noted(args: GpuArguments, op: HostOp | None) -> GpuArguments:
    """Arguments of a collective whose kernel has none: those that its caller noted (`record_param_comms`)."""
    while op is not None:
        noted = decoded(op.args, GpuArguments, GpuArguments())
        if noted.collective is not None:
            return noted
        op = op.parent
    return args


def _collective(name: str, args: GpuArguments, parent: HostOp | None) -> Collective:
    """What a kernel of NCCL or RCCL sends, from its arguments, else from what launched it."""
    noted = parent.name if parent is not None and parent.name.startswith(LIBRARIES) else ""
    kind = collective_kind(args.collective or noted or name)
    if kind == "collective":
        kind = collective_kind(name)
    size = dtype_bytes(short_dtype(args.dtype)) if args.dtype else None
    elements = max(filter(None, (args.elements_in, args.elements_out)), default=None)
    sent = elements * size if elements is not None and size is not None else None
    ranks = _ranks(args.ranks)
    return Collective(kind, sent, args.group_size or len(ranks) or None, (ranks,) if ranks else (), args.group or "")
