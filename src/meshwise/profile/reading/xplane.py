"""Traces of JAX and XLA (`*.xplane.pb`) on TPU, GPU and CPU; the HLO of each program is read from the same file.

Planes are parsed one at a time, so that a large file never stands in memory whole. Not here: what an instruction does
(`hlo`), the protocol buffers (`protos`).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from meshwise.profile.chips import chip_of
from meshwise.profile.kinds import IN_FLIGHT, collective_kind, is_part, kernel_activity, kernel_category
from meshwise.profile.reading.events import Events, read_events
from meshwise.profile.reading.graphs import GraphNodes, NodeKey
from meshwise.profile.reading.hlo import HloProgram
from meshwise.profile.reading.protos import BrokenProtoError, Message, parse
from meshwise.profile.reading.wire import parsed_plane, planes
from meshwise.profile.reading.xplane_ops import Names, Reader, hlo_kind
from meshwise.profile.trace import (
    Activity,
    Collective,
    Device,
    HostThread,
    Marker,
    OpKind,
    Stream,
    StreamBuilder,
    Times,
    Trace,
)

_Rows = npt.NDArray[np.intp]

_DEVICE = re.compile(r"/device:(?P<kind>TPU|GPU|[A-Z]+):(?P<number>\d+)(?P<part> SparseCore \d+)?$")
#: Lines of a TPU whose events are operations.
_OPERATIONS = ("XLA Ops", "Async XLA Ops")

#: Statistics that all events of a host are asked for: of steps, of launches, of what a CPU device runs.
_OF_HOSTS = "step_num", "correlation_id", "hlo_op", "hlo_module", "device_ordinal", "program_id", "run_id"
#: Those that tell kernels of a GPU apart.
_OF_KERNELS = "hlo_op", "program_id", "name", "memcpy_details", "cuda_graph_node_id"


def read_xplane(data: bytes, source: str) -> Trace:
    """Read a file.

    Raises:
        ConfigError: not such a file, a part of one, or a damaged one.
    """
    reader, parts = Reader(source), planes(data, source)
    for part in parts:  # programs first: they say what the operations are; then hosts, which launch them
        if part.name == "/host:metadata":
            _read_programs(reader, parsed_plane(data, part, source))
    for part in parts:
        if part.name.startswith("/host:") and part.name != "/host:metadata":
            _read_host(reader, parsed_plane(data, part, source))
    for part in parts:
        match = _DEVICE.match(part.name)
        if match and match["kind"] != "CUSTOM":
            _read_device(
                reader, parsed_plane(data, part, source), (match["kind"], int(match["number"])), match["part"] or ""
            )
    return _trace(reader)


def _read_programs(reader: Reader, plane: Message) -> None:
    names = Names.of(plane)
    for number, event in names.events.items():
        for stat in event.stats:
            if not stat.HasField("bytes_value"):
                continue
            try:
                program = HloProgram(stat.bytes_value)
            except BrokenProtoError:
                reader.broken += 1
                continue
            found = re.search(r"\((\d+)\)$", event.name)
            reader.programs[int(found[1]) if found else number] = program
            reader.by_name.setdefault(program.name, []).append(program)


def _trace(reader: Reader) -> Trace:
    kinds = sorted({kind for kind, _ in reader.devices})
    devices = tuple(
        Device(
            f"{kind}:{reader.numbers.get((kind, number), number)}",
            reader.chips.get((kind, number), ""),
            reader.numbers.get((kind, number), number),
            reader.source,
            tuple(streams),
        )
        for (kind, number), streams in sorted(reader.devices.items())
    )
    places = {number: place for place, (_, number) in enumerate(sorted(reader.devices))}
    markers = tuple(
        replace(m, device=places[m.device]) if m.device >= 0 else m
        for m in reader.markers if m.device < 0 or m.device in places
    )  # fmt: skip
    missing = []
    if not reader.programs:
        missing.append("the HLO of its programs: scopes and shapes are those of the events only")
    if reader.broken:
        missing.append(f"the HLO of {reader.broken} programs, which is damaged")
    if reader.unknown:
        missing.append(f"the HLO of {reader.unknown:,} operations")
    if reader.unplaced:
        missing.append(f"the instruction of {reader.unplaced:,} kernels of CUDA graphs, which go by their own names")
    if kinds == ["GPU"] and not any(reader.chips.values()):
        missing.append("the name of the chip (--on names it)")
    return Trace(
        reader.source, "xplane", reader.ops.ops, devices, markers, tuple(reader.threads),
        tuple(reader.texts), max((len(devices), *(len(p.devices) for p in reader.programs.values()))) or None,
        tuple(missing),
    )  # fmt: skip


# The host, and a CPU that XLA runs on.


def _read_host(reader: Reader, plane: Message) -> None:
    names = Names.of(plane)
    texts = {number: str(metadata.name) for number, metadata in names.events.items()}
    known = [number for number, text in texts.items() if not text.startswith(("$", "end: ", "ThreadpoolListener"))]
    cpus: dict[int, dict[str, StreamBuilder]] = {}
    for line in plane.lines:
        events = read_events(line, names.numbered(*_OF_HOSTS))
        chosen = np.isin(events.metadata, known)
        for place in np.flatnonzero(chosen & events.has("step_num")).tolist():
            number = names.values(events.parsed(place).stats)["step_num"]
            text = f"{texts[int(events.metadata[place])]} {number}"
            reader.markers.append(Marker(text, int(events.start[place]), int(events.duration[place])))
        correlation, launches = events.numbers("correlation_id")
        launches &= chosen
        reader.launches.update(zip(correlation[launches].tolist(), events.start[launches].tolist(), strict=True))
        of_cpus = chosen & ~events.has("correlation_id") & events.has("hlo_op") & events.numbers("device_ordinal")[1]
        if of_cpus.any():
            _read_cpus(reader, names, events, np.flatnonzero(of_cpus), partial(_cpu_stream, cpus, line))
        rows = np.flatnonzero(chosen & ~of_cpus & (events.duration > 0))
        if len(rows):
            reader.threads.append(_thread(reader, line, events, rows, texts))
    for number, streams in cpus.items():
        reader.devices.setdefault(("CPU", number), []).extend(b.build() for _, b in sorted(streams.items()))
        reader.chips["CPU", number] = "CPU"


def _thread(reader: Reader, line: Message, events: Events, rows: _Rows, texts: Mapping[int, str]) -> HostThread:
    """What a thread of the host did, by start."""
    numbers, which = np.unique(events.metadata[rows], return_inverse=True)
    indices = [reader.texts.setdefault(texts[number], len(reader.texts)) for number in numbers.tolist()]
    start, duration, text = events.start[rows], events.duration[rows], np.array(indices, dtype=np.int32)[which]
    order = np.lexsort((text, duration, start))
    return HostThread(line.display_name or line.name, start[order], duration[order], text[order])


def _cpu_stream(cpus: dict[int, dict[str, StreamBuilder]], line: Message, number: int) -> StreamBuilder:
    """The stream of a CPU device that a thread is."""
    name = str(line.name or line.id)
    streams = cpus.setdefault(number, {})
    if name not in streams:
        streams[name] = StreamBuilder(name, nested=True)
    return streams[name]


def _read_cpus(
    reader: Reader, names: Names, events: Events, rows: _Rows, stream: Callable[[int], StreamBuilder]
) -> None:
    """The operations of CPU devices among the events of a thread."""
    first, which = events.distinct(rows, "hlo_op", "program_id", "hlo_module")
    ops = np.array([_cpu_op(reader, names, events.parsed(place)) for place in first], dtype=np.int64)[which]
    device, runs = events.numbers("device_ordinal")[0][rows], _runs(events)[rows]
    for number in np.unique(device).tolist():
        own = device == number
        start = events.start[rows[own]]
        stream(number).extend(start, events.duration[rows[own]], ops[own], start, runs[own])


def _cpu_op(reader: Reader, names: Names, event: Message) -> int:
    """The number of an operation of a CPU device."""
    stats, text = names.values(event.stats), str(names.events[event.metadata_id].name)
    key = stats["hlo_op"], stats.get("program_id"), stats.get("hlo_module"), text
    if key not in reader.known:
        reader.known[key] = reader.ops.index(hlo_kind(reader, str(stats["hlo_op"]), stats, text))
    return reader.known[key]


def _runs(events: Events) -> Times:
    """Of each event the run of its program, -1 if it is not said; XLA counts in 32 bits, with a sign."""
    runs, known = events.numbers("run_id")
    return np.where(known, runs & 0xFFFFFFFF, -1)


# Accelerators.


def _read_device(reader: Reader, plane: Message, key: tuple[str, int], part: str) -> None:
    names = Names.of(plane)
    about = names.values(plane.stats)
    chip = str(about.get("device_type_string") or about.get("device_name") or _amd(about) or "")
    reader.chips[key] = reader.chips.get(key) or chip
    if isinstance(about.get("core_details"), bytes):
        reader.numbers[key] = _job_number(about["core_details"], chip)
    modules = _modules(names, plane)
    streams, graphs = reader.devices.setdefault(key, []), _Graphs(reader)
    lines: list[Stream] = []
    on_tpu = any(line.name in _OPERATIONS for line in plane.lines)
    for line in plane.lines:
        if line.name == "Steps" and not part:
            _read_steps(reader, names, line, key)
        elif on_tpu and line.name in _OPERATIONS:
            lines.append(_tpu_line(reader, names, line, modules, part))
        elif not on_tpu and line.name.startswith("Stream"):
            graphs.lines.append(_gpu_line(reader, names, line, graphs))
    streams += _in_flight(reader, lines) if on_tpu else graphs.streams()
    reader.devices[key] = [s for s in streams if len(s.op)]
    if not reader.devices[key]:
        del reader.devices[key]


def _job_number(details: object, chip: str) -> int:
    """The number of a TPU's device within its job, from the numbers of its chip and core; planes count per host."""
    core, found = parse("CoreDetails", bytes(details)), chip_of(chip)  # type: ignore[call-overload]
    per_chip = found.devices_per_chip if found is not None else 1
    return int(core.global_chip_id * per_chip + (core.core_num if per_chip > 1 else 0))


