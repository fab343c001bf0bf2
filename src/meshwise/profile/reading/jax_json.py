"""Traces of JAX in JSON (`*.trace.json.gz`), and those of any other tool in Chrome's format.

JAX cuts this file off at a million events: where the `*.xplane.pb` beside it is there, it is read instead. Not here:
PyTorch's profiler (`kineto`).
"""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec

from meshwise.profile.kinds import collective_kind, is_collective, kernel_activity, kernel_category
from meshwise.profile.reading.chrome import Document, Event, complete, decoded, first_time, picoseconds
from meshwise.profile.reading.hlo import phase_of
from meshwise.profile.trace import Activity, Collective, Device, Marker, OpKind, OpTable, StreamBuilder, Trace

_CUT_OFF = 1_000_000
_ASYNC = re.compile(r"all-(reduce|gather|to-all)|reduce-scatter|collective-permute|collective-broadcast|ragged-all")


class NameArguments(msgspec.Struct, gc=False):
    """The name of a process or a thread."""

    name: str = ""


class XlaArguments(msgspec.Struct, gc=False):
    """What is read of an operation's arguments."""

    hlo_op: str | None = None
    hlo_module: str | None = None
    hlo_category: str | None = None
    tf_op: str | None = None
    long_name: str | None = None
    flops: float | str | None = msgspec.field(name="model_flops", default=None)
    num_bytes: float | str | None = msgspec.field(name="bytes_accessed", default=None)
    step: int | str | None = msgspec.field(name="step_num", default=None)
    device: int | str | None = msgspec.field(name="device_ordinal", default=None)


def read_chrome(document: Document, source: str) -> Trace:
    """Make a trace of a file's events; without a device, all threads stand for one."""
    events = document.traceEvents or ()
    processes, threads = _names(events)
    base, ops = first_time(events), OpTable()
    builders: dict[str, dict[str, StreamBuilder]] = {}
    markers: list[Marker] = []
    for event, length in complete(events):
        start, duration = picoseconds(event.ts, base), picoseconds(length, 0.0)
        if start is None or duration is None or duration < 0:
            continue
        process = processes.get(event.pid, str(event.pid))
        thread = threads.get((event.pid, event.tid), str(event.tid))
        args = decoded(event.args, XlaArguments, XlaArguments())
        if thread == "Steps" or args.step is not None:
            markers.append(Marker(f"step {args.step if args.step is not None else event.name}", start, duration))
            continue
        device = _device(process, thread, args)
        if device is not None:
            streams = builders.setdefault(device, {})
            builder = streams.setdefault(thread, StreamBuilder(thread, nested=not thread.startswith("Stream")))
            builder.add(start, duration, ops.index(_kind(event.name or "", args)))
    missing = ["shapes of operations (the xplane.pb beside it has them)"] if builders else []
    host_only = not builders
    if host_only:
        builders = _any_threads(events, base, ops)
        missing = ["devices and kinds of operations: every thread counts as one stream of one device"]
    if len(events) >= _CUT_OFF:
        missing.append("events after the first million, which JAX leaves out (the xplane.pb beside it has all)")
    devices = tuple(
        Device(name, "", number, source, tuple(b.build() for _, b in sorted(streams.items())))
        for number, (name, streams) in enumerate(sorted(builders.items()))
    )
    return Trace(source, "chrome", ops.ops, devices, tuple(markers), missing=tuple(missing), host_only=host_only)


def _names(events: tuple[Event, ...]) -> tuple[dict[object, str], dict[tuple[object, object], str]]:
    """Names of processes and of threads."""
    processes: dict[object, str] = {}
    threads: dict[tuple[object, object], str] = {}
    for event in (e for e in events if e.ph == "M"):
        name = decoded(event.args, NameArguments, NameArguments()).name
        if event.name == "process_name":
            processes[event.pid] = name
        elif event.name == "thread_name":
            threads[event.pid, event.tid] = name
    return processes, threads


def _device(process: str, thread: str, args: XlaArguments) -> str | None:
    """The device that an event ran on, None for the host's events and for summaries."""
    if process.startswith("/device:"):
        on_stream = thread.startswith("Stream") or thread in ("XLA Ops", "Async XLA Ops")
        return process.removeprefix("/device:") if on_stream else None
    return f"CPU:{args.device}" if args.hlo_op and args.device is not None else None


def _kind(name: str, args: XlaArguments) -> OpKind:
    """An operation from its name and arguments."""
    scope, label = (args.tf_op or "").rstrip(":"), args.hlo_category or ""
    text = f"{label} {args.hlo_op or name}"
    base = OpKind(
        name, Activity.COMPUTE, "other", scope, phase=phase_of(scope), program=args.hlo_module or "", label=label
    )
    if _ASYNC.search(text) or is_collective(name):
        found = _ASYNC.search(text)
        sent = Collective(collective_kind(found[0] if found else name))
        return replace(base, activity=Activity.COLLECTIVE, category="collective", collective=sent)
    if re.search(r"copy-(start|done)|infeed|outfeed", text) or kernel_activity(name, "kernel") == Activity.COPY:
        return replace(base, activity=Activity.COPY, category="copy")
    if re.match(r"(while|conditional|call)[.\d]*$", name):
        return replace(base, activity=Activity.CONTROL, category="control")
    category = "matmul" if "convolution" in label else kernel_category(f"{scope} {name}" if scope else name)
    flops, moved = (None if v is None else float(v) for v in (args.flops, args.num_bytes))
    return replace(base, category=category, flops=flops, num_bytes=moved, source="" if flops is None else "trace")


def _any_threads(events: tuple[Event, ...], base: float, ops: OpTable) -> dict[str, dict[str, StreamBuilder]]:
    """Every thread as a stream."""
    streams: dict[str, StreamBuilder] = {}
    for event, length in complete(events):
        start, duration = picoseconds(event.ts, base), picoseconds(length, 0.0)
        if start is None or duration is None or duration < 0 or event.cat in ("Trace", "python_function"):
            continue
        name = event.name or ""
        collective = is_collective(name)
        kind = OpKind(
            name, Activity.COLLECTIVE if collective else Activity.COMPUTE, "collective" if collective else "host",
            collective=Collective(collective_kind(name)) if collective else None,
        )  # fmt: skip
        thread = f"{event.pid}/{event.tid}"
        streams.setdefault(thread, StreamBuilder(thread, nested=True)).add(start, duration, ops.index(kind))
    return {"host": streams} if streams else {}
