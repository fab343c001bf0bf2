"""The one evaluator: a placed program, sizes of its mesh axes (floats, or arrays of candidates), wires -> costs.

A single estimate and a whole search run this same code. Not here: which candidates there are (`planning`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

from meshwise.costs.arithmetic import Num, is_one, maximum, some
from meshwise.costs.ends import own_positions
from meshwise.costs.extents import Extents
from meshwise.costs.layout_choices import Candidates, LayoutChoices
from meshwise.costs.local import LocalBlock, evaluate_local, local_prices, repeats_whole, whole_extents
from meshwise.costs.lower import LoweredTrainingBlock
from meshwise.costs.memory import StageMemory, fullest, stage_memories
from meshwise.costs.offload import HostInputs, HostPart, offload_memory, offload_time
from meshwise.costs.overlap import RoleSums, role_sums
from meshwise.costs.pipeline import Part, Pipeline, device_shares, num_layers
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.state_plan import UpdatePlan
from meshwise.costs.step import BlockTime, CollectivePrices, Ledger, StepRates, StepTime, Wires
from meshwise.costs.step_time import StepParts, step_time
from meshwise.costs.traffic import CollectiveTemplate
from meshwise.sharding.placed import Purpose

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
    memory: Mapping[str, Num]
    host: HostInputs = field(compare=False, repr=False)
    host_memory: Mapping[str, Num] = field(default_factory=dict)


def _block_time(
    problem: TrainingProblem,
    structure: LayoutChoices,
    b: LoweredTrainingBlock,
    own: LocalBlock,
    *,
    share: Num,
    sent: Iterable[CollectiveTemplate],
) -> BlockTime:
    """So many copies of a block: arguments as in `evaluate`; `share` as in `LoweredTrainingBlock.part`."""
    part = b.part(structure, share)
    repeats = repeats_whole(problem, structure) and bool(b.passes["recompute"])
    return BlockTime(part.block, part.share * part.block.repeat, own.passes, tuple(sent), own.sent, repeats)


def evaluate(
    problem: TrainingProblem,
    structure: LayoutChoices,
    candidates: Candidates,
    wires: Wires,
    local: tuple[LocalBlock, ...] | None = None,
    *,
    ledger: Ledger | None = None,
    bounded: bool = True,
) -> Costs:
    """Time and memory of a training step.

    Args:
        problem: model, job, cluster, calibration.
        structure: the choices that are not sizes.
        candidates: sizes.
        wires: mesh axes -> wire of the group along them, of the same shape as the candidates.
        local: from `evaluate_local`, where it was computed before.
        ledger: filled with what the time's terms are sums of.
        bounded: whether bounds on both sides of the expected time are asked for, and what is hidden; else they are NaN
            and empty.
    """
    of = evaluated(problem, structure, candidates, wires, local, ledger=ledger, bounded=bounded)
    return of.costs(candidates.pipeline)


@dataclass(frozen=True)
class Evaluated:
    """Candidates priced but for their pipeline: `costs` puts any schedule together, which is cheap.

    Args:
        problem: model, job, cluster, calibration.
        structure: the choices that are not sizes; offload_share: as in `Candidates`.
        blocks: planned, with the part of their copies that they stand for, and what one device does on its own.
        extents: on the whole mesh.
        step: sums of a step's time.
        ledger: filled with what the terms are sums of; `costs` may then be called once.
    """

    problem: TrainingProblem
    structure: LayoutChoices
    offload_share: Num
    blocks: tuple[tuple[LoweredTrainingBlock, Part, LocalBlock], ...]
    extents: Extents
    step: StepParts
    ledger: Ledger | None = None

    def _stages(self, pipeline: Pipeline) -> tuple[StageMemory, ...]:
        alone, shape = self.problem.held_as(self.structure), pipeline.shape
        lone = alone is not self.structure and some((shape.num_microbatches == 1) & (shape.stages == 1))
        return stage_memories(
            [(part, p.state, own.memory) for p, part, own in self.blocks],
            self.extents,
            self.problem.job.formats,
            pipeline,
            in_step=self.problem.made_in_step,
            positions=own_positions(
                self.problem.job.seq_len, self.extents.mesh, sequence_parallel=self.structure.sequence_parallel
            ),
            noted=self.ledger is not None,
            alone=[b.state for b in self.problem.lowered.training(alone.but(remat="none"))] if lone else [],
        )

    def time(self, pipeline: Pipeline) -> StepTime:
        """Time under a schedule, with nothing in the host's memory."""
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
            update_last=self.problem.own_program,
        )

    def _copied(self, pipeline: Pipeline) -> Num:
        """Bytes of gradients that devices with copies of the same stages tell each other."""
        if pipeline.schedule.copies == 1:
            return 0.0
        return self._update(pipeline, lambda plan: self.extents.weighted(plan.gradients))

    def _update(self, pipeline: Pipeline, amount: Callable[[UpdatePlan], Num]) -> Num:
        """What the update takes on the fullest device of the pipeline, which the others wait for."""
        amounts = [(part, amount(p.update) * (part.block.repeat * part.share)) for p, part, _ in self.blocks]
        most: Num = 0.0
        for shares in device_shares(num_layers(self.problem.train_program()), pipeline):
            total: Num = 0.0
            for part, value in amounts:
                total = total + value * shares[part.block.role]
            most = maximum(most, total)
        return most

    def _orthogonal_seconds(self, pipeline: Pipeline, peak: float) -> Num:
        """Seconds, at the data-sheet rate, of matmuls that make matrices orthogonal: at least those of the largest."""
        largest = max(p.update.largest(self.extents) for p, _, _ in self.blocks)
        if not largest:
            return 0.0
        return maximum(self._update(pipeline, lambda plan: plan.flops(self.extents)), largest) / peak


