"""Finds traces under a path, and tells their formats by their first bytes.

Not here: the formats themselves (one file each).
"""

from __future__ import annotations

import glob
import gzip
import io
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

from meshwise.core.errors import ConfigError
from meshwise.profile.reading.nsys_jax import RANGES, is_nsys_jax, read_nsys_jax
from meshwise.profile.trace import Trace

_KNOWN = (
    "xplane.pb of JAX, JSON of PyTorch's or JAX's profiler (also .gz), a folder or zip of nsys-jax, SQLite of Nsight"
)
_SUFFIXES = (".xplane.pb", ".json", ".json.gz", ".sqlite", ".zip", ".pt.trace.json", ".pt.trace.json.gz")
_LARGEST_UNPACKED = 16 << 30


def read_traces(paths: Iterable[str]) -> tuple[Trace, ...]:
    """Read all traces under files, folders and patterns (`rank*.json.gz`), in the order of their names.

    Raises:
        ConfigError: nothing is there, or something that is no trace, is cut off or damaged.
        MissingDependencyError: a format needs a library that is not installed.
    """
    found = [trace for path in paths for place in _places(path) for trace in (read_trace(place),)]
    if not found:
        raise ConfigError("expected a trace, found none")
    return tuple(found)


def read_trace(path: str | Path) -> Trace:
    """Read one trace: a file, or a folder of nsys-jax.

    Raises:
        ConfigError: it is no trace, is cut off or damaged.
        MissingDependencyError: its format needs a library that is not installed.
    """
    place = Path(path)
    if place.is_dir():
        files = {str(p.relative_to(place)): p.read_bytes for p in sorted(place.rglob("*")) if p.is_file()}
        return _checked(read_nsys_jax(files, place.name))
    try:
        data = place.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {place}: {(error.strerror or str(error)).lower()}") from None
    if not data:
        raise ConfigError(f"{place} is empty; was the profiler stopped before it wrote?")
    return _checked(_read_bytes(data, place))


def _checked(trace: Trace) -> Trace:
    if not trace.devices:
        raise ConfigError(
            f"{trace.source}: expected operations of a device, found none; was anything run while it was recorded?"
        )
    return trace


def _read_bytes(data: bytes, place: Path) -> Trace:
    name = place.name
    if data[:2] == b"\x1f\x8b":
        data = _unpacked(data, place)
    start = data[:64].lstrip()[:1]
    if start in (b"{", b"["):
        return _read_json(data, name)
    if data[:4] == b"PK\x03\x04":
        return _read_zip(data, place)
    if data[:15] == b"SQLite format 3":
        from meshwise.profile.reading.nsys import read_nsys  # noqa: PLC0415  (with msgspec)

        return read_nsys(place)
    if data[:1] == b"\x0a":
        from meshwise.profile.reading.protos import BrokenProtoError  # noqa: PLC0415  (loaded when it is needed)
        from meshwise.profile.reading.xplane import read_xplane  # noqa: PLC0415  (with NumPy's columns and protobuf)

        try:
            return read_xplane(data, name)
        except (TypeError, OverflowError, BrokenProtoError) as error:  # names that are no text, times that are none
            raise ConfigError(f"{place} is damaged: {error}; was the file copied as text?") from None
    raise ConfigError(f"{place}: expected a trace, found a file that begins with {data[:8]!r}; known are {_KNOWN}")


def _unpacked(data: bytes, place: Path) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            found = file.read(_LARGEST_UNPACKED)
    except (EOFError, gzip.BadGzipFile, zlib.error, OSError) as error:
        raise ConfigError(f"{place} is cut off or damaged: {str(error).lower()}; copy it again") from None
    if not found:
        raise ConfigError(f"{place} is empty; was the profiler stopped before it wrote?")
    return found


def _read_json(data: bytes, name: str) -> Trace:
    from meshwise.profile.reading.chrome import read_document  # noqa: PLC0415  (msgspec is loaded when it is needed)
    from meshwise.profile.reading.jax_json import read_chrome  # noqa: PLC0415
    from meshwise.profile.reading.kineto import is_kineto, read_kineto  # noqa: PLC0415

    document = read_document(data, name)
    if document.traceEvents is None:
        raise ConfigError(f"{name}: expected trace events in Chrome's format, found JSON without a list traceEvents")
    if not document.traceEvents:
        raise ConfigError(f"{name} has no events; was anything run while it was recorded?")
    return read_kineto(document, name) if is_kineto(document.traceEvents) else read_chrome(document, name)


def _read_zip(data: bytes, place: Path) -> Trace:
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        files = {name: _member(archive, name, place) for name in archive.namelist() if not name.endswith("/")}
    except zipfile.BadZipFile as error:
        raise ConfigError(f"{place} is cut off or damaged: {str(error).lower()}; copy it again") from None
    root = next((n.removesuffix(RANGES) for n in files if n.endswith(RANGES)), "")
    files = {name.removeprefix(root): read for name, read in files.items()}
    if not is_nsys_jax(files):
        raise ConfigError(
            f"{place}: expected a zip file of nsys-jax, with {RANGES}; unpack it and name the trace in it"
        )
    return read_nsys_jax(files, place.name)


def _member(archive: zipfile.ZipFile, name: str, place: Path) -> Callable[[], bytes]:
    def read() -> bytes:
        try:
            return archive.read(name)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise ConfigError(f"{place}: {name} is damaged: {str(error).lower()}; copy it again") from None

    return read


def _places(path: str) -> list[Path]:
    """The traces that a path means.

    Raises:
        ConfigError: there are none.
    """
    place = Path(path)
    if not place.exists():
        matches = sorted(m for m in glob.glob(path, recursive=True) if Path(m).exists())  # noqa: PTH207 -- no broken links
        found = [p for match in matches for p in _places(match)]
        if not found:
            raise ConfigError(f"{path}: no such file or folder")
        return found
    if place.is_file() or (place / RANGES).exists():
        return [place]
    inside = sorted(p for p in place.rglob("*") if p.is_file() and p.name.endswith(_SUFFIXES))
    xplanes = [p for p in inside if p.name.endswith(".xplane.pb")]
    if xplanes:  # of JAX's runs the newest: folders are named by time
        newest = max(p.parent for p in xplanes)
        return [p for p in xplanes if p.parent == newest]
    if not inside:
        raise ConfigError(f"{path}: expected a trace in the folder, found none; known are {_KNOWN}")
    return inside
