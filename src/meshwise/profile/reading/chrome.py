"""Decodes trace events in JSON (Chrome's format: PyTorch's profiler, vLLM, SGLang, JAX), plain or compressed by gzip.

Arguments of events stay bytes until someone asks for them: most of a file are Python frames, which are dropped. Not
here: what the events mean (`kineto`, `jax_json`).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from meshwise.core.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    import msgspec
else:
    try:
        import msgspec
    except ImportError as error:
        hint = "JSON traces are read with msgspec, which is not installed: pip install 'meshwise[profile]'"
        raise MissingDependencyError(hint) from error

T = TypeVar("T")

#: Microseconds: a trace is no longer than this, and no time is later.
_LONGEST, _LATEST = 1e12, 1e18

#: Picoseconds in a nanosecond: the finest that JSON traces hold.
_NANOSECOND = 1000

Number = int | float | str | None


class Event(msgspec.Struct, gc=False):
    """One event as it stands in the file; `args` is not decoded yet."""

    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: Number = None
    tid: Number = None
    ts: Number = None
    dur: Number = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


class DeviceProperties(msgspec.Struct, gc=False):
    """A GPU of the host that was traced."""

    id: int = 0
    name: str = ""


class Group(msgspec.Struct, gc=False):
    """A process group."""

    pg_name: str = ""
    pg_desc: str = ""
    pg_size: int = 0
    ranks: tuple[int, ...] = ()


class Distributed(msgspec.Struct, gc=False):
    """Which process of how many."""

    rank: int | None = None
    world_size: int | None = None
    pg_config: tuple[Group, ...] = ()


class Document(msgspec.Struct, gc=False):
    """A file: its events, and what it says of the machine."""

    traceEvents: tuple[Event, ...] | None = None  # noqa: N815  (the format's name)
    deviceProperties: msgspec.Raw = msgspec.Raw(b"null")  # noqa: N815
    distributedInfo: msgspec.Raw = msgspec.Raw(b"null")  # noqa: N815


def decoded(raw: msgspec.Raw | bytes, kind: type[T], default: T) -> T:
    """Decode a part, the `default` where it is of another form."""
    found = _DECODERS.get(kind)
    if found is None:
        found = _DECODERS[kind] = msgspec.json.Decoder(kind, strict=False)
    try:
        value: T = found.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return default
    return value


#: What was decoded once -> its decoder.
_DECODERS: dict[object, msgspec.json.Decoder[Any]] = {}


def read_document(data: bytes, where: str) -> Document:
    """Decode a file.

    Raises:
        ConfigError: no JSON, torn, or JSON of something else.
    """
    try:
        return _decode(data)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: expected trace events in Chrome's format, found other JSON: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        mended = _mended(data)
        if mended is None:
            raise ConfigError(f"{where}: not valid JSON: {error}; is the file complete?") from None
    try:
        return _decode(mended)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}; is the file complete?") from None


def _decode(data: bytes) -> Document:
    if data.lstrip()[:1] == b"[":
        return Document(traceEvents=msgspec.json.decode(data, type=tuple[Event, ...]))
    return msgspec.json.decode(data, type=Document)


def _mended(data: bytes) -> bytes | None:
    """The same with numbers that are none (NaN, Infinity) as null, and broken characters replaced; None if torn."""
    try:
        value: object = json.loads(data.decode("utf-8", errors="replace"), parse_constant=lambda _: None, strict=False)
        return msgspec.json.encode(value)
    except (ValueError, RecursionError, msgspec.MsgspecError):
        return None


def picoseconds(value: Number, base: float) -> int | None:
    """Microseconds of a file as whole picoseconds after `base` (microseconds), to the nanosecond; None if no number.

    Whole microseconds since 1970 are exact; with a fraction a double holds a quarter of a microsecond of them.
    """
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if value is None or not abs(value - base) < _LONGEST:  # not a number, either
        return None
    return round((value - base) * 1000) * _NANOSECOND


def first_time(events: tuple[Event, ...]) -> float:
    """The earliest time of timed events, microseconds; 0 without any. Single ones weeks apart do not count."""
    found = [e.ts for e in events if e.ph in ("X", "B") and isinstance(e.ts, int | float) and abs(e.ts) < _LATEST]
    if not found:
        return 0.0
    usual = statistics.median_low(found)
    return min(time for time in found if abs(time - usual) < _LONGEST)


def complete(events: tuple[Event, ...]) -> Iterator[tuple[Event, Number]]:
    """Each event that has a duration, with it; pairs of begin and end are joined."""
    open_: dict[tuple[Number, Number], list[Event]] = {}
    for event in events:
        if event.ph == "X":
            yield event, event.dur
        elif event.ph == "B":
            open_.setdefault((event.pid, event.tid), []).append(event)
        elif event.ph == "E" and (stack := open_.get((event.pid, event.tid))):
            begun = stack.pop()
            if isinstance(begun.ts, int | float) and isinstance(event.ts, int | float):
                yield begun, event.ts - begun.ts
