"""HBM bytes of a training step on one chip, by class. The total is the sum of its classes, exactly.

What a class holds is read from the placed blocks. Not here: allocator fragmentation beyond the named reserve.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwise.costs.arithmetic import maximum, where
from meshwise.costs.extents import Extents, WeightedSum, element_bytes, held_bytes, held_key, weighted_sum
from meshwise.costs.pipeline import Part, Pipeline, device_shares, num_layers, program_of, uneven
from meshwise.costs.update import moment_bytes, weight_bytes
from meshwise.jobs import Optimizer, Precision
from meshwise.sharding import CollectiveKind
from meshwise.sharding.place import Held, LocalOp, PlacedBlock, Purpose, Transfer
from meshwise.tensors import Block, Kind

__all__ = [
    "LARGEST_COUNTS",
    "MEMORY_CLASSES",
    "RESERVE_SHARE",
    "End",
    "HeldActivations",
    "Holding",
    "LayerMemory",
    "LocalMemory",
    "MemoryPlan",
    "StageMemory",
    "activation_floor",
    "fullest",
    "held_activations",
    "local_memory",
    "memory_plan",
    "pipeline_ends",
    "stage_memories",
    "state_bytes",
]

#: Class -> what it holds.
MEMORY_CLASSES = {
    "parameters": "weights as stored between steps",
    "master_copies": "high-precision weights that the optimizer updates",
    "gradients": "accumulated gradients of the weights",
    "optimizer": "the optimizer's moments",
    "activations": "what the forward pass keeps for the backward pass, over all layers and microbatches in flight",
    "logits_and_loss": "logits, their gradient, and what the loss keeps",
    "workspace": "operands of the largest operation, and what one layer computes again",
    "gathered_weights": "weights gathered for the layer at work and the next, and one layer's unreduced gradients",
    "communication_buffers": "the largest gathered or unreduced activation",
    "reserve": "runtime, code, compiler scratch and fragmentation (a stated share of HBM)",
}

#: Share of HBM that is left to the runtime: about 2 GB of an 80 GB GPU (CUDA context and NCCL), a few hundred MB of a
#: TPU.
RESERVE_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one copy of a block before sizes are known.

    Args:
        parameters, tied, gradients: the training state as stored; `tied` belongs to another block.
        tied_gradients: accumulated here for that block, which adds them to its own once a step.
        states: elements (not bytes) of the optimizer's shard.
        moments: bytes of the optimizer's state.
        kept: activations held for the backward pass.
        remade: activations computed again.
        operations: what each operation of the backward pass holds besides these; the largest counts.
        gathered, stored: weights as used and as stored, each weighted by what is alive at once.
        buffers: gathered or unreduced activations, each with the mesh axes over which it was moved.
    """

    parameters: WeightedSum
    tied: WeightedSum
    gradients: WeightedSum
    tied_gradients: WeightedSum
    states: WeightedSum
    moments: WeightedSum
    kept: WeightedSum
    remade: WeightedSum
    operations: tuple[WeightedSum, ...]
    gathered: WeightedSum
    stored: WeightedSum
    buffers: tuple[tuple[WeightedSum, tuple[str, ...]], ...]


def memory_plan(placed: PlacedBlock, precision: Precision, optimizer: Optimizer) -> MemoryPlan:
    """Read from a placed block what it holds."""
    stored = {h.tensor.name: h for h in (*placed.weights, *placed.tied)}
    # Where the copy is larger than what is stored: one layer at work, one on its way, and the gradient of the whole
    # before it is scattered.
    alive = [
        (h, 2 * element_bytes(h.tensor, precision) + (0.0 if h.tensor.frozen else precision.gradients.bytes))
        for h in placed.gathered
    ]
    return MemoryPlan(
        parameters=weighted_sum((held_key(h), weight_bytes(h.tensor, precision)) for h in placed.weights),
        tied=held_bytes(placed.tied, precision),
        gradients=held_bytes(placed.gradients, precision),
        tied_gradients=held_bytes(placed.tied_gradients, precision),
        states=weighted_sum((held_key(h), 1.0) for h in placed.optimizer),
        moments=moment_bytes(placed, precision, optimizer),
        kept=held_bytes(placed.kept, precision),
        remade=held_bytes(placed.workspace, precision),
        operations=_operations(placed, precision),
        gathered=weighted_sum((held_key(h), w) for h, w in alive),
        stored=weighted_sum((held_key(stored[h.tensor.name]), w) for h, w in alive),
        buffers=_buffers(placed, precision),
    )


