"""What a report lays out for a terminal, as HTML: paragraphs, tables, lists, bars. Not here: pages and charts."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from markupsafe import Markup, escape
from rich.console import Console, ConsoleRenderable, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshwise.report.chart import Bars, Beside, Drawing
from meshwise.report.report import Hanging
from meshwise.report.table import Noted

#: Text of a table's cell -> where it leads.
Named = Mapping[str, str]

_NOWHERE: Named = {}

#: Letters from which on a column is broken into lines on a narrow screen.
_LONG = 15

#: A space in front of a unit, and one beside an equals sign in front of a number.
_TIES = re.compile(r"(?<=\d) (?=(?:%|x|[num]?s|[KMGT]i?B(?:/s)?)(?![\w/]))|(?<= =) (?=\d)| (?== \d)")

#: An option or an arrow, whose hyphens end no line; where a name, a layout or a formula may be broken.
_WHOLE = re.compile(r"--[a-z][a-z-]*|-&gt;")
_BREAKS = re.compile(r"(?<=[\w)])(?:[,.](?=[a-z])|[*/](?!s\b)(?=[\w(])|\((?=\w))", re.IGNORECASE)


def tied(text: str) -> Markup:
    r"""A sentence in which numbers keep their units, and options their hyphens, at the end of a line.

    >>> tied("85.9 % of 2 s")
    Markup('85.9\xa0% of 2\xa0s')
    """
    return Markup(_WHOLE.sub(r'<span class="whole">\g<0></span>', str(escape(_TIES.sub("\xa0", text)))))  # noqa: S704


def breakable(text: str) -> Markup:
    """The same, which may be broken inside of names, layouts and formulas."""
    return Markup(_BREAKS.sub(r"\g<0><wbr>", str(tied(text))))  # noqa: S704


def html_of(items: Iterable[RenderableType], named: Named = _NOWHERE) -> str:
    """Write blocks of a report as HTML; bullets below each other become one list.

    Args:
        items: the blocks.
        named: what becomes a link in tables.
    """
    return str(_joined(items, named))


def _joined(items: Iterable[RenderableType], named: Named) -> Markup:
    out, bullets = Markup(), Markup()
    for item in items:
        if isinstance(item, Hanging):
            bullets += Markup("<li>{}</li>").format(tied(item.line))
            continue
        if bullets:
            out, bullets = out + Markup("<ul>{}</ul>").format(bullets), Markup()
        out += _block(item, named)
    return out + Markup("<ul>{}</ul>").format(bullets) if bullets else out


def _block(item: RenderableType, named: Named) -> Markup:  # noqa: PLR0911  (one for each kind of block)
    """One block as HTML."""
    match item:
        case Drawing():
            return Markup()
        case Text():
            return _paragraph(item)
        case Table():
            return _table(item, named)
        case Noted():
            return _noted(item, named)
        case Bars():
            return bars(item)
        case Beside():
            return Markup('<div class="beside"><div>{}</div><div>{}</div></div>').format(
                _block(item.left, named), _block(item.right, named)
            )
        case Group():
            return _joined(item.renderables, named)
        case Padding():
            return _block(item.renderable, named)
        case _:
            return _preformatted(item)


def _paragraph(text: Text) -> Markup:
    if not text.plain.strip():
        return Markup()
    lines = Markup("<br>").join(tied(line) for line in text.plain.split("\n"))
    heading, paragraph = Markup("<h3>{}</h3>"), Markup("<p>{}</p>")
    return (heading if text.style == "bold" else paragraph).format(lines)


def _preformatted(item: RenderableType) -> Markup:
    """A block of lines that only a terminal lays out."""
    assert isinstance(item, ConsoleRenderable | str), f"expected a block of a report, found {type(item).__name__}"
    target = io.StringIO()
    Console(file=target, width=80, color_system=None, markup=False, highlight=False, force_jupyter=False).print(item)
    return Markup('<pre tabindex="0">{}</pre>').format(target.getvalue().rstrip())


def _table(grid: Table, named: Named) -> Markup:
    columns = [[_plain(cell) for cell in column.cells] for column in grid.columns]
    right = [column.justify == "right" for column in grid.columns]
    head = [_plain(column.header) for column in grid.columns] if grid.show_header else []
    return table(head, list(zip_longest(*columns, fillvalue="")), right, title=_plain(grid.title or ""), named=named)


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def _noted(grid: Noted, named: Named) -> Markup:
    right = [name.startswith(">") for name in grid.columns]
    notes = [note for _, note in grid.rows]
    return table(
        [name.lstrip(">!") for name in grid.columns], [row for row, _ in grid.rows], right, notes=notes, named=named
    )


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str | Markup]],
    right: Sequence[bool] = (),
    *,
    title: str = "",
    notes: Sequence[str] = (),
    named: Named = _NOWHERE,
) -> Markup:
    """A table that scrolls inside itself.

    Args:
        head: names of the columns; none for facts, whose first column names the row.
        rows: their cells.
        right: of each column, whether it holds numbers.
        title: above it.
        notes: of each row, below it.
        named: what becomes a link.
    """
    right = right or [False] * max((len(row) for row in rows), default=0)
    kinds = [_kind(flush, [row[n] for row in rows if n < len(row)]) for n, flush in enumerate(right)]
    lines = Markup()
    for row, note in zip_longest(rows, notes, fillvalue=""):
        lines += Markup("<tr>{}</tr>").format(_cells(row, kinds, named, facts=not head))
        if note:
            lines += Markup('<tr class="note"><td colspan="{}"><span>{}</span></td></tr>').format(len(row), tied(note))
    caption = Markup("<caption>{}</caption>").format(title) if title else ""
    region = Markup('<div class="scroll" tabindex="0" role="group" aria-label="{}">').format(title or "table")
    return region + Markup("<table>{}{}<tbody>{}</tbody></table></div>").format(caption, _head(head, right), lines)


def _kind(flush: bool, cells: Sequence[str]) -> Markup:
    """The class of a column: of numbers, or of words that may be broken."""
    kind = "num" if flush else "long" if max(map(len, cells), default=0) >= _LONG else ""
    return Markup(' class="{}"').format(kind) if kind else Markup()


def _head(head: Sequence[str], right: Sequence[bool]) -> Markup:
    if not head:
        return Markup()
    names = (
        Markup('<th scope="col"{}>{}</th>').format(_kind(flush, ()), name) if name else Markup("<td></td>")
        for name, flush in zip(head, right, strict=True)
    )
    return Markup("<thead><tr>{}</tr></thead>").format(Markup().join(names))


def _cells(row: Sequence[str | Markup], kinds: Sequence[Markup], named: Named, *, facts: bool) -> Markup:
    out = Markup()
    for number, (cell, kind) in enumerate(zip(row, kinds, strict=True)):
        broken = tied if "num" in kind else breakable
        text = cell if isinstance(cell, Markup) else Markup("<br>").join(map(broken, cell.strip().split("\n")))
        if cell in named and (number == 0 or row[0] not in named):
            text = Markup('<a href="{}">{}</a>').format(named[cell], text)
        first = facts and number == 0 and text
        out += (Markup('<th scope="row"{}>{}</th>') if first else Markup("<td{}>{}</td>")).format(kind, text)
    return out


def bars(block: Bars) -> Markup:
    """The parts of a whole: a table whose last column is a bar as long as its share."""
    rows = Markup()
    for name, value in block.rows():
        share = min(value / block.whole, 1.0)
        bar = Markup(
            '<svg class="bar" aria-hidden="true"><rect class="rail" width="100%" height="100%"/>'
            '<rect class="a" width="{:.2f}%" height="100%"/></svg>'
        ).format(100 * share)
        rows += Markup('<tr><th scope="row">{}</th><td class="num">{}</td><td class="wide">{}</td></tr>').format(
            name.replace("_", " "), block.show(value), bar
        )
    return Markup('<table class="bars"><caption>{}</caption><tbody>{}</tbody></table>').format(tied(block.title), rows)