def evaluated(
    problem: TrainingProblem,
    structure: LayoutChoices,
    candidates: Candidates,
    wires: Wires,
    local: tuple[LocalBlock, ...] | None = None,
    *,
    ledger: Ledger | None = None,
    bounded: bool = True,
) -> Evaluated:
    """Everything that all pipeline schedules of the candidates share; arguments as in `evaluate`."""
    c = candidates
    lowered = problem.lowered.training(structure)
    if local is None:
        prices, plain = local_prices(problem, structure, c.local, bounded=bounded), structure.stored_plainly
        of = partial(evaluate_local, problem, prices=prices, looped=c.local.looped)
        known = of(plain) if plain != structure and problem.lowered.knows(plain) else None
        local = of(structure, known=known)
    extents = whole_extents(problem, structure, c)
    blocks = tuple((b, b.part(structure, c.remat_share), own) for b, own in zip(lowered, local, strict=True))
    times = []
    for b, _, own in blocks:
        sent = b.collectives
        if ledger is None:  # over axes of size 1 they cost nothing
            alone = {axes for axes in b.groups if is_one(extents.devices(axes))}
            sent = tuple(one for one in sent if one.key.mesh_axes not in alone)
        times.append(_block_time(problem, structure, b, own, share=c.remat_share, sent=sent))
    rates = rates_of(problem, structure, wires, bounded=bounded)
    sums, once = role_sums(times, CollectivePrices(rates, extents), ledger)
    boundary = extents.weighted(problem.lowered.between_stages(structure, problem.model.between_stages))
    scattered = problem.calibration.scattered_sends and not structure.sequence_parallel
    layers = num_layers(problem.train_program())
    step = StepParts(sums, once, layers, rates, boundary, c.tensor if scattered else 1.0)
    return Evaluated(problem, structure, c.offload_share, blocks, extents, step, ledger)


def rates_of(problem: TrainingProblem, structure: LayoutChoices, wires: Wires, *, bounded: bool = True) -> StepRates:
    """The rates of one evaluation; arguments as in `evaluate`."""
    both_ways = structure.collective_matmul == "bidirectional"
    return StepRates(problem.cluster.chip, problem.calibration_of(structure), wires, both_ways, bounded)


def offloaded(costs: Costs, which: Iterable[str], share: Num = 1.0, *, ledger: Ledger | None = None) -> Costs:
    """The same candidates with parts in the host's memory: arithmetic on what was priced without.

    Args:
        costs: of `evaluate` with a structure that offloads nothing.
        which: of `layout.OFFLOADABLE`.
        share: of the layers whose activations are offloaded (float or array).
        ledger: filled as in `evaluate`.
    """
    parts = tuple(which)
    host, holdings = costs.host, None if ledger is None else ledger.holdings
    memory, host_memory = offload_memory(host.stages, host.hbm_capacity, parts, share, holdings)
    return Costs(offload_time(costs.step, costs.host, parts, share, ledger), memory, costs.host, host_memory)


class ActivationPrices(CollectivePrices):
    """Prices of collectives, and the sums of the blocks that all remat policies share: all but layers."""

    @cached_property
    def sums(self) -> dict[tuple[int, ...], Mapping[str, RoleSums]]:
        """By role, by the numbers of these blocks."""
        return {}


def evaluate_activations(
    problem: TrainingProblem,
    structure: LayoutChoices,
    prices: ActivationPrices,
    local: tuple[LocalBlock, ...],
) -> Mapping[str, RoleSums]:
    """Sums of one microbatch, by role, of a step whose weights, gradients, optimizer and sends take no time.

    Their makespan bounds the expected time.
    They depend on the sizes of one device's own work alone: not on pipelines, nor on how replicas are split between
    data and fsdp, nor on what is stored where.

    Args:
        problem, local: as in `evaluate`.
        structure: whose layers all follow its remat policy.
        prices: of collectives, whose links are those of the groups along the axes of `LocalSizes`; shared by structures
            that split experts alike, on the same links.
    """
    blocks, times = problem.lowered.training(structure), []
    others = tuple([b.number for b in blocks if b.role != "layer"])
    known = prices.sums.get(others, {})
    for b, own in zip(blocks, local, strict=True):
        if b.role in known:
            continue
        # Gradients of learned positions are summed over replicas, too: no bound counts them.
        moving = (
            one
            for one in b.collectives
            if one.local and one.purpose in _OF_ACTIVATIONS and not {"data", "fsdp"} & set(one.key.mesh_axes)
        )
        times.append(_block_time(problem, structure, b, own, share=1.0, sent=moving))
    sums = role_sums(times, prices)[0]
    if not known:
        prices.sums[others] = {role: own for role, own in sums.items() if role != "layer"}
    return {b.role: known.get(b.role) or sums[b.role] for b in blocks}