def _amd(about: dict[str, object]) -> str:
    """A GPU without a name, known by vendor, cores and memory."""
    if about.get("device_vendor") == "AMD":
        large = int(str(about.get("memory_size", 0))) > 2.3e11
        cores = {304: f"AMD Instinct {'MI325X' if large else 'MI300X'}", 256: "AMD Instinct MI355X",
                 208: "AMD Instinct MI250X"}  # fmt: skip
        return cores.get(int(str(about.get("core_count", 0))), "")
    if about.get("device_vendor") in ("Nvidia", "NVIDIA"):
        major, minor = str(about.get("compute_cap_major", "")), str(about.get("compute_cap_minor", ""))
        size = int(str(about.get("memory_size", 0)))
        found = {"80": "NVIDIA A100 80GB" if size > 6e10 else "NVIDIA A100 40GB", "90": "NVIDIA H100 80GB HBM3",
                 "100": "NVIDIA B200", "89": "NVIDIA L40S", "70": "NVIDIA V100"}  # fmt: skip
        return "NVIDIA H200" if major + minor == "90" and size > 1.2e11 else found.get(major + minor, "")
    return ""


def _read_steps(reader: Reader, names: Names, line: Message, key: tuple[str, int]) -> None:
    events = read_events(line, {})
    for place, number in enumerate(events.metadata.tolist()):
        name = f"step {names.events[number].name}" if number in names.events else "step"
        reader.markers.append(Marker(name, int(events.start[place]), int(events.duration[place]), key[1]))


