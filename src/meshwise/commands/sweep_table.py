"""The file of a sweep's rows: each is written as it comes, so that a sweep that stops goes on where it was.

CSV holds the rows itself; Parquet is written at the end, from CSV beside it. At the end rows stand in the order of the
questions. Not here: what rows hold (`report.sweep`).
"""

from __future__ import annotations

import csv
import fcntl
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwise.core.errors import ConfigError, MeshwiseError, MissingDependencyError
from meshwise.core.files import write_whole
from meshwise.report.sweep import Row

#: Columns that every table has; what they hold is text, whatever it looks like.
KEY, STATUS, REASON = "key", "status", "reason"
_TEXT = (KEY, STATUS, REASON, "command", "plan_layout", "plan_prefill_layout")

PARQUET = ".parquet"


class Table:
    """A file of rows, which this process alone writes.

    Args:
        file: CSV or Parquet, told by its ending.

    Raises:
        MeshwiseError: another ending; a folder that does not exist; MissingDependencyError: PyArrow is not installed.
        ConfigError: the file is no table of a sweep.
    """

    def __init__(self, file: Path) -> None:
        if file.suffix not in (".csv", PARQUET):
            raise MeshwiseError(f"--out {file}: expected a name that ends in .csv or {PARQUET}")
        if not file.parent.is_dir():
            raise MeshwiseError(f"--out {file}: there is no folder {str(file.parent)!r}; make it first")
        if file.suffix == PARQUET:
            _arrow()
        self.file = file
        self.journal = file if file.suffix == ".csv" else file.with_name(f"{file.name}.csv")
        written = _read_parquet(file) if file.suffix == PARQUET and file.exists() else []
        lines = _whole_lines(self.journal)
        self.rows: dict[str, Row] = {row[KEY]: row for row in (*written, *_rows(lines, str(self.journal)))}

    def open(self, columns: Sequence[str], kept: Iterable[Row]) -> None:
        """Begin to write: `kept` rows first, others by `add`.

        Raises:
            MeshwiseError: another sweep writes the file, or it cannot be written.
        """
        self.rows = {row[KEY]: row for row in kept}
        self.columns = list(dict.fromkeys((*columns, *(name for row in self.rows.values() for name in row))))
        try:
            with self.journal.open("a") as before:
                fcntl.flock(before, fcntl.LOCK_EX | fcntl.LOCK_NB)
                write_whole(self.journal, _text(self.columns, self.rows.values()).encode())
                self._stream = self.journal.open("a", encoding="utf-8", newline="")
                fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MeshwiseError(f"--out {self.file}: another sweep is writing it; wait, or give another name") from None
        except OSError as error:
            raise MeshwiseError(f"--out {self.file}: {error.strerror}") from None

    def add(self, row: Row) -> None:
        """Write one row, at once."""
        assert set(row) <= set(self.columns), f"columns that were not declared: {set(row) - set(self.columns)}"
        self.rows[row[KEY]] = row
        self._stream.write(_line(self.columns, row))
        self._stream.flush()

    def close(self, order: Sequence[str]) -> None:
        """Write all rows, those with keys of `order` first; Parquet, too."""
        place = {key: number for number, key in enumerate(order)}
        rows = sorted(self.rows.values(), key=lambda row: place.get(row[KEY], len(place)))
        if self.file.suffix == ".csv":
            write_whole(self.file, _text(self.columns, rows).encode())
        else:
            write_whole(self.file, _parquet(self.columns, rows))
            self.journal.unlink()
        self._stream.close()


def cell(name: str, text: str) -> Any:
    """A cell of CSV as the value that was written: a number, or text; empty is None.

    >>> cell("mfu", "0.5"), cell("num_chips", "8"), cell("reason", "8"), cell("model", "llama-3-8b"), cell("mfu", "")
    (0.5, 8, '8', 'llama-3-8b', None)
    """
    if not text:
        return None
    if name not in _TEXT and (text[0].isdigit() or text[0] == "-"):
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
    return {"True": True, "False": False}.get(text, text)


def _whole_lines(file: Path) -> str:
    """The text of a file up to its last line break: a line that was torn has none."""
    try:
        text = file.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise MeshwiseError(f"--out {file}: {error.strerror}") from None
    return text[: text.rfind("\n") + 1]


def _rows(text: str, file: str) -> list[Row]:
    if not text:
        return []
    try:
        header, *rows = csv.reader(io.StringIO(text))
    except csv.Error as error:
        raise ConfigError(f"--out {file}: expected rows of a sweep: {error}; give another name") from None
    if KEY not in header or STATUS not in header:
        raise ConfigError(f"--out {file}: expected rows of a sweep, found another table; give another name")
    return [{name: cell(name, value) for name, value in zip(header, row, strict=False)} for row in rows]


def _line(columns: Sequence[str], row: Mapping[str, Any]) -> str:
    """One line of CSV: line breaks in cells are spaces, so that a row is a line."""
    stream = io.StringIO()
    values = (row.get(name) for name in columns)
    csv.writer(stream, lineterminator="\n").writerow(" ".join(v.split()) if isinstance(v, str) else v for v in values)
    return stream.getvalue()


def _text(columns: Sequence[str], rows: Iterable[Row]) -> str:
    return "".join([_line(columns, dict(zip(columns, columns, strict=True))), *(_line(columns, row) for row in rows)])


# Parquet


def _arrow() -> Any:
    try:
        import pyarrow.parquet  # noqa: PLC0415  (an optional extra)
    except ImportError:
        raise MissingDependencyError(
            "--out with .parquet needs PyArrow: pip install 'meshwise[parquet]'; or give a name that ends in .csv"
        ) from None
    return pyarrow


def _read_parquet(file: Path) -> list[Row]:
    arrow = _arrow()
    try:
        found = arrow.parquet.read_table(file)
    except (OSError, arrow.ArrowException) as error:
        raise ConfigError(f"--out {file}: expected Parquet, found what cannot be read: {error}") from None
    if KEY not in found.column_names or STATUS not in found.column_names:
        raise ConfigError(f"--out {file}: expected rows of a sweep, found another table; give another name")
    rows: list[Row] = found.to_pylist()
    return rows


def _parquet(columns: Sequence[str], rows: Sequence[Row]) -> bytes:
    """The rows as Parquet: a column is of numbers where all its cells are, else of text."""
    arrow, target = _arrow(), io.BytesIO()
    held: dict[str, Any] = {}
    for name in columns:
        cells = [row.get(name) for row in rows]
        kinds = {type(one) for one in cells if one is not None}
        if kinds <= {int, float} and kinds:
            kind = arrow.int64() if kinds == {int} else arrow.float64()
        elif kinds == {bool}:
            kind = arrow.bool_()
        else:
            kind, cells = arrow.string(), [None if one is None else str(one) for one in cells]
        held[name] = arrow.array(cells, kind)
    arrow.parquet.write_table(arrow.table(held), target)
    return target.getvalue()
