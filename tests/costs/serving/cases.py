"""Small serving problems, priced."""

from __future__ import annotations

from meshwise.costs.calibration import IDENTITY, default_calibration
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import ServingSetup
from meshwise.costs.serving.estimate import engine_axis_mappings, estimate_serving, wires_of
from meshwise.costs.serving.sizes import StepSizes
from meshwise.costs.serving.step import price_step
from meshwise.hardware import parse_cluster
from meshwise.jobs import ServingLoad
from meshwise.models import load_model
from meshwise.sharding.serving import parse_serving_layout

__all__ = ["estimate", "problem", "setup", "step"]


def problem(model="llama-3-8b", on="h100:8", *, ideal=False, prompt=1024, output=256, **load):
    cluster = parse_cluster(on)
    calibration = IDENTITY if ideal else default_calibration(cluster.chip)
    return ServingProblem(load_model(model), ServingLoad(prompt=prompt, output=output, **load), cluster, calibration)


def step(given, name, layout, batch, queries, keys):  # noqa: PLR0917 -- sizes as they are spoken
    """One step on the fastest wires."""
    layout = parse_serving_layout(layout, num_chips=given.cluster.num_chips)
    fabric = given.network
    sizes = StepSizes(float(batch), float(queries), float(keys), {a: float(n) for a, n in layout.sizes.items()})
    priced = [
        price_step(given, name, layout.structure, sizes, wires_of(given, fabric, wiring))
        for wiring in engine_axis_mappings(layout.sizes, fabric)
    ]
    return min(priced, key=lambda costs: costs.expected)


def setup(given, layout, batch, prefill=None, mode="aggregated", **more):
    chips = given.cluster.num_chips
    decode = parse_serving_layout(layout, num_chips=chips)
    into = decode if prefill is None else parse_serving_layout(prefill, num_chips=chips)
    return ServingSetup(mode, into, decode, batch, **more)


def estimate(given, layout, batch, prefill=None, mode="aggregated", **more):
    return estimate_serving(given, setup(given, layout, batch, prefill, mode, **more))
