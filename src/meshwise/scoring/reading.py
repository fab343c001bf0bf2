"""Files of measurements as rows: the header, cells, and what is wrong with them. Not here: the columns (`rows`)."""

from __future__ import annotations

import csv
import difflib
import math
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from meshwise.core.errors import MeshwiseError
from meshwise.costs.machine import MeasuredOperation
from meshwise.scoring.rows import Row, TrainingRun, UnreadRow

R = TypeVar("R", bound=Row | MeasuredOperation)
Shipped = TypeVar("Shipped", bound=Row)

#: Columns of counts that may be 0: a prefill has no output.
_FROM_ZERO = ("output_len",)


def read_text(path: Path) -> str:
    """Read a file's text.

    Raises:
        MeshwiseError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise MeshwiseError(f"{path}: {reason}") from None


def shipped_rows(kind: type[Shipped]) -> tuple[Shipped, ...]:
    """Published measurements that come with the package, each with its source."""
    text = (files("meshwise.scoring") / "data" / kind.SHIPPED).read_text(encoding="utf-8")
    rows = read_rows(text, kind.SHIPPED, kind)
    if unread := [row.reason for row in rows if isinstance(row, UnreadRow)]:
        raise MeshwiseError(unread[0])
    return tuple(row for row in rows if not isinstance(row, UnreadRow))


def is_serving(text: str) -> bool:
    """Whether a file's header is that of measured serving."""
    return {"engine", "phase"} <= set(_lines(text, "measured rows")[0][1])


def is_operations(text: str) -> bool:
    """Whether a file's header is that of single operations."""
    return {"category", "op"} <= set(_lines(text, "measured rows")[0][1])


def read_rows(text: str, where: str, kind: type[R]) -> tuple[R | UnreadRow, ...]:
    """Read the text of a file; errors call it `where`.

    Returns: a row for each line that is not blank; one with a wrong cell, or the id of a row before, says so.

    Raises:
        MeshwiseError: the header has an unknown column or lacks one, or no rows follow.
    """
    (_, header), *lines = _lines(text, where)
    _check_header(header, where, kind)
    rows: list[R | UnreadRow] = []
    seen: set[str] = set()
    for number, cells in lines:
        if any(cells):
            rows.append(_read_row(cells, header, seen, (where, number), kind))
            seen.add(rows[-1].id)
    if not rows:
        raise MeshwiseError(f"{where}: expected rows of measurements under a header, found none")
    return tuple(rows)


def _lines(text: str, where: str) -> list[tuple[int, list[str]]]:
    """Each line's number and cells, the header first."""
    reader = csv.reader(text.splitlines(keepends=True))
    try:
        return [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader] or [(1, [])]
    except csv.Error as error:
        raise MeshwiseError(f"{where}, line {reader.line_num}: expected CSV: {error}") from None


def _check_header(header: Sequence[str], where: str, kind: type[R]) -> None:
    columns = set(header)
    if kind is TrainingRun and {"engine", "phase"} <= columns:
        raise MeshwiseError(
            f"{where}: these are measurements of serving (columns engine, phase), which `meshwise score` predicts; "
            "expected training runs (docs/measurements.md)"
        )
    if kind is TrainingRun and {"category", "op"} <= columns:
        raise MeshwiseError(
            f"{where}: these are single operations (columns category, op), which say nothing of clocks over minutes, "
            "the host, or what hides behind what; expected training runs: one row a run, with the columns of "
            "docs/measurements.md, as meshwise profile TRACE --plan PLAN --save-step FILE writes one of a trace; "
            "meshwise calibrate reads single operations"
        )
    names = [f.name for f in fields(kind)]
    for name in header:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "docs/measurements.md lists the columns"
            raise MeshwiseError(f"{where}: column {name!r} is not one of the format; {hint}")
    if repeated := next((name for name in header if header.count(name) > 1), None):
        raise MeshwiseError(f"{where}: column {repeated!r} stands twice in the header; keep one")
    if missing := [name for name in _required(kind) if name not in header]:
        raise MeshwiseError(f"{where}: the header lacks {', '.join(missing)}; docs/measurements.md lists the columns")


def _required(kind: type[Any]) -> list[str]:
    """Columns without blank cells; a blank id is the number of the line."""
    return [f.name for f in fields(kind) if f.default is MISSING and f.name != "id"]


def _read_row(
    cells: Sequence[str], header: Sequence[str], seen: Container[str], place: tuple[str, int], kind: type[R]
) -> R | UnreadRow:
    """Read one row; `seen` holds the ids before, `place` is the file and the line."""
    where, line = f"{place[0]}, line {place[1]}", place[1]
    values = dict(zip(header, cells, strict=False))
    name = values.get("id") or f"line {line}"
    if len(cells) != len(header):
        return UnreadRow(name, f"{where}: expected {len(header)} cells, found {len(cells)}")
    if name in seen:
        return UnreadRow(name, f"{where}: two rows have the id {name!r}; give each its own")
    try:
        return _row({**values, "id": name}, where, kind)
    except MeshwiseError as error:
        return UnreadRow(name, str(error), values.get("primary", "").strip() != "no")


def _row(values: Mapping[str, str], where: str, kind: type[R]) -> R:
    types = _types(kind)  # type: ignore[arg-type]  # classes are hashable, type variables of them not to mypy
    cells = {name: _cell(name, types[name], text, where) for name, text in values.items()}
    for name in _required(kind):
        if cells[name] in (None, ""):
            raise MeshwiseError(f"{where}, column {name}: expected a value, found a blank cell")
    metric, known = cells["measured_metric"], (*kind.TIMES, *kind.MEMORY)
    if metric not in known:
        raise MeshwiseError(f"{where}, column measured_metric: expected one of {', '.join(known)}; found {metric!r}")
    cells["primary"] = cells.get("primary") or "yes"
    if cells["primary"] not in ("yes", "no"):
        raise MeshwiseError(f"{where}, column primary: expected yes or no, found {cells['primary']!r}")
    return kind(**cells)  # type: ignore[arg-type]


@cache
def _types(kind: type[Any]) -> dict[str, type]:
    """What the cells of each column are: str, int or float."""
    hints = get_type_hints(kind)
    return {
        f.name: next(t for t in (str, int, float) if t in (hints[f.name], *get_args(hints[f.name])))
        for f in fields(kind)
    }


#: Cells that say as much as blank ones.
_BLANK = re.compile(r"-|\?|n/?a|unknown|unspecified|not (?:stated|said|given|known|reported)", re.IGNORECASE)


def _cell(column: str, kind: type, text: str, where: str) -> str | int | float | None:
    if column != "id" and _BLANK.fullmatch(text):
        text = ""
    if kind is str:
        return text
    if not text:
        return None
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        value = math.nan
    least = 0 if column in _FROM_ZERO else 1
    if not math.isfinite(value) or value < 0 or (value == 0 and least) or (kind is int and value != int(value)):
        expected = "a number above 0" if kind is float else f"a whole number of at least {least}"
        raise MeshwiseError(f"{where}, column {column}: expected {expected}, found {text!r}")
    return value if kind is float else int(value)
