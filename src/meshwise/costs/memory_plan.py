"""What a placed block holds, read from it before sizes are known: training state, activations, what is gathered.

Not here: sizes and stages (`memory`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshwise.core.tensors import Attention, Convert, Elementwise, Kind
from meshwise.costs.extents import Symbols, WeightedSum, element_bytes
from meshwise.costs.update import moment_bytes, weight_bytes
from meshwise.jobs import Optimizer, Precision
from meshwise.sharding import CollectiveKind
from meshwise.sharding.placed import Held, LocalOp, PlacedBlock, Purpose, Transfer

#: Activations, and unreduced gradients, that are held at once.
Moment = tuple[WeightedSum, WeightedSum]


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
        operations: what each operation of the backward pass holds: activations (of a layer, besides these), and
            gradients of weights that are still to be scattered; the largest counts.
        bucket: gradients of all weights of a layer that are gathered, before they are scattered.
        gathered, stored: the same weights as used and as stored.
        buffers: gathered or unreduced activations, each with the mesh axes over which it was moved, data and fsdp left
            out.
        compiled_remade, compiled_operations: as `remade` and `operations` where a compiler fuses what is elementwise.
        weights: as `gathered`, each weight alone.
        kept_scores, remade_scores: scores of attention where kernels are not fused, and masks of dropout where that is
            done to what each part of a layer adds: kept, or made again.
    """

    parameters: WeightedSum
    tied: WeightedSum
    gradients: WeightedSum
    tied_gradients: WeightedSum
    states: WeightedSum
    moments: WeightedSum
    kept: WeightedSum
    remade: WeightedSum
    operations: tuple[Moment, ...]
    bucket: WeightedSum
    gathered: WeightedSum
    stored: WeightedSum
    buffers: tuple[tuple[WeightedSum, tuple[str, ...]], ...]
    compiled_remade: WeightedSum
    compiled_operations: tuple[Moment, ...]
    weights: tuple[WeightedSum, ...]
    kept_scores: WeightedSum
    remade_scores: WeightedSum


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
    operations = _operations(placed, symbols, precision) if is_layer else _moments(placed, symbols, precision)
    return MemoryPlan(
        parameters=symbols.sum((symbols.held(h), weight_bytes(h.tensor, precision)) for h in placed.weights),
        tied=symbols.held_bytes(placed.tied, precision),
        gradients=symbols.held_bytes(placed.gradients, precision),
        tied_gradients=symbols.held_bytes(placed.tied_gradients, precision),
        states=symbols.sum((symbols.held(h), 1.0) for h in placed.optimizer),
        moments=moment_bytes(placed, symbols, precision, optimizer),
        kept=symbols.held_bytes(placed.kept, precision),
        remade=symbols.held_bytes(placed.workspace, precision),
        operations=operations,
        bucket=symbols.sum((symbols.held(h), precision.reductions.bytes) for h in trained),
        gathered=symbols.sum((symbols.held(h), w) for h, w in alive),
        stored=symbols.sum((symbols.held(stored[h.tensor.name]), w) for h, w in alive),
        buffers=_buffers(placed, symbols, precision) if is_layer else (),
        compiled_remade=symbols.held_bytes(_compiled_workspace(placed), precision),
        compiled_operations=_operations(placed, symbols, precision, compiled=True) if is_layer else operations,
        weights=tuple(symbols.sum([(symbols.held(h), w)]) for h, w in alive) if is_layer else (),
        kept_scores=_scores(placed, symbols, again=False),
        remade_scores=_scores(placed, symbols, again=True),
    )


def _compiled_workspace(placed: PlacedBlock) -> list[Held]:
    """What is made again and waits for a gradient, where what reads the result of an activation makes that itself."""
    gradients = [i for i in placed.backward if isinstance(i, LocalOp) and i.op.name not in placed.recomputed]
    read = {h.tensor.name for item in gradients for h in item.inputs}
    remade = {
        op.output.name
        for op in placed.block.ops
        if isinstance(op, Elementwise) and not (op.reduced or op.linear or isinstance(op, Convert))
    }
    return [h for h in placed.workspace if h.tensor.name in read - remade]


def _scores(placed: PlacedBlock, symbols: Symbols, *, again: bool) -> WeightedSum:
    """Scores of a block's attention, of one microbatch, every pair of them; and masks of what its parts add."""
    found = []
    whole = {h.tensor.name for h in placed.kept} <= set(placed.block.inputs)  # all of it is computed again
    for item in placed.forward:
        if not isinstance(item, LocalOp):
            continue
        splits = dict(item.splits)
        if isinstance(item.op, Attention) and (item.op.name in placed.recomputed) == again:
            axes = (*item.op.inputs[0].axes[:-1], item.op.key_axis)
            found.append((symbols.volume(axes, (splits.get(a, ()) for a in axes)), _SCORE_BYTES))
        if item.op.name.startswith("residual.") and whole == again:
            found.append((symbols.held(item.output), _MASK_BYTES))
    return symbols.sum(found)


