"""What a training program holds tensor by tensor, and which mesh axes split it. Not here: any tool's own words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from meshwise.core.tensors import Attention, Block, Program, Sizes
from meshwise.sharding import Sharding
from meshwise.sharding.place import placed_in_training
from meshwise.sharding.placed import Held
from meshwise.sharding.strategy import Strategy

#: The mesh axes that split an axis, major to minor.
Split = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HeldIn:
    """A tensor of a block as it is held.

    Args:
        name: "block/tensor"; "block/operation.tensor" of what an attention reads.
        axes: of the tensor; "L" is the layers of a block that repeats.
        shape: of the whole tensor, one microbatch; None where routing decides.
        sharding: which mesh axes split which dimension.
    """

    name: str
    axes: tuple[str, ...]
    shape: tuple[int | None, ...]
    sharding: Sharding


@dataclass(frozen=True, slots=True)
class PlacedTensors:
    """All tensors of a program: the training state as stored, activations as they live between operations."""

    weights: tuple[HeldIn, ...]
    gradients: tuple[HeldIn, ...]
    optimizer: tuple[HeldIn, ...]
    activations: tuple[HeldIn, ...]

    @property
    def all(self) -> tuple[HeldIn, ...]:
        """Every one of them."""
        return (*self.weights, *self.gradients, *self.optimizer, *self.activations)


def placed_tensors(program: Program, strategy: Strategy, seq_len: int, sequences: int = 1) -> PlacedTensors:
    """List what is held of a program, of so many sequences.

    Remat policies choose what is kept, and repeat the forward pass: whatever the policy, every tensor is held alike.
    """
    sizes = program.bind(batch=sequences, queries=seq_len)
    weights, gradients, optimizer = (
        tuple(h for block in program for h in _state(block, strategy, part, sizes))
        for part in ("weights", "gradients", "optimizer")
    )
    activations = tuple(h for block in program for h in _activations(block, strategy, sizes))
    return PlacedTensors(weights, gradients, optimizer, activations)


def _whole(size: Any) -> int | None:
    return int(size) if size == int(size) else None


def _state(block: Block, strategy: Strategy, part: str, sizes: Sizes) -> Iterator[HeldIn]:
    """Weights, gradients or optimizer state; layers of one kind are stacked in front."""
    for t in block.weights:
        axes, splits = t.axes, strategy.stored(t.axes, part).splits
        shape = tuple(_whole(sizes[a]) for a in axes)
        if block.repeat > 1:
            axes, splits, shape = ("L", *axes), ((), *splits), (block.repeat, *shape)
        yield HeldIn(f"{block.name}/{t.name}", axes, shape, Sharding(splits))


def _activations(block: Block, strategy: Strategy, sizes: Sizes) -> Iterator[HeldIn]:
    """What enters, what operations leave (sums completed), and what attention reads."""
    for name, h in _held_at_work(block, strategy):
        shape = tuple(None if a.startswith("C") else _whole(sizes[a]) for a in h.tensor.axes)
        yield HeldIn(f"{block.name}/{name}", h.tensor.axes, shape, h.sharding)


def _held_at_work(block: Block, strategy: Strategy) -> Iterator[tuple[str, Held]]:
    """The same by name, before sizes are known."""
    entering = {t.name: t for op in block.ops for t in op.inputs if t.name in block.inputs}
    yield from ((t.name, Held(t, strategy.home(t.axes))) for t in entering.values())
    for item in placed_in_training(block, strategy):
        if item.moves is False:
            if isinstance(item.op, Attention):
                yield from ((f"{item.op.name}.{h.tensor.name}", h) for h in item.inputs)
            yield item.output.tensor.name, _complete(item.output, strategy)


def _complete(held: Held, strategy: Strategy) -> Held:
    """Where a partial sum goes when it is added up."""
    return replace(held, sharding=strategy.home(held.tensor.axes)) if held.sharding.unreduced else held


def split_axes(held: HeldIn) -> Iterator[tuple[str, int, Split]]:
    """Axes of a tensor that are split, but for sequences: its name, its size, and the mesh axes."""
    for axis, size, split in zip(held.axes, held.shape, held.sharding.splits, strict=True):
        if axis != "B" and size is not None and split:
            yield axis, size, split


def divisors(program: Program, seq_len: int, strategy: Strategy, part: str = "") -> dict[Split, int]:
    """Mesh axes that split something, and what divides all sizes that they split: ways that divide these divide it.

    Sequences are left out: a microbatch has as many for each device.

    Args:
        program, seq_len: tokens of a sequence.
        strategy: rule tables.
        part: of the training state ("weights", "gradients", "optimizer"); "" for activations.
    """
    sizes, found = program.bind(batch=1, queries=seq_len), dict[Split, int]()
    if part:
        stored = dict.fromkeys(t.axes for block in program for t in block.weights)
        held = dict.fromkeys((axes, strategy.stored(axes, part).splits) for axes in stored)
    else:
        at_work = (h for block in program for _, h in _held_at_work(block, strategy))
        held = dict.fromkeys((h.tensor.axes, h.sharding.splits) for h in at_work)
    for axis, split in dict.fromkeys(one for axes, splits in held for one in zip(axes, splits, strict=True)):
        routed = not part and axis.startswith("C")
        if split and axis != "B" and not routed and (size := _whole(sizes[axis])) is not None:
            found[split] = math.gcd(found.get(split, 0), size)
    return found
