"""Databases that Nsight Systems exports (`nsys export --type sqlite`): kernels, copies, calls of CUDA, NVTX ranges.

Tables are there only if they have rows. PyTorch's ranges (`emit_nvtx`) tell operations and shapes, those of XLA thunks.
Not here: nsys-jax (`nsys_jax`).
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from meshwise.core.errors import ConfigError, MeshwiseError
from meshwise.profile.reading.host_tree import HostOp, HostTree
from meshwise.profile.reading.kineto import GpuArguments, gpu_kind
from meshwise.profile.trace import Device, Marker, OpTable, StreamBuilder, Trace

_NANOSECOND = 1000
#: Direction of a copy as CUPTI counts them -> as PyTorch's profiler names it.
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
#: Kinds of NVTX events that have an end: pushed and popped, started and ended.
_RANGES = (59, 60)
_SIZED = re.compile(r"(?P<name>[^,]+), (?:seq|op_id)[^\[]*(?:sizes = (?P<sizes>\[.*\]))?")
_THUNK = re.compile(r"TSL:Thunk:#(?:name=(?P<scope>.*),)?hlo_op=")

Row = Sequence[object]


class _Database:
    """A database whose tables and columns may be missing."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        self.tables = {str(name) for (name,) in names}

    def rows(self, table: str, *columns: str) -> Iterator[Row]:
        """Columns of a table, None where it lacks one; nothing where there is no such table."""
        if table not in self.tables:
            return iter(())
        there = {str(row[1]) for row in self._connection.execute(f"PRAGMA table_info({table})")}
        wanted = ", ".join(f'"{c}"' if c in there else "NULL" for c in columns)
        return self._connection.execute(f"SELECT {wanted} FROM {table}")  # noqa: S608  (names of our own)


def read_nsys(path: Path) -> Trace:
    """Read a database.

    Raises:
        ConfigError: it is damaged, or of another kind.
    """
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            return _trace(_Database(connection), path.name)
    except MeshwiseError:
        raise
    except (sqlite3.DatabaseError, ValueError, OverflowError) as error:  # also text that is none, words for numbers
        raise ConfigError(f"{path} cannot be read as a database of Nsight Systems: {error}; export it again") from None


def _trace(database: _Database, source: str) -> Trace:
    kernels = "CUPTI_ACTIVITY_KIND_KERNEL"
    if kernels not in database.tables:
        raise ConfigError(
            f"{source}: expected a table {kernels}, found none; was CUDA traced, and is it an export of Nsight Systems?"
        )
    texts = {int(str(n)): str(text) for n, text in database.rows("StringIds", "id", "value")}
    timed = (kernels, "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_MEMCPY")
    base = min((int(str(s)) for table in timed for (s,) in database.rows(table, "start") if s is not None), default=0)
    tree, markers = _host(database, texts, base)
    launches = {
        int(str(c)): ((int(str(start)) - base) * _NANOSECOND, thread)
        for start, thread, c in database.rows("CUPTI_ACTIVITY_KIND_RUNTIME", "start", "globalTid", "correlationId")
        if c is not None
    }
    ops = OpTable()
    builders: dict[int, dict[str, StreamBuilder]] = {}
    known: dict[tuple[object, ...], int] = {}
    for name, event, start, end, device, stream, correlation, size in _device_rows(database, texts):
        launch = launches.get(int(str(correlation))) if correlation is not None else None
        parent = tree.find(launch[1], launch[0]) if launch else None
        key = name, event, size, parent.name if parent else "", parent.operands if parent else (), _scope(parent)
        if key not in known:
            args = GpuArguments(num_bytes=float(str(size)) if size is not None else None)
            known[key] = ops.index(gpu_kind(name, event, args, parent))
        streams = builders.setdefault(int(str(device or 0)), {})
        builder = streams.setdefault(str(stream), StreamBuilder(str(stream)))
        begin = (int(str(start)) - base) * _NANOSECOND
        builder.add(begin, (int(str(end)) - int(str(start))) * _NANOSECOND, known[key], launch[0] if launch else -1)
    chips = {int(str(n)): str(name) for n, name in database.rows("TARGET_INFO_GPU", "id", "name") if n is not None}
    devices = tuple(
        Device(f"GPU {n}", chips.get(n, next(iter(chips.values()), "")), None, source,
               tuple(b.build() for _, b in sorted(streams.items())))
        for n, streams in sorted(builders.items())
    )  # fmt: skip
    threads, names = tree.threads()
    missing = () if any(op.operands for op in ops.ops) else ("shapes (torch.autograd.profiler.emit_nvtx records them)",)
    return Trace(source, "nsys", ops.ops, devices, tuple(markers), threads, names, missing=missing)


