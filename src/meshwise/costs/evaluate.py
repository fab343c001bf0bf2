"""The one evaluator: a placed program, sizes of its mesh axes (floats, or arrays of candidates), wires -> costs.

A single estimate and a whole search run this same code. Not here: which candidates there are (`planning`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from meshwise.core.tensors import Tensor
from meshwise.costs.arithmetic import is_one, maximum, where
from meshwise.costs.compute import OperationPrices, PassCompute
from meshwise.costs.expert_load import expert_load
from meshwise.costs.extents import Extents, held_bytes
from meshwise.costs.layout_choices import Candidates, LayoutChoices, LocalSizes
from meshwise.costs.lower import LocalBlock, LoweredBlock, plan_structure
from meshwise.costs.memory import LocalMemory, StageMemory, fullest, local_memory, stage_memories
from meshwise.costs.network import GroupLink
from meshwise.costs.offload import HostInputs, HostPart, offload_memory, offload_time
from meshwise.costs.overlap import role_sums
from meshwise.costs.pipeline import Part, Pipeline, device_shares, num_layers, program_of
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.step import BlockTime, Ledger, StepRates, StepTime
from meshwise.costs.step_time import StepParts, step_time
from meshwise.costs.traffic import Flow
from meshwise.costs.update import UpdatePlan
from meshwise.models import Model
from meshwise.sharding.placed import Held, Purpose

#: Purposes of what moves for the activations of a microbatch.
_OF_ACTIVATIONS = (Purpose.ACTIVATIONS, Purpose.RING, Purpose.MATMUL)


@dataclass(frozen=True, slots=True)
class Costs:
    """What the evaluator says of candidates: floats or arrays.

    Args:
        step: time.
        memory: bytes on the fullest chip by class, and "total".
        host: what `offloaded` needs; its cost is nothing until that is called.
        host_memory: bytes in the host's memory for one chip by class, and "total"; empty where nothing is offloaded.
    """

    step: StepTime
    memory: Mapping[str, Any]
    host: HostInputs = field(compare=False, repr=False)
    host_memory: Mapping[str, Any] = field(default_factory=dict)


def evaluate_local(
    problem: TrainingProblem, structure: LayoutChoices, sizes: LocalSizes, known: Sequence[LocalBlock] | None = None
) -> tuple[LocalBlock, ...]:
    """Price what one device does on its own: operations, activations, and the bytes of most collectives.

    A search calls it once for the few distinct sizes there are.

    Args:
        problem, structure: as in `evaluate`.
        sizes: floats or arrays.
        known: the same of a structure that differs only in what it stores where (`zero`, `fully_sharded`), whose
            operations are the same.
    """
    return _evaluate_local(problem, structure, sizes, plan_structure(problem, structure), known)


def _evaluate_local(
    problem: TrainingProblem,
    structure: LayoutChoices,
    sizes: LocalSizes,
    planned: tuple[LoweredBlock, ...],
    known: Sequence[LocalBlock] | None = None,
) -> tuple[LocalBlock, ...]:
    extents = local_extents(problem, structure, sizes)
    prices = OperationPrices(extents, problem.compute_rates)
    passes = [_passes(problem, structure, b, prices) for b in planned] if known is None else [b.passes for b in known]
    return tuple(
        LocalBlock(
            own,
            {i: plan.bytes(extents) for i, plan in enumerate(b.flows) if plan.local},
            _local_memory(problem, b, extents),
        )
        for own, b in zip(passes, planned, strict=True)
    )


def repeats_whole(problem: TrainingProblem, structure: LayoutChoices) -> bool:
    """Whether layers that are recomputed are repeated to their end."""
    return problem.calibration.repeats_whole and structure.remat == "full"


def _passes(
    problem: TrainingProblem, structure: LayoutChoices, b: LoweredBlock, prices: OperationPrices
) -> dict[str, PassCompute]:
    """Price the passes of a block; where the software repeats a whole layer, that is what recomputation takes."""
    passes = {name: prices.pass_compute(works, b.alike[name]) for name, works in b.works.items()}
    if repeats_whole(problem, structure) and b.works["recompute"]:
        forward, needed = passes["forward"], passes["recompute"]  # bounds count what is needed
        passes["recompute"] = replace(
            needed,
            seconds=maximum(forward.seconds, needed.seconds),
            serial_seconds=maximum(forward.serial_seconds, needed.serial_seconds),
            attention_seconds=forward.attention_seconds,
        )
    return passes


def evaluate_local_memory(
    problem: TrainingProblem, structure: LayoutChoices, sizes: LocalSizes
) -> tuple[tuple[LoweredBlock, LocalMemory], ...]:
    """Evaluate the activations of each block alone; arguments as in `evaluate_local`."""
    extents = local_extents(problem, structure, sizes)
    return tuple((b, _local_memory(problem, b, extents)) for b in plan_structure(problem, structure))


def _local_memory(problem: TrainingProblem, b: LoweredBlock, extents: Extents) -> LocalMemory:
    bucketed = problem.bucketed and b.placed.block.role == "layer"
    return local_memory(b.memory, extents, problem.calibration, bucketed=bucketed)


def local_extents(problem: TrainingProblem, structure: LayoutChoices, sizes: LocalSizes) -> Extents:
    """Lengths of one microbatch on one device, where no weight is split over data and fsdp."""
    bound = _bound(problem, structure, sizes, sizes.micro_batch * sizes.expert)
    return Extents(bound, {"data": 1.0, "fsdp": 1.0, **sizes.mesh})


def whole_extents(problem: TrainingProblem, structure: LayoutChoices, c: Candidates) -> Extents:
    """Lengths on the whole mesh: B is the sequences of one microbatch over all devices."""
    return Extents(_bound(problem, structure, c.local, c.micro_batch * c.replicas), c.mesh)


def _bound(problem: TrainingProblem, structure: LayoutChoices, sizes: LocalSizes, sequences: Any) -> dict[str, Any]:
    """Sizes of all axes for so many sequences; slots of experts are those of the busiest device."""
    program = problem.train_program()
    bound = program.bind(batch=sequences, queries=problem.job.seq_len)
    if "C" in bound:
        devices = sizes.expert if structure.expert_tensor_parallel else sizes.expert * sizes.tensor
        shards = sizes.context * sizes.ulysses * (devices / sizes.expert)
        tokens = sizes.micro_batch * problem.job.seq_len / shards
        experts, chosen = bound["E"], bound["top_k"]
        scatter = (experts - chosen) / max(experts - 1, 1)  # a token's experts differ
        bound["C"] = bound["C"] * expert_load(problem.job, tokens * chosen, devices, scatter=scatter)
    return bound


def evaluate(
    problem: TrainingProblem,
    structure: LayoutChoices,
    candidates: Candidates,
    wires: Callable[[tuple[str, ...]], GroupLink],
    local: tuple[LocalBlock, ...] | None = None,
    *,
    ledger: Ledger | None = None,
) -> Costs:
    """Time and memory of a training step.

    Args:
        problem: model, job, cluster, calibration.
        structure: the choices that are not sizes.
        candidates: sizes.
        wires: mesh axes -> wire of the group along them, of the same shape as the candidates.
        local: from `evaluate_local`, where it was computed before.
        ledger: filled with what the time's terms are sums of, for workings.
    """
    return evaluated(problem, structure, candidates, wires, local, ledger=ledger).costs(candidates.pipeline)


@dataclass(frozen=True)
class Evaluated:
    """Candidates priced but for their pipeline: `costs` puts any schedule together, which is cheap.

    Args:
        problem: model, job, cluster, calibration.
        structure: the choices that are not sizes; offload_share: as in `Candidates`.
        blocks: planned, with the part of their copies that they stand for, and what one device does on its own.
        extents: on the whole mesh.
        step: sums of a step's time.
        ledger: to be filled, for workings; then `costs` may be asked for once.
    """

    problem: TrainingProblem
    structure: LayoutChoices
    offload_share: Any
    blocks: tuple[tuple[LoweredBlock, Part, LocalBlock], ...]
    extents: Extents
    step: StepParts | None = None
    ledger: Ledger | None = None

    def memory(self, pipeline: Pipeline, offload: tuple[str, ...]) -> Any:
        """Bytes on the fullest chip under a schedule, with parts in the host's memory or none.

        Infinite where the host has too little memory for them.
        """
        stages = self._stages(pipeline)
        if not offload:
            return fullest(stages, self.problem.cluster.chip.hbm_usable, None)["total"]
        inside, away = offload_memory(self._host_inputs(pipeline, stages), offload, self.offload_share, None)
        room = self.problem.cluster.chip.host_memory or 0.0
        return where(away["total"] <= room, inside["total"], math.inf)

    def _stages(self, pipeline: Pipeline) -> tuple[StageMemory, ...]:
        return stage_memories(
            [(part, p.memory, own.memory) for p, part, own in self.blocks],
            self.extents,
            self.problem.job.formats,
            pipeline,
            noted=self.ledger is not None,
        )

    def time(self, pipeline: Pipeline) -> StepTime:
        """Time under a schedule, with nothing in the host's memory."""
        assert self.step is not None, "without sums of time there is memory alone"
        chip, formats = self.problem.cluster.chip, self.problem.job.formats
        return step_time(
            self.step,
            pipeline,
            optimizer_bytes=self._update(pipeline, lambda plan: self.extents.weighted(plan.traffic)),
            copied_bytes=self._copied(pipeline),
            optimizer_matmul=self._orthogonal_seconds(pipeline, chip.peak(formats.other_compute)),
            ledger=self.ledger,
        )

    def costs(self, pipeline: Pipeline) -> Costs:
        """Time and memory under a schedule, of the stages that were evaluated."""
        step, stages = self.time(pipeline), self._stages(pipeline)
        offload = self.structure.offload
        holdings = None if self.ledger is None or offload else self.ledger.holdings
        memory = fullest(stages, self.problem.cluster.chip.hbm_usable, holdings)
        costs = Costs(step, memory, self._host_inputs(pipeline, stages))
        return offloaded(costs, offload, self.offload_share, ledger=self.ledger) if offload else costs

    def _host_inputs(self, pipeline: Pipeline, stages: tuple[StageMemory, ...]) -> HostInputs:
        """Gather what offloading depends on; nothing is computed yet."""
        own = [b.passes for _, p, b in self.blocks if p.block.role == "layer"]
        return HostInputs(
            link_bandwidth=self.problem.cluster.chip.host_link_bandwidth,
            efficiency=self.problem.calibration.link_efficiency,
            parts=tuple(HostPart(layer, passes) for layer, passes in zip(stages[-1].layers, own, strict=True)),
            stages=stages,
            hbm_capacity=self.problem.cluster.chip.hbm_usable,
            pipeline=pipeline,
        )

    def _copied(self, pipeline: Pipeline) -> Any:
        """Bytes of gradients that devices with copies of the same stages tell each other."""
        if pipeline.schedule.copies == 1:
            return 0.0
        return self._update(pipeline, lambda plan: self.extents.weighted(plan.gradients))

    def _update(self, pipeline: Pipeline, amount: Callable[[UpdatePlan], Any]) -> Any:
        """What the update takes on the fullest device of the pipeline, which the others wait for."""
        amounts = [(part, amount(p.update) * (part.block.repeat * part.share)) for p, part, _ in self.blocks]
        most: Any = 0.0
        for shares in device_shares(num_layers(self.problem.train_program()), pipeline):
            total: Any = 0.0
            for part, value in amounts:
                total = total + value * shares[part.block.role]
            most = maximum(most, total)
        return most

    def _orthogonal_seconds(self, pipeline: Pipeline, peak: float) -> Any:
        """Seconds, at the data-sheet rate, of matmuls that make matrices orthogonal: at least those of the largest."""
        largest = max(p.update.largest(self.extents) for p, _, _ in self.blocks)
        if not largest:
            return 0.0
        return maximum(self._update(pipeline, lambda plan: plan.flops(self.extents)), largest) / peak


