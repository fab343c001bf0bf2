"""Traces of JAX and XLA (`*.xplane.pb`) on TPU, GPU and CPU; the HLO of each program is read from the same file.

Planes are parsed one at a time, so that a large file never stands in memory whole. Not here: what an instruction does
(`hlo`), the protocol buffers (`protos`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from meshwise.profile.chips import chip_of
from meshwise.profile.kinds import collective_kind, kernel_activity, kernel_category
from meshwise.profile.reading.hlo import HloProgram, phase_of
from meshwise.profile.reading.hlo_parts import arrays_in, groups_in
from meshwise.profile.reading.protos import BrokenProtoError, Message, parse
from meshwise.profile.reading.wire import parsed_plane, planes
from meshwise.profile.trace import (
    Activity,
    Collective,
    Device,
    HostThread,
    Marker,
    OpKind,
    OpTable,
    Stream,
    StreamBuilder,
    Trace,
)
from meshwise.profile.work import array_bytes

_DEVICE = re.compile(r"/device:(?P<kind>TPU|GPU|[A-Z]+):(?P<number>\d+)(?P<part> SparseCore \d+)?$")
_NANOSECOND = 1000
#: Lines of a TPU whose events are operations.
_OPERATIONS = ("XLA Ops", "Async XLA Ops")


@dataclass
class _Names:
    """Names of one plane's metadata."""

    stats: dict[int, str]
    events: dict[int, Message]

    @classmethod
    def of(cls, plane: Message) -> _Names:
        return cls({e.key: e.value.name for e in plane.stat_metadata}, {e.key: e.value for e in plane.event_metadata})

    def values(self, stats: Message) -> dict[str, object]:
        """Statistics by name; most are references or numbers that are not 0."""
        names, found = self.stats, dict[str, object]()
        for stat in stats:
            reference = stat.ref_value
            found[names.get(stat.metadata_id, "")] = (
                names.get(reference, "") if reference else stat.int64_value or self.value(stat)
            )
        return found

    def value(self, stat: Message) -> object:
        """The value of one, references resolved."""
        if stat.HasField("ref_value"):
            return self.stats.get(stat.ref_value, "")
        for name in ("int64_value", "uint64_value", "str_value", "double_value", "bytes_value"):
            if stat.HasField(name):
                return getattr(stat, name)
        return None


@dataclass
class _Reader:
    """Collects what the planes hold."""

    source: str
    ops: OpTable = field(default_factory=OpTable)
    known: dict[tuple[object, ...], int] = field(default_factory=dict)
    programs: dict[int, HloProgram] = field(default_factory=dict)
    by_name: dict[str, HloProgram] = field(default_factory=dict)
    devices: dict[tuple[str, int], list[Stream]] = field(default_factory=dict)
    chips: dict[tuple[str, int], str] = field(default_factory=dict)
    numbers: dict[tuple[str, int], int] = field(default_factory=dict)
    markers: list[Marker] = field(default_factory=list)
    threads: list[HostThread] = field(default_factory=list)
    texts: dict[str, int] = field(default_factory=dict)
    launches: dict[int, int] = field(default_factory=dict)
    unknown: int = 0
    broken: int = 0


def read_xplane(data: bytes, source: str) -> Trace:
    """Read a file.

    Raises:
        ConfigError: not such a file, a part of one, or a damaged one.
    """
    reader, parts = _Reader(source), planes(data, source)
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


def _read_programs(reader: _Reader, plane: Message) -> None:
    names = _Names.of(plane)
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
            reader.by_name[program.name] = program


def _trace(reader: _Reader) -> Trace:
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
    if kinds == ["GPU"] and not any(reader.chips.values()):
        missing.append("the name of the chip (--on names it)")
    return Trace(
        reader.source, "xplane", reader.ops.ops, devices, markers, tuple(reader.threads),
        tuple(reader.texts), max((len(devices), *(len(p.devices) for p in reader.programs.values()))) or None,
        tuple(missing),
    )  # fmt: skip


# The host, and a CPU that XLA runs on.


