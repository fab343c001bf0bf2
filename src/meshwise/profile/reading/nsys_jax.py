"""What `nsys-jax` writes: thunks projected onto the GPU (Parquet), and the HLO of each program; a folder or a zip file.

Not here: Nsight's own database (`nsys`), what an instruction does (`hlo`).
"""

from __future__ import annotations

import io
import lzma
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwise.core.errors import ConfigError, MissingDependencyError
from meshwise.profile.kinds import kernel_category
from meshwise.profile.reading.hlo import HloProgram, phase_of
from meshwise.profile.reading.protos import BrokenProtoError
from meshwise.profile.trace import Activity, Device, OpKind, OpTable, StreamBuilder, Trace

#: Where the projected ranges are in the folder.
RANGES = "nvtx_gpu_proj_trace/trace.parquet"
_DEVICES = "device-metadata.parquet"
_THUNK = re.compile(r"TSL:Thunk:#(?:name=(?P<scope>.*),)?hlo_op=(?P<op>[^,#]+)")
_MODULE = re.compile(r"TSL:XlaModule:#hlo_module=(?P<name>[^,#]+)(?:,program_id=(?P<number>\d+))?")
_NANOSECOND = 1000

Files = Mapping[str, Callable[[], bytes]]
Columns = Mapping[str, list[object]]


def is_nsys_jax(names: Files) -> bool:
    """Whether the files of a folder are those of nsys-jax."""
    return RANGES in names


def _table(data: bytes, where: str) -> Columns:
    """The columns of a Parquet file.

    Raises:
        ConfigError: it is none.
        MissingDependencyError: pyarrow is not installed.
    """
    try:
        from pyarrow import ArrowException, parquet  # noqa: PLC0415  (heavy, and optional)
    except ImportError as error:
        hint = "nsys-jax writes Parquet, which pyarrow reads, and it is not installed: pip install 'meshwise[parquet]'"
        raise MissingDependencyError(hint) from error
    try:
        columns: Columns = parquet.read_table(io.BytesIO(data)).to_pydict()
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{where}: cannot be read as Parquet: {error}") from None
    return columns


@dataclass(frozen=True)
class _Run:
    """One run of a program: what its thunks' parent is."""

    name: str
    number: int | None
    place: int
    launch: int


def read_nsys_jax(files: Files, source: str) -> Trace:
    """Read a folder's files.

    Raises:
        ConfigError: damaged, or of another version of the tool.
        MissingDependencyError: pyarrow is not installed.
    """
    table = _table(files[RANGES](), f"{source}/{RANGES}")
    needed = ("Name", "Projected Start", "Projected Duration", "RangeId", "ParentId")
    lacking = [name for name in needed if name not in table]
    if lacking:
        raise ConfigError(
            f"{source}/{RANGES}: expected the columns {', '.join(needed)}; found none named {lacking[0]!r}"
        )
    runs = _runs(table)
    programs = _Programs(files)
    launches = table.get("Orig Start", [None] * len(table["Name"]))
    times = (int(float(str(t))) for t in (*table["Projected Start"], *launches) if t is not None)
    ops, base = OpTable(), min(times, default=0)
    kinds: dict[tuple[str, str, int | None], int] = {}
    builders = {activity: StreamBuilder(activity.name.lower()) for activity in Activity}
    columns = zip(*(table[name] for name in needed), launches, strict=True)
    for name, start, duration, _, parent, launch in columns:
        found = _THUNK.match(name) if isinstance(name, str) else None
        run = runs.get(int(float(str(parent)))) if found and parent is not None else None
        if found is None or run is None:
            continue
        key = found["op"], run.name, run.number
        if key not in kinds:
            kinds[key] = ops.index(programs.op(found["op"], found["scope"] or "", run))
        kind = ops[kinds[key]]
        launched = (int(float(str(launch))) - base) * _NANOSECOND if launch is not None else -1
        builders[kind.activity].add(
            (int(str(start)) - base) * _NANOSECOND, int(str(duration)) * _NANOSECOND, kinds[key], launched, run.place
        )
    streams = tuple(b.build() for b in builders.values() if b.op)
    devices = (Device("GPU", _chip(files, source), None, source, streams),) if streams else ()
    missing = tuple(programs.missing)
    return Trace(source, "nsys-jax", ops.ops, devices, missing=missing)


def _runs(table: Columns) -> dict[int, _Run]:
    """Range -> the run of a program that it is; those inside of others (autotuning) are left out."""
    rows = zip(
        table["Name"],
        table["RangeId"],
        table["Projected Start"],
        table.get("Lvl", [0] * len(table["Name"])),
        strict=True,
    )
    found = [
        (int(str(start)), int(float(str(number))), match)
        for name, number, start, level in rows
        if isinstance(name, str) and number is not None and (match := _MODULE.match(name)) and not level
    ]
    return {
        number: _Run(m["name"], int(m["number"]) if m["number"] else None, place, start)
        for place, (start, number, m) in enumerate(sorted(found, key=lambda f: f[:2]))
    }


class _Programs:
    """The HLO of each program, read when it is first needed."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._read: dict[tuple[str, int | None], HloProgram | None] = {}
        self.missing: list[str] = []

    def op(self, name: str, scope: str, run: _Run) -> OpKind:
        """The operation of a thunk; known by its name alone where the HLO lacks it."""
        program = self._program(run.name, run.number)
        found = program.op(name) if program is not None else None
        return found or OpKind(
            name, Activity.COMPUTE, kernel_category(name), scope=scope, phase=phase_of(scope), program=run.name
        )

    def _program(self, name: str, number: int | None) -> HloProgram | None:
        key = name, number
        if key not in self._read:
            self._read[key] = self._load(name, number)
            if self._read[key] is None:
                self.missing.append(f"the HLO of {name}")
        return self._read[key]

    def _load(self, name: str, number: int | None) -> HloProgram | None:
        pattern = re.compile(rf"module_{number or 0:04d}\.{re.escape(name)}\..*after_optimizations\.hlo\.pb(\.xz)?$")
        path = next((p for p in sorted(self._files) if pattern.match(p.rpartition("/")[2])), None)
        if path is None:
            return None
        data = self._files[path]()
        try:
            return HloProgram(lzma.decompress(data) if path.endswith(".xz") else data)
        except (BrokenProtoError, lzma.LZMAError):
            return None


def _chip(files: Files, source: str) -> str:
    """The GPU's name."""
    if _DEVICES not in files:
        return ""
    table = _table(files[_DEVICES](), f"{source}/{_DEVICES}")
    column = next((table[c] for c in table if "TARGET_INFO_GPU" in c and "'name'" in c), [])
    return str(column[0]) if column else ""
