"""Files of measurements: what rows of every kind share; reading. Not here: the kinds (`reading`, `serving`)."""

from __future__ import annotations

import csv
import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from meshwise.core.errors import MeshwiseError
from meshwise.scoring.columns import Column, Metric


class RowError(MeshwiseError):
    """A cell of a file of measurements that cannot be read; says the line and the column."""


@dataclass(frozen=True, slots=True)
class UnreadRow:
    """A row that cannot be read, which leaves the other rows of its file as they are.

    Args:
        id: of the row, or the number of its line.
        reason: the line and the column, what was expected, what was found.
    """

    id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(ABC):
    """What every row says: where it is from, of which model, on which machine, and the number.

    `METRICS` are those that rows of a kind may have.
    """

    METRICS: ClassVar[Mapping[str, Metric]]

    id: str
    source: str = ""
    chip: str = ""
    run_id: str = ""
    source_url_or_repo_path: str = ""
    year: int | None = None
    model: str = ""
    params_b: float | None = None
    layers: int | None = None
    d_model: int | None = None
    d_ff: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    head_dim: int | None = None
    vocab: int | None = None
    moe_experts: int | None = None
    moe_topk: int | None = None
    hardware: str = ""
    n_chips: int
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    dp: int | None = None
    measured_metric: str
    measured_value: float
    unit: str
    primary: str = "yes"
    arch_source: str = ""
    software: str = ""
    notes: str = ""

    @property
    def words(self) -> str:
        """All remarks, in lower case, to look for words in."""
        return f"{self.model} {self.arch_source} {self.software} {self.notes}".lower()

    @property
    def is_memory(self) -> bool:
        """Whether memory was measured, not time."""
        return self.METRICS[self.measured_metric].of == "memory"

    @property
    def counts(self) -> bool:
        """Whether it is an independent number; numbers of memory are, whatever else the run says."""
        return self.primary != "no" or self.is_memory

    @property
    @abstractmethod
    def positions(self) -> int:
        """Tokens of the longest sequence: rows of a learned table of positions."""

    @property
    def machine_words(self) -> str:
        """Remarks that may say how many slices of TPUs there are."""
        return f"{self.notes} {self.hardware}"


R = TypeVar("R", bound=Row)


@dataclass(frozen=True, slots=True)
class RowFormat(Generic[R]):
    """A kind of rows.

    Args:
        columns: that there are.
        always: columns that are never blank.
        row: the type of a row, its fields the columns.
    """

    columns: tuple[Column, ...]
    always: tuple[str, ...]
    row: type[R]


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


def header_of(text: str) -> list[str]:
    """Give the names of a file's columns."""
    return [cell.strip() for cell in next(csv.reader(text.splitlines(keepends=True)), [])]


def rows_of(text: str, where: str, kind: RowFormat[R]) -> tuple[R | UnreadRow, ...]:
    """Read the text of a file; `where` is what errors call it.

    Returns: a row for each line that is not blank; those with a wrong cell, or the id of a row before, say so.

    Raises:
        MeshwiseError: the header has an unknown column or lacks one, or there are no rows.
    """
    header = header_of(text)
    _check_header(header, where, kind)
    lines = csv.reader(text.splitlines(keepends=True))
    next(lines)
    rows: list[R | UnreadRow] = []
    seen: set[str] = set()
    for cells in lines:
        if any(cell.strip() for cell in cells):
            rows.append(_read_row(cells, header, seen, (where, lines.line_num), kind))
            seen.add(rows[-1].id)
    if not rows:
        raise MeshwiseError(f"{where}: expected rows of measurements under a header, found none")
    return tuple(rows)


def all_read(rows: Iterable[R | UnreadRow]) -> tuple[R, ...]:
    """Give rows of which all can be read.

    Raises:
        RowError: one cannot.
    """
    read: list[R] = []
    for row in rows:
        if isinstance(row, UnreadRow):
            raise RowError(row.reason)
        read.append(row)
    return tuple(read)


def _read_row(
    cells: Sequence[str], header: Sequence[str], seen: Container[str], place: tuple[str, int], kind: RowFormat[R]
) -> R | UnreadRow:
    """Read one row; `seen` are ids of those before, `place` is the file and the line."""
    where, line = f"{place[0]}, line {place[1]}", place[1]
    values = {name: cell.strip() for name, cell in zip(header, cells, strict=False)}
    name = values.get("id") or f"line {line}"
    if len(cells) != len(header):
        return UnreadRow(name, f"{where}: expected {len(header)} cells, found {len(cells)}")
    if name in seen:
        return UnreadRow(name, f"{where}: two rows have the id {name!r}; give each its own")
    try:
        return _row({**values, "id": name}, where, kind)
    except RowError as error:
        return UnreadRow(name, str(error))


def _check_header(header: list[str], where: str, kind: RowFormat[R]) -> None:
    names = [c.name for c in kind.columns]
    for name in header:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "docs/measurements.md lists the columns"
            raise MeshwiseError(f"{where}: column {name!r} is not one of the format; {hint}")
    if repeated := next((name for name in header if header.count(name) > 1), None):
        raise MeshwiseError(f"{where}: column {repeated!r} stands twice in the header; keep one")
    if missing := [name for name in kind.always if name not in header]:
        raise MeshwiseError(f"{where}: the header lacks {', '.join(missing)}; docs/measurements.md lists the columns")


def _row(values: Mapping[str, str], where: str, kind: RowFormat[R]) -> R:
    by_name = {c.name: c for c in kind.columns}
    cells = {name: _cell(by_name[name], text, where) for name, text in values.items()}
    for name in kind.always:
        if cells[name] in (None, ""):
            raise RowError(f"{where}, column {name}: expected a value, found a blank cell")
    metric = str(cells["measured_metric"])
    if metric not in kind.row.METRICS:
        raise RowError(
            f"{where}, column measured_metric: expected one of {', '.join(kind.row.METRICS)}; found {metric!r}"
        )
    if cells.get("primary") not in (None, "", "yes", "no"):
        raise RowError(f"{where}, column primary: expected yes or no, found {cells['primary']!r}")
    cells["primary"] = cells.get("primary") or "yes"
    assert set(cells) <= {f.name for f in fields(kind.row)}
    return kind.row(**cells)  # type: ignore[arg-type]


_EXPECTED = {
    "count": "a whole number of at least 1",
    "whole": "a whole number of at least 0",
    "number": "a number above 0",
}


def _cell(column: Column, text: str, where: str) -> str | int | float | None:
    if column.kind == "text":
        return text
    if not text:
        return None
    expected = _EXPECTED[column.kind]
    wrong = RowError(f"{where}, column {column.name}: expected {expected}, found {text!r}")
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        raise wrong from None
    if not math.isfinite(value) or value < 0 or (value == 0 and column.kind != "whole"):
        raise wrong
    if column.kind == "number":
        return value
    if value != int(value):
        raise wrong
    return int(value)
