"""The 80 % interval of a planned step, and the constants that its expected time comes from.

Only for calibrations whose whole steps were compared with measured ones. Not here: how wide it is (`costs.spread`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType

from meshwise.core.explanation import Explanation
from meshwise.core.units import format_time
from meshwise.costs.calibration import Calibration
from meshwise.costs.estimate import step_spread
from meshwise.costs.spread import EIGHTY_PERCENT, SPREADS, interval_of
from meshwise.report.table import Columns, tabulate, words
from meshwise.search import Plan

_MICRO = "matmuls of K = 1,024 to 16,384 and causal attention over 512 to 16,384 keys, NVIDIA AIConfigurator database"
_DAO = "Dao 2023, FlashAttention-2, figures 4 to 7, which show its predecessor, too"
_STEPS = "fitted to whole steps, around single operations"


def has_interval(calibration: Calibration) -> bool:
    """Whether steps under it were compared with measured ones."""
    return calibration.uncertainty_sources is not None


def likely_data(plan: Plan) -> dict[str, list[float]]:
    """The interval for JSON, beside the bounds; nothing under other calibrations."""
    return {"interval_80": list(_interval(plan, _parts(plan)))} if has_interval(plan.problem.calibration) else {}


def likely_words(plan: Plan) -> str:
    """The interval and its causes, in one line; empty for calibrations without one."""
    if not has_interval(plan.problem.calibration):
        return ""
    parts = _parts(plan)
    low, high = _interval(plan, parts)
    causes = ", ".join(f"{words(cause)} {100 * s:.1f} %" for cause, s in parts.items())
    return f"Four of five such steps take {format_time(low)} to {format_time(high)} (spread: {causes})"


def likely_range(plan: Plan) -> str:
    """The interval in few words; empty for calibrations without one."""
    if not has_interval(plan.problem.calibration):
        return ""
    low, high = _interval(plan, _parts(plan))
    return f"80 % of such steps: {format_time(low)} to {format_time(high)}"


def explain_likely(plan: Plan) -> tuple[Explanation, ...]:
    """Show how the interval comes about."""
    calibration = plan.problem.calibration
    if not has_interval(calibration):
        return ()
    step, parts = plan.estimate.step_time, _parts(plan)
    low, high = _interval(plan, parts)
    squares = " + ".join(f"{s:.3f}^2" for s in parts.values())
    spread = math.hypot(*parts.values())
    causes = "; ".join(f"{words(cause)}: {SPREADS[cause].why}" for cause in parts)
    return (
        Explanation(
            "80 % interval of the step time",
            "expected / and x e^(1.28 x sqrt(sum of squares of spreads)), not under the lower bound, which no step "
            "beats; it may end above the upper one, which overlaps nothing but reaches the expected rates",
            f"{format_time(step.expected)} / and x e^(1.28 x sqrt({squares})) = e^(1.28 x {spread:.3f}) = "
            f"{math.exp(EIGHTY_PERCENT * spread):.3f}",
            f"{format_time(low)} to {format_time(high)}",
            f"{causes}; docs/accuracy.md says how many measured steps lie in it",
        ),
    )


def constants_table(calibration: Calibration) -> tuple[RenderableType, ...]:
    """List the constants of a calibration, each with its source."""
    if not has_interval(calibration):
        return ()
    columns: Columns = {
        f"constant of {calibration.name}": "name",
        ">value": ("value", lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.3g}"),
        "unit": "unit",
    }
    return (tabulate(columns, _constants(calibration), note=lambda constant: constant["source"]),)


def constants_data(calibration: Calibration) -> dict[str, Any]:
    """The same for JSON."""
    if not has_interval(calibration):
        return {}
    name, constants = calibration.name, _constants(calibration)
    return {"calibration": {"name": name, "constants": constants, "source": calibration.source}}


def _parts(plan: Plan) -> dict[str, float]:
    return step_spread(plan.problem, plan.fabric, plan.layout, plan.estimate)


def _interval(plan: Plan, parts: Mapping[str, float]) -> tuple[float, float]:
    step = plan.estimate.step_time
    likely = interval_of(step.expected, step.lower, math.hypot(*parts.values()))
    return likely.low, likely.high


def _constants(c: Calibration) -> list[dict[str, Any]]:
    """Name as in files of `calibrate` where these have it, value, unit, source."""
    return [
        {"name": n, "value": value, "unit": unit, "source": "your own measurements" if n in c.refined else source}
        for n, value, unit, source in _all(c)
        if value is not None
    ]


def _all(c: Calibration) -> Iterator[tuple[str, float | None, str, str]]:
    flops, own = "share of dense FLOP/s", f"the family's, {_STEPS}"
    if "family" in (c.uncertainty_sources or ()):
        own = "inherited from other families: no steps of this one were measured"
    fused = _MICRO if c.half_attention or c.unfused_attention else _DAO
    yield "matmul_efficiency", c.matmul_efficiency, flops, own
    for dtype, share in c.narrow:
        yield f"matmul_efficiency.{dtype.value}", share, flops, own
    yield "attention_efficiency", c.attention_efficiency, flops, fused
    yield "attention_backward", c.attention_backward, "of the forward rate", _DAO
    yield "half_depth", c.half_depth, "terms of a sum", _MICRO
    yield "half_attention", c.half_attention, "keys", _MICRO
    yield "compute_units", c.compute_units, "in each wave of tiles", "the chip's"
    yield "hbm_efficiency", c.hbm_efficiency, "share of HBM bandwidth", own
    yield "links.efficiency", c.links.efficiency, "share of link bandwidth", own
    yield "links.startup", c.links.startup, "s", "collectives by size of message (docs/planning.md)"
    yield "elementwise_passes", c.elementwise_passes, "times the bytes", f"the software's, {_STEPS}"
    yield "gap", c.gap, "s between operations", _STEPS
    yield "mixture_launch", c.mixture_launch, "s an operation", _STEPS
    yield "interference", c.interference, "share of what is hidden", _STEPS