def _operations(placed: PlacedBlock, precision: Precision) -> tuple[WeightedSum, ...]:
    """Activations that each operation of the backward pass makes or reads besides what is kept anyway."""
    known = {h.tensor.name for h in (*placed.kept, *placed.workspace)}
    sums = set()
    for item in placed.backward:
        if isinstance(item, LocalOp):
            held = [
                h
                for h in (*item.inputs, item.output)
                if h.tensor.kind is Kind.ACTIVATION and h.tensor.name not in known
            ]
            sums.add(held_bytes(held, precision))
    # What another operation holds all of, and more, is never the largest.
    terms = {one: dict(one) for one in sums}
    return tuple(
        one
        for one in sorted(sums)
        if not any(other != one and all(terms[other].get(key, 0.0) >= w for key, w in one) for other in sums)
    )


def _buffers(placed: PlacedBlock, precision: Precision) -> tuple[tuple[WeightedSum, tuple[str, ...]], ...]:
    found = set()
    for item in (*placed.forward, *placed.backward):
        if not isinstance(item, Transfer):
            continue
        c = item.collective
        gathers = c.kind is CollectiveKind.ALL_GATHER
        if item.purpose is Purpose.ACTIVATIONS:
            found.add((held_bytes((Held(item.tensor, c.after if gathers else c.before),), precision), c.mesh_axes))
        elif item.purpose is Purpose.RING:  # one block at work, the next on its way
            shard = Held(item.tensor, c.before if gathers else c.after)
            found.add((held_bytes((shard, shard), precision), c.mesh_axes))
    return tuple(sorted(found))


@dataclass(slots=True)
class LocalMemory:
    """What depends only on the sizes of one device's own work: bytes (floats or arrays)."""

    kept: Any
    workspace: Any
    gathered: Any
    buffers: Any


def local_memory(plan: MemoryPlan, extents: Extents) -> LocalMemory:
    """Give sizes to the activations of a block."""
    largest: Any = 0.0
    for operation in plan.operations:
        largest = maximum(largest, extents.weighted(operation))
    buffers: Any = 0.0
    for num_bytes, axes in plan.buffers:
        if not set(axes) & {"data", "fsdp"}:
            buffers = maximum(buffers, extents.weighted(num_bytes) * (1 - 1 / extents.devices(axes)))
    return LocalMemory(
        kept=extents.weighted(plan.kept),
        workspace=extents.weighted(plan.remade) + largest,
        gathered=extents.weighted(plan.gathered),
        buffers=buffers,
    )


def stage_memories(
    blocks: Sequence[tuple[Part, MemoryPlan, LocalMemory]],
    extents: Extents,
    precision: Precision,
    pipeline: Pipeline,
    *,
    noted: bool = False,
) -> tuple[StageMemory, ...]:
    """What the chips hold that may be the fullest: with the embedding, with the head; the one with most layers last.

    Under 1F1B the first stage holds up to `stages` microbatches in flight, the last holds one; `schedules` says what
    others hold. Where layers do not divide, a device between may have more of them than the ends, and counts, too.

    Args:
        blocks: all blocks; each layer group's `repeat` is spread over the stages, rounded up.
        extents: local sizes of the training state.
        precision: bytes per element.
        pipeline: schedule and sizes (floats or arrays).
        noted: whether to write down what the classes are made of (floats only).

    Source: book, Training, "memory"; Korthikanti et al. 2022.
    """
    state = [state_bytes(plan, extents, precision) for _, plan, _ in blocks]
    ends = pipeline_ends(num_layers(program_of(part for part, _, _ in blocks)), pipeline)
    return tuple(_stage_memory(blocks, state, end, [] if noted else None) for end in ends)


