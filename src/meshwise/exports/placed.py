"""The tensors of a plan's program and where each is held: the placed blocks, with sizes put in.

Not here: how any tool writes a sharding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from meshwise.core.tensors import Attention, Block, Kind, Sizes
from meshwise.exports.choices import Choices
from meshwise.sharding import Sharding
from meshwise.sharding.place import place_block
from meshwise.sharding.placed import Held, LocalOp, PlacedBlock
from meshwise.sharding.remat import remat_policy
from meshwise.sharding.strategy import Strategy


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


def placed_tensors(choices: Choices, sequences: int = 1) -> PlacedTensors:
    """Place the program of a plan and list what is held, of so many sequences."""
    program = choices.model.train_program()
    strategy = choices.structure.strategy
    sizes = program.bind(batch=sequences, queries=choices.seq_len)
    policy = remat_policy(choices.structure.remat)
    placed = [place_block(block, strategy, policy) for block in program]
    return PlacedTensors(
        weights=tuple(h for p in placed for h in _state(p.block, p.weights, sizes)),
        gradients=tuple(h for p in placed for h in _state(p.block, p.gradients, sizes)),
        optimizer=tuple(h for p in placed for h in _state(p.block, p.optimizer, sizes)),
        activations=tuple(h for p in placed for h in _activations(p, strategy, sizes)),
    )


def _whole(size: Any) -> int | None:
    return int(size) if size == int(size) else None


def _state(block: Block, held: tuple[Held, ...], sizes: Sizes) -> Iterator[HeldIn]:
    """Weights, gradients or optimizer state; layers of one kind are stacked in front."""
    for h in held:
        axes, splits = h.tensor.axes, h.sharding.splits
        shape = tuple(_whole(sizes[a]) for a in axes)
        if block.repeat > 1:
            axes, splits, shape = ("L", *axes), ((), *splits), (block.repeat, *shape)
        name = h.tensor.name.removeprefix("d_") if h.tensor.kind is Kind.GRADIENT else h.tensor.name
        yield HeldIn(f"{block.name}/{name}", axes, shape, Sharding(splits))


def _activations(placed: PlacedBlock, strategy: Strategy, sizes: Sizes) -> Iterator[HeldIn]:
    """What enters, what operations leave (sums completed), and what attention reads."""
    block = placed.block
    entering = {t.name: t for op in block.ops for t in op.inputs if t.name in block.inputs}
    held = [(t.name, Held(t, strategy.home(t.axes))) for t in entering.values()]
    for item in placed.forward:
        if isinstance(item, LocalOp):
            if isinstance(item.op, Attention):
                held += [(f"{item.op.name}.{h.tensor.name}", h) for h in item.inputs]
            held.append((item.output.tensor.name, _complete(item.output, strategy)))
    for name, h in held:
        shape = tuple(None if a.startswith("C") else _whole(sizes[a]) for a in h.tensor.axes)
        yield HeldIn(f"{block.name}/{name}", h.tensor.axes, shape, h.sharding)


def _complete(held: Held, strategy: Strategy) -> Held:
    """Where a partial sum goes when it is added up."""
    return replace(held, sharding=strategy.home(held.tensor.axes)) if held.sharding.unreduced else held