def _read_host(reader: _Reader, plane: Message) -> None:
    names = _Names.of(plane)
    texts = {number: str(metadata.name) for number, metadata in names.events.items()}
    known = {number for number, text in texts.items() if not text.startswith(("$", "end: ", "ThreadpoolListener"))}
    cpus: dict[int, dict[str, StreamBuilder]] = {}
    for line in plane.lines:
        base, stream = line.timestamp_ns * _NANOSECOND, partial(_cpu_stream, cpus, line)
        rows: list[tuple[int, int, int]] = []
        for event in line.events:
            if event.metadata_id not in known:
                continue
            start, text = base + event.offset_ps, texts[event.metadata_id]
            if event.stats and _host_event(reader, names.values(event.stats), event, (start, text), stream):
                continue
            if event.duration_ps:
                rows.append((start, event.duration_ps, reader.texts.setdefault(text, len(reader.texts))))
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
    reader: _Reader,
    stats: dict[str, object],
    event: Message,
    about: tuple[int, str],
    stream: Callable[[int], StreamBuilder],
) -> bool:
    """Read an event with statistics, its start and its name; say whether it is an operation of a CPU device."""
    start, text = about
    if "step_num" in stats:
        reader.markers.append(Marker(f"{text} {stats['step_num']}", start, event.duration_ps))
    correlation = stats.get("correlation_id")
    if isinstance(correlation, int):
        reader.launches[correlation] = start
    if "hlo_op" not in stats or "device_ordinal" not in stats or correlation is not None:
        return False
    key = stats["hlo_op"], stats.get("program_id"), stats.get("hlo_module"), event.metadata_id
    op = reader.known.get(key)
    if op is None:
        op = reader.known[key] = reader.ops.index(_hlo_kind(reader, str(stats["hlo_op"]), stats, text))
    stream(int(str(stats["device_ordinal"]))).add(start, event.duration_ps, op, start, _run(stats))
    return True


def _run(stats: dict[str, object]) -> int:
    """The run of a program, -1 if it is not said; XLA counts in 32 bits, with a sign."""
    run = stats.get("run_id")
    return run & 0xFFFFFFFF if isinstance(run, int) else -1


# Accelerators.


def _read_device(reader: _Reader, plane: Message, key: tuple[str, int], part: str) -> None:
    names = _Names.of(plane)
    about = names.values(plane.stats)
    chip = str(about.get("device_type_string") or about.get("device_name") or _amd(about) or "")
    reader.chips[key] = reader.chips.get(key) or chip
    if isinstance(about.get("core_details"), bytes):
        reader.numbers[key] = _job_number(about["core_details"], chip)
    modules = _modules(names, plane)
    streams = reader.devices.setdefault(key, [])
    on_tpu = any(line.name in _OPERATIONS for line in plane.lines)
    for line in plane.lines:
        if line.name == "Steps" and not part:
            _read_steps(reader, names, line, key)
        elif on_tpu and line.name in _OPERATIONS:
            streams.append(_tpu_line(reader, names, line, modules, part))
        elif not on_tpu and line.name.startswith("Stream"):
            streams.append(_gpu_line(reader, names, line))
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


def _read_steps(reader: _Reader, names: _Names, line: Message, key: tuple[str, int]) -> None:
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


def _modules(names: _Names, plane: Message) -> _Modules:
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


def _tpu_line(reader: _Reader, names: _Names, line: Message, modules: _Modules, part: str) -> Stream:
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


def _tpu_kind(reader: _Reader, names: _Names, number: int, modules: _Modules, start: int) -> OpKind:
    """An operation of a TPU, from its metadata and from the HLO of its program."""
    metadata = names.events.get(number)
    if metadata is None:
        return OpKind("unknown", Activity.COMPUTE, "other")
    stats = names.values(metadata.stats)
    run = modules.at(start)
    stats.setdefault("program_id", modules.program[run] if run >= 0 else -1)
    stats.setdefault("hlo_module", modules.name[run] if run >= 0 else "")
    name = metadata.display_name or re.sub(r" = .*", "", metadata.name, flags=re.DOTALL).lstrip("%")
    return _hlo_kind(reader, str(stats.get("hlo_op", name)), stats, metadata.name)


def _gpu_line(reader: _Reader, names: _Names, line: Message) -> Stream:
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
        )
        op = known.get(key)
        if op is None:
            kernel = metadata.name if metadata is not None else ""
            op = known[key] = reader.ops.index(_gpu_kind(reader, kernel, stats))
        correlation = stats.get("correlation_id")
        launch = reader.launches.get(correlation, -1) if isinstance(correlation, int) else -1
        builder.add(base + event.offset_ps, event.duration_ps, op, launch, _run(stats))
    return builder.build()


