"""What one device does on its own, which few sizes decide: its operations, what it holds, the bytes that it sends.

Not here: steps (`evaluate`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshwise.costs.arithmetic import Num, maximum, minimum
from meshwise.costs.compute import OperationPrices, PassCompute
from meshwise.costs.extents import CHUNK_AXIS, Extents
from meshwise.costs.layout_choices import Candidates, LayoutChoices, LocalSizes
from meshwise.costs.lower import LoweredTrainingBlock
from meshwise.costs.memory import LocalMemory, local_memory
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.routing import dropless_capacity, expert_load
from meshwise.sharding.layout import CHUNK_POSITIONS

#: Slots of an expert that a device has room for, where no token may be dropped and none is known before it comes:
#: programs of XLA have shapes that are known beforehand.
_CAPACITY = "capacity"


@dataclass(frozen=True, slots=True)
class LocalBlock:
    """What depends only on the sizes in `LocalSizes`.

    Args:
        passes: compute, as in `BlockTime`.
        sent: bytes of collectives, by their `cost`.
        memory: activations.
    """

    passes: Mapping[str, PassCompute]
    sent: Mapping[int, Num]
    memory: LocalMemory


class LocalPrices(OperationPrices):
    """Prices of one device's operations, and of the blocks that all remat policies share: all but layers."""

    @cached_property
    def held_extents(self) -> Extents:
        """Lengths of what is held."""
        return held_extents(self.extents)

    @cached_property
    def memories(self) -> dict[int, LocalMemory]:
        """What such blocks hold, by their numbers."""
        return {}

    @cached_property
    def blocks(self) -> dict[int, LocalBlock]:
        """All that a device does in them, likewise."""
        return {}


#: Sizes of single layouts whose prices a problem keeps.
_MOST_PRICES = 64

#: Of all blocks of a program.
Local = tuple[LocalBlock, ...]


def evaluate_local(
    problem: TrainingProblem,
    structure: LayoutChoices,
    prices: LocalPrices,
    known: Sequence[LocalBlock] | None = None,
    memories: Sequence[LocalMemory] | None = None,
    *,
    looped: Num = 0.0,
) -> tuple[LocalBlock, ...]:
    """Price what one device does on its own: operations, activations, and the bytes of most collectives.

    A search calls it once for the few distinct sizes there are.

    Args:
        problem, structure: as in `evaluate`.
        prices: from `local_prices`, for this structure or for another one that splits experts alike.
        known: the same of a structure that differs only in what it stores where (`zero`, `fully_sharded`), whose
            operations and activations are the same.
        memories: from `evaluate_local_memory`, where they are known.
        looped: of the sizes.
    """
    blocks = problem.lowered.training(structure)
    if memories is None:
        memories = evaluate_local_memory(problem, structure, prices) if known is None else [b.memory for b in known]
    found = []
    for number, (b, memory) in enumerate(zip(blocks, memories, strict=True)):
        shared = prices.blocks.get(b.number)
        if shared is not None:
            found.append(shared)
            continue
        if known is None:
            passes = _passes(problem, structure, b, prices)
            own = problem.with_copies(structure, b, passes, memory.kept, looped=looped, bounded=prices.bounded)
        else:
            own = dict(known[number].passes)
        sent = {one.cost: one.bytes(prices.extents) for one in b.collectives if one.local}
        found.append(LocalBlock(own, sent, memory))
        if b.role != "layer":
            prices.blocks[b.number] = found[-1]
    return tuple(found)


def evaluate_passes(
    problem: TrainingProblem, structure: LayoutChoices, prices: LocalPrices
) -> list[dict[str, PassCompute]]:
    """The passes alone of `evaluate_local`, of each block, without copies of what is kept; arguments as there."""
    return [_passes(problem, structure, b, prices) for b in problem.lowered.training(structure)]


def evaluate_local_memory(
    problem: TrainingProblem, structure: LayoutChoices, prices: LocalPrices, role: str = ""
) -> tuple[LocalMemory, ...]:
    """The memory alone of `evaluate_local`, arguments as there: of all blocks, or of those of one role."""
    blocks = (b for b in problem.lowered.training(structure) if role in ("", b.role))
    return tuple(_local_memory(problem, b, prices) for b in blocks)


def held_extents(extents: Extents) -> Extents:
    """The same for what is held: rows of experts have space for all that could come, where programs drop none."""
    if _CAPACITY not in extents.sizes:
        return extents
    return Extents(extents.symbols, {**extents.sizes, "C": extents.sizes[_CAPACITY]}, extents.mesh)


