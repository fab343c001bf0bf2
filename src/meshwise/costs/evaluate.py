"""The one evaluator: a placed program, sizes of its mesh axes (floats, or arrays of a million candidates), wires -> costs.

A single estimate and a whole search run this same code. Not here: which candidates there are (`planning`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwise.costs.calibration import Calibration
from meshwise.costs.extents import Extents
from meshwise.costs.memory import training_memory
from meshwise.costs.network import Wire
from meshwise.costs.step import Rates, StepTime, block_times, step_time
from meshwise.hardware import Cluster
from meshwise.jobs import Optimizer, Precision, TrainingJob
from meshwise.models import Model
from meshwise.sharding.place import Held, PlacedBlock, place_block
from meshwise.sharding.remat import remat_policy
from meshwise.sharding.strategy import training_strategy
from meshwise.tensors import Block, Tensor

__all__ = ["Candidates", "Costs", "Structure", "TrainingProblem", "evaluate", "place_structure"]


@dataclass(frozen=True, slots=True)
class TrainingProblem:
    """What is given: everything but the layout."""

    model: Model
    job: TrainingJob
    cluster: Cluster
    calibration: Calibration


@dataclass(frozen=True, slots=True)
class Structure:
    """What placing depends on: the choices of a layout that are not sizes."""

    zero: int
    sequence_parallel: bool
    remat: str


@dataclass(frozen=True, slots=True)
class Candidates:
    """Sizes of layouts that share a structure: floats, or arrays of one length."""

    data: Any
    fsdp: Any
    context: Any
    tensor: Any
    stage: Any
    micro_batch: Any
    num_microbatches: Any

    @property
    def mesh(self) -> Mapping[str, Any]:
        """Mesh axis -> size."""
        return {a: getattr(self, a) for a in ("data", "fsdp", "context", "tensor", "stage")}

    @property
    def sequences(self) -> Any:
        """Sequences per step."""
        return self.micro_batch * self.num_microbatches * self.data * self.fsdp


@dataclass(frozen=True, slots=True)
class Costs:
    """What the evaluator says of candidates: floats or arrays."""

    step: StepTime
    memory: Mapping[str, Any]


_PLACED: dict[tuple[int, Structure], tuple[Block, PlacedBlock]] = {}


def place_structure(model: Model, structure: Structure) -> tuple[PlacedBlock, ...]:
    """Place every block of the model's training program; each (block, structure) once in a process."""
    placed = []
    strategy = training_strategy(zero=structure.zero, sequence=structure.sequence_parallel)
    for block in model.train_program():
        key = (id(block), structure)
        if key not in _PLACED:  # the block is kept beside its placement, so that its id stays its own
            policy = remat_policy("none" if block.role != "layer" else structure.remat)
            _PLACED[key] = (block, place_block(block, strategy, policy))
        placed.append(_PLACED[key][1])
    return tuple(placed)


def evaluate(
    problem: TrainingProblem, structure: Structure, candidates: Candidates, wires: Callable[[tuple[str, ...]], Wire]
) -> Costs:
    """Time and memory of a training step.

    Args:
        problem: model, job, cluster, calibration.
        structure: zero stage, sequence parallelism, remat.
        candidates: sizes.
        wires: mesh axes -> wire of the group along them, of the same shape as the candidates.
    """
    job, chip = problem.job, problem.cluster.chip
    formats = job.formats
    program = problem.model.train_program()
    placed = place_structure(problem.model, structure)
    batch = candidates.micro_batch * candidates.data * candidates.fsdp
    extents = Extents(program.bind(batch=batch, queries=job.seq_len), candidates.mesh)
    rates = Rates(chip, problem.calibration, wires)
    step = step_time(
        block_times(placed, extents, chip, job, problem.calibration),
        rates,
        peak_flops_per_s=chip.peak(formats.compute),
        stages=candidates.stage,
        num_microbatches=candidates.num_microbatches,
        boundary_bytes=extents.held_bytes(_residual(structure), formats),
        optimizer_bytes=_optimizer_bytes(placed, extents, formats, job.optimizer_kind, candidates.stage),
    )
    memory = training_memory(
        placed,
        extents,
        formats,
        job.optimizer_kind,
        hbm_capacity=chip.hbm_capacity,
        stages=candidates.stage,
        num_microbatches=candidates.num_microbatches,
    )
    return Costs(step, memory)


def _residual(structure: Structure) -> Held:
    """The residual stream as it stands between blocks, which is what stages send each other."""
    x = Tensor("x", ("B", "T", "D"))
    strategy = training_strategy(zero=structure.zero, sequence=structure.sequence_parallel)
    return Held(x, strategy.home(x.axes))


def _optimizer_bytes(
    placed: tuple[PlacedBlock, ...], extents: Extents, formats: Precision, optimizer: Optimizer, stages: Any
) -> Any:
    """HBM traffic of the update on one chip: gradients and old values read, moments and weights read and written."""
    states: Any = 0.0
    for p in placed:
        share = 1 / stages if p.block.role == "layer" else 1.0
        for h in p.optimizer:
            states = states + extents.elements(h.tensor, h.sharding) * (p.block.repeat * share)
    master = formats.master.bytes if formats.master else 0.0
    per_state = 2 * optimizer.moments * formats.moments.bytes + 2 * master + 2 * formats.weights.bytes + formats.gradients.bytes
    return states * per_state


