"""What one layout would do: time and its terms, memory by class, utilisation, what binds, what a run costs.

Made by the same evaluator as a whole search. Not here: which layout is best (`planning`), or words (`report`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from meshwise.core.errors import LayoutError
from meshwise.core.tensors import Attention, Einsum, Fused
from meshwise.core.units import format_bytes, format_time
from meshwise.costs.evaluate import Costs, evaluate
from meshwise.costs.fabric import Fabric
from meshwise.costs.layout_choices import Candidates, LayoutChoices
from meshwise.costs.local import Local
from meshwise.costs.network import PlacedWires
from meshwise.costs.offload import check_offload
from meshwise.costs.pipeline import Pipeline, fills, num_layers
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.spread import spread_parts
from meshwise.costs.step import Ledger
from meshwise.models import Model
from meshwise.sharding.layout import MESH_AXES, Layout
from meshwise.sharding.remat import check_remat


@dataclass(frozen=True, slots=True)
class Interval:
    """A bound from below, an expectation, a bound from above."""

    lower: float
    expected: float
    upper: float


@dataclass(frozen=True, slots=True, repr=False)
class Estimate:
    """What a layout would do in one training step.

    Args:
        step_time: seconds.
        terms: exposed seconds by name; they add up to `step_time.expected`.
        hidden: seconds of communication that compute hides, by axis.
        resources: seconds that each resource is busy at data-sheet rates; the largest is `step_time.lower`.
        bound: the resource that is busiest: "compute", "hbm", or "<axis> communication" ("host" for the host link).
        memory: bytes by class on the fullest chip, and "total".
        hbm_capacity: bytes of one chip, as the device reports them.
        host_memory: bytes in the host's memory for one chip by class, and "total"; empty where nothing is offloaded.
        host_capacity: the chip's share of the host's memory, None where it is not known.
        tokens: tokens per step.
        num_chips: chips used.
        model_flops: FLOPs that the model needs per step: 6 x active parameters x tokens, plus causal attention three
            times over.
        recompute_flops: FLOPs of the forward pass that are done again.
        peak_flops_per_s: of one chip in the compute format: the denominator of MFU.
    """

    step_time: Interval
    terms: Mapping[str, float]
    hidden: Mapping[str, float]
    resources: Mapping[str, float]
    bound: str
    memory: Mapping[str, float]
    hbm_capacity: float
    host_memory: Mapping[str, float]
    host_capacity: float | None
    tokens: float
    num_chips: int
    model_flops: float
    recompute_flops: float
    peak_flops_per_s: float

    def __repr__(self) -> str:
        held = f"{format_bytes(self.memory['total'])} of {format_bytes(self.hbm_capacity)}"
        return f"<Estimate: {format_time(self.step_time.expected)} a step, {self.bound}-bound, {held}>"

    @property
    def fits(self) -> bool:
        """Whether the fullest chip's memory suffices, and the host's for what is offloaded."""
        host = self.host_memory.get("total", 0.0) <= (self.host_capacity or 0.0)
        return self.memory["total"] <= self.hbm_capacity and host

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the chips could do in the expected step time."""
        return self.model_flops / (self.step_time.expected * self.num_chips * self.peak_flops_per_s)

    @property
    def hfu(self) -> float:
        """The same with recomputed FLOPs counted."""
        return self.mfu * (1 + self.recompute_flops / self.model_flops)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, all chips together."""
        return self.tokens / self.step_time.expected

    @property
    def tokens_per_chip(self) -> float:
        """Tokens of a step per chip: the book's B/N."""
        return self.tokens / self.num_chips


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """What a whole run takes.

    Args:
        steps: optimizer steps.
        days, chip_hours: expected.
        cost_usd: dollars, None where no price is known.
        energy_kwh: at the chips' rated power, without hosts and cooling.
    """

    steps: float
    days: Interval
    chip_hours: float
    cost_usd: float | None
    energy_kwh: float


def model_flops(problem: TrainingProblem, tokens: float) -> float:
    """FLOPs that training on `tokens` needs by the convention of MFU; attention and recurrences as computed.

    6 per active parameter and token; where weights are frozen, 4 of theirs and of what stays wide, 6 of the adapters'.
    """
    if not problem.job.tuning.full:
        frozen, trained, attention = tuned_flops(problem, tokens)
        return 2 * frozen + 3 * trained + 3 * attention
    program = problem.model.train_program()
    seq_len = problem.job.seq_len
    sizes = program.bind(batch=tokens / seq_len, queries=seq_len)
    mixed = sum(repeat * op.flops(sizes) for repeat, op in problem.mixing)
    return float(6 * problem.model.parameters.active_in_mfu * tokens + 3 * mixed)