def evaluated(
    problem: TrainingProblem,
    structure: LayoutChoices,
    candidates: Candidates,
    wires: Callable[[tuple[str, ...]], GroupLink],
    local: tuple[LocalBlock, ...] | None = None,
    *,
    ledger: Ledger | None = None,
) -> Evaluated:
    """Everything that all pipeline schedules of the candidates share; arguments as in `evaluate`."""
    c, formats = candidates, problem.job.formats
    planned = plan_structure(problem, structure)
    if local is None:
        local = _evaluate_local(problem, structure, c.local, planned)
    extents = whole_extents(problem, structure, c)
    parts = [p.part(structure, c.remat_share) for p in planned]
    noted = ledger is not None
    times = [_block_time(*of, extents, noted=noted) for of in zip(planned, parts, local, strict=True)]
    step = _step_parts(
        times,
        rates_of(problem, structure, wires),
        extents.weighted(held_bytes(_between_stages(problem.model, structure), formats)),
        ledger,
        c.tensor if problem.calibration.scattered_sends and not structure.sequence_parallel else 1.0,
    )
    blocks = tuple((p, part, own) for p, part, own in zip(planned, parts, local, strict=True))
    return Evaluated(problem, structure, c.offload_share, blocks, extents, step, ledger)


def rates_of(
    problem: TrainingProblem, structure: LayoutChoices, wires: Callable[[tuple[str, ...]], GroupLink]
) -> StepRates:
    """Give the rates of one evaluation; arguments as in `evaluate`."""
    both_ways = structure.collective_matmul == "bidirectional"
    return StepRates(problem.cluster.chip, problem.calibration, wires, both_ways=both_ways)