def fullest(ends: Sequence[StageMemory], hbm_capacity: float, holdings: list[Holding] | None = None) -> dict[str, Any]:
    """Choose the stage that holds most.

    Args:
        ends: of `stage_memories`.
        hbm_capacity: bytes; the reserve is a share of it.
        holdings: filled with what the classes of the fullest device are made of (floats only).

    Returns: class -> bytes (float or array), and their sum as "total".
    """
    most = ends[0]
    result = dict(most.classes)
    total: Any = sum(result.values())
    for other in ends[1:]:
        others = sum(other.classes.values())
        less = others < total
        result = {name: where(less, result[name], other.classes[name]) for name in result}
        total = maximum(total, others)
        most = most if holdings is None or less else other
    if holdings is not None:
        holdings += most.holdings or []
    result["reserve"] = RESERVE_SHARE * hbm_capacity + 0.0 * result["parameters"]
    total = 0.0
    for name in MEMORY_CLASSES:
        total = total + result[name]
    return {**{name: result[name] for name in MEMORY_CLASSES}, "total": total}


@dataclass(frozen=True, slots=True)
class HeldActivations:
    """Bytes of activations of one microbatch on one device (floats or arrays).

    Args:
        kept: role -> of all copies of its blocks.
        workspace: of the layer that needs most.
    """

    kept: Mapping[str, Any]
    workspace: Any


def held_activations(blocks: Iterable[tuple[Part, LocalMemory]]) -> HeldActivations:
    """Add up what one device holds of each block's activations."""
    kept: dict[str, Any] = {"embed": 0.0, "layer": 0.0, "head": 0.0}
    workspace: Any = 0.0
    for part, local in blocks:
        role, n = part.block.role, part.block.repeat * part.share
        kept[role] = kept[role] + n * (local.kept + local.workspace if role == "head" else local.kept)
        if role == "layer":
            workspace = maximum(workspace, local.workspace * (part.share > 0))
    return HeldActivations(kept, workspace)


def activation_floor(held: HeldActivations, ends: Iterable[End], hbm_capacity: float, *, offloaded: bool) -> Any:
    """Bytes that some chip holds at least, however weights and optimizer are stored: activations, logits, the reserve.

    Args:
        held: of all blocks.
        ends: the devices that may be the fullest.
        hbm_capacity: bytes; the reserve is a share of it.
        offloaded: whether kept activations may be in the host's memory, so that they do not count.
    """
    kept, floor = held.kept, 0.0
    for end in ends:
        most: Any = end.counts["head"] * end.logits_in_flight * kept["head"]
        if not offloaded:
            most = most + end.in_flight * (end.counts["layer"] * kept["layer"] + end.counts["embed"] * kept["embed"])
        floor = maximum(floor, most)
    return floor + held.workspace + RESERVE_SHARE * hbm_capacity


#: Classes of which the largest holding counts; the others are sums of their holdings.
LARGEST_COUNTS = ("workspace", "gathered_weights", "communication_buffers")


@dataclass(frozen=True, slots=True)
class Holding:
    """What one block contributes to a class.

    Args:
        name: the class.
        block: whose it is.
        copies: on the stage, times microbatches in flight for activations; 0 or 1 where only the largest counts.
        num_bytes: of one copy.
    """

    name: str
    block: Block
    copies: Any
    num_bytes: Any


