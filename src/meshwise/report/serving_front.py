"""Fronts of latency and throughput as SVG. Not here: the same in a terminal (`plan_serve`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwise.costs.serving.answer import ServingEstimate
from meshwise.report.chart import new_figure, svg_of
from meshwise.search.serving.planner import FrontPoint


def front_svg(fronts: Mapping[str, Sequence[FrontPoint]], best: ServingEstimate, title: str) -> str:
    """Draw output tokens per second and chip against time per output token, a line for each front.

    Args:
        fronts: name -> its points, least time first; filled where engines prefill and decode, hollow where apart.
        best: the plan that was chosen.
        title: above the picture.

    Raises:
        MissingDependencyError: when matplotlib is absent.
    """
    figure = new_figure(7.5, 4.8)
    axes = figure.subplots()
    for name, front in fronts.items():
        x, y = [1e3 * p.tpot for p in front], [p.tokens for p in front]
        (line,) = axes.plot(x, y, drawstyle="steps-post", linewidth=1, label=name or "the front")
        for filled, mode in ((True, "aggregated"), (False, "disaggregated")):
            points = [(px, py) for px, py, p in zip(x, y, front, strict=True) if p.setup.mode == mode]
            face = line.get_color() if filled else "white"
            axes.plot(*zip(*points, strict=True) if points else ((), ()), "o", markersize=4, color=line.get_color(),
                      markerfacecolor=face)  # fmt: skip
    axes.plot(
        [1e3 * best.tpot.expected], [best.throughput_per_chip], "*", markersize=13, color="black", label="the plan"
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("time per output token, ms (filled: engines do both; hollow: apart)")
    axes.set_ylabel("output tokens/s per chip")
    axes.set_title(title, fontsize="medium")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize="small")
    return svg_of(figure)
