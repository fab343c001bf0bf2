"""A log-log chart drawn with braille dots, two by four to a character. Not here: what is drawn (`roofline`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

#: Bit of each dot of a braille cell, by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


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
        """Give the drawing with labels: the highest and lowest y on the left, `x_ticks` (value, text) below."""
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


def _share(value: float, span: tuple[float, float]) -> float:
    """Where `value` stands in `span` on a logarithmic scale, 0 to 1 inside."""
    return math.log(value / span[0]) / math.log(span[1] / span[0])
