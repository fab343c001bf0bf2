"""Charts as SVG, drawn for any width: places are shares of it, and letters keep their size.

Each is a figure that asks one question and has its numbers as a table. Colours, dashes and patterns are classes of the
style sheet. Not here: what the numbers mean (`pictures`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from meshwise.report.chart import round_ticks
from meshwise.web.html import table

#: Pixels: of a chart's height, and of the room for its labels above and below.
HEIGHT, ABOVE, BELOW = 280, 26, 26

#: Pixels of a letter beside an axis, at most.
_LETTER = 7


@dataclass(frozen=True)
class Axis:
    """One axis, logarithmic.

    Args:
        low, high: ends of what is shown.
        show: a value in words.
        title: what it is.
    """

    low: float
    high: float
    show: Callable[[float], str]
    title: str

    def share(self, value: float) -> float:
        """Where a value stands, 0 to 1, clipped to the ends."""
        at = math.log(value / self.low) / math.log(self.high / self.low)
        return min(max(at, 0.0), 1.0)


def figure(
    question: str, picture: Markup, head: Sequence[str], rows: Sequence[Sequence[str]], note: str = ""
) -> Markup:
    """A picture with its question, and its numbers as a table.

    Args:
        question: above it.
        picture: SVG, hidden from screen readers, which have the table.
        head: of the table; a name that starts with ">" is of numbers.
        rows: of the table.
        note: one sentence below.
    """
    right = [name.startswith(">") for name in head]
    numbers = table([name.lstrip(">") for name in head], rows, right)
    below = Markup("<p>{}</p>").format(note) if note else ""
    return Markup(
        "<figure><figcaption>{}</figcaption>{}{}<details><summary>as a table</summary>{}</details></figure>"
    ).format(question, picture, below, numbers)


@dataclass
class Plot:
    """A plot over two logarithmic axes.

    Args:
        x, y: the axes.
    """

    x: Axis
    y: Axis

    def __post_init__(self) -> None:
        self.parts: list[Markup] = []

    def at(self, x: float, y: float) -> tuple[str, str]:
        """A place: a share of the width, pixels from above."""
        down = ABOVE + (1 - self.y.share(y)) * (HEIGHT - ABOVE - BELOW)
        return f"{100 * self.x.share(x):.2f}%", f"{down:.1f}"

    def line(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """A line through points."""
        places = [self.at(x, y) for x, y in points]
        for (x1, y1), (x2, y2) in pairwise(places):
            self.parts.append(Markup('<line class="{}" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(kind, x1, y1, x2, y2))

    def point(self, x: float, y: float, kind: str, words: str = "", *, radius: int = 4, leads: str = "") -> None:
        """A dot; `words` are shown where the pointer rests on it; `leads` is its link, for a pointer alone."""
        across, down = self.at(x, y)
        named = Markup("<title>{}</title>").format(words) if words else ""
        dot = Markup('<circle class="{}" cx="{}" cy="{}" r="{}">{}</circle>').format(kind, across, down, radius, named)
        self.parts.append(Markup('<a href="{}" tabindex="-1">{}</a>').format(leads, dot) if leads else dot)

    def label(self, x: float, y: float, words: str, *, up: int = 9, left: bool | None = None) -> None:
        """Words beside a place, on its left or right; by default where there is more room."""
        across, down = self.at(x, y)
        anchor, aside = ("end", -10) if (self.x.share(x) >= 0.5 if left is None else left) else ("start", 10)
        self.parts.append(
            Markup('<text class="{}" x="{}" y="{}" dx="{}">{}</text>').format(
                anchor, across, f"{float(down) - up:.1f}", aside, words
            )
        )

    def upright(self, x: float, words: str) -> None:
        """A dotted line from below to above, with words at its head."""
        across = self.at(x, self.y.low)[0]
        line = Markup('<line class="limit" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>')
        head = Markup('<text class="{}" x="{}" y="12">{}</text>')
        self.parts += [
            line.format(across, ABOVE - 8, HEIGHT - BELOW),
            head.format(_anchor(self.x.share(x), 0.2), across, words),
        ]

    def svg(self, kind: str = "plot") -> Markup:
        """The picture, of a class; the numbers of the axis up stand beside it."""
        grid, beside = Markup(), Markup()
        for value in round_ticks(self.x.low, self.x.high):
            across = self.at(value, self.y.low)[0]
            grid += Markup('<line class="grid" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>').format(
                across, ABOVE, HEIGHT - BELOW
            )
            grid += Markup('<text class="tick {}" x="{}" y="{}">{}</text>').format(
                _anchor(self.x.share(value), 0.1), across, HEIGHT - BELOW + 16, self.x.show(value)
            )
        named = [(self.at(self.x.low, value)[1], self.y.show(value)) for value in round_ticks(self.y.low, self.y.high)]
        width = _LETTER * max(len(words) for _, words in named) + 8
        for down, words in named:
            grid += Markup('<line class="grid" x1="0" x2="100%" y1="{0}" y2="{0}"/>').format(down)
            beside += Markup('<text class="tick end" x="{}" y="{}">{}</text>').format(
                width - 6, f"{float(down) + 4:.1f}", words
            )
        drawn = Markup('<svg width="{}" height="{}" aria-hidden="true">{}</svg>').format(width, HEIGHT, beside)
        drawn += Markup('<svg class="{}" height="{}" aria-hidden="true">{}</svg>').format(
            kind, HEIGHT, grid + Markup().join(self.parts)
        )
        return Markup(
            '<div class="axis">{} (up)</div><div class="plotted">{}</div><div class="axis right">{} (right)</div>'
        ).format(self.y.title, drawn, self.x.title)


def _anchor(share: float, edge: float) -> str:
    """Where words stand beside a place, so that they stay inside; `edge` is the share that half of them needs."""
    return "start" if share < edge else "end" if share > 1 - edge else "middle"


def lanes(rows: Iterable[tuple[str, Sequence[tuple[int, int, str]]]], columns: int, ends: str = "") -> Markup:
    """A strip a row, of pieces from one column to another, each of a kind.

    Args:
        rows: name, and pieces (first column, one past the last, kind).
        columns: of a strip.
        ends: what the strips' right ends mean, of those that begin at 0.
    """
    out = Markup()
    for name, pieces in rows:
        rects = (
            Markup('<rect class="{}" x="{:.4g}%" width="{:.4g}%" height="22"/>').format(
                kind, 100 * first / columns, 100 * (end - first) / columns
            )
            for first, end, kind in pieces
        )
        strip = Markup('<svg class="lane" aria-hidden="true">{}</svg>').format(Markup().join(rects))
        out += Markup('<tr><th scope="row">{}</th><td class="wide">{}</td></tr>').format(name, strip)
    if ends:
        out += Markup('<tr><td></td><td class="axis ends"><span>0</span><span>{}</span></td></tr>').format(ends)
    return Markup('<table class="lanes"><tbody>{}</tbody></table>').format(out)


def legend(kinds: Iterable[tuple[str, str]]) -> Markup:
    """Signs and their names."""
    signs = (
        Markup(
            '<span class="sign"><svg width="18" height="14" aria-hidden="true">'
            '<rect class="{}" width="18" height="14"/></svg> {}</span>'
        ).format(kind, name)
        for kind, name in kinds
    )
    return Markup('<p class="legend">{}</p>').format(Markup(" ").join(signs))