def tuned_flops(problem: TrainingProblem, tokens: float) -> tuple[float, float, float]:
    """FLOPs of one forward pass where weights are frozen: of frozen weights, of adapters, of attention.

    Backward, a frozen weight costs as much again (the gradient of its input), an adapter twice as much.
    """
    program, seq_len = problem.train_program(), problem.job.seq_len
    sizes = program.bind(batch=tokens / seq_len, queries=seq_len)
    frozen = trained = attention = 0.0
    for block in program:
        for op in block.ops:
            flops = float(block.repeat * op.flops(sizes))
            if op.matmul and isinstance(op, Attention | Fused):
                attention += flops
            elif isinstance(op, Einsum) and any(t.frozen for t in op.inputs):
                frozen += flops
            elif isinstance(op, Einsum):
                trained += flops
    return frozen, trained, attention


def _recompute_flops(
    problem: TrainingProblem, structure: LayoutChoices, candidates: Candidates, sequences: float
) -> float:
    sizes = problem.train_program().bind(batch=sequences, queries=problem.job.seq_len)
    total = 0.0
    for lowered in problem.lowered.training(structure):
        total += lowered.placed.block.repeat * sum(op.flops(sizes) for op in lowered.recomputed_matmuls)
    return float(total * candidates.remat_share)


def layout_factors(fabric: Fabric, layout: Layout) -> dict[str, list[float]]:
    """Extents of each mesh axis on the dimensions of the network, as `make_group_link` takes them."""
    assert layout.wires is not None, "the search fills in the wires"
    extents = dict(layout.wires)
    dims = len(fabric.dimensions)
    return {a: [float(e) for e in extents.get(a, (1,) * dims)] for a in MESH_AXES}


def layout_wires(problem: TrainingProblem, fabric: Fabric, layout: Layout) -> PlacedWires:
    """Wires of a complete layout: mesh axes -> wire."""
    return PlacedWires(fabric, layout_factors(fabric, layout), problem.routing)


@lru_cache(maxsize=1024)  # of one layout several ask
def layout_candidate(model: Model, layout: Layout) -> tuple[LayoutChoices, Candidates]:
    """A layout as the evaluator takes it: its structure and its sizes.

    Raises:
        LayoutError: the model has fewer layers than are to be recomputed, or offloaded; the pipeline cannot run so.
        UnknownNameError: its layers have no such operations as the remat policy lists.
    """
    check_remat(layout.remat, model.train_program())
    layers = model.num_layers
    for name in ("remat_layers", "offload_layers"):
        if (getattr(layout, name) or 0) > layers:
            raise LayoutError(
                f"layout: {name}={getattr(layout, name)} is more than the {layers} layers of {model.name}; "
                f"use {layers} or less, or leave it out for all"
            )
    check_pipeline(num_layers(model.train_program()), layout)
    candidates = Candidates(
        **{a: float(s) for a, s in layout.sizes.items()},
        micro_batch=float(layout.micro_batch),
        num_microbatches=float(layout.num_microbatches),
        virtual_stages=float(layout.virtual_stages),
        schedule=layout.schedule,
        remat_share=1.0 if layout.remat_layers is None else layout.remat_layers / layers,
        offload_share=1.0 if layout.offload_layers is None else layout.offload_layers / layers,
    )
    return LayoutChoices.of(layout), candidates


def check_pipeline(layers: int, layout: Layout) -> None:
    """Refuse a pipeline that its schedule cannot run.

    Raises:
        LayoutError: the schedule needs other sizes, or more layers than there are.
    """
    pipeline = Pipeline.of(layout.schedule, layout.stage, layout.num_microbatches, layout.virtual_stages)
    reason = pipeline.schedule.why_not(pipeline.shape)
    if reason is not None:
        raise LayoutError(f"layout: schedule={reason}")
    if not fills(layers, pipeline):
        raise LayoutError(
            f"layout: schedule={layout.schedule} on {layout.stage} stages cuts the model into {pipeline.num_chunks} "
            f"chunks, found {layers} layers; use fewer stages or virtual stages"
        )


def evaluate_layout(problem: TrainingProblem, fabric: Fabric, layout: Layout, ledger: Ledger | None = None) -> Costs:
    """Evaluate one layout with the evaluator of the search; `ledger` is filled with what its terms are sums of."""
    structure, candidates = _checked_candidate(problem, layout)
    return evaluate(problem, structure, candidates, layout_wires(problem, fabric, layout), ledger=ledger)


