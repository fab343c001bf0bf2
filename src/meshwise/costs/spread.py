"""How far a measured step may lie from the expected one: an 80 % interval from what is known and what is not.

Not here: bounds, which no step can leave (`step`), and what is achieved (`calibration`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from meshwise.core.dtypes import DType
from meshwise.costs.calibration import Calibration
from meshwise.models import Model

#: Standard deviations of a normal distribution on each side that hold 80 % of it.
EIGHTY_PERCENT = 1.2816


@dataclass(frozen=True, slots=True)
class Spread:
    """A cause of uncertainty: standard deviation of the logarithm of what it touches.

    Args:
        sigma: of the logarithm.
        why: in words, with where it is from.
    """

    sigma: float
    why: str


#: Cause -> how much. Those that name a term of the step count with that term's share of the time, launches with the
#: share that they decide (`estimate.launched_share`).
SPREADS = {
    "software": Spread(0.09, "releases of the same software differ, as do kernels, clocks and clusters"),
    "finished": Spread(0.04, "in place of software: of a generation without more releases"),
    "compute": Spread(0.06, "achieved rates of matmuls and attention"),
    "communication": Spread(0.25, "achieved bandwidth, other traffic, what is hidden"),
    "overheads": Spread(0.30, "bubbles, optimizer, streams to the host"),
    "remat": Spread(0.12, "what is recomputed is not known: between nothing and all of the forward pass"),
    "zero": Spread(0.03, "what replicas share out is not known"),
    "micro_batch": Spread(0.10, "the microbatch is not known"),
    "mixture": Spread(0.14, "kernels and exchanges of experts change between releases by a quarter"),
    "launches": Spread(0.40, "what hosts take to launch layers with experts: a dozen launches and a synchronisation"),
    "engine": Spread(0.12, "releases of serving engines, their settings, and lengths of requests differ"),
    "experts": Spread(0.21, "in place of mixture, of engines: they differ more in kernels and exchanges of experts"),
    "model": Spread(0.12, "no steps of engines with a model of as many layers and as wide were measured"),
    "unnamed": Spread(0.12, "the software is not known, or was not measured: kernels and overlap may be others'"),
    "chip": Spread(0.10, "no steps of this chip were measured, of others of its family were"),
    "format": Spread(0.08, "no steps of such chips in this number format were measured, in others they were"),
    "anchored": Spread(0.10, "what one layout is off by for reasons of its own, beside measured ones of its machine"),
    "family": Spread(0.14, "no steps of such chips were measured; families keep 60 to 79 % of their peak in matmuls"),
}

#: Times these spreads that intervals of training have: what forecasts of sources that were left out are off by says it
#: (`scoring.held_out`). Those of serving likewise: 0.56 times holds 80 % where each engine of a source is left out,
#: and 0.57 where each model is, if a model that no other rows are of counts as not measured.
WIDTH, SERVING_WIDTH = 0.61, 0.57

_TERMS = {
    **dict.fromkeys(("forward", "backward", "recompute", "matmuls", "attention", "elementwise"), "compute"),
    **dict.fromkeys(
        ("tensor", "cache", "width", "context", "expert", "fsdp", "data", "pipeline_send"), "communication"
    ),
    **dict.fromkeys(("pipeline_bubble", "optimizer", "offload", "pipeline", "host"), "overheads"),
}


@dataclass(frozen=True, slots=True)
class Likely:
    """Seconds between which a measured step lies in four of five cases."""

    low: float
    high: float


def uncertainty_sources(calibration: Calibration, model: Model, compute: DType | None = None) -> tuple[str, ...]:
    """Causes of uncertainty of a chip and a model, whatever is known of the layout.

    Args:
        calibration: of the chip.
        model: that is trained or served.
        compute: format of its matmuls; None where whole steps do not say which were measured.
    """
    found = calibration.uncertainty_sources or ()
    known = compute is None or calibration.measured_formats is None or compute in calibration.measured_formats
    own = () if known or {"anchored", "family"} & {*found} else ("format",)
    mixture = "experts" if "engine" in found else "mixture"
    return (*found, *own, *((mixture,) if model.mixtures else ()))


def spread_parts(terms: Mapping[str, float], unknown: Collection[str] = (), launched: float = 0.0) -> dict[str, float]:
    """Each cause's standard deviation of the logarithm of a step's time, `WIDTH` or `SERVING_WIDTH` times that stated.

    Args:
        terms: exposed seconds by name.
        unknown: causes of `SPREADS` that are open: "remat", "zero", "micro_batch", "mixture", "family", ...; "anchored"
            stands in place of those that measured layouts of the machine share, "finished" in place of "software".
        launched: share of the step in which devices wait for hosts to launch layers with experts.
    """
    total = sum(terms.values())
    shares = dict.fromkeys(("compute", "communication", "overheads"), 0.0)
    for name, seconds in terms.items():
        shares[_TERMS[name]] += seconds / total
    parts = {"software": SPREADS["software"].sigma}
    shares["launches"] = launched
    parts |= {cause: share * SPREADS[cause].sigma for cause, share in shares.items() if share}
    if {"anchored", "finished"} & {*unknown}:
        del parts["software"]
    if "anchored" in unknown:  # what layouts of one machine share was measured
        parts.pop("compute", None)
    width = SERVING_WIDTH if "engine" in unknown else WIDTH
    return {cause: width * s for cause, s in (parts | {cause: SPREADS[cause].sigma for cause in unknown}).items()}


def relative_spread(terms: Mapping[str, float], unknown: Collection[str] = (), launched: float = 0.0) -> float:
    """The standard deviation of the logarithm of a step's time; arguments as in `spread_parts`."""
    return math.hypot(*spread_parts(terms, unknown, launched).values())


#: Causes whose effect all layouts of a machine, a model and its software share.
_SHARED = ("software", "finished", "compute", "unnamed", "chip", "format", "family", "mixture")


#: What each layout is off by alone, beside measured ones of its machine.
OWN_SPREAD = WIDTH * SPREADS["anchored"].sigma


def shared_spread(terms: Mapping[str, float], unknown: Collection[str] = ()) -> float:
    """The standard deviation of what all layouts of a machine, a model and its software are off by together.

    It is what `OWN_SPREAD` leaves of these causes, and half of them at least.
    """
    parts = spread_parts(terms, {*unknown} - {"anchored"})
    whole = math.hypot(*(parts.get(cause, 0.0) for cause in _SHARED))
    return math.sqrt(max(whole**2 - OWN_SPREAD**2, (whole / 2) ** 2))


def likely_interval(expected: float, lower: float, terms: Mapping[str, float], unknown: Collection[str] = ()) -> Likely:
    """The 80 % interval of a step's time; never below `lower`, which no step beats."""
    return interval_of(expected, lower, relative_spread(terms, unknown))


def interval_of(expected: float, lower: float, spread: float) -> Likely:
    """The same of a standard deviation of the logarithm."""
    factor = math.exp(EIGHTY_PERCENT * spread)
    return Likely(max(expected / factor, min(lower, expected)), expected * factor)
