"""From values to JSON fields, tables and words, all in one style: tables fit 80 columns.

Not here: what they hold (one file a verb), and units (`meshwise.core.units`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

T = TypeVar("T")

#: Where a row's cell is found: a path, a path and how its value is shown, or a function of the row.
Cell = str | tuple[str, Callable[[Any], str]] | Callable[[Any], str]

#: Header, written as for `table` -> its cells.
Columns = Mapping[str, Cell]


def pick(value: Any, path: str) -> Any:
    """Follow a path through attributes and mappings; None where a part of it is None.

    >>> pick({"size": {"bytes": 3}}, "size.bytes"), pick({"size": None}, "size.bytes"), pick(1 + 2j, "imag")
    (3, None, 2.0)
    """
    for name in path.split("."):
        value = None if value is None else value[name] if isinstance(value, Mapping) else getattr(value, name)
    return value


def picked(value: Any, *fields: str) -> dict[str, Any]:
    """JSON fields of a value, in order: `name`, or `key=path` where the key differs; a text may hold several.

    >>> picked(1 + 2j, "real imaginary=imag")
    {'real': 1.0, 'imaginary': 2.0}
    """
    pairs = (field.partition("=") for text in fields for field in text.split())
    return {key: plain(pick(value, path or key)) for key, _, path in pairs}


def plain(value: Any) -> Any:
    """A value for JSON: records and enumerations as what they hold, infinite numbers as None."""
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {plain(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return None if isinstance(value, float) and math.isinf(value) else value


def counted(number: int, noun: str) -> str:
    """Write a number of things.

    >>> counted(1, "chip"), counted(8960, "chip"), counted(0, "slice")
    ('1 chip', '8,960 chips', '0 slices')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def words(name: str) -> str:
    """A name as words: "pipeline bubble" of `pipeline_bubble`."""
    return name.replace("_", " ")


def spaced(layout: object) -> str:
    """A layout whose line may break after each comma."""
    return str(layout).replace(",", ", ")


def or_dash(value: Any, show: Callable[[Any], str], *, missing: str = "-") -> str:
    """A value that may be None, which is shown as `missing`."""
    return missing if value is None else show(value)


def signed_percent(share: float) -> str:
    """A relative difference, `+3.2 %`."""
    return f"{100 * share:+.1f} %"


def said(*items: T | None) -> tuple[T, ...]:
    """The lines or blocks that say anything: neither None nor "".

    >>> said("always", "sometimes" if False else "", None)
    ('always',)
    """
    return tuple(item for item in items if item is not None and item != "")


def tabulate(
    columns: Columns,
    rows: Iterable[Any],
    *,
    title: str = "",
    missing: str = "-",
    note: Callable[[Any], str] | None = None,
) -> RenderableType:
    """Lay out a row for each value.

    Args:
        columns: header -> where a row's cell is found.
        rows: the values.
        title: above the table.
        missing: stands for None.
        note: of a row, on lines of its own below it.
    """
    if note is not None:
        return Noted(tuple(columns), tuple((tuple(cells(columns, row, missing)), note(row)) for row in rows))
    return table(tuple(columns), (cells(columns, row, missing) for row in rows), title=title)


def cells(columns: Columns, row: Any, missing: str = "-") -> list[str]:
    """The cells of one row of `tabulate`."""
    return [_cell(cell, row, missing) for cell in columns.values()]


def _cell(cell: Cell, row: Any, missing: str) -> str:
    if callable(cell):
        return cell(row)
    path, show = (cell, str) if isinstance(cell, str) else cell
    return or_dash(pick(row, path), show, missing=missing)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> Table:
    """Lay out rows under a header; a column whose name starts with ">" is set flush right.

    A column whose name starts with "!" is never wrapped.
    """
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", title=title or None)
    grid.title_justify = "left"
    grid.title_style = "bold"
    for column in columns:
        right, whole = column.startswith(">"), column.startswith("!")
        grid.add_column(
            Text(column.lstrip(">!")), justify="right" if right else "left", no_wrap=right or whole, overflow="fold"
        )
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    return grid


@dataclass(frozen=True, slots=True)
class Noted:
    """A table whose notes take the whole width: a grid of cells cannot hold them."""

    columns: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], str], ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = tuple(c.lstrip(">!") for c in self.columns)
        lines = (names, *(cells for cells, _ in self.rows))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

        def line(cells: Sequence[str]) -> str:
            pairs = zip(self.columns, cells, widths, strict=True)
            return "  ".join(f"{c:>{w}}" if name.startswith(">") else f"{c:<{w}}" for name, c, w in pairs).rstrip()

        yield Text(line(names), style="bold")
        for cells, note in self.rows:
            yield Text(line(cells))
            for part in Text(note).wrap(console, options.max_width - 4) if note else ():
                yield Text("    ") + part


def facts(rows: Iterable[tuple[str, str] | tuple[str, str, str]]) -> Table:
    """Lay out name, value and an optional remark on each line, without a header."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(style="dim")
    for name, value, *remark in rows:
        grid.add_row(Text(name), Text(value), Text(remark[0] if remark else ""))
    return grid