def _operations(
    placed: PlacedBlock, symbols: Symbols, precision: Precision, *, compiled: bool = False
) -> tuple[Moment, ...]:
    """What each operation of a layer's backward pass makes or reads besides what is kept anyway.

    Where it is `compiled`, what is elementwise is done where its result is read.
    """
    known = {h.tensor.name for h in (*placed.kept, *placed.workspace)}
    sums: dict[Moment, None] = {}  # in order
    for item in placed.backward:
        if isinstance(item, LocalOp) and not (compiled and isinstance(item.op, Elementwise)):
            held = [h for h in (*item.inputs, item.output) if h.tensor.name not in known]
            sums[_moment(held, symbols, precision)] = None
    return _largest_moments(sums, symbols)


def _moments(placed: PlacedBlock, symbols: Symbols, precision: Precision) -> tuple[Moment, ...]:
    """What is alive while each operation of a backward pass runs that follows its forward pass, or ends the step.

    What was kept is let go of once it has been read, gradients of weights once they are scattered. Besides, weights
    that only the forward pass reads, with its results.
    """
    born: dict[Held, int] = dict.fromkeys(placed.kept, -1)
    dies: dict[Held, int] = {}
    for at, item in enumerate(placed.backward):
        for h in _read(item):
            born.setdefault(h, -1)
            dies[h] = at
        for h in _made(item):
            born.setdefault(h, at)
    moments: dict[Moment, None] = {}  # in order
    for at in range(len(placed.backward)):
        alive = [h for h, birth in born.items() if birth <= at <= dies.get(h, birth)]
        moments[_moment(alive, symbols, precision)] = None
    read = {h.tensor.name for h in dies}
    forward = [h for h in placed.gathered if h.tensor.name not in read]
    results = [item.output for item in placed.forward if isinstance(item, LocalOp)]
    if forward:
        weights = symbols.sum((symbols.held(h), element_bytes(h.tensor, precision)) for h in forward)
        moments[symbols.held_bytes(results[-1:], precision), weights] = None
    return _largest_moments(moments, symbols)


def _read(item: LocalOp | Transfer) -> tuple[Held, ...]:
    return item.inputs if isinstance(item, LocalOp) else (Held(item.tensor, item.collective.before),)


def _made(item: LocalOp | Transfer) -> tuple[Held, ...]:
    if isinstance(item, LocalOp):
        return (item.output,)
    # What is scattered is added to an accumulator, which is counted anyway.
    return () if item.purpose is Purpose.GRADIENTS else (Held(item.tensor, item.collective.after),)


def _moment(alive: Iterable[Held], symbols: Symbols, precision: Precision) -> Moment:
    held = [h for h in alive if h.tensor.kind is Kind.ACTIVATION]
    unreduced = [h for h in alive if h.tensor.kind is Kind.GRADIENT]
    return (
        symbols.held_bytes(held, precision),
        symbols.sum((symbols.held(h), precision.reductions.bytes) for h in unreduced),
    )


def _largest_moments(moments: Iterable[Moment], symbols: Symbols) -> tuple[Moment, ...]:
    """Leave out moments of which another holds all, and more: they are never the largest."""
    weights = {one: tuple(symbols.weights(part) for part in one) for one in moments}

    def within(one: Moment, other: Moment) -> bool:
        pairs = zip(weights[one], weights[other], strict=True)
        return all(there.get(volume, 0.0) >= w for part, there in pairs for volume, w in part.items())

    return tuple(one for one in weights if not any(other != one and within(one, other) for other in weights))


def _buffers(
    placed: PlacedBlock, symbols: Symbols, precision: Precision
) -> tuple[tuple[WeightedSum, tuple[str, ...]], ...]:
    found = set()
    for item in (*placed.forward, *placed.backward):
        if not isinstance(item, Transfer) or {"data", "fsdp"} & set(item.collective.mesh_axes):
            continue
        c = item.collective
        split, whole = (c.before, c.after) if c.kind is CollectiveKind.ALL_GATHER else (c.after, c.before)
        held: tuple[Held, ...] = ()
        if item.purpose in (Purpose.ACTIVATIONS, Purpose.MATMUL):  # what came round is kept for the products made again
            held = (Held(item.tensor, whole),)
        elif item.purpose is Purpose.RING:  # one block at work, the next on its way
            held = (Held(item.tensor, split),) * 2
        if held:
            found.add((symbols.held_bytes(held, precision), c.mesh_axes))
    return tuple(sorted(found))
