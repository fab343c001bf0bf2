"""What a placed block holds, and what updating its weights takes: sums still to be given sizes.

Training state, activations, gathered weights; traffic and matmuls of the optimizer. Not here: sizes and stages
(`memory`), which optimizers there are (`jobs`), seconds (`step`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod

from meshwise.core.dtypes import DType
from meshwise.core.tensors import Attention, Block, Convert, Einsum, Elementwise, Kind, Lookup, Tensor
from meshwise.costs.arithmetic import Num
from meshwise.costs.extents import CHUNK_AXIS, Extents, Split, Symbols, Volume, WeightedSum, element_bytes
from meshwise.jobs import Optimizer, Precision, newton_schulz_flops
from meshwise.sharding import Collective, CollectiveKind, Sharding
from meshwise.sharding.placed import Held, LocalOp, PlacedBlock, Purpose, Transfer

#: Activations that are held at once, and unreduced gradients, with gathered weights that still wait to be read.
Moment = tuple[WeightedSum, WeightedSum]


#: Bytes of activations on their way, with the mesh axes.
Buffers = tuple[tuple[WeightedSum, tuple[str, ...]], ...]


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one copy of a block before sizes are known.

    Args:
        parameters, tied, gradients: the training state as stored; `tied` belongs to another block.
        tied_gradients: accumulated here for that block, which adds them to its own once a step.
        states: elements (not bytes) of the optimizer's shard.
        moments: bytes of the optimizer's state.
        kept: activations held for the backward pass.
        remade: activations computed again.
        bucket: gradients of all weights of a layer that are gathered, before they are scattered.
        gathered, stored: the same weights as used and as stored.
        compiled_remade: as `remade` where a compiler fuses what is elementwise.
        weights: as `gathered`, each weight alone.
        kept_scores, remade_scores: scores of attention where kernels are not fused, and masks of dropout where that is
            done to what each part of a layer adds: kept, or made again.
        find_buffers: `buffers`.
        find_moments: what each operation of the backward pass holds, as `operations`; `compiled` or not.
    """

    parameters: WeightedSum
    tied: WeightedSum
    gradients: WeightedSum
    tied_gradients: WeightedSum
    states: WeightedSum
    moments: WeightedSum
    kept: WeightedSum
    remade: WeightedSum
    bucket: WeightedSum
    gathered: WeightedSum
    stored: WeightedSum
    compiled_remade: WeightedSum
    weights: tuple[WeightedSum, ...]
    kept_scores: WeightedSum
    remade_scores: WeightedSum
    find_buffers: Callable[[], Buffers] = field(compare=False, repr=False)
    find_moments: Callable[..., tuple[Moment, ...]] = field(compare=False, repr=False)

    @cached_property
    def buffers(self) -> Buffers:
        """Gathered or unreduced activations, each with the mesh axes that it was moved over, data and fsdp left out."""
        return self.find_buffers()

    @cached_property
    def operations(self) -> tuple[Moment, ...]:
        """What each operation of the backward pass holds: activations (of a layer, besides these), and gradients.

        Of gradients those of weights that are still to be scattered; the largest counts.
        """
        return self.find_moments(compiled=False)

    @cached_property
    def compiled_operations(self) -> tuple[Moment, ...]:
        """The same where a compiler fuses what is elementwise, and a head's gathered weights go once they are read."""
        return self.find_moments(compiled=True)


#: Bytes of a score of attention that wait for the backward pass: the softmax, what dropout left of it, and its mask
#: (Korthikanti et al. 2022, section 4.1).
_SCORE_BYTES = 5.0

#: Bytes of an element of a mask of dropout.
_MASK_BYTES = 1.0


def memory_plan(placed: PlacedBlock, symbols: Symbols, precision: Precision, optimizer: Optimizer) -> MemoryPlan:
    """Read from a placed block what it holds."""
    stored = {h.tensor.name: h for h in (*placed.weights, *placed.tied)}
    is_layer = placed.block.role == "layer"
    alive = [(h, element_bytes(h.tensor, precision)) for h in placed.gathered]
    trained = [h for h in placed.gathered if is_layer and not h.tensor.frozen]
    scores = _scores(placed, symbols)
    return MemoryPlan(
        parameters=symbols.sum((symbols.held(h), weight_bytes(h.tensor, precision)) for h in placed.weights),
        tied=symbols.held_bytes(placed.tied, precision),
        gradients=symbols.held_bytes(placed.gradients, precision),
        tied_gradients=symbols.held_bytes(placed.tied_gradients, precision),
        states=symbols.sum((symbols.held(h), 1.0) for h in placed.optimizer),
        moments=_moment_bytes(placed, symbols, precision, optimizer),
        kept=symbols.held_bytes(placed.kept, precision),
        remade=symbols.held_bytes(placed.workspace, precision),
        bucket=symbols.sum((symbols.held(h), precision.reductions.bytes) for h in trained),
        gathered=symbols.sum((symbols.held(h), w) for h, w in alive),
        stored=symbols.sum((symbols.held(stored[h.tensor.name]), w) for h, w in alive),
        compiled_remade=symbols.held_bytes(_compiled_workspace(placed), precision),
        weights=tuple(symbols.sum([(symbols.held(h), w)]) for h, w in alive) if is_layer else (),
        kept_scores=scores[False],
        remade_scores=scores[True],
        find_buffers=partial(_buffers, placed if is_layer else None, symbols, precision),
        find_moments=partial(_operations if is_layer else _moments, placed, symbols, precision),
    )