def _gpu_kind(reader: _Reader, kernel: str, stats: dict[str, object]) -> OpKind:
    """A kernel: of an HLO operation if it says of which."""
    event = "gpu_memcpy" if "memcpy_details" in stats else "gpu_memset" if "memset_details" in stats else "kernel"
    activity = kernel_activity(kernel, event)
    if "hlo_op" in stats:
        found = _hlo_kind(reader, str(stats["hlo_op"]), stats, kernel)
        moved = activity == Activity.COPY and found.activity == Activity.COMPUTE
        return replace(found, activity=Activity.COPY, category="copy") if moved else found
    size = re.search(r"size:(\d+)", str(stats.get("memcpy_details", "")))
    collective = Collective(collective_kind(kernel)) if activity == Activity.COLLECTIVE else None
    category = {Activity.COLLECTIVE: "collective", Activity.COPY: "copy"}.get(activity) or kernel_category(kernel)
    return OpKind(kernel, activity, category, scope=str(stats.get("name", "")), collective=collective,
                  num_bytes=float(size[1]) if size and int(size[1]) else None)  # fmt: skip


def _hlo_kind(reader: _Reader, name: str, stats: dict[str, object], text: str) -> OpKind:
    """The operation of an instruction: from its program's HLO, else from the event's own words.

    What the trace itself says (a TPU's category, FLOPs, bytes) goes before what is counted here.
    """
    number = stats.get("program_id")
    program = reader.programs.get(number) if isinstance(number, int) else None
    program = program or reader.by_name.get(str(stats.get("hlo_module", "")))
    found = program.op(name) if program is not None else None
    if found is None:
        reader.unknown += 1
        found = _from_words(name, stats, text)
    changes: dict[str, object] = {}
    if stats.get("hlo_category"):
        changes["label"] = str(stats["hlo_category"])
    for key, attribute in (("flops", "flops"), ("bytes_accessed", "num_bytes")):
        if isinstance(stats.get(key), int | float) and found.activity != Activity.CONTROL:
            changes |= {attribute: float(str(stats[key])), "source": "trace"}
    if not found.scope and stats.get("tf_op"):
        scope = str(stats["tf_op"]).rstrip(":")
        changes |= {"scope": scope, "phase": phase_of(scope)}
    return replace(found, **changes) if changes else found  # type: ignore[arg-type]


def _from_words(name: str, stats: dict[str, object], text: str) -> OpKind:
    """An operation whose program is not in the file."""
    label = str(stats.get("hlo_category", ""))
    plain = re.sub(r"[.\d]+$", "", name)
    words = f"{label} {plain}"
    scope = str(stats.get("tf_op") or stats.get("name") or "").rstrip(":")
    base = OpKind(name, Activity.COMPUTE, "other", scope, phase=phase_of(scope), label=label,
                  program=str(stats.get("hlo_module", "")))  # fmt: skip
    results, operands = arrays_in(text)
    if re.search(r"all-|reduce-scatter|collective|ragged-all|\bsend|\brecv", words):
        named = collective_kind(plain)
        kind = named if named != "collective" else collective_kind(label)
        groups = groups_in(text)
        largest = max(map(array_bytes, (*results, *operands)), default=0.0)
        sent = Collective(kind, largest or None, len(groups[0]) if groups else None, groups)
        return replace(base, activity=Activity.COLLECTIVE, category="collective", collective=sent)
    if re.search(r"copy-(start|done)|infeed|outfeed|async-start|async-done", words):
        return replace(base, activity=Activity.COPY, category="copy")
    if re.match(r"(while|conditional|call)\b", plain):
        return replace(base, activity=Activity.CONTROL, category="control")
    if "convolution" in label or " dot(" in text or plain.startswith("dot"):
        category = "matmul"
    elif label in ("data formatting", "copy") or plain in ("copy", "transpose", "bitcast"):
        category = "layout"
    else:
        category = kernel_category(f"{scope} {plain}") if scope else kernel_category(plain)
    return replace(base, category=category, results=results, operands=operands)