@dataclass(frozen=True)
class _Modules:
    """Runs of programs on one device, by start."""

    start: np.ndarray
    end: np.ndarray
    program: list[int]
    name: list[str]
    run: list[int]

    def at(self, time: int) -> int:
        """The run at a time, -1 if there is none."""
        place = int(np.searchsorted(self.start, time, side="right")) - 1
        return place if place >= 0 and time < self.end[place] else -1


def _modules(names: Names, plane: Message) -> _Modules:
    rows = []
    for line in plane.lines:
        if line.name == "XLA Modules":
            events = read_events(line, {})
            for place, start in enumerate(events.start.tolist()):
                event = events.parsed(place)
                metadata = names.events.get(event.metadata_id)
                text = metadata.name if metadata is not None else ""
                found = re.match(r"(.*)\((\d+)\)$", text)
                program = int(found[2]) if found else int(str(names.values(event.stats).get("program_id", -1)))
                rows.append((start, start + event.duration_ps, program, found[1] if found else text))
    rows.sort()
    start, end = np.array([r[0] for r in rows], dtype=np.int64), np.array([r[1] for r in rows], dtype=np.int64)
    return _Modules(start, end, [r[2] for r in rows], [r[3] for r in rows], list(range(len(rows))))


def _tpu_line(reader: Reader, names: Names, line: Message, modules: _Modules, part: str) -> Stream:
    """A line of a TPU: what an operation is stands in its metadata."""
    events = read_events(line, {})
    first, which = events.distinct(np.arange(len(events.metadata)))
    kinds = [_tpu_kind(reader, names, int(events.metadata[p]), modules, int(events.start[p])) for p in first]
    builder = StreamBuilder(f"{line.name}{part}", nested=line.name == "XLA Ops")
    ops = np.array([reader.ops.index(kind) for kind in kinds], dtype=np.int64)[which]
    unknown = np.full(len(ops), -1)
    builder.extend(events.start, events.duration, ops, unknown, unknown)
    stream = builder.build()
    runs = np.searchsorted(modules.start, stream.start, side="right") - 1
    inside = (runs >= 0) & (stream.start < modules.end[np.maximum(runs, 0)]) if len(modules.start) else runs >= 0
    return replace(stream, run=np.where(inside, runs, -1))


