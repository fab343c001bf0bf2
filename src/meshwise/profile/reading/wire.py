"""Finds the planes of an xplane file without parsing it, so that they can be parsed one at a time.

Not here: what a plane holds (`xplane`).
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.core.errors import ConfigError
from meshwise.profile.reading.protos import BrokenProtoError, Message, parse


@dataclass(frozen=True)
class Part:
    """Where one plane lies in the file, and its name."""

    name: str
    start: int
    end: int


def planes(data: bytes, where: str) -> tuple[Part, ...]:
    """Find the planes of a file without parsing them.

    Raises:
        ConfigError: bytes that are no such file, or a part of one.
    """
    at = 0
    found: list[Part] = []
    while at < len(data):
        tag, begin = _varint(data, at, where)
        size, begin = _varint(data, begin, where)
        if tag & 7 != 2 or not 1 <= tag >> 3 <= 4 or begin + size > len(data):
            kind = "is cut off or damaged" if found else "is no xplane file, is cut off, or is damaged"
            at_byte = f"{where} {kind} at byte {at:,} of {len(data):,}"
            raise ConfigError(f"{at_byte}; record it again, or copy it in binary mode")
        if tag >> 3 == 1:
            found.append(Part(_plane_name(data, begin, begin + size, where), begin, begin + size))
        at = begin + size
    if not found:
        raise ConfigError(f"{where}: expected planes of XLA's profiler, found none")
    return tuple(found)


def _plane_name(data: bytes, at: int, end: int, where: str) -> str:
    """The name of a plane: field 2, which stands before its lines; "" if it has none."""
    while at < end:
        tag, at = _varint(data, at, where)
        size, at = _varint(data, at, where)
        if tag == 0x12:
            return data[at : at + size].decode("utf-8", errors="replace")
        if tag & 7 == 2:
            return ""
    return ""


def parsed_plane(data: bytes, part: Part, where: str) -> Message:
    """Parse one plane.

    Raises:
        ConfigError: it is damaged.
    """
    try:
        return parse("XPlane", data[part.start : part.end])
    except BrokenProtoError:
        raise ConfigError(
            f"{where} is damaged: plane {part.name[:80]!r} at byte {part.start:,} cannot be parsed; was the file "
            "copied as text?"
        ) from None


def _varint(data: bytes, at: int, where: str) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ConfigError(f"{where} is cut off or damaged at byte {at:,} of {len(data):,}; record it again")
