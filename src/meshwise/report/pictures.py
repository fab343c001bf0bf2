"""Points and curves on logarithmic axes, for the terminal and as SVG. Not here: what they show (one file a verb)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from meshwise.report.chart import Chart
from meshwise.report.drawing import new_figure, svg_of

Points = Sequence[tuple[float, float]]


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
    for (x, y), name in zip(points, names, strict=True):
        axes.annotate(name, (x, y), textcoords="offset points", xytext=(5, 5), fontsize="small")
    axes.set_xlabel(x_title)
    axes.set_ylabel(y_title)
    axes.grid(visible=True, which="both", alpha=0.3)
    return svg_of(figure)