def _step_parts(
    times: Sequence[BlockTime], rates: StepRates, boundary_bytes: Any, ledger: Ledger | None = None, senders: Any = 1.0
) -> StepParts:
    sums, once = role_sums(times, rates, ledger)
    layers = num_layers(program_of(b.part for b in times))
    return StepParts(sums, once, layers, rates, boundary_bytes, senders)


def offloaded(costs: Costs, which: Iterable[str], share: Any = 1.0, *, ledger: Ledger | None = None) -> Costs:
    """The same candidates with parts in the host's memory: arithmetic on what was priced without.

    Args:
        costs: of `evaluate` with a structure that offloads nothing.
        which: of `layout.OFFLOADABLE`.
        share: of the layers whose activations are offloaded (float or array).
        ledger: filled as in `evaluate`.
    """
    parts = tuple(which)
    memory, host_memory = offload_memory(costs.host, parts, share, None if ledger is None else ledger.holdings)
    return Costs(offload_time(costs.step, costs.host, parts, share, ledger), memory, costs.host, host_memory)


def evaluate_activations(
    problem: TrainingProblem,
    structure: LayoutChoices,
    wires: Callable[[tuple[str, ...]], GroupLink],
    local: tuple[LocalBlock, ...],
) -> StepParts:
    """Sums of a step whose weights, gradients, optimizer and sends take no time: their makespan bounds the expected.

    They depend on the sizes of one device's own work alone: not on pipelines, nor on how replicas are split between
    data and fsdp, nor on what is stored where.

    Args:
        problem, local: as in `evaluate`.
        structure: whose layers all follow its remat policy.
        wires: mesh axes of `LocalSizes` -> wire of the group along them.
    """
    planned = plan_structure(problem, structure)
    times = [
        BlockTime(p.part(structure, 1.0), **own.passes, flows=_activation_flows(p, own))
        for p, own in zip(planned, local, strict=True)
    ]
    return _step_parts(times, rates_of(problem, structure, wires), 0.0)


