"""Placing a program on a mesh: local operations and the collectives between them, derived from rule tables.

Depends only on the structure of a layout (which axis is split over which mesh axis), never on sizes, so that one
placement serves a million candidates. Not here: bytes per second, or any strategy's formula.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from meshwise.core.backward import backward
from meshwise.core.tensors import (
    AttentionGradient,
    Block,
    Elementwise,
    Kind,
    Lookup,
    Op,
    Route,
    Tensor,
)
from meshwise.sharding.collective_products import AXIS, moves_beside_products, split_by_rows
from meshwise.sharding.mesh import Sharding
from meshwise.sharding.placed import Held, LocalOp, PlacedBlock, Purpose, Transfer
from meshwise.sharding.remat import RematPolicy, Saved, is_passing, saved_activations
from meshwise.sharding.reshard import CollectiveKind, nearest, reshard
from meshwise.sharding.ring_attention import with_ring
from meshwise.sharding.strategy import Strategy, iteration_space


class _Placer:
    """Walks operations in order, knows where every tensor is, and moves it when an operation needs it elsewhere."""

    def __init__(
        self,
        strategy: Strategy,
        held: dict[str, Held],
        beside: frozenset[str] = frozenset(),
        *,
        slices_copies: bool = False,
        known: dict[str, LocalOp] | None = None,
    ) -> None:
        self.strategy = strategy
        self.known = {} if known is None else known  # operations that are placed in one way wherever their inputs are
        self.slices_copies = slices_copies  # whether a slice of an earlier copy serves as well
        self.beside = beside  # names of what moves round a ring beside products, forward or as a gradient
        self.held = held
        self.copies: set[tuple[str, Sharding]] = set()
        self.forms: dict[str, list[Sharding]] = {}  # what each tensor became on its ways
        self.wanted = defaultdict[str, list[Sharding]](list)  # as what each tensor was read
        self.items: list[LocalOp | Transfer] = []

    def run_forward(self, block: Block) -> None:
        """Place all operations of a block, and complete its outputs."""
        for op in block.ops:
            self.run(op)
        for name in block.outputs:
            self.settle(name, "")

    def run(self, op: Op) -> None:
        """Place one operation."""
        if op.name in self.known:
            placed = self.known[op.name]
            for held in placed.inputs:
                self.bring(held.tensor, held.sharding, op.name)
            self._append(placed)
            return
        if self._passes_partial_sums(op):
            self._run_on_partial_sums(op)
            return
        op = self._add_parts_first(op)
        splits = iteration_space(self.strategy, op)
        # Routing is linear: partial sums over mesh axes that split neither tokens nor slots are routed as they are, and
        # added afterwards, when there is one value a token again; over others they are scattered on the way. So is the
        # gradient of a table: gradients of learned positions, partial over sequences, are added up once a step.
        moved = _moved(op)
        routed = frozenset[str]() if moved is None else self.held[moved.name].sharding.unreduced
        passed = routed.difference(*splits.values())
        inputs = []
        for t in op.inputs:
            wanted = Sharding.of(t.axes, splits, unreduced=passed if t is moved else ())
            self.bring(t, wanted, op.name, as_it_is=t is moved and bool(routed))
            inputs.append(Held(t, wanted))
        output = Held(op.output, self._output_sharding(op, splits, passed))
        placed = LocalOp(op, tuple(inputs), output, tuple(splits.items()))
        if is_placed_uniformly(op):
            self.known[op.name] = placed
        self._append(placed)

    def _append(self, placed: LocalOp) -> None:
        self.items.append(placed)
        self.held[placed.output.tensor.name] = placed.output

    def _output_sharding(self, op: Op, splits: dict[str, tuple[str, ...]], passed: frozenset[str]) -> Sharding:
        if isinstance(op, AttentionGradient):
            # Written for all key positions; a partial sum over the devices that hold other queries, and over those that
            # hold other heads where one key serves them all.
            own = {a: s for a, s in splits.items() if a != op.source.query_axis}
            kept = {m for a in op.output.axes for m in own.get(a, ())}
            pending = {m for a in op.source.axes for m in splits.get(a, ())} - kept
            return Sharding.of(op.output.axes, own, unreduced=pending)
        if isinstance(op, Route):  # slots carry the split of the tokens they came from
            summed = splits["E"] if op.combine else ()
            return Sharding.of(op.output.axes, splits, unreduced=passed.union(summed))
        out_axes = {a for split in (splits.get(x, ()) for x in op.output.axes) for a in split}
        pending = {a for x in op.axes for a in splits.get(x, ())} - out_axes
        return Sharding.of(op.output.axes, splits, unreduced=passed.union(pending))

    def _passes_partial_sums(self, op: Op) -> bool:
        """Whether `op` is linear and its moving inputs are partial sums in the same way, so that it may run on them."""
        linear = isinstance(op, Elementwise) and op.linear
        moving = [self.held[t.name] for t in op.inputs if t.kind is Kind.ACTIVATION]
        if not linear or not moving or not moving[0].sharding.unreduced:
            return False
        same = all(h.sharding == moving[0].sharding and h.tensor.axes == moving[0].tensor.axes for h in moving)
        return same and len(moving) == len(op.inputs) and op.output.axes == moving[0].tensor.axes

    def _add_parts_first(self, op: Op) -> Op:
        """Where several addends of a sum are partial in the same way, add those locally, so that one reduction does.

        Returns: the operation that remains.
        """
        if not (isinstance(op, Elementwise) and op.linear):
            return op
        alike: dict[Sharding, list[Tensor]] = {}
        for t in op.inputs:
            if t.axes == op.output.axes and self.held[t.name].sharding.unreduced:
                alike.setdefault(self.held[t.name].sharding, []).append(t)
        for parts in alike.values():
            if len(parts) > 1:
                whole = replace(parts[0], name=f"{op.output.name}.parts")
                add = replace(
                    op, name=f"{op.name}.parts", inputs=tuple(parts), output=whole, flops_per_element=len(parts) - 1
                )
                self._run_on_partial_sums(add)
                rest = tuple(t for t in op.inputs if t not in parts)
                op = replace(op, inputs=(*rest, whole), flops_per_element=op.flops_per_element - len(parts) + 1)
        return op

    def _run_on_partial_sums(self, op: Op) -> None:
        sharding = self.held[op.inputs[0].name].sharding
        inputs = tuple(Held(t, sharding) for t in op.inputs)
        splits = dict(zip(op.output.axes, sharding.splits, strict=True))
        self._append(LocalOp(op, inputs, Held(op.output, sharding), tuple(splits.items())))

    def bring(self, t: Tensor, wanted: Sharding, reader: str, *, as_it_is: bool = False) -> None:
        """Move tensor `t` to `wanted` for `reader`, reusing a copy that was made before.

        Args:
            t: the tensor.
            wanted: where.
            reader: operation that waits for it.
            as_it_is: whether a partial sum is moved as such, instead of being completed for all readers.
        """
        self.wanted[t.name].append(wanted)
        held = self.held[t.name]
        if held.sharding.unreduced and not as_it_is:
            held = self.settle(t.name, reader)
        is_there = held.sharding is wanted or held.sharding == wanted or (t.name, wanted) in self.copies
        if not is_there and (as_it_is or not self._lies_in_a_copy(t, wanted)):
            self._move(held, wanted, reader)
            self.copies.add((t.name, wanted))

    def _lies_in_a_copy(self, t: Tensor, wanted: Sharding) -> bool:
        """Whether every device holds what is wanted as a part of a copy that was made before."""
        copies = (sharding for name, sharding in self.copies if name == t.name) if self.slices_copies else ()
        return any(all(c.kind is CollectiveKind.SLICE for c in reshard(copy, wanted)) for copy in copies)

    def settle(self, name: str, reader: str) -> Held:
        """Sum a partial value into the place where its kind lives, once and for all readers."""
        held = self.held[name]
        if held.sharding.unreduced:
            home = self.strategy.home(held.tensor.axes)
            self._move(held, home, reader)
            held = self.held[name] = Held(held.tensor, home)
        return held

    def _move(self, held: Held, target: Sharding, reader: str) -> None:
        purposes = {Kind.WEIGHT: Purpose.WEIGHTS, Kind.GRADIENT: Purpose.GRADIENTS}
        purpose = purposes.get(held.tensor.kind, Purpose.ACTIVATIONS)
        name, steps = held.tensor.name, reshard(held.sharding, target)
        self.forms.setdefault(name, []).extend([c.after for c in steps])
        if self.beside and name.removeprefix("d_").removesuffix(".parts") in self.beside:
            self.items += _pieces(held, target, reader)
            return
        for c in steps:
            if c.kind is not CollectiveKind.SLICE:
                self.items.append(Transfer(held.tensor, c, purpose, reader))


def is_placed_uniformly(op: Op) -> bool:
    """Whether an operation is placed in one way wherever its inputs are: it runs on no partial sums."""
    return not (isinstance(op, Elementwise) and op.linear) and _moved(op) is None


def _moved(op: Op) -> Tensor | None:
    """What an operation moves as it is, so that partial sums of it may be moved; None where it computes."""
    if isinstance(op, Route):
        return op.inputs[0]
    return op.inputs[1] if isinstance(op, Lookup) and op.scatter else None


def _transfers(held: Held, target: Sharding, purpose: Purpose, reader: str) -> list[Transfer]:
    steps = reshard(held.sharding, target)
    return [Transfer(held.tensor, c, purpose, reader) for c in steps if c.kind is not CollectiveKind.SLICE]


def _pieces(held: Held, target: Sharding, reader: str) -> list[Transfer]:
    """What travels beside products: a gather or a scatter over their axis; an AllReduce is a scatter, then a gather."""
    if AXIS not in held.sharding.unreduced or AXIS in target.splitting_axes:
        moved = _transfers(held, target, Purpose.ACTIVATIONS, reader)
        return [replace(t, purpose=Purpose.MATMUL) if t.collective.mesh_axes == (AXIS,) else t for t in moved]
    rows = split_by_rows(held.tensor, target)
    scattered = _transfers(held, rows, Purpose.MATMUL, reader)
    return [*scattered, *_transfers(Held(held.tensor, rows), target, Purpose.ACTIVATIONS, reader)]


def place_block(block: Block, strategy: Strategy, policy: RematPolicy) -> PlacedBlock:
    """Place `block`, forward and backward, on the mesh axes of `strategy`.

    Args:
        block: operations on named axes.
        strategy: rule tables; every mesh axis they name may turn out to have size 1, which costs nothing.
        policy: what is kept for the backward pass.

    Raises:
        ShardingError: for rules that give one tensor the same mesh axis twice.
    """
    placed, gradients = _place_passes(block, replace(strategy, optimizer=(), ring=False), policy)
    own = {h.tensor.name: h for h in placed.weights}
    optimizer = tuple(
        Held(h.tensor, strategy.stored(h.tensor.axes, "optimizer")) for h in own.values() if not h.tensor.frozen
    )
    whole = replace(placed, optimizer=optimizer, step=_step_transfers(own, gradients, optimizer))
    return with_ring(whole, strategy) if strategy.ring else whole


@lru_cache(maxsize=256)  # ways to store the optimizer's state share them, as do formats
def _place_passes(block: Block, strategy: Strategy, policy: RematPolicy) -> tuple[PlacedBlock, Mapping[str, Held]]:
    """Place the two passes, whatever the optimizer does; arguments as in `place_block`.

    Returns: the block, and by the names of their weights the gradients that the backward pass leaves.
    """
    outside, forward, back, kept = _place_activations(block, replace(strategy, gradients=()), policy)
    items, gradients = _accumulated(back, strategy)
    # No operation makes gradients of idle weights, so nothing is reduced or moved; they have accumulators all the same.
    idle = {
        t.name: Held(replace(t, name=f"d_{t.name}", kind=Kind.GRADIENT), strategy.stored(t.axes, "gradients"))
        for t in block.idle
        if not t.frozen
    }
    placed = _placed(block, outside, forward.items, items)
    own = {h.tensor.name for h in placed.weights}
    every = gradients | idle
    whole = replace(
        placed,
        backward=tuple(items),
        recomputed=back.recomputed,
        kept=tuple(kept.values()),
        workspace=back.workspace,
        tied_gradients=tuple(h for n, h in every.items() if n not in own),
        gradients=tuple(every[h.tensor.name] for h in placed.weights if h.tensor.name in every),
    )
    return whole, {n: h for n, h in gradients.items() if n not in idle}


class _Backward(NamedTuple):
    """A backward pass before gradients of weights are brought to their accumulators."""

    items: list[LocalOp | Transfer]
    whole: tuple[tuple[int, Held], ...]  # these gradients, each with the number of items after which it is whole
    recomputed: frozenset[str]  # names of operations that run again
    workspace: tuple[Held, ...]  # what they make
    wanted: dict[str, list[Sharding]]  # as what each tensor is read


@lru_cache(maxsize=256)  # ways to store gradients share them
def _place_activations(
    block: Block, strategy: Strategy, policy: RematPolicy
) -> tuple[dict[str, Held], _Placer, _Backward, dict[str, Held]]:
    """Place the two passes, wherever gradients are added up; all of it is only read.

    Returns: how what enters the block is held, its forward and its backward pass, what is kept in between.
    """
    outside, forward = _place_forward_pass(block, strategy)
    saved = saved_activations(block, policy)
    made = {t.name: forward.held[t.name] for t in saved.kept}
    back = _place_backward(block, strategy, saved, outside | made, forward)
    kept = _as_read_again(made, forward.forms, back.wanted)
    if kept != made:
        back = _place_backward(block, strategy, saved, outside | kept, forward)
    return outside, forward, back, kept


@lru_cache(maxsize=256)  # whatever is kept, and wherever gradients are added up
def _place_forward_pass(block: Block, strategy: Strategy) -> tuple[dict[str, Held], _Placer]:
    """How what enters the block is held, and its forward pass; both are only read, or completed."""
    outside = _outside(block, strategy)
    beside = moves_beside_products(block, strategy) if strategy.pieces else frozenset[str]()
    forward = _Placer(strategy, dict(outside), beside)
    forward.run_forward(block)
    return outside, forward


def placed_in_training(block: Block, strategy: Strategy) -> list[LocalOp | Transfer]:
    """The forward pass of one copy of a block in training; it is known where the block was placed so."""
    tables = replace(strategy, gradients=(), optimizer=(), ring=False)
    return _place_forward_pass(replace(block, repeat=1), tables)[1].items


def place_forward(block: Block, strategy: Strategy) -> PlacedBlock:
    """Place one forward pass of `block` alone, as a step of serving is: nothing is kept for later but caches.

    Args:
        block: operations on named axes; caches come from outside.
        strategy: rule tables; every mesh axis they name may turn out to have size 1, which costs nothing.

    Raises:
        ShardingError: for rules that give one tensor the same mesh axis twice.
    """
    outside = _outside(block, strategy)
    placer = _Placer(strategy, dict(outside), slices_copies=True)
    placer.run_forward(block)
    placed = _placed(block, outside, placer.items)
    return with_ring(placed, strategy) if strategy.ring else placed


def _placed(block: Block, outside: dict[str, Held], *passes: list[LocalOp | Transfer]) -> PlacedBlock:
    """A block with the items of its forward pass, and the weights that this and further passes read."""
    weights = {n: h for n, h in outside.items() if h.tensor.kind is Kind.WEIGHT}
    inputs = [item.inputs for items in passes for item in items if item.moves is False]
    read = [h for held in inputs for h in held if h.tensor.name in weights]
    gathered = {h.tensor.name: h for h in read if h.sharding != weights[h.tensor.name].sharding}
    own = {t.name: weights[t.name] for t in block.weights}
    return PlacedBlock(
        block=block,
        forward=tuple(passes[0]),
        weights=tuple(own.values()),
        tied=tuple(h for n, h in weights.items() if n not in own),
        gathered=tuple(gathered.values()),
        caches=tuple(h for h in outside.values() if h.tensor.kind is Kind.KV_CACHE),
    )


def _outside(block: Block, strategy: Strategy) -> dict[str, Held]:
    """How what enters the block is held: weights as stored, caches where they stay, all else at home."""
    made = {op.output.name for op in block.ops}
    read = {t.name: t for t in (*(t for op in block.ops for t in op.inputs if t.name not in made), *block.idle)}

    def sharding(t: Tensor) -> Sharding:
        if t.kind is Kind.WEIGHT:
            return strategy.stored(t.axes, "weights")
        return strategy.cached(t.axes) if t.kind is Kind.KV_CACHE else strategy.home(t.axes)

    return {t.name: Held(t, sharding(t)) for t in read.values()}


def _as_read_again(
    made: dict[str, Held], forms: dict[str, list[Sharding]], wanted: dict[str, list[Sharding]]
) -> dict[str, Held]:
    """Choose as what each activation is kept: of the forms that are no larger, that with the least to move afterwards.

    Slots are kept where their experts are, keys and values as Ulysses attention read them. What was gathered is larger:
    it is gathered again.

    Args:
        made: activations as operations left them.
        forms: what each became on its ways in the forward pass.
        wanted: as what the backward pass reads each.
    """
    kept = {}
    for name, own in made.items():
        small = [f for f in forms.get(name, ()) if f.splitting_axes >= own.sharding.splitting_axes]
        kept[name] = Held(own.tensor, nearest((own.sharding, *small), {*wanted.get(name, ())})) if small else own
    return kept


def _place_backward(
    block: Block, strategy: Strategy, saved: Saved, held: dict[str, Held], forward: _Placer
) -> _Backward:
    """Place recomputation and gradients."""
    ops = backward(block)
    outputs = {op.output.name: op.output for op in block.ops}
    for name in block.outputs:
        grad = replace(outputs[name], name=f"d_{name}")
        held[grad.name] = Held(grad, strategy.home(grad.axes))
    placer = _Placer(strategy, dict(held), forward.beside, known=forward.known)
    if block.role == "head":  # nothing runs between its passes: what was gathered for the one is there for the other
        placer.copies |= forward.copies
    for op in saved.recompute:
        placer.run(op)
    recomputed = frozenset(item.op.name for item in placer.items if item.moves is False)
    whole: list[tuple[int, Held]] = []
    read_later = {t.name for op in ops for t in op.inputs}
    for op in ops:
        placer.run(op)
        if op.output.kind is Kind.GRADIENT and op.output.name not in read_later:
            whole.append((len(placer.items), placer.held[op.output.name]))
    for t in (t for op in block.ops for t in op.inputs if t.name in block.inputs and t.kind is Kind.ACTIVATION):
        if f"d_{t.name}" in placer.held:
            placer.settle(f"d_{t.name}", "")
    workspace = tuple(placer.held[op.output.name] for op in saved.recompute if not is_passing(op))
    return _Backward(placer.items, tuple(whole), recomputed, workspace, placer.wanted)


def _accumulated(back: _Backward, strategy: Strategy) -> tuple[list[LocalOp | Transfer], dict[str, Held]]:
    """Move each weight's gradient to its accumulator as soon as it is whole.

    Returns: all that the backward pass does, and the accumulators by the weights' names.
    """
    items, gradients, begin = list[LocalOp | Transfer](), dict[str, Held](), 0
    for at, held in back.whole:
        transfers, accumulator = _accumulate(strategy, held)
        items += [*back.items[begin:at], *transfers]
        gradients[held.tensor.name.removeprefix("d_")] = accumulator
        begin = at
    return items + back.items[begin:], gradients


def _accumulate(strategy: Strategy, held: Held) -> tuple[list[Transfer], Held]:
    """Bring a weight's gradient to its accumulator: split as the table says, other sums left for the step's end."""
    splits = strategy.stored(held.tensor.axes, "gradients").splits
    used = {a for s in splits for a in s}
    target = Sharding(splits, frozenset(held.sharding.unreduced - used))
    return _transfers(held, target, Purpose.GRADIENTS, ""), Held(held.tensor, target)


def _step_transfers(
    weights: dict[str, Held], gradients: Mapping[str, Held], optimizer: tuple[Held, ...]
) -> tuple[Transfer, ...]:
    """Once a step: gradients to the optimizer's shards, new weights from there to where they are stored."""
    transfers: list[Transfer] = []
    for state in optimizer:
        name = state.tensor.name
        if name not in gradients:
            continue
        transfers += _transfers(gradients[name], state.sharding, Purpose.GRADIENTS, "")
        transfers += _transfers(Held(state.tensor, state.sharding), weights[name].sharding, Purpose.WEIGHTS, "")
    return tuple(transfers)