def _checked_candidate(problem: TrainingProblem, layout: Layout) -> tuple[LayoutChoices, Candidates]:
    check_offload(problem.cluster.chip, layout.offload)
    return layout_candidate(problem.model, layout)


def estimate_training(problem: TrainingProblem, fabric: Fabric, layout: Layout, local: Local | None = None) -> Estimate:
    """Estimate one complete layout.

    Args:
        problem: model, job, cluster, calibration.
        fabric: the network, or the part of it that the layout uses.
        layout: with wires.
        local: as `evaluate` takes it.

    Raises:
        LayoutError: when the layout does not fit the fabric.
    """
    if layout.num_chips != math.prod(fabric.sizes):
        raise LayoutError(
            f"layout {layout} uses {layout.num_chips:,} chips, the network has {math.prod(fabric.sizes):,}"
        )
    structure, candidates = _checked_candidate(problem, layout)
    if layout.context == 1:
        structure = problem.lowered.without_context(structure)
    costs = evaluate(problem, structure, candidates, layout_wires(problem, fabric, layout), local)
    return estimate_of(problem, layout, structure, candidates, costs)


def estimate_of(
    problem: TrainingProblem, layout: Layout, structure: LayoutChoices, candidates: Candidates, costs: Costs
) -> Estimate:
    """The estimate of a complete layout that was evaluated, alone (floats), as `layout_candidate` has it."""
    step = costs.step
    resources = {name: float(v) for name, v in step.resources.items()}
    busiest = max(resources.keys() - {"in_turn"}, key=lambda name: resources[name])
    tokens = layout.sequences * problem.job.seq_len
    return Estimate(
        step_time=Interval(float(step.lower), float(step.expected), float(step.upper)),
        terms={name: float(v) for name, v in step.terms.items()},
        hidden={name: float(v) for name, v in step.hidden.items()},
        resources=resources,
        bound=busiest if busiest in ("compute", "hbm") else f"{busiest} communication",
        memory={name: float(v) for name, v in costs.memory.items()},
        hbm_capacity=problem.cluster.chip.hbm_usable,
        host_memory={name: float(v) for name, v in costs.host_memory.items()},
        host_capacity=problem.cluster.chip.host_memory,
        tokens=tokens,
        num_chips=layout.num_chips,
        model_flops=model_flops(problem, tokens),
        recompute_flops=_recompute_flops(problem, structure, candidates, layout.sequences),
        peak_flops_per_s=problem.cluster.chip.peak(problem.job.formats.compute),
    )


#: By how much the logarithm of what a host takes for a launch is changed, to see what a step changes by.
_LATER = 0.05


def launched_share(problem: TrainingProblem, fabric: Fabric, layout: Layout, expected: float) -> float:
    """Share of a step in which devices wait for hosts to launch layers with experts: it grows in proportion to that.

    Args:
        problem: model, job, cluster, calibration.
        fabric: the network, or the part of it that the layout uses.
        layout: with wires.
        expected: seconds of its step.

    Returns: 0 for dense models, and where nothing is launched one by one.
    """
    launch = problem.calibration.mixture_launch
    if not (launch and problem.model.mixtures):
        return 0.0
    later = replace(problem.calibration, mixture_launch=launch * math.exp(_LATER))
    costs = evaluate_layout(replace(problem, calibration=later), fabric, layout)
    return math.log(float(costs.step.expected) / expected) / _LATER


def step_spread(problem: TrainingProblem, fabric: Fabric, layout: Layout, estimate: Estimate) -> dict[str, float]:
    """Each cause's standard deviation of the logarithm of a step's time (`costs.spread`), of an estimated layout."""
    launched = launched_share(problem, fabric, layout, estimate.step_time.expected)
    return spread_parts(estimate.terms, problem.uncertainty_sources, launched)


def training_run(problem: TrainingProblem, estimate: Estimate) -> TrainingRun | None:
    """Cost of the job's whole token budget, or None where it has none."""
    if problem.job.tokens is None:
        return None
    steps = problem.job.tokens / estimate.tokens
    t = estimate.step_time
    days = Interval(*(steps * s / 86400 for s in (t.lower, t.expected, t.upper)))
    chip_hours = days.expected * 24 * estimate.num_chips
    price = problem.cluster.price_per_chip_hour
    return TrainingRun(
        steps=steps,
        days=days,
        chip_hours=chip_hours,
        cost_usd=None if price is None else chip_hours * price,
        energy_kwh=chip_hours * problem.cluster.chip.power / 1000,
    )
