"""The one evaluator: a placed program, sizes of its mesh axes (floats, or arrays of candidates), wires -> costs.

A single estimate and a whole search run this same code. Not here: which candidates there are (`planning`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import numpy as np

from meshwise.costs.arithmetic import maximum, where
from meshwise.costs.assembly import StepParts, step_time
from meshwise.costs.calibration import Calibration
from meshwise.costs.compute import ComputeRates, OpWork, PassCompute, pass_compute, pass_work
from meshwise.costs.expert_load import expert_load
from meshwise.costs.extents import Extents, held_bytes
from meshwise.costs.memory import (
    LocalMemory,
    MemoryPlan,
    StageMemory,
    fullest,
    local_memory,
    memory_plan,
    stage_memories,
)
from meshwise.costs.network import Wire
from meshwise.costs.offload import HostInputs, HostPart, offload_memory, offload_time
from meshwise.costs.pipeline import Part, Pipeline, device_shares, num_layers, program_of
from meshwise.costs.routing import Routing
from meshwise.costs.stage_sums import role_sums
from meshwise.costs.step import BlockTime, Ledger, StepRates, StepTime
from meshwise.costs.traffic import Flow, FlowPlan, flow_plans
from meshwise.costs.update import UpdatePlan, update_plan
from meshwise.hardware import Cluster
from meshwise.jobs import FineTuning, Optimizer, Precision, TrainingJob, narrowed, with_adapters
from meshwise.models import Model
from meshwise.sharding.layout import MESH_AXES, Layout
from meshwise.sharding.place import Held, PlacedBlock, Purpose, place_block
from meshwise.sharding.remat import remat_policy
from meshwise.sharding.strategy import Strategy, training_strategy
from meshwise.tensors import Attention, Block, Program, Route, Tensor

__all__ = [
    "Candidates",
    "Costs",
    "Evaluated",
    "LocalBlock",
    "LocalSizes",
    "PlannedBlock",
    "Structure",
    "TrainingProblem",
    "evaluate",
    "evaluate_activations",
    "evaluate_local",
    "evaluate_local_memory",
    "evaluate_memory",
    "evaluated",
    "local_extents",
    "offloaded",
    "place_structure",
    "plan_structure",
    "whole_extents",
]


@dataclass(frozen=True, slots=True)
class TrainingProblem:
    """What is given: everything but the layout."""

    model: Model
    job: TrainingJob
    cluster: Cluster
    calibration: Calibration

    @property
    def routing(self) -> Routing | None:
        """How the model's router spreads tokens over experts; None without experts.

        Of several kinds of mixtures the one whose tokens reach most experts.
        """
        kinds = [Routing(m.experts, m.top_k, m.groups, m.groups_limit) for m in self.model.mixtures]
        return max(kinds, key=lambda r: (r.top_k, r.reachable), default=None)

    def train_program(self) -> Program:
        """Give the model's program as the job trains it: with conversions to narrow formats, and with adapters."""
        return _job_program(self.model, self.job.formats, self.job.tuning)


@cache
def _job_program(model: Model, formats: Precision, tuning: FineTuning) -> Program:
    return with_adapters(narrowed(model.train_program(), formats), tuning)


