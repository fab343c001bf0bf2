"""What a placed block holds of the training state, and what updating its weights takes: sums still to be given sizes.

Traffic and matmuls of the optimizer, gathered weights. Not here: activations (`activation_plan`), sizes and stages
(`memory`), which optimizers there are (`jobs`), seconds (`step`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from meshwise.core.dtypes import DType
from meshwise.core.tensors import Block, Einsum, Kind, Lookup, Tensor
from meshwise.costs.arithmetic import Num
from meshwise.costs.extents import Extents, Split, Symbols, Volume, WeightedSum, element_bytes
from meshwise.jobs import Optimizer, Precision, newton_schulz_flops
from meshwise.sharding import Collective, CollectiveKind, Sharding
from meshwise.sharding.placed import Held, PlacedBlock, Purpose, Transfer


@dataclass(frozen=True)
class StatePlan:
    """Bytes of the training state of one copy of a block, and of its weights at work, before sizes are known.

    Args:
        parameters, tied, gradients: the training state as stored; `tied` belongs to another block.
        tied_gradients: accumulated here for that block, which adds them to its own once a step.
        states: elements (not bytes) of the optimizer's shard.
        moments: bytes of the optimizer's state.
        bucket: gradients of all weights of a layer that are gathered, before they are scattered.
        gathered, stored: the same weights as used and as stored.
        weights: as `gathered`, each weight alone.
    """

    parameters: WeightedSum
    tied: WeightedSum
    gradients: WeightedSum
    tied_gradients: WeightedSum
    states: WeightedSum
    moments: WeightedSum
    bucket: WeightedSum
    gathered: WeightedSum
    stored: WeightedSum
    weights: tuple[WeightedSum, ...]


def state_plan(placed: PlacedBlock, symbols: Symbols, precision: Precision, optimizer: Optimizer) -> StatePlan:
    """Read from a placed block what it holds of weights, gradients and the optimizer's state."""
    stored = {h.tensor.name: h for h in (*placed.weights, *placed.tied)}
    is_layer = placed.block.role == "layer"
    alive = [(h, element_bytes(h.tensor, precision)) for h in placed.gathered]
    trained = [h for h in placed.gathered if is_layer and not h.tensor.frozen]
    return StatePlan(
        parameters=symbols.sum((symbols.held(h), weight_bytes(h.tensor, precision)) for h in placed.weights),
        tied=symbols.held_bytes(placed.tied, precision),
        gradients=symbols.held_bytes(placed.gradients, precision),
        tied_gradients=symbols.held_bytes(placed.tied_gradients, precision),
        states=symbols.sum((symbols.held(h), 1.0) for h in placed.optimizer),
        moments=_moment_bytes(placed, symbols, precision, optimizer),
        bucket=symbols.sum((symbols.held(h), precision.reductions.bytes) for h in trained),
        gathered=symbols.sum((symbols.held(h), w) for h, w in alive),
        stored=symbols.sum((symbols.held(stored[h.tensor.name]), w) for h, w in alive),
        weights=tuple(symbols.sum([(symbols.held(h), w)]) for h, w in alive) if is_layer else (),
    )


