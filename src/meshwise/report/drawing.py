"""Figures as SVG, of matplotlib, an optional extra. Not here: what is drawn."""

from __future__ import annotations

import io
from typing import Any

from meshwise.core.errors import MissingDependencyError


def new_figure(width: float, height: float) -> Any:
    """Begin a figure of so many inches.

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
    target = io.StringIO()
    figure.savefig(target, format="svg", metadata={"Date": None})
    return target.getvalue()