@dataclass(frozen=True, slots=True)
class Structure:
    """The choices of a layout that are not sizes. Placing depends on nothing else.

    Args:
        zero, sequence_parallel, remat, fully_sharded, expert_tensor_parallel, context_method: as in `Layout`.
        partial_remat: whether only `Candidates.remat_share` of the layers follow `remat`; the others keep everything.
        offload: as in `Layout`; placing does not depend on it.
        exchanges: whether experts live on several devices of the axis `expert`, so that tokens leave for them from
            where the residual stream has them; else they are gathered first, once for all their experts.
    """

    zero: int
    sequence_parallel: bool
    remat: str
    fully_sharded: bool = True
    expert_tensor_parallel: bool = True
    context_method: str = "gather"
    exchanges: bool = False
    partial_remat: bool = False
    offload: tuple[str, ...] = ()

    @classmethod
    def of(cls, layout: Layout) -> Structure:
        """Read the choices of a layout."""
        own = {f.name: getattr(layout, f.name) for f in fields(cls) if f.name not in ("exchanges", "partial_remat")}
        return cls(**own, exchanges=layout.expert > 1, partial_remat=layout.remat_layers is not None)

    @property
    def strategy(self) -> Strategy:
        """The rule tables."""
        return training_strategy(
            zero=self.zero,
            sequence=self.sequence_parallel,
            fully_sharded=self.fully_sharded,
            experts=self._experts,
            ring=self.context_method == "ring",
        )

    @property
    def _experts(self) -> tuple[str, ...]:
        """What the tensor axis splits of a mixture, as `strategy.tensor` takes it."""
        if not self.expert_tensor_parallel:
            return ("E", "C")
        return ("Fe", "C") if self.exchanges and self.sequence_parallel else ("Fe",)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Sizes of layouts that share a structure: floats, or arrays of one length.

    `remat_share` is the share of layers that follow the remat policy, above 0 and up to 1, where the structure is
    `partial_remat`; on every stage alike, of fractions of a layer where it comes to that. `offload_share` is likewise
    the share of layers whose activations are offloaded, where the structure offloads activations. All have one
    `schedule` of the pipeline.
    """

    data: Any
    fsdp: Any
    context: Any
    tensor: Any
    stage: Any
    micro_batch: Any
    num_microbatches: Any
    expert: Any = 1.0
    ulysses: Any = 1.0
    remat_share: Any = 1.0
    offload_share: Any = 1.0
    virtual_stages: Any = 1.0
    schedule: str = "1f1b"

    @property
    def mesh(self) -> Mapping[str, Any]:
        """Mesh axis -> size."""
        return {a: getattr(self, a) for a in MESH_AXES}

    @property
    def pipeline(self) -> Pipeline:
        """The schedule of the pipeline and its sizes."""
        return Pipeline.of(self.schedule, self.stage, self.num_microbatches, self.virtual_stages)

    @property
    def replicas(self) -> Any:
        """Groups of devices that see different sequences."""
        return self.data * self.fsdp * self.expert

    @property
    def sequences(self) -> Any:
        """Sequences per step."""
        return self.micro_batch * self.num_microbatches * self.replicas

    @property
    def local(self) -> LocalSizes:
        """What one device's own work depends on."""
        return LocalSizes(**{f.name: getattr(self, f.name) for f in fields(LocalSizes)})


@dataclass(frozen=True, slots=True)
class LocalSizes:
    """The sizes that one device's work on one microbatch depends on: floats, or arrays of one length."""

    micro_batch: Any
    context: Any = 1.0
    ulysses: Any = 1.0
    expert: Any = 1.0
    tensor: Any = 1.0


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


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """A placed block with its structure worked out: what remains is arithmetic on sizes."""

    placed: PlacedBlock
    works: Mapping[str, tuple[OpWork, ...]]
    flows: tuple[FlowPlan, ...]
    memory: MemoryPlan
    update: UpdatePlan

    def part(self, structure: Structure, candidates: Candidates) -> Part:
        """Which copies of its block it stands for."""
        block = self.placed.block
        if not structure.partial_remat or block.role != "layer":
            return Part(block)
        if block.name.endswith(_REST):
            return Part(block, 1 - candidates.remat_share, rest=True)
        return Part(block, candidates.remat_share)


@dataclass(frozen=True, slots=True)
class LocalBlock:
    """What depends only on the sizes in `LocalSizes`."""

    passes: Mapping[str, PassCompute]
    flows: Mapping[int, Any]  # index of the flow plan -> bytes
    memory: LocalMemory

    def take(self, index: Any) -> LocalBlock:
        """The same for other rows: entries `index` of every array."""

        def pick(value: Any) -> Any:
            return value[index] if isinstance(value, np.ndarray) else value

        def pick_all(values: Any) -> Any:
            return type(values)(*(pick(getattr(values, f.name)) for f in fields(values)))

        passes = {name: pick_all(p) for name, p in self.passes.items()}
        return LocalBlock(passes, {i: pick(v) for i, v in self.flows.items()}, pick_all(self.memory))

    def joined(self, other: LocalBlock, numbers: tuple[int, int]) -> LocalBlock:
        """The rows of this one, then those of `other`; `numbers` of each."""

        def join(a: Any, b: Any) -> Any:
            if not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray) and a == b:
                return a  # the same for all rows
            return np.concatenate([np.broadcast_to(v, n) for v, n in zip((a, b), numbers, strict=True)])

        def join_all(a: Any, b: Any) -> Any:
            return type(a)(*(join(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)))

        passes = {name: join_all(p, other.passes[name]) for name, p in self.passes.items()}
        flows = {i: join(v, other.flows[i]) for i, v in self.flows.items()}
        return LocalBlock(passes, flows, join_all(self.memory, other.memory))


#: Placements kept at a time: a few models with all their structures; a long-lived process then starts over.
_KEPT = 4096

#: Ends the name of the copies of a layer that a partial remat policy leaves out.
_REST = " (all kept)"

_PLACED: dict[tuple[int, Structure, bool], tuple[Block, PlacedBlock]] = {}
_PLANNED: dict[tuple[int, Precision, Optimizer], tuple[PlacedBlock, PlannedBlock]] = {}


