"""What a placed block holds of activations: sums still to be given sizes.

Not here: sizes and stages (`memory`), the training state (`state_plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

from meshwise.core.tensors import Attention, Convert, Elementwise, Kind
from meshwise.costs.extents import CHUNK_AXIS, Symbols, Volume, WeightedSum, element_bytes
from meshwise.jobs import Precision
from meshwise.sharding import CollectiveKind, Sharding
from meshwise.sharding.placed import Held, LocalOp, PlacedBlock, Purpose, Transfer

#: Activations that are held at once, and unreduced gradients, with gathered weights that still wait to be read.
Moment = tuple[WeightedSum, WeightedSum]


#: Bytes of activations on their way, with the mesh axes.
Buffers = tuple[tuple[WeightedSum, tuple[str, ...]], ...]


class Compiled(NamedTuple):
    """How a compiler holds what it makes; eager software has none.

    Args:
        overwrites: whether what is elementwise is written over what it is made of.
        stay: whether a head's gathered weights are there while their gradient is made.
    """

    overwrites: bool = False
    stay: bool = False


@dataclass(frozen=True)
class ActivationPlan:
    """Bytes of activations of one copy of a block before sizes are known.

    Args:
        kept: held for the backward pass.
        remade: computed again.
        compiled_remade: as `remade` where a compiler fuses what is elementwise.
        kept_scores, remade_scores: scores of attention where kernels are not fused, and masks of dropout where that is
            done to what each part of a layer adds: kept, or made again.
        find_buffers: `buffers`.
        find_moments: `operations`.
    """

    kept: WeightedSum
    remade: WeightedSum
    compiled_remade: WeightedSum
    kept_scores: WeightedSum
    remade_scores: WeightedSum
    find_buffers: Callable[[], Buffers] = field(compare=False, repr=False)
    find_moments: Callable[[Compiled | None], tuple[Moment, ...]] = field(compare=False, repr=False)
    found: dict[Compiled | None, tuple[Moment, ...]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def buffers(self) -> Buffers:
        """Gathered or unreduced activations, each with the mesh axes that it was moved over, data and fsdp left out."""
        return self.find_buffers()

    def operations(self, compiled: Compiled | None = None) -> tuple[Moment, ...]:
        """What each operation of the backward pass holds: activations (of a layer, besides these), and gradients.

        Of gradients those of weights that are still to be scattered; the largest counts. A compiler fuses what is
        elementwise, and lets go of a head's gathered weights once they are read, unless they stay.
        """
        if (known := self.found.get(compiled)) is None:
            known = self.found[compiled] = self.find_moments(compiled)
        return known


#: Bytes of a score of attention that wait for the backward pass: the softmax, what dropout left of it, and its mask
#: (Korthikanti et al. 2022, section 4.1).
_SCORE_BYTES = 5.0

#: Bytes of an element of a mask of dropout.
_MASK_BYTES = 1.0


def activation_plan(placed: PlacedBlock, symbols: Symbols, precision: Precision) -> ActivationPlan:
    """Read from a placed block what it holds of activations."""
    is_layer = placed.block.role == "layer"
    scores = _scores(placed, symbols)
    return ActivationPlan(
        kept=symbols.held_bytes(placed.kept, precision),
        remade=symbols.held_bytes(placed.workspace, precision),
        compiled_remade=symbols.held_bytes(_compiled_workspace(placed), precision),
        kept_scores=scores[False],
        remade_scores=scores[True],
        find_buffers=partial(_buffers, placed if is_layer else None, symbols, precision),
        find_moments=partial(_operations if is_layer else _moments, placed, symbols, precision),
    )


def with_buffers(plan: ActivationPlan, placed: PlacedBlock, symbols: Symbols, precision: Precision) -> ActivationPlan:
    """The plan of a layer that sends other activations, and holds what `plan` is of."""
    return replace(plan, find_buffers=partial(_buffers, placed, symbols, precision))


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


def _operations(
    placed: PlacedBlock, symbols: Symbols, precision: Precision, compiled: Compiled | None
) -> tuple[Moment, ...]:
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


def _moments(
    placed: PlacedBlock, symbols: Symbols, precision: Precision, compiled: Compiled | None
) -> tuple[Moment, ...]:
    """What is alive while each operation of a backward pass runs that follows its forward pass, or ends the step.

    What was kept is let go of once it has been read, gradients of weights once they are scattered. Besides, weights
    that only the forward pass reads, with its results. Where it is `compiled`, the others are let go of, too: gathered
    once for both passes, they are gone when their own gradient is made; and what is elementwise, and read by nothing
    else, is made as it is read (the gradient of capped logits, of which that before the cap is made); it may be written
    over what was kept for it.
    """
    born: dict[Held, int] = dict.fromkeys(placed.kept, -1)
    nowhere = _made_as_read(placed) if compiled else set()
    dies: dict[Held, int] = {}
    in_turn = [at for at, item in enumerate(placed.backward) if any(map(_in_chunk, (*_read(item), *_made(item))))]
    for at, item in enumerate(placed.backward):
        # Of what goes chunk by chunk, all else is there from the first to the last.
        begins, ends = (in_turn[0], in_turn[-1]) if at in in_turn else (at, at)
        for h in _read(item):
            if h in nowhere:
                continue
            born.setdefault(h, -1)
            over = compiled and compiled.overwrites and _written_over(item, h, nowhere)
            dies[h] = at - 1 if over else at if _in_chunk(h) else ends
        for h in _made(item):
            if h not in nowhere:
                born.setdefault(h, at if _in_chunk(h) else begins)
    moments: dict[Moment, None] = {}  # in order
    gathered = {h: -1 for h in placed.gathered if compiled and not compiled.stay and h in dies}
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


def _made_as_read(placed: PlacedBlock) -> set[Held]:
    """What elementwise operations of the backward pass make for others of them alone."""
    elementwise = {True: set[Held](), False: set[Held]()}
    for item in placed.backward:
        elementwise[item.moves is False and isinstance(item.op, Elementwise)].update(_read(item))
    made = {i.output for i in placed.backward if i.moves is False and isinstance(i.op, Elementwise)}
    return (made & elementwise[True]) - elementwise[False]


def _written_over(item: LocalOp | Transfer, held: Held, nowhere: Collection[Held]) -> bool:
    """Whether what an operation makes of things that are nowhere takes the place of this, which it reads."""
    made = _made(item)
    alike = [h for h in made if (h.tensor.axes, h.sharding) == (held.tensor.axes, held.sharding)]
    return bool(alike) and any(h in nowhere for h in _read(item))


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