def _scope(parent: HostOp | None) -> str:
    return parent.scope if parent else ""


def _device_rows(
    database: _Database, texts: dict[int, str]
) -> Iterator[tuple[str, str, object, object, object, object, object, object]]:
    """(name, kind of event, start, end, device, stream, correlation, bytes) of kernels, copies and fills."""
    common = ("start", "end", "deviceId", "streamId", "correlationId")
    for demangled, short, *row in database.rows("CUPTI_ACTIVITY_KIND_KERNEL", "demangledName", "shortName", *common):
        name = texts.get(int(str(demangled if demangled is not None else short or -1)), "kernel")
        yield name, "kernel", *row, None  # type: ignore[misc]
    for kind, size, *row in database.rows("CUPTI_ACTIVITY_KIND_MEMCPY", "copyKind", "bytes", *common):
        yield f"Memcpy {_COPIES.get(int(str(kind or 0)), 'other')}", "gpu_memcpy", *row, size  # type: ignore[misc]
    for size, *row in database.rows("CUPTI_ACTIVITY_KIND_MEMSET", "bytes", *common):
        yield "Memset (Device)", "gpu_memset", *row, size  # type: ignore[misc]


def _host(database: _Database, texts: dict[int, str], base: int) -> tuple[HostTree, list[Marker]]:
    """Ranges of NVTX as operations of the host, and calls of CUDA."""
    tree, markers = HostTree(), []
    columns = ("start", "end", "text", "textId", "globalTid", "eventType")
    for start, end, text, number, thread, kind in database.rows("NVTX_EVENTS", *columns):
        if end is None or start is None or (kind is not None and kind not in _RANGES):
            continue
        name = str(text) if text is not None else texts.get(int(str(number or -1)), "")
        begin, length = (int(str(start)) - base) * _NANOSECOND, (int(str(end)) - int(str(start))) * _NANOSECOND
        operation = _operation(name, begin, length)
        tree.add(thread, operation)
        if operation.annotation:
            markers.append(Marker(name, begin, length))
    for start, end, thread, call in database.rows("CUPTI_ACTIVITY_KIND_RUNTIME", "start", "end", "globalTid", "nameId"):
        begin, length = (int(str(start)) - base) * _NANOSECOND, (int(str(end)) - int(str(start))) * _NANOSECOND
        tree.add_call(thread, begin, length, texts.get(int(str(call or -1)), "CUDA"))
    tree.build()
    return tree, markers


def _operation(name: str, start: int, duration: int) -> HostOp:
    """A range as an operation of PyTorch with its shapes, as a thunk of XLA, or as an annotation."""
    nothing = msgspec.Raw(b"{}")
    if thunk := _THUNK.match(name):
        return HostOp(str(thunk["scope"] or name), start, duration, nothing)
    sized = _SIZED.fullmatch(name)
    if sized is None:
        return HostOp(name, start, duration, nothing, annotation=not name.startswith("aten::"))
    try:
        dims = json.loads(sized["sizes"] or "[]")
    except ValueError:
        dims = []
    arguments = json.dumps({"Input Dims": dims, "Input type": [""] * len(dims)})
    return HostOp(sized["name"], start, duration, msgspec.Raw(arguments.encode()))
