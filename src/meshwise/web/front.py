"""The front of a serving plan: how much throughput low latency costs, and one of its points that the reader chose.

A chosen point is the option `at` of the link. A pointer drags along the points, keys move the slider over the same
links; without JavaScript they are links. Not here: the search (`search`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from meshwise.core.units import format_count, format_time
from meshwise.web.answers import Answered
from meshwise.web.charts import Axis, Plot, figure
from meshwise.web.moves import shared
from meshwise.web.views import changed, link

_Json = Mapping[str, Any]

#: Points that are shown at most.
_MOST = 48


def points_of(data: _Json) -> Sequence[_Json]:
    """The points of the front that are shown, by latency; none where there are too few to draw."""
    points = data.get("pareto") or []
    if len(points) < 2:
        return []
    step = -(-len(points) // _MOST)
    return [*points[:-1:step], points[-1]]


def chosen(page: Mapping[str, str], points: Sequence[_Json]) -> int | None:
    """Which point a link chose, None if it chose none of them."""
    text = page.get("at", "")
    return int(text) if text.isdecimal() and int(text) < len(points) else None


def words_of(point: _Json) -> str:
    """A point in a few words: time of a token, tokens a second of all chips."""
    return f"{format_time(point['tpot_s'])}, {point['output_tokens_per_s']:,.0f}/s"


def along(answered: Answered, page: Mapping[str, str]) -> tuple[Mapping[str, str], str]:
    """Words -> link of every point, and the words of the chosen one, else of the plan's own."""
    data = answered.envelope or {}
    points = points_of(data)
    if not points:
        return {}, ""
    best = data["plans"][0]["tpot_s"]
    nearest = min(range(len(points)), key=lambda n: abs(points[n]["tpot_s"] - best))
    own = chosen(page, points)
    links = {words_of(point): _at(answered, number) for number, point in enumerate(points)}
    return links, words_of(points[nearest if own is None else own])


def _at(answered: Answered, number: int) -> str:
    return f"{link(answered.verb, answered.pairs)}&at={number}"


def front_picture(answered: Answered, data: _Json, page: Mapping[str, str]) -> Markup:
    """The chart; nothing where the search kept no front.

    Args:
        answered, data: the plan.
        page: options of the page alone, such as the chosen point.
    """
    points = points_of(data)
    if not points:
        return Markup()
    plot, best, own = _plot(data, points), data["plans"][0], chosen(page, points)
    for number, p in enumerate(points):
        kind = "apart" if p["mode"] == "disaggregated" else "dot"
        plot.point(p["tpot_s"], p["output_tokens_per_s"], kind, _layout_words(p), leads=_at(answered, number))
    if data["inputs"]["max_tpot_s"]:
        plot.upright(data["inputs"]["max_tpot_s"], f"target {format_time(data['inputs']['max_tpot_s'])}")
    plot.point(best["tpot_s"], best["output_tokens_per_s"], "you", "the plan", radius=7)
    plot.label(best["tpot_s"], best["output_tokens_per_s"], "the plan", up=14)
    note = Markup("Filled: engines prefill and decode in turn; hollow: in engines apart.")
    if own is not None:
        plot.point(
            points[own]["tpot_s"], points[own]["output_tokens_per_s"], "at", _layout_words(points[own]), radius=9
        )
        note = _chosen_words(answered, points[own]) + note
    rows = [
        (
            format_time(p["tpot_s"]),
            f"{p['output_tokens_per_s']:,.0f}",
            format_time(p["ttft_s"]),
            f"{p['batch']:,}",
            p["decode_layout"],
        )
        for p in points[:: max(1, len(points) // 24)]
    ]
    head = (">a token", ">tokens/s", ">first token", ">batch", "layout")
    return figure("How much throughput does low latency cost?", plot.svg("plot front"), head, rows, note)


def _plot(data: _Json, points: Sequence[_Json]) -> Plot:
    """The axes, and the front as steps: what a latency reaches, a longer one reaches, too."""
    best = data["plans"][0]
    times, tokens = [p["tpot_s"] for p in points], [p["output_tokens_per_s"] for p in points]
    every_x, every_y = [*times, best["tpot_s"]], [*tokens, best["output_tokens_per_s"]]
    plot = Plot(
        Axis(min(every_x) / 1.3, max(every_x) * 1.3, format_time, "time per output token"),
        Axis(min(every_y) / 1.3, max(every_y) * 1.3, format_count, "output tokens/s of all chips"),
    )
    steps = [(x, y) for (x1, y1), x2 in zip(zip(times, tokens, strict=True), [*times[1:], times[-1]], strict=True)
             for x, y in ((x1, y1), (x2, y1))]  # fmt: skip
    plot.line(steps, "front")
    return plot


def _layout_words(point: _Json) -> str:
    apart = ", apart" if point["mode"] == "disaggregated" else ""
    return f"{point['decode_layout']}, batch {point['batch']:,}{apart}"


def _chosen_words(answered: Answered, point: _Json) -> Markup:
    """What the chosen point is, and where it is estimated in full."""
    words = Markup("<b>Chosen: {} a token, {} tokens/s, the first after {}: {}</b>").format(
        format_time(point["tpot_s"]), f"{point['output_tokens_per_s']:,.0f}", format_time(point["ttft_s"]),
        _layout_words(point),
    )  # fmt: skip
    if point["mode"] == "disaggregated":
        return words + Markup(". ")
    asked = changed(
        "estimate serve",
        shared(answered.pairs, "estimate serve"),
        layout=point["decode_layout"],
        batch=str(point["batch"]),
    )
    return words + Markup(' (<a href="{}">all of it</a>). ').format(link("estimate serve", asked))
