"""HBM bytes of a training step on one chip, by class. The total is the sum of its classes, exactly.

What a class holds is read from the placed blocks. Not here: allocator fragmentation beyond the named reserve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwise.costs.arithmetic import ceil, maximum, minimum, where
from meshwise.costs.extents import Extents, element_bytes
from meshwise.jobs import Optimizer, Precision
from meshwise.sharding import CollectiveKind
from meshwise.sharding.place import Held, LocalOp, PlacedBlock, Purpose, Transfer
from meshwise.tensors import Kind

__all__ = ["MEMORY_CLASSES", "RESERVE_SHARE", "training_memory"]

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

#: Share of HBM that is left to the runtime: about 2 GB of an 80 GB GPU (CUDA context and NCCL), a few hundred MB of a TPU.
RESERVE_SHARE = 0.02


@dataclass(slots=True)
class _BlockMemory:
    """Bytes of one copy of a block on one chip, for one microbatch."""

    parameters: Any = 0.0
    tied: Any = 0.0
    gradients: Any = 0.0
    states: Any = 0.0  # elements of the optimizer's shard
    kept: Any = 0.0
    workspace: Any = 0.0
    gathered: Any = 0.0
    buffers: Any = 0.0


def _block_memory(placed: PlacedBlock, extents: Extents, precision: Precision) -> _BlockMemory:
    def total(held: Sequence[Held]) -> Any:
        result: Any = 0.0
        for h in held:
            result = result + extents.held_bytes(h, precision)
        return result

    m = _BlockMemory()
    m.parameters = total(placed.weights)
    m.tied = total(placed.tied)
    m.gradients = total(placed.gradients)
    for h in placed.optimizer:
        m.states = m.states + extents.elements(h.tensor, h.sharding)
    m.kept = total(placed.kept)
    m.workspace = total(placed.workspace) + _largest_operation(placed, extents, precision)
    stored = {h.tensor.name: h for h in (*placed.weights, *placed.tied)}
    for h in placed.gathered:
        # Nothing is gathered where the copy is no larger than what is stored. One layer at work, one on its way, and the
        # gradient of the whole before it is scattered.
        whole = extents.elements(h.tensor, h.sharding)
        extra = whole - extents.elements(h.tensor, stored[h.tensor.name].sharding)
        factor = 2 * element_bytes(h.tensor, precision) + precision.gradients.bytes
        m.gathered = m.gathered + extra * factor
    for item in (*placed.forward, *placed.backward):
        if isinstance(item, Transfer) and item.purpose is Purpose.ACTIVATIONS:
            c = item.collective
            side = c.after if c.kind is CollectiveKind.ALL_GATHER else c.before
            size = extents.elements(item.tensor, side) * element_bytes(item.tensor, precision)
            m.buffers = maximum(m.buffers, size * (1 - 1 / extents.devices(c.mesh_axes)))
    return m


def _largest_operation(placed: PlacedBlock, extents: Extents, precision: Precision) -> Any:
    """Bytes of the activations that the hungriest operation of the backward pass makes besides what is kept anyway."""
    kept = {h.tensor.name for h in (*placed.kept, *placed.workspace)}
    largest: Any = 0.0
    for item in placed.backward:
        if not isinstance(item, LocalOp):
            continue
        total: Any = 0.0
        for h in (*item.inputs, item.output):
            if h.tensor.kind is Kind.ACTIVATION and h.tensor.name not in kept:
                total = total + extents.held_bytes(h, precision)
        largest = maximum(largest, total)
    return largest


def training_memory(
    placed: Sequence[PlacedBlock],
    extents: Extents,
    precision: Precision,
    optimizer: Optimizer,
    *,
    hbm_capacity: float,
    stages: Any,
    num_microbatches: Any,
) -> Mapping[str, Any]:
    """Bytes of each class on the chip that holds most: of the first or of the last pipeline stage (1F1B schedule).

    The first stage holds the embedding and up to `stages` microbatches in flight; the last holds the head and one.

    Args:
        placed: all blocks on the mesh; each layer group's `repeat` is spread over the stages, rounded up.
        extents: local sizes; B is one microbatch.
        precision, optimizer: bytes per element, values per parameter.
        hbm_capacity: bytes; the reserve is a share of it.
        stages, num_microbatches: floats or arrays.

    Returns: class -> bytes (float or array), and their sum as "total". Source: book, Training, "memory"; Korthikanti et al. 2022.
    """
    blocks = [(p.block.role, p.block.repeat, _block_memory(p, extents, precision)) for p in placed]
    layers = sum(repeat for role, repeat, _ in blocks if role == "layer")
    share = ceil(layers / stages) / layers
    single = stages == 1
    ends = {}
    for end, in_flight in (("embed", minimum(stages, num_microbatches)), ("head", 1.0)):
        other = where(single, 1.0, 0.0)  # with one stage, both ends are on it
        counts = {"embed": 1.0 if end == "embed" else other, "head": 1.0 if end == "head" else other, "layer": share}
        held = where(single, 1.0, in_flight)
        ends[end] = _classes(blocks, counts, held, precision, optimizer, single=single)
    totals = {end: sum(classes.values()) for end, classes in ends.items()}
    first = totals["embed"] > totals["head"]
    result = {name: where(first, ends["embed"][name], ends["head"][name]) for name in ends["embed"]}
    result["reserve"] = RESERVE_SHARE * hbm_capacity + 0.0 * result["parameters"]
    total: Any = 0.0
    for name in MEMORY_CLASSES:
        total = total + result[name]
    return {**{name: result[name] for name in MEMORY_CLASSES}, "total": total}


def _classes(
    blocks: list[tuple[str, int, _BlockMemory]],
    counts: Mapping[str, Any],
    in_flight: Any,
    precision: Precision,
    optimizer: Optimizer,
    *,
    single: Any,
) -> dict[str, Any]:
    """Classes of one stage that holds `counts` of each role's blocks."""
    out: dict[str, Any] = dict.fromkeys(("parameters", "master_copies", "gradients", "optimizer", "activations"), 0.0)
    out |= dict.fromkeys(("logits_and_loss", "workspace", "gathered_weights", "communication_buffers"), 0.0)
    master = precision.master.bytes if precision.master else 0.0
    moments = optimizer.moments * precision.moments.bytes
    for role, repeat, m in blocks:
        n = counts[role] * repeat
        present = counts[role] > 0
        out["parameters"] = out["parameters"] + n * m.parameters + where(single, 0.0, n * m.tied)
        out["gradients"] = out["gradients"] + n * m.gradients
        out["master_copies"] = out["master_copies"] + n * m.states * master
        out["optimizer"] = out["optimizer"] + n * m.states * moments
        if role == "head":
            out["logits_and_loss"] = out["logits_and_loss"] + n * (m.kept + m.workspace)
        else:
            out["activations"] = out["activations"] + n * m.kept * in_flight
            out["workspace"] = maximum(out["workspace"], where(present, m.workspace, 0.0))
        out["gathered_weights"] = maximum(out["gathered_weights"], where(present, m.gathered, 0.0))
        out["communication_buffers"] = maximum(out["communication_buffers"], where(present, m.buffers, 0.0))
    return out