def with_buffers(plan: MemoryPlan, placed: PlacedBlock, symbols: Symbols, precision: Precision) -> MemoryPlan:
    """The plan of a layer that sends other activations, and holds what `plan` is of."""

    def moments(*, compiled: bool) -> tuple[Moment, ...]:
        return plan.compiled_operations if compiled else plan.operations

    return replace(plan, find_buffers=partial(_buffers, placed, symbols, precision), find_moments=moments)


def in_chunks(placed: PlacedBlock) -> PlacedBlock:
    """A head with logits of no more positions than a chunk has, one device's own."""

    def cut(held: Held) -> Held:
        axes = held.tensor.axes
        if "V" not in axes or held.tensor.kind is not Kind.ACTIVATION:
            return held
        own = tuple(CHUNK_AXIS if a == "T" else a for a in axes)
        splits = {a: s for a, s in zip(axes, held.sharding.splits, strict=True) if a != "T"}
        return Held(replace(held.tensor, axes=own), Sharding.of(own, splits))

    def one(item: LocalOp | Transfer) -> LocalOp | Transfer:
        if not isinstance(item, LocalOp):
            return item
        return replace(item, inputs=tuple(map(cut, item.inputs)), output=cut(item.output))

    return replace(placed, backward=tuple(map(one, placed.backward)), kept=tuple(map(cut, placed.kept)))


def _compiled_workspace(placed: PlacedBlock) -> list[Held]:
    """What is made again and waits for a gradient, where what reads the result of an activation makes that itself."""
    gradients = [i for i in placed.backward if i.moves is False and i.op.name not in placed.recomputed]
    read = {h.tensor.name for item in gradients for h in item.inputs}
    remade = {
        op.output.name
        for op in placed.block.ops
        if isinstance(op, Elementwise) and not (op.reduced or op.linear or isinstance(op, Convert))
    }
    return [h for h in placed.workspace if h.tensor.name in read - remade]


def _scores(placed: PlacedBlock, symbols: Symbols) -> Mapping[bool, WeightedSum]:
    """Scores of a block's attention, of one microbatch, every pair of them; and masks of what its parts add.

    Returns: those that are kept (False), and those that are made again (True).
    """
    found: dict[bool, list[tuple[Volume, float]]] = {False: [], True: []}
    whole = {h.tensor.name for h in placed.kept} <= set(placed.block.inputs)  # all of it is computed again
    for item in placed.forward:
        if item.moves is True:
            continue
        if isinstance(item.op, Attention):
            splits, axes = dict(item.splits), (*item.op.inputs[0].axes[:-1], item.op.key_axis)
            volume = symbols.volume(axes, (splits.get(a, ()) for a in axes))
            found[item.op.name in placed.recomputed].append((volume, _SCORE_BYTES))
        if item.op.name.startswith("residual."):
            found[whole].append((symbols.held(item.output), _MASK_BYTES))
    return {again: symbols.sum(terms) for again, terms in found.items()}


def _operations(placed: PlacedBlock, symbols: Symbols, precision: Precision, *, compiled: bool) -> tuple[Moment, ...]:
    """What each operation of a layer's backward pass makes or reads besides what is kept anyway.

    Where it is `compiled`, what is elementwise is done where its result is read.
    """
    known = {h.tensor.name for h in (*placed.kept, *placed.workspace)}
    items, alive = list[LocalOp](), list[list[Held]]()
    for item in placed.backward:
        if item.moves is False and not (compiled and isinstance(item.op, Elementwise)):
            held = [h for h in (*item.inputs, item.output) if h.tensor.name not in known]
            if [h for h in held if h.tensor.kind is not Kind.WEIGHT]:
                items.append(item)
                alive.append(held)
    key = tuple(items), frozenset([h.tensor.name for held in alive for h in held]), precision
    largest = symbols.moments.get(key)
    if largest is None:  # remat policies share them
        moments = dict.fromkeys(_moment(held, symbols, precision) for held in alive)  # in order
        largest = symbols.moments[key] = _largest_moments(moments, symbols)
    return largest