def _in_flight(reader: Reader, lines: list[Stream]) -> list[Stream]:
    """Lines of a TPU, on which what is sent asynchronously stands once.

    A line of its own shows it from beginning to end; what starts it and waits for it among the other operations takes
    time, and sends nothing besides.
    """
    apart = [line.name.startswith("Async") for line in lines]
    ops = [np.unique(line.op, return_inverse=True) for line in lines]
    sent = (reader.ops[n].collective for (own, _), alone in zip(ops, apart, strict=True) if alone for n in own.tolist())
    flying = {one.kind for one in sent if one is not None}
    found = []
    for line, (own, which), alone in zip(lines, ops, apart, strict=True):
        kinds = [reader.ops[number] for number in own.tolist()]
        if alone:
            kinds = [replace(kind, name=kind.name + IN_FLIGHT) for kind in kinds]
        else:
            parts = [k.collective is not None and k.collective.kind in flying and is_part(k.name) for k in kinds]
            kinds = [replace(k, collective=None) if part else k for k, part in zip(kinds, parts, strict=True)]
        found.append(replace(line, op=np.array([reader.ops.index(k) for k in kinds], dtype=np.int32)[which]))
    return found


def _tpu_kind(reader: Reader, names: Names, number: int, modules: _Modules, start: int) -> OpKind:
    """An operation of a TPU, from its metadata and from the HLO of its program."""
    metadata = names.events.get(number)
    if metadata is None:
        return OpKind("unknown", Activity.COMPUTE, "other")
    stats = names.values(metadata.stats)
    run = modules.at(start)
    stats.setdefault("program_id", modules.program[run] if run >= 0 else -1)
    stats.setdefault("hlo_module", modules.name[run] if run >= 0 else "")
    name = metadata.display_name or re.sub(r" = .*", "", metadata.name, flags=re.DOTALL).lstrip("%")
    return hlo_kind(reader, str(stats.get("hlo_op", name)), stats, metadata.name)