def place_structure(problem: TrainingProblem | Model, structure: Structure) -> tuple[PlacedBlock, ...]:
    """Place every block of a training program; each (block, structure) once in a process.

    Where only some layers follow the remat policy, a layer is placed twice: as the policy says, then keeping all.
    """
    placed = []
    whole = replace(structure, partial_remat=False, offload=())
    for block in problem.train_program():
        own = _heeded(whole, block)
        placed.append(_placed(block, own))
        if structure.partial_remat and block.role == "layer":
            placed.append(_placed(block, replace(own, remat="none"), rest=True))
    return tuple(placed)


def _placed(block: Block, structure: Structure, *, rest: bool = False) -> PlacedBlock:
    """Place one block, or find where it was placed before; `rest` marks copies that a policy leaves out."""
    key = (id(block), structure, rest)
    if len(_PLACED) > _KEPT:
        _PLACED.clear()
    if key not in _PLACED:  # the block is kept beside its placement, so that its id stays its own
        named = replace(block, name=block.name + _REST) if rest else block
        _PLACED[key] = (block, place_block(named, structure.strategy, remat_policy(structure.remat)))
    return _PLACED[key][1]


def _heeded(structure: Structure, block: Block) -> Structure:
    """The structure with every choice that means nothing to `block` set to one value, so that it is placed once."""
    kinds = {type(op) for op in block.ops}
    return replace(
        structure,
        remat=structure.remat if block.role == "layer" else "none",
        expert_tensor_parallel=structure.expert_tensor_parallel or Route not in kinds,
        exchanges=structure.exchanges and Route in kinds,
        context_method=structure.context_method if Attention in kinds else "gather",
    )


def plan_structure(problem: TrainingProblem, structure: Structure) -> tuple[PlannedBlock, ...]:
    """Place every block and work out what its costs are sums of; once in a process."""
    planned = []
    formats, optimizer = problem.job.formats, problem.job.optimizer_kind
    for placed in place_structure(problem, structure):
        key = (id(placed), formats, optimizer)
        if len(_PLANNED) > _KEPT:
            _PLANNED.clear()
        if key not in _PLANNED:
            block = PlannedBlock(
                placed,
                pass_work(placed, formats),
                flow_plans(placed, formats, optimizer),
                memory_plan(placed, formats, optimizer),
                update_plan(placed, formats, optimizer),
            )
            _PLANNED[key] = (placed, block)
        planned.append(_PLANNED[key][1])
    return tuple(planned)


def evaluate_local(
    problem: TrainingProblem, structure: Structure, sizes: LocalSizes, known: Sequence[LocalBlock] | None = None
) -> tuple[LocalBlock, ...]:
    """Price what one device does on its own: operations, activations, and the bytes of most collectives.

    A search calls it once for the few distinct sizes there are.

    Args:
        problem, structure: as in `evaluate`.
        sizes: floats or arrays.
        known: the same of a structure that differs only in what it stores where (`zero`, `fully_sharded`), whose
            operations are the same.
    """
    extents = local_extents(problem, structure, sizes)
    rates = ComputeRates.of(problem.cluster.chip, problem.job.formats, problem.calibration)
    planned = plan_structure(problem, structure)
    passes = (
        [{name: pass_compute(works, extents, rates) for name, works in b.works.items()} for b in planned]
        if known is None
        else [b.passes for b in known]
    )
    return tuple(
        LocalBlock(
            own,
            {i: plan.flow(extents).num_bytes for i, plan in enumerate(b.flows) if plan.local},
            local_memory(b.memory, extents),
        )
        for own, b in zip(passes, planned, strict=True)
    )


def evaluate_local_memory(
    problem: TrainingProblem, structure: Structure, sizes: LocalSizes
) -> tuple[tuple[PlannedBlock, LocalMemory], ...]:
    """Evaluate the activations of each block alone; arguments as in `evaluate_local`."""
    extents = local_extents(problem, structure, sizes)
    return tuple((b, local_memory(b.memory, extents)) for b in plan_structure(problem, structure))


def local_extents(problem: TrainingProblem, structure: Structure, sizes: LocalSizes) -> Extents:
    """Lengths of one microbatch on one device, where no weight is split over data and fsdp."""
    mesh = {f.name: getattr(sizes, f.name) for f in fields(sizes) if f.name != "micro_batch"}
    return Extents(
        _bound(problem, structure, sizes, sizes.micro_batch * sizes.expert), {"data": 1.0, "fsdp": 1.0, **mesh}
    )


def whole_extents(problem: TrainingProblem, structure: Structure, c: Candidates) -> Extents:
    """Lengths on the whole mesh: B is the sequences of one microbatch over all devices."""
    return Extents(_bound(problem, structure, c.local, c.micro_batch * c.replicas), c.mesh)


