"""Tables that fit 80 columns, all in one style. Not here: what they hold (one file a verb)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text


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


def noted_table(columns: Sequence[str], rows: Iterable[tuple[Sequence[str], str]]) -> RenderableType:
    """Lay out rows as `table` does, each with a note on lines of its own below it."""
    return _Noted(tuple(columns), tuple((tuple(cells), note) for cells, note in rows))


@dataclass(frozen=True, slots=True)
class _Noted:
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
