"""Traces of JAX and XLA (`*.xplane.pb`) on TPU, GPU and CPU; the HLO of each program is read from the same file.

Planes are parsed one at a time, so that a large file never stands in memory whole. Not here: what an instruction does
(`hlo`), the protocol buffers (`protos`).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np

from meshwise.profile.chips import chip_of
from meshwise.profile.kinds import collective_kind, kernel_activity, kernel_category
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
    Trace,
)

_DEVICE = re.compile(r"/device:(?P<kind>TPU|GPU|[A-Z]+):(?P<number>\d+)(?P<part> SparseCore \d+)?$")
_NANOSECOND = 1000
#: Lines of a TPU whose events are operations.
_OPERATIONS = ("XLA Ops", "Async XLA Ops")

#: Statistics of a host's events that are read: of steps, of launches, of what a CPU device runs.
_OF_HOSTS = (
    *("step_num", "correlation_id", "hlo_op", "hlo_module", "device_ordinal", "program_id", "run_id"),
    *("hlo_category", "tf_op", "name", "flops", "bytes_accessed"),
)


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
    known = {number for number, text in texts.items() if not text.startswith(("$", "end: ", "ThreadpoolListener"))}
    wanted = names.named(*_OF_HOSTS)
    cpus: dict[int, dict[str, StreamBuilder]] = {}
    for line in plane.lines:
        base, stream = line.timestamp_ns * _NANOSECOND, cache(partial(_cpu_stream, cpus, line))
        rows: list[tuple[int, int, int]] = []
        for event in line.events:
            if event.metadata_id not in known:
                continue
            start, duration, text = base + event.offset_ps, event.duration_ps, texts[event.metadata_id]
            stats = names.some(event.stats, wanted)
            if stats and _host_event(reader, stats, (start, duration, text), stream):
                continue
            if duration:
                rows.append((start, duration, reader.texts.setdefault(text, len(reader.texts))))
        if rows:
            columns = np.array(sorted(rows), dtype=np.int64)
            name = line.display_name or line.name
            reader.threads.append(HostThread(name, columns[:, 0], columns[:, 1], columns[:, 2].astype(np.int32)))
    for number, streams in cpus.items():
        reader.devices.setdefault(("CPU", number), []).extend(b.build() for _, b in sorted(streams.items()))
        reader.chips["CPU", number] = "CPU"


def _cpu_stream(cpus: dict[int, dict[str, StreamBuilder]], line: Message, number: int) -> StreamBuilder:
    """The stream of a CPU device that a thread is."""
    name = str(line.name or line.id)
    streams = cpus.setdefault(number, {})
    if name not in streams:
        streams[name] = StreamBuilder(name, nested=True)
    return streams[name]


def _host_event(
    reader: Reader,
    stats: dict[str, object],
    about: tuple[int, int, str],
    stream: Callable[[int], StreamBuilder],
) -> bool:
    """Read an event with statistics: its start, duration and name; say whether it is an operation of a CPU device."""
    start, duration, text = about
    if "step_num" in stats:
        reader.markers.append(Marker(f"{text} {stats['step_num']}", start, duration))
    correlation = stats.get("correlation_id")
    if isinstance(correlation, int):
        reader.launches[correlation] = start
    if "hlo_op" not in stats or "device_ordinal" not in stats or correlation is not None:
        return False
    key = stats["hlo_op"], stats.get("program_id"), stats.get("hlo_module"), text
    op = reader.known.get(key)
    if op is None:
        op = reader.known[key] = reader.ops.index(hlo_kind(reader, str(stats["hlo_op"]), stats, text))
    stream(int(str(stats["device_ordinal"]))).add(start, duration, op, start, _run(stats))
    return True


def _run(stats: dict[str, object]) -> int:
    """The run of a program, -1 if it is not said; XLA counts in 32 bits, with a sign."""
    run = stats.get("run_id")
    return run & 0xFFFFFFFF if isinstance(run, int) else -1


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
    on_tpu = any(line.name in _OPERATIONS for line in plane.lines)
    for line in plane.lines:
        if line.name == "Steps" and not part:
            _read_steps(reader, names, line, key)
        elif on_tpu and line.name in _OPERATIONS:
            streams.append(_tpu_line(reader, names, line, modules, part))
        elif not on_tpu and line.name.startswith("Stream"):
            graphs.lines.append(_gpu_line(reader, names, line, graphs))
    streams += graphs.streams()
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
        cores = {304: "AMD Instinct MI300X", 256: "AMD Instinct MI355X", 208: "AMD Instinct MI250X"}
        return cores.get(int(str(about.get("core_count", 0))), "")
    if about.get("device_vendor") in ("Nvidia", "NVIDIA"):
        major, minor = str(about.get("compute_cap_major", "")), str(about.get("compute_cap_minor", ""))
        size = int(str(about.get("memory_size", 0)))
        found = {"80": "NVIDIA A100 80GB" if size > 6e10 else "NVIDIA A100 40GB", "90": "NVIDIA H100 80GB HBM3",
                 "100": "NVIDIA B200", "89": "NVIDIA L40S", "70": "NVIDIA V100"}  # fmt: skip
        return "NVIDIA H200" if major + minor == "90" and size > 1.2e11 else found.get(major + minor, "")
    return ""


def _read_steps(reader: Reader, names: Names, line: Message, key: tuple[str, int]) -> None:
    base = line.timestamp_ns * _NANOSECOND
    for event in line.events:
        metadata = names.events.get(event.metadata_id)
        name = f"step {metadata.name}" if metadata is not None else "step"
        reader.markers.append(Marker(name, base + event.offset_ps, event.duration_ps, key[1]))


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
            base = line.timestamp_ns * _NANOSECOND
            for event in line.events:
                metadata = names.events.get(event.metadata_id)
                stats = names.values(event.stats)
                text = metadata.name if metadata is not None else ""
                found = re.match(r"(.*)\((\d+)\)$", text)
                program = int(found[2]) if found else int(str(stats.get("program_id", -1)))
                start = base + event.offset_ps
                rows.append((start, start + event.duration_ps, program, found[1] if found else text))
    rows.sort()
    start, end = np.array([r[0] for r in rows], dtype=np.int64), np.array([r[1] for r in rows], dtype=np.int64)
    return _Modules(start, end, [r[2] for r in rows], [r[3] for r in rows], list(range(len(rows))))


def _tpu_line(reader: Reader, names: Names, line: Message, modules: _Modules, part: str) -> Stream:
    """A line of a TPU: what an operation is stands in its metadata."""
    base = line.timestamp_ns * _NANOSECOND
    known: dict[int, int] = {}
    builder = StreamBuilder(f"{line.name}{part}", nested=line.name == "XLA Ops")
    for event in line.events:
        start = base + event.offset_ps
        op = known.get(event.metadata_id)
        if op is None:
            kind = _tpu_kind(reader, names, event.metadata_id, modules, start)
            op = known[event.metadata_id] = reader.ops.index(kind)
        builder.add(start, event.duration_ps, op)
    stream = builder.build()
    runs = np.searchsorted(modules.start, stream.start, side="right") - 1
    inside = (runs >= 0) & (stream.start < modules.end[np.maximum(runs, 0)]) if len(modules.start) else runs >= 0
    return replace(stream, run=np.where(inside, runs, -1))


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
    base = line.timestamp_ns * _NANOSECOND
    known: dict[tuple[object, ...], int] = {}
    builder = StreamBuilder(line.name)
    for event in line.events:
        stats = names.values(event.stats)
        metadata = names.events.get(event.metadata_id)
        key = (
            event.metadata_id,
            stats.get("hlo_op"),
            stats.get("program_id"),
            stats.get("name"),
            stats.get("memcpy_details"),
            stats.get("cuda_graph_node_id"),
        )
        op = known.get(key)
        if op is None:
            kernel = metadata.name if metadata is not None else ""
            op = graphs.number(kernel, stats)
            if op is None:
                op = reader.ops.index(_gpu_kind(reader, kernel, stats))
            known[key] = op
        correlation = stats.get("correlation_id")
        launch = reader.launches.get(correlation, -1) if isinstance(correlation, int) else -1
        builder.add(base + event.offset_ps, event.duration_ps, op, launch, _run(stats))
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