@dataclass
class _Graphs:
    """Kernels of CUDA graphs, whose instructions are known when all of them were seen: until then each has a number.

    Args:
        lines: streams that are being read; operations below 0 are numbers of kernels here, -1 the first.
    """

    reader: Reader
    nodes: GraphNodes = field(default_factory=GraphNodes)
    lines: list[StreamBuilder] = field(default_factory=list)
    known: dict[NodeKey, int] = field(default_factory=dict)
    programs: dict[int | str, HloProgram] = field(default_factory=dict)
    kernels: list[tuple[str, dict[str, object]]] = field(default_factory=list)

    def number(self, kernel: str, stats: dict[str, object]) -> int | None:
        """The number of a kernel, None if it says itself of which instruction it is."""
        graph, node = stats.get("cuda_graph_id"), stats.get("cuda_graph_node_id")
        if not graph or not isinstance(graph, int) or not isinstance(node, int) or "hlo_op" not in stats:
            return None
        number, program = self.reader.program_of(stats)
        if program is None or str(stats["hlo_op"]) in program:
            return None
        key = number, graph, node
        if key not in self.known:
            details = f"{stats.get('memcpy_details', '')} {stats.get('kernel_details', '')}"
            self.nodes.add(key, str(stats["hlo_op"]), kernel, details)
            self.programs[number] = program
            self.kernels.append((kernel, stats))
            self.known[key] = -len(self.kernels)
        return self.known[key]

    def streams(self) -> list[Stream]:
        """What was read, each kernel with its instruction; one whose instruction is not found goes by its own name."""
        found = self.nodes.instructions(self.programs)
        ops: dict[int, int] = {}
        for key, number in self.known.items():
            kernel, stats = self.kernels[-number - 1]
            own = {k: v for k, v in stats.items() if k not in ("hlo_op", "tf_op", "name")}
            if key in found:
                own["hlo_op"] = found[key]
            else:
                self.reader.unplaced += self.nodes.is_instruction(key)
            ops[number] = self.reader.ops.index(_gpu_kind(self.reader, kernel, own))
        for line in self.lines if ops else ():
            line.op = array("i", (ops.get(op, op) for op in line.op))
        return [line.build() for line in self.lines]


def _gpu_line(reader: Reader, names: Names, line: Message, graphs: _Graphs) -> StreamBuilder:
    """A stream of a GPU: what a kernel is stands in the event."""
    events = read_events(line, names.numbered(*_OF_KERNELS, "correlation_id", "run_id"))
    first, which = events.distinct(np.arange(len(events.metadata)), *_OF_KERNELS)
    ops = []
    for place in first:
        event = events.parsed(place)
        stats, metadata = names.values(event.stats), names.events.get(event.metadata_id)
        kernel = metadata.name if metadata is not None else ""
        number = graphs.number(kernel, stats)
        ops.append(reader.ops.index(_gpu_kind(reader, kernel, stats)) if number is None else number)
    correlation, known = events.numbers("correlation_id")
    launches = [reader.launches.get(number, -1) for number in correlation.tolist()]
    launch = np.where(known, np.array(launches, dtype=np.int64), -1)
    builder = StreamBuilder(line.name)
    builder.extend(events.start, events.duration, np.array(ops, dtype=np.int64)[which], launch, _runs(events))
    return builder


def _gpu_kind(reader: Reader, kernel: str, stats: dict[str, object]) -> OpKind:
    """A kernel: of an HLO operation if it says of which."""
    event = "gpu_memcpy" if "memcpy_details" in stats else "gpu_memset" if "memset_details" in stats else "kernel"
    activity = kernel_activity(kernel, event)
    if "hlo_op" in stats:
        found = hlo_kind(reader, str(stats["hlo_op"]), stats, kernel)
        moved = activity == Activity.COPY and found.activity == Activity.COMPUTE
        return replace(found, activity=Activity.COPY, category="copy") if moved else found
    size = re.search(r"size:(\d+)", str(stats.get("memcpy_details", "")))
    collective = Collective(collective_kind(kernel)) if activity == Activity.COLLECTIVE else None
    category = {Activity.COLLECTIVE: "collective", Activity.COPY: "copy"}.get(activity) or kernel_category(kernel)
    return OpKind(kernel, activity, category, scope=str(stats.get("name", "")), collective=collective,
                  num_bytes=float(size[1]) if size and int(size[1]) else None)  # fmt: skip
