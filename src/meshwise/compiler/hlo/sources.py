"""Source lines of instructions, in both forms in which programs carry them: in place, or by numbers into tables.

Not here: scopes, which every instruction has in its own text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from meshwise.compiler.hlo.reader import Instruction, Module

_PLACE = re.compile(r'source_file="([^"]*)"(?:[^}]*?source_line=(\d+))?')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_QUOTED = re.compile(r'(\d+) "(.*)"')
_LOCATION = re.compile(r"(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)")
_STACK = re.compile(r"(\d+) \{file_location_id=(\d+)")


def source_of(module: Module, i: Instruction) -> str:
    """File and line that an instruction comes from, `model.py:41`; "" where the program does not say."""
    place = _PLACE.search(i.tail)
    if place is not None:
        return f"{PurePosixPath(place[1]).name}:{place[2] or '?'}"
    frame = _FRAME.search(i.tail)
    if frame is None or frame[1] == "0":
        return ""
    if "sources" not in module.known:
        module.known["sources"] = _places(module)
    places: Mapping[str, str] = module.known["sources"]
    return places.get(frame[1], "")


def _places(module: Module) -> Mapping[str, str]:
    """Number of a frame -> file and line."""
    files = {m[1]: PurePosixPath(m[2]).name for m in _matches(_QUOTED, module.tables.get("FileNames", ()))}
    lines = {
        m[1]: f"{files.get(m[2], '?')}:{m[3]}" for m in _matches(_LOCATION, module.tables.get("FileLocations", ()))
    }
    return {m[1]: lines.get(m[2], "") for m in _matches(_STACK, module.tables.get("StackFrames", ()))}


def _matches(pattern: re.Pattern[str], lines: Iterable[str]) -> Iterable[re.Match[str]]:
    return (match for line in lines if (match := pattern.match(line)) is not None)