@dataclass(frozen=True, slots=True)
class End:
    """A device of the pipeline that may hold most (floats or arrays).

    Args:
        counts: role -> copies there of each block's `repeat`.
        in_flight: microbatches whose activations are held, of all its chunks.
        logits_in_flight: microbatches whose logits are held.
        tied_apart: 1 where what tied weights belong to is on another device, so that they and their gradients are held
            twice, else 0.
    """

    counts: Mapping[str, Any]
    in_flight: Any
    logits_in_flight: Any
    tied_apart: Any


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """What copies of a layer hold on one stage (floats or arrays).

    Args:
        block: the layer.
        number: of its copies on the stage.
        present: 1 where there are any, else 0.
        in_flight: microbatches whose activations are held.
        state: as from `state_bytes`.
        kept: bytes of one copy's activations of one microbatch.
    """

    block: Block
    number: Any
    present: Any
    in_flight: Any
    state: Mapping[str, Any]
    kept: Any

    def one(self, name: str) -> Any:
        """Bytes of one copy, and of one microbatch, in the class `name`."""
        return self.kept if name == "activations" else self.state[name]

    def copies(self, name: str) -> Any:
        """How many of these the class `name` holds."""
        return self.number * self.in_flight if name == "activations" else self.number


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What a chip of one stage holds (floats or arrays).

    Args:
        classes: name -> bytes, the reserve left out.
        layers: what they hold of these.
        holdings: what the classes are made of, where it was written down.
    """

    classes: Mapping[str, Any]
    layers: tuple[LayerMemory, ...]
    holdings: list[Holding] | None


def pipeline_ends(layers: int, pipeline: Pipeline) -> tuple[End, ...]:
    """Say what the devices hold that may be the fullest: those with the head, the embedding, or more layers."""
    schedule, shape = pipeline.schedule, pipeline.shape
    first, middle, last = device_shares(layers, pipeline)
    apart = 0.0 if schedule.folded else (shape.stages > 1) * 1.0
    logits = schedule.held_head(shape)
    chunks = pipeline.device_chunks

    def end(counts: Mapping[str, Any], held: Any) -> End:
        return End(counts, held / chunks, logits, apart)

    ends = [end(first, schedule.held_first(shape))]
    if not schedule.folded:
        ends.append(end(last, schedule.held_last(shape)))
    if uneven(layers, pipeline):
        ends.append(end(middle, where(pipeline.has_middle, schedule.held_second(shape), schedule.held_first(shape))))
    return tuple(ends)


def state_bytes(plan: MemoryPlan, extents: Extents, precision: Precision) -> dict[str, Any]:
    """The training state of one copy of a block."""
    states = extents.weighted(plan.states)
    return {
        "parameters": extents.weighted(plan.parameters),
        "tied": extents.weighted(plan.tied),
        "gradients": extents.weighted(plan.gradients),
        "tied_gradients": extents.weighted(plan.tied_gradients),
        "master_copies": states * (precision.master.bytes if precision.master else 0.0),
        "optimizer": extents.weighted(plan.moments),
        "stored": extents.weighted(plan.stored),
    }


def _stage_memory(
    blocks: Sequence[tuple[Part, MemoryPlan, LocalMemory]],
    state: Sequence[Mapping[str, Any]],
    end: End,
    holdings: list[Holding] | None,
) -> StageMemory:
    """Classes of one stage, the reserve left out; `holdings` is filled with what they are made of."""
    layers: list[LayerMemory] = []
    out: dict[str, Any] = {name: 0.0 for name in MEMORY_CLASSES if name != "reserve"}

    def add(name: str, block: Block, copies: Any, num_bytes: Any) -> None:
        out[name] = out[name] + copies * num_bytes
        if holdings is not None:
            holdings.append(Holding(name, block, copies, num_bytes))

    def largest(name: str, block: Block, present: Any, num_bytes: Any) -> None:
        out[name] = maximum(out[name], present * num_bytes)
        if holdings is not None:
            holdings.append(Holding(name, block, present, num_bytes))

    for (part, _, local), held in zip(blocks, state, strict=True):
        block = part.block
        n = end.counts[block.role] * block.repeat * part.share
        present = (end.counts[block.role] > 0) * (part.share > 0) * 1.0
        if block.role == "layer":
            layers.append(LayerMemory(block, n, present, end.in_flight, held, local.kept))
        for name in ("parameters", "master_copies", "gradients", "optimizer"):
            add(name, block, n, held[name])
        add("parameters", block, end.tied_apart * n, held["tied"])
        add("gradients", block, end.tied_apart * n, held["tied_gradients"])
        if block.role == "head":
            add("logits_and_loss", block, n * end.logits_in_flight, local.kept + local.workspace)
        else:
            add("activations", block, n * end.in_flight, local.kept)
            largest("workspace", block, present, local.workspace)
        largest("gathered_weights", block, present, maximum(local.gathered - held["stored"], 0.0))
        largest("communication_buffers", block, present, local.buffers)
    return StageMemory(out, tuple(layers), holdings)