def _moments(placed: PlacedBlock, symbols: Symbols, precision: Precision, *, compiled: bool) -> tuple[Moment, ...]:
    """What is alive while each operation of a backward pass runs that follows its forward pass, or ends the step.

    What was kept is let go of once it has been read, gradients of weights once they are scattered. Besides, weights
    that only the forward pass reads, with its results. Where it is `compiled`, the others are let go of, too: gathered
    once for both passes, they are gone when their own gradient is made.
    """
    born: dict[Held, int] = dict.fromkeys(placed.kept, -1)
    dies: dict[Held, int] = {}
    in_turn = [at for at, item in enumerate(placed.backward) if any(map(_in_chunk, (*_read(item), *_made(item))))]
    for at, item in enumerate(placed.backward):
        # Of what goes chunk by chunk, all else is there from the first to the last.
        begins, ends = (in_turn[0], in_turn[-1]) if at in in_turn else (at, at)
        for h in _read(item):
            born.setdefault(h, -1)
            dies[h] = at if _in_chunk(h) else ends
        for h in _made(item):
            born.setdefault(h, at if _in_chunk(h) else begins)
    moments: dict[Moment, None] = {}  # in order
    gathered = {h: -1 for h in placed.gathered if compiled and h in dies}
    for at in range(len(placed.backward)):
        alive = [h for h, birth in (born | gathered).items() if birth <= at <= dies.get(h, birth)]
        moments[_moment(alive, symbols, precision, gathered)] = None
    read = {h.tensor.name for h in dies}
    forward = [h for h in placed.gathered if h.tensor.name not in read]
    results = [item.output for item in placed.forward if item.moves is False]
    if forward:
        weights = symbols.sum((symbols.held(h), element_bytes(h.tensor, precision)) for h in forward)
        moments[symbols.held_bytes(results[-1:], precision), weights] = None
    return _largest_moments(moments, symbols)


def _in_chunk(held: Held) -> bool:
    return CHUNK_AXIS in held.tensor.axes


def _read(item: LocalOp | Transfer) -> tuple[Held, ...]:
    return item.inputs if item.moves is False else (Held(item.tensor, item.collective.before),)


def _made(item: LocalOp | Transfer) -> tuple[Held, ...]:
    if item.moves is False:
        return (item.output,)
    # What is scattered is added to an accumulator, which is counted anyway.
    return () if item.purpose is Purpose.GRADIENTS else (Held(item.tensor, item.collective.after),)


def _moment(alive: Collection[Held], symbols: Symbols, precision: Precision, gathered: Collection[Held] = ()) -> Moment:
    held = [h for h in alive if h.tensor.kind is Kind.ACTIVATION]
    unreduced = [(symbols.held(h), precision.reductions.bytes) for h in alive if h.tensor.kind is Kind.GRADIENT]
    weights = (
        [(symbols.held(h), element_bytes(h.tensor, precision)) for h in alive if h in gathered] if gathered else []
    )
    return symbols.held_bytes(held, precision), symbols.sum([*unreduced, *weights])


def _largest_moments(moments: Iterable[Moment], symbols: Symbols) -> tuple[Moment, ...]:
    """Leave out moments of which another holds all, and more: they are never the largest."""
    weights = {
        one: {(p, v): w for p, part in enumerate(one) for v, w in symbols.weights(part).items()} for one in moments
    }
    largest: dict[Moment, dict[tuple[int, Volume], float]] = {}
    for one in sorted(weights, key=lambda one: sum(weights[one].values()), reverse=True):
        mine = weights[one]
        for there in largest.values():  # two that hold the same in other orders count once
            if mine.keys() <= there.keys() and all(there[volume] >= w for volume, w in mine.items()):
                break
        else:
            largest[one] = mine
    return tuple(one for one in weights if one in largest)


def _buffers(placed: PlacedBlock | None, symbols: Symbols, precision: Precision) -> Buffers:
    """Buffers of a layer; none of what is no layer."""
    found = set[tuple[WeightedSum, tuple[str, ...]]]()
    for item in (*placed.forward, *placed.backward) if placed else ():
        if item.moves is False or item.purpose in (Purpose.WEIGHTS, Purpose.GRADIENTS):
            continue
        c = item.collective
        if "data" in c.mesh_axes or "fsdp" in c.mesh_axes:
            continue
        split, whole = (c.before, c.after) if c.kind is CollectiveKind.ALL_GATHER else (c.after, c.before)
        held: tuple[Held, ...] = (Held(item.tensor, whole),)  # of products: kept for those made again
        if item.purpose is Purpose.RING:  # one block at work, the next on its way
            held = (Held(item.tensor, split),) * 2
        found.add((symbols.held_bytes(held, precision), c.mesh_axes))
    return tuple(sorted(found))


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