def _bound(problem: TrainingProblem, structure: Structure, sizes: LocalSizes, sequences: Any) -> dict[str, Any]:
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
    structure: Structure,
    candidates: Candidates,
    wires: Callable[[tuple[str, ...]], Wire],
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
    structure: Structure
    offload_share: Any
    blocks: tuple[tuple[PlannedBlock, Part, LocalBlock], ...]
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

    def costs(self, pipeline: Pipeline) -> Costs:
        """Time and memory under a schedule, of the stages that were evaluated."""
        chip, formats = self.problem.cluster.chip, self.problem.job.formats
        assert self.step is not None, "without sums of time there is memory alone"
        step = step_time(
            self.step,
            pipeline,
            optimizer_bytes=self._update(pipeline, lambda plan: self.extents.weighted(plan.traffic)),
            optimizer_matmul=self._orthogonal_seconds(pipeline, chip.peak(formats.other_compute)),
            ledger=self.ledger,
        )
        stages = self._stages(pipeline)
        offload = self.structure.offload
        holdings = None if self.ledger is None or offload else self.ledger.holdings
        costs = Costs(step, fullest(stages, chip.hbm_usable, holdings), self._host_inputs(pipeline, stages))
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
    structure: Structure,
    candidates: Candidates,
    wires: Callable[[tuple[str, ...]], Wire],
    local: tuple[LocalBlock, ...] | None = None,
    *,
    ledger: Ledger | None = None,
) -> Evaluated:
    """Everything that all pipeline schedules of the candidates share; arguments as in `evaluate`."""
    c, formats = candidates, problem.job.formats
    planned = plan_structure(problem, structure)
    if local is None:
        local = evaluate_local(problem, structure, c.local)
    extents = whole_extents(problem, structure, c)
    parts = [p.part(structure, c) for p in planned]
    times = [_block_time(p, part, own, extents) for p, part, own in zip(planned, parts, local, strict=True)]
    step = _step_parts(
        times,
        StepRates(problem.cluster.chip, problem.calibration, wires),
        extents.weighted(held_bytes(_between_stages(problem.model, structure), formats)),
        ledger,
    )
    blocks = tuple((p, part, own) for p, part, own in zip(planned, parts, local, strict=True))
    return Evaluated(problem, structure, c.offload_share, blocks, extents, step, ledger)


def _step_parts(
    times: Sequence[BlockTime], rates: StepRates, boundary_bytes: Any, ledger: Ledger | None = None
) -> StepParts:
    sums, once = role_sums(times, rates, ledger)
    layers = num_layers(program_of(b.part for b in times))
    return StepParts(sums, once, layers, rates, boundary_bytes)


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
    structure: Structure,
    candidates: Candidates,
    wires: Callable[[tuple[str, ...]], Wire],
    local: tuple[LocalBlock, ...],
) -> StepParts:
    """Sums of a step whose weights, gradients, optimizer and sends take no time: their makespan bounds the expected.

    They do not depend on how replicas are split between data and fsdp, nor on what is stored where. Args: as in
    `evaluate`.
    """
    planned = plan_structure(problem, structure)
    times = [
        BlockTime(p.part(structure, candidates), **own.passes, flows=_activation_flows(p, own))
        for p, own in zip(planned, local, strict=True)
    ]
    return _step_parts(times, StepRates(problem.cluster.chip, problem.calibration, wires), 0.0)


def evaluate_memory(
    problem: TrainingProblem, structure: Structure, candidates: Candidates, local: tuple[LocalBlock, ...]
) -> Evaluated:
    """Evaluate the memory alone, which needs no wires. Args: as in `evaluate`."""
    extents = whole_extents(problem, structure, candidates)
    planned = plan_structure(problem, structure)
    blocks = tuple((p, p.part(structure, candidates), own) for p, own in zip(planned, local, strict=True))
    return Evaluated(problem, structure, candidates.offload_share, blocks, extents)


def _activation_flows(planned: PlannedBlock, local: LocalBlock) -> tuple[Flow, ...]:
    moving = (Purpose.ACTIVATIONS, Purpose.RING)
    return tuple(p.sized(local.flows[i]) for i, p in enumerate(planned.flows) if p.local and p.purpose in moving)


def _block_time(planned: PlannedBlock, part: Part, local: LocalBlock, extents: Extents) -> BlockTime:
    flows = tuple(
        plan.sized(local.flows[i]) if i in local.flows else plan.flow(extents) for i, plan in enumerate(planned.flows)
    )
    return BlockTime(part, **local.passes, flows=flows)


def _between_stages(model: Model, structure: Structure) -> tuple[Held, ...]:
    """What stages send each other: the residual stream, and what layers read besides it."""
    further = (Held(t, structure.strategy.home(t.axes)) for t in model.passed_along)
    return (_residual(structure), *further)


@cache
def _residual(structure: Structure) -> Held:
    """The residual stream as it stands between blocks."""
    x = Tensor("x", ("B", "T", "D"))
    return Held(x, structure.strategy.home(x.axes))