def local_prices(
    problem: TrainingProblem, structure: LayoutChoices, sizes: LocalSizes, *, bounded: bool = True
) -> LocalPrices:
    """Prices of what one device does on its own, each worked out when it is first asked for.

    Of the structure, only whether experts are split over tensors matters: all others share them.

    Args:
        problem, structure, bounded: as in `evaluate`.
        sizes: floats or arrays.
    """

    def made() -> LocalPrices:
        extents = local_extents(problem, structure, sizes)
        ops, rates = problem.lowered.ops.values, problem.compute_rates
        return LocalPrices(ops, extents, rates, bounded=bounded, leaves=problem.xla_leaves if bounded else None)

    own = sizes.micro_batch, sizes.context, sizes.ulysses, sizes.expert, sizes.tensor
    if not all(isinstance(size, float | int) for size in own):
        return made()
    # Layouts that differ elsewhere share them: an estimate is often one of several.
    known, key = problem.operation_prices, (structure.expert_tensor_parallel, bounded, *map(float, own))
    prices = known.get(key)
    if not isinstance(prices, LocalPrices):
        if len(known) >= _MOST_PRICES:
            known.clear()
        known[key] = prices = made()
    return prices


def repeats_whole(problem: TrainingProblem, structure: LayoutChoices) -> bool:
    """Whether layers that are recomputed are repeated to their end."""
    return problem.calibration.repeats_whole and structure.remat == "full"


def _passes(
    problem: TrainingProblem, structure: LayoutChoices, b: LoweredTrainingBlock, prices: LocalPrices
) -> dict[str, PassCompute]:
    """Price the passes of a block; where the software repeats a whole layer, that is what recomputation takes."""
    passes = {name: prices.pass_compute(ops) for name, ops in b.passes.items()}
    if repeats_whole(problem, structure) and b.passes["recompute"]:
        forward, needed = passes["forward"], passes["recompute"]  # bounds count what is needed
        passes["recompute"] = replace(
            needed,
            seconds=maximum(forward.seconds, needed.seconds),
            serial_seconds=maximum(forward.serial_seconds, needed.serial_seconds),
            attention_seconds=forward.attention_seconds,
        )
    if prices.own and prices.own.makes_as_read(b.role, "backward"):
        passes["backward"] = prices.products_alone(b.passes["backward"])
    return passes


def _local_memory(problem: TrainingProblem, b: LoweredTrainingBlock, prices: LocalPrices) -> LocalMemory:
    if (known := prices.memories.get(b.number)) is not None:
        return known
    bucketed = problem.bucketed and b.role == "layer"
    found = local_memory(
        b.activations, b.state, prices.held_extents, problem.calibration,
        bucketed=bucketed, overwrites=prices.own is not None and prices.own.fuses_loss,
    )  # fmt: skip
    if b.role != "layer":
        prices.memories[b.number] = found
    return found


def local_extents(problem: TrainingProblem, structure: LayoutChoices, sizes: LocalSizes) -> Extents:
    """Lengths of one microbatch on one device, where no weight is split over data and fsdp."""
    bound = _bound(problem, structure, sizes, sizes.micro_batch * sizes.expert)
    return Extents(problem.lowered.symbols, bound, {"data": 1.0, "fsdp": 1.0, **sizes.mesh})


def whole_extents(problem: TrainingProblem, structure: LayoutChoices, c: Candidates) -> Extents:
    """Lengths on the whole mesh: B is the sequences of one microbatch over all devices."""
    bound = _bound(problem, structure, c.local, c.micro_batch * c.replicas)
    return Extents(problem.lowered.symbols, bound, c.mesh)


def _bound(problem: TrainingProblem, structure: LayoutChoices, sizes: LocalSizes, sequences: Num) -> dict[str, Num]:
    """Sizes of all axes for a number of sequences; slots of experts are those of the busiest device."""
    program = problem.train_program()
    bound = program.bind(batch=sequences, queries=problem.job.seq_len)
    if "C" in bound:
        devices = sizes.expert if structure.expert_tensor_parallel else sizes.expert * sizes.tensor
        shards = sizes.context * sizes.ulysses * (devices / sizes.expert)
        tokens = sizes.micro_batch * problem.job.seq_len / shards
        experts, chosen = bound["E"], bound["top_k"]
        scatter = (experts - chosen) / max(experts - 1, 1)  # a token's experts differ
        if problem.has_dropless_capacity:
            bound[_CAPACITY] = bound["C"] * dropless_capacity(experts, chosen, devices)
        bound["C"] = bound["C"] * expert_load(problem.job, tokens * chosen, devices, scatter=scatter)
    positions = problem.job.seq_len / (sizes.context * sizes.ulysses)
    bound[CHUNK_AXIS] = minimum(positions, maximum(CHUNK_POSITIONS / sizes.micro_batch, 1.0))
    return bound