#: Muon's matrices travel and are multiplied in bf16 (Liu et al. 2025, Moonlight, algorithm 1).
_MUON_FORMAT = DType.BF16


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight as optimizers see it, by its axes: a stack of matrices (one per expert), their rows, their columns."""

    stack: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]


def matrices(block: Block) -> dict[str, Matrix]:
    """The weights of `block` that are matrices, by name: those that an einsum sums over, and tables.

    What stands in weight, input and output alike is no part of a matrix but tells several apart (experts).
    """
    found: dict[str, Matrix] = {}
    for op in block.ops:
        for t in op.inputs:
            if t.kind is not Kind.WEIGHT or t.name in found:
                continue
            if isinstance(op, Lookup) and len(t.axes) > 1:
                found[t.name] = Matrix((), t.axes[:1], t.axes[1:])
            elif isinstance(op, Einsum):
                others = {a for o in op.inputs if o is not t for a in o.axes}
                rows = tuple(a for a in t.axes if a not in op.output.axes)
                columns = tuple(a for a in t.axes if a in op.output.axes and a not in others)
                stack = tuple(a for a in t.axes if a in op.output.axes and a in others)
                if rows and columns:
                    found[t.name] = Matrix(stack, rows, columns)
    return found


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """The update of one copy of a block before sizes are known.

    Args:
        traffic: HBM bytes on one chip.
        gradients: bytes of the gradients that one chip's optimizer reads, as they travel.
        orthogonal: matrices that are made orthogonal, each with the mesh axes over which its work is dealt out.
        iterations: of Newton-Schulz on each.
    """

    traffic: WeightedSum
    gradients: WeightedSum
    orthogonal: tuple[tuple[Matrix, Split], ...]
    iterations: int

    def flops(self, extents: Extents) -> Num:
        """FLOPs on the matrix unit of one chip: whole matrices are dealt out evenly."""
        total: Num = 0.0
        for matrix, split in self.orthogonal:
            stack = prod(extents.sizes[a] for a in matrix.stack)
            total = total + stack * self._of_one(matrix, extents) / extents.devices(split)
        return total

    def largest(self, extents: Extents) -> float:
        """FLOPs of the largest matrix, which no two chips share."""
        return max((self._of_one(m, extents) for m, _ in self.orthogonal), default=0.0)

    def _of_one(self, matrix: Matrix, extents: Extents) -> float:
        rows, columns = (prod(extents.sizes[a] for a in axes) for axes in (matrix.rows, matrix.columns))
        return float(newton_schulz_flops(rows, columns, self.iterations))


def update_plan(placed: PlacedBlock, symbols: Symbols, precision: Precision, optimizer: Optimizer) -> UpdatePlan:
    """Read from a placed block what its update moves and computes.

    Gradients and old values are read (by factored moments twice), moments, master copies and weights read and written;
    a matrix that is made orthogonal is written for that and read back.
    """
    master = precision.master.bytes if precision.master else 0.0
    terms: list[tuple[Volume, float]] = []
    for held in placed.optimizer:
        gradient = precision.gradients.bytes * (2 if optimizer.factored else 1)
        weight = element_bytes(held.tensor, precision)
        per_element = gradient + 2 * master + weight + weight_bytes(held.tensor, precision)
        if _orthogonal(held, placed.block, optimizer):
            per_element += 2 * _MUON_FORMAT.bytes
        terms.append((symbols.held(held), per_element))
        moments = _moment_terms(held, placed.block, symbols, precision, optimizer)
        terms += [(volume, 2 * num_bytes) for volume, num_bytes in moments]
    return UpdatePlan(
        traffic=symbols.sum(terms),
        gradients=symbols.sum((symbols.held(h), precision.reductions.bytes) for h in placed.optimizer),
        orthogonal=tuple(_orthogonal_matrices(placed, optimizer)),
        iterations=optimizer.orthogonal_iterations,
    )


def _moment_bytes(placed: PlacedBlock, symbols: Symbols, precision: Precision, optimizer: Optimizer) -> WeightedSum:
    """Bytes of the optimizer's state of one copy of a block."""
    return symbols.sum(
        term for h in placed.optimizer for term in _moment_terms(h, placed.block, symbols, precision, optimizer)
    )


def weight_bytes(tensor: Tensor, precision: Precision) -> float:
    """Bytes of one element of a weight as stored between steps, with all its copies."""
    recipe = precision.recipe
    narrow = recipe is not None and recipe.weights is not None and tensor.dtype == recipe.weights.dtype
    copies = recipe.weight_copies if recipe is not None and narrow and not tensor.frozen else 1
    return copies * element_bytes(tensor, precision)


def update_transfers(placed: PlacedBlock, optimizer: Optimizer) -> Iterator[tuple[str, Transfer]]:
    """Where matrices are made orthogonal: name and AllToAll of each, which brings it to one chip, whole, and back."""
    for held, split in _dealt(placed, optimizer):
        if split:
            t = Tensor(f"momentum.{held.tensor.name}", held.tensor.axes, Kind.WEIGHT, _MUON_FORMAT)
            whole = Sharding(((),) * len(t.axes))
            exchange = Collective(CollectiveKind.ALL_TO_ALL, split, held.sharding, whole)
            yield held.tensor.name, Transfer(t, exchange, Purpose.WEIGHTS, "")


def _orthogonal(held: Held, block: Block, optimizer: Optimizer) -> bool:
    return bool(optimizer.orthogonal_iterations) and block.role == "layer" and held.tensor.name in matrices(block)


def _dealt(placed: PlacedBlock, optimizer: Optimizer) -> Iterator[tuple[Held, Split]]:
    """Matrices to be made orthogonal, with the mesh axes that share out their state."""
    if optimizer.orthogonal_iterations:
        for held in placed.optimizer:
            if _orthogonal(held, placed.block, optimizer):
                yield held, tuple(sorted(a for split in held.sharding.splits for a in split))


def _orthogonal_matrices(placed: PlacedBlock, optimizer: Optimizer) -> Iterator[tuple[Matrix, Split]]:
    found = matrices(placed.block) if optimizer.orthogonal_iterations else {}
    for held, split in _dealt(placed, optimizer):
        yield found[held.tensor.name], split


def _moment_terms(
    held: Held, block: Block, symbols: Symbols, precision: Precision, optimizer: Optimizer
) -> Iterable[tuple[Volume, float]]:
    """Parts of the state of one tensor, with bytes per element."""
    scaled = 1 + 4 / optimizer.block_scaled if optimizer.block_scaled else 0.0
    first, second = scaled or precision.moments.bytes, scaled or precision.second_moments.bytes
    whole = optimizer.moments
    if optimizer.orthogonal_iterations and not _orthogonal(held, block, optimizer):
        whole = optimizer.other_moments
    parts = [(symbols.held(held), sum((first, second)[:whole]))] if whole else []
    if optimizer.factored:
        matrix = matrices(block).get(held.tensor.name)
        splits: Mapping[str, Split] = dict(zip(held.tensor.axes, held.sharding.splits, strict=True))
        sums = [held.tensor.axes] if matrix is None else [matrix.stack + matrix.rows, matrix.stack + matrix.columns]
        parts += [(symbols.volume(axes, [splits[a] for a in axes]), second) for axes in sums]
    return parts
