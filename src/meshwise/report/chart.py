"""Pictures: charts on logarithmic axes in braille dots for the terminal, figures as SVG, traces for Perfetto.

Not here: what they show (one file a verb).
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from meshwise.core.errors import MissingDependencyError
from meshwise.core.units import format_count

Points = Sequence[tuple[float, float]]

#: Bit of each dot of a braille cell, by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


class Drawing(Text):
    """A picture made of characters, which a page replaces by its own."""


@dataclass
class Chart:
    """A canvas of `columns` x `rows` characters over a range of x and one of y, both logarithmic.

    Args:
        x, y: lowest and highest value shown.
        columns, rows: of the drawing, without labels.
    """

    x: tuple[float, float]
    y: tuple[float, float]
    columns: int = 60
    rows: int = 12
    cells: dict[tuple[int, int], str] = field(default_factory=dict)

    def dot_of(self, x: float, y: float) -> tuple[int, int]:
        """Find the dot of a point: column from the left, row from the top."""
        return (
            round(_share(x, self.x) * (2 * self.columns - 1)),
            round((1 - _share(y, self.y)) * (4 * self.rows - 1)),
        )

    def curve(self, function: Callable[[float], float]) -> None:
        """Draw y = function(x), one dot per dot column, and down or up to the one before."""
        last = None
        for column in range(2 * self.columns):
            x = self.x[0] * (self.x[1] / self.x[0]) ** (column / (2 * self.columns - 1))
            row = self.dot_of(x, function(x))[1]
            for r in range(min(row, row if last is None else last), max(row, row if last is None else last) + 1):
                self._dot(column, r)
            last = row

    def drop(self, x: float) -> None:
        """Draw a dotted vertical line at `x`."""
        for row in range(0, 4 * self.rows, 2):
            self._dot(self.dot_of(x, self.y[0])[0], row)

    def mark(self, x: float, y: float, sign: str) -> None:
        """Put a character at a point, clipped to the canvas."""
        column, row = self.dot_of(min(max(x, self.x[0]), self.x[1]), min(max(y, self.y[0]), self.y[1]))
        self.cells[column // 2, row // 4] = sign

    def _dot(self, column: int, row: int) -> None:
        if not (0 <= column < 2 * self.columns and 0 <= row < 4 * self.rows):
            return
        cell = self.cells.get((column // 2, row // 4), "\u2800")
        if 0x2800 <= ord(cell) <= 0x28FF:
            self.cells[column // 2, row // 4] = chr(ord(cell) | _DOTS[row % 4][column % 2])

    def lines(self, y_label: Callable[[float], str], x_ticks: Sequence[tuple[float, str]]) -> list[str]:
        """The drawing with labels: the highest and lowest y on the left, `x_ticks` (value, text) below."""
        high, low = y_label(self.y[1]), y_label(self.y[0])
        margin = max(len(high), len(low))
        lines = []
        for row in range(self.rows):
            label = high if row == 0 else low if row == self.rows - 1 else ""
            body = "".join(self.cells.get((column, row), " ") for column in range(self.columns))
            lines.append(f"{label:>{margin}} |{body.rstrip()}")
        lines.append(f"{'':>{margin}} +{'-' * self.columns}")
        axis = [" "] * (self.columns + 1)
        for value, text in x_ticks:
            start = min(max(self.dot_of(value, self.y[0])[0] // 2 - len(text) // 2, 0), self.columns - len(text))
            if all(c == " " for c in axis[max(start - 1, 0) : start + len(text) + 1]):
                axis[start : start + len(text)] = text
        lines.append(f"{'':>{margin}}  {''.join(axis).rstrip()}")
        return lines


#: Rows of a block of bars, those under a share of the whole as one.
_BARS, _SMALL = 6, 0.01

#: Eighths of a character.
_EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True, slots=True)
class Bars:
    """The parts of a whole, largest first, each as a bar as long as its share; small ones are one row.

    Args:
        title: what the whole is, above the bars.
        parts: name -> its size; parts of no size are left out.
        whole: what a bar over the full width would be.
        show: a size in words.
    """

    title: str
    parts: Mapping[str, float]
    whole: float
    show: Callable[[float], str]

    def rows(self) -> Iterator[tuple[str, float]]:
        """The rows as they are shown."""
        found = sorted(((n, v) for n, v in self.parts.items() if v > 0), key=lambda row: -row[1])
        large = [row for row in found if row[1] >= _SMALL * self.whole]
        kept = found if len(found) <= _BARS and len(found) - len(large) < 2 else large[: _BARS - 1]
        yield from kept
        if rest := found[len(kept) :]:
            yield rest[0][0] if len(rest) == 1 else f"{len(rest)} others", sum(value for _, value in rest)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [(name.replace("_", " "), self.show(value), value / self.whole) for name, value in self.rows()]
        names, sizes = max(len(name) for name, *_ in rows), max(len(size) for _, size, _ in rows)
        room = max(options.max_width - names - sizes - 2, 4)
        yield Text(self.title, style="bold")
        for name, size, share in rows:
            eighths = max(round(8 * room * min(share, 1.0)), 1)
            bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
            yield Text(f"{name:<{names}} {size:>{sizes}} {bar}", no_wrap=True)


@dataclass(frozen=True, slots=True)
class Beside:
    """Two blocks beside each other where there is room for both, else below each other."""

    left: RenderableType
    right: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width < 76:
            yield from (self.left, Text(), self.right)
            return
        grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(self.left, self.right)
        yield grid


def round_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """At most so many round numbers of a logarithmic axis: 1, 2 and 5 of each power of ten, else 1 and 3, else 1.

    Of a span that has too few of these, multiples of a round step.

    >>> round_ticks(3, 70), round_ticks(90, 20000), round_ticks(0.081, 0.093)
    ([5.0, 10.0, 20.0, 50.0], [100.0, 300.0, 1000.0, 3000.0, 10000.0], [0.085, 0.09])
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in ((1, 2, 5), (1, 3), (1,)):
        every = [step * 10.0**k for k in range(first, last + 1) for step in steps]
        inside = [tick for tick in every if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(inside) <= most:
            break
    if len(inside) > 1:
        return inside[:: math.ceil(len(inside) / most)]
    unit = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(unit * n for n in (1, 2, 5, 10) if high - low <= most * unit * n)
    return [float(f"{n * step:.9g}") for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _share(value: float, span: tuple[float, float]) -> float:
    """Where `value` stands in `span` on a logarithmic scale, 0 to 1 inside."""
    return math.log(value / span[0]) / math.log(span[1] / span[0])


def terminal_chart(
    points: Points,
    signs: str,
    y_label: Callable[[float], str],
    x_label: Callable[[float], str],
    *,
    joined: bool = False,
) -> str:
    """Draw points as characters, one sign each, and with `joined` the line through them."""
    x, y = ((_span([p[k] for p in points])) for k in (0, 1))
    chart = Chart(x, y, columns=58, rows=10)
    if joined and len(points) > 1:
        chart.curve(lambda at: _between(points, at))
    for (px, py), sign in zip(points, signs, strict=True):
        chart.mark(px, py, sign)
    ticks = [(px, x_label(px)) for px, _ in sorted(points)]
    return "\n".join(chart.lines(y_label, ticks))


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest, with a little room."""
    low, high = min(values), max(values)
    return low / 1.1, high * 1.1


def _between(points: Points, at: float) -> float:
    """The line through the points, straight on logarithmic axes, level outside."""
    (x0, y0), *_, (x1, y1) = points
    if at <= x0 or at >= x1:
        return y0 if at <= x0 else y1
    (xa, ya), (xb, yb) = next((a, b) for a, b in pairwise(points) if a[0] <= at <= b[0])
    share = math.log(at / xa) / math.log(xb / xa)
    return float(ya * (yb / ya) ** share)


def write_svg(points: Points, names: Sequence[str], x_title: str, y_title: str, *, joined: bool = False) -> str:
    """Draw points with their names as SVG, on logarithmic axes.

    Raises:
        MissingDependencyError: when matplotlib is absent.
    """
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    axes.loglog(xs, ys, "o-" if joined else "o")
    middle = math.sqrt(min(xs) * max(xs))
    for number, ((x, y), name) in enumerate(zip(points, names, strict=True)):  # inside of the frame, beside the line
        side, aside = ("left", 5) if x <= middle else ("right", -5)
        up = -12 if joined and x > middle and ys[number - 1] > y else 5
        axes.annotate(name, (x, y), textcoords="offset points", xytext=(aside, up), fontsize="small", ha=side)
    if joined:
        axes.set_xticks(xs, [f"{x:,.6g}" for x in xs])
        axes.minorticks_off()
    axes.set(xlabel=x_title, ylabel=y_title)
    axes.grid(visible=True, which="both", alpha=0.3)
    return svg_of(figure)


def bars_svg(title: str, blocks: Sequence[Bars], mesh: Mapping[str, Mapping[str, int]] | None = None) -> str:
    """Draw blocks of bars below each other, and mesh axes on the dimensions of a network, as SVG.

    Args:
        title: above all.
        blocks: each with its rows.
        mesh: dimension of the network -> mesh axis -> its extent there; each as long as the logarithm of its extent.

    Raises:
        MissingDependencyError: when matplotlib is absent.
    """
    found = [(block, list(block.rows())[::-1]) for block in blocks]
    heights = [len(rows) + 1.5 for _, rows in found] + ([len(mesh) + 1.5] if mesh else [])
    figure = new_figure(8, 0.3 * sum(heights) + 0.4)
    figure.suptitle(title, fontsize="medium")
    panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (block, rows) in zip(panels, found, strict=False):
        drawn = axes.barh([name.replace("_", " ") for name, _ in rows], [value / block.whole for _, value in rows])
        axes.bar_label(drawn, [block.show(value) for _, value in rows], padding=3, fontsize="small")
        axes.set(xlim=(0, 1.15), xticks=[])
        axes.set_title(block.title, fontsize="small", loc="left")
    if mesh:
        _draw_mesh(panels[-1], mesh)
    return svg_of(figure)


def _draw_mesh(axes: Any, mesh: Mapping[str, Mapping[str, int]]) -> None:
    names = list(dict.fromkeys(axis for ways in mesh.values() for axis in ways))
    for dimension, ways in [*mesh.items()][::-1]:
        start = 0.0
        for axis, extent in ways.items():
            width = math.log2(extent)
            drawn = axes.barh(dimension, width, left=start, color=f"C{names.index(axis)}", edgecolor="white")
            axes.bar_label(drawn, [f"{axis} {extent}"], label_type="center", fontsize="small", color="white")
            start += width
        if not ways:
            axes.barh(dimension, 0)
    axes.set(xticks=[])
    axes.set_title("the mesh on the network", fontsize="small", loc="left")


def new_figure(width: float, height: float) -> Any:
    """A new matplotlib figure, in inches.

    Raises:
        MissingDependencyError: when matplotlib is absent.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  (an optional extra)
    except ImportError:
        raise MissingDependencyError("--svg needs matplotlib: pip install 'meshwise[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def svg_of(figure: Any) -> str:
    """Write a figure as SVG, without a date, so that equal figures are equal files."""
    from matplotlib.ticker import FixedLocator  # noqa: PLC0415  (an optional extra, which made the figure)

    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        if axis.get_scale() == "log" and not isinstance(axis.get_major_locator(), FixedLocator):
            low, high = sorted(axis.get_view_interval())
            ticks = round_ticks(low, high, 8)
            axis.set_ticks(ticks, [f"{tick:,.6g}" if tick < 1e6 else format_count(tick) for tick in ticks])
            axis.set_ticks([], minor=True)
    target = io.StringIO()
    figure.savefig(target, format="svg", metadata={"Date": None})
    return target.getvalue()


def trace_name(what: str, name: str, **at: int) -> dict[str, Any]:
    """The event that names a "process" or a "thread" of a trace."""
    return {"ph": "M", "name": f"{what}_name", **at, "args": {"name": name}}


def trace_span(name: str, category: str, start: float, seconds: float, **fields: Any) -> dict[str, Any]:
    """A complete event of a trace: times go in as seconds and are written as microseconds."""
    return {"ph": "X", "name": name, "cat": category, "ts": start * 1e6, "dur": seconds * 1e6, **fields}


def trace_text(events: Sequence[dict[str, Any]]) -> str:
    """A file of Chrome trace events, which Perfetto opens."""
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, allow_nan=False) + "\n"