def evaluate_memory(
    problem: TrainingProblem, structure: LayoutChoices, candidates: Candidates, local: tuple[LocalBlock, ...]
) -> Evaluated:
    """Evaluate the memory alone, which needs no wires. Args: as in `evaluate`."""
    extents = whole_extents(problem, structure, candidates)
    planned = plan_structure(problem, structure)
    blocks = tuple((p, p.part(structure, candidates.remat_share), own) for p, own in zip(planned, local, strict=True))
    return Evaluated(problem, structure, candidates.offload_share, blocks, extents)


def _activation_flows(planned: LoweredBlock, local: LocalBlock) -> tuple[Flow, ...]:
    """What moves activations. Gradients of learned positions are summed over replicas, too: no bound counts them."""
    moving = [
        i
        for i, p in enumerate(planned.flows)
        if p.local and p.purpose in _OF_ACTIVATIONS and not {"data", "fsdp"} & set(p.mesh_axes)
    ]
    return tuple(planned.flows[i].sized(local.flows[i]) for i in moving)


def _block_time(planned: LoweredBlock, part: Part, local: LocalBlock, extents: Extents, *, noted: bool) -> BlockTime:
    """Price one block; what would be sent within groups of one device takes no time, and is left out unless `noted`."""
    known = local.flows
    flows = tuple(
        plan.sized(known[i] if i in known else plan.bytes(extents))
        for i, plan in enumerate(planned.flows)
        if noted or not is_one(extents.devices(plan.mesh_axes))
    )
    return BlockTime(part, **local.passes, flows=flows)


def _between_stages(model: Model, structure: LayoutChoices) -> tuple[Held, ...]:
    """What stages send each other: the residual stream, and what layers read besides it."""
    further = (Held(t, structure.strategy.home(t.axes)) for t in model.passed_along)
    return (_residual(structure, model.residual_axes), *further)


@cache
def _residual(structure: LayoutChoices, axes: tuple[str, ...]) -> Held:
    """The residual stream as it stands between blocks."""
    x = Tensor("x", axes)
    return Held(x, structure.strategy.home(x.axes))
