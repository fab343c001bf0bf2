"""A program on a mesh as values: local operations, transfers, and what of a block is held where.

Not here: how a block is placed (`place`), or what any of it costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal

from meshwise.core.tensors import Block, Op, Tensor
from meshwise.sharding.mesh import Sharding
from meshwise.sharding.reshard import Collective


class Purpose(StrEnum):
    """Why data moves.

    Weights and gradients of one block can be moved beside another block's compute, keys and values of a ring beside
    their own attention, pieces of a collective matmul beside their own products; other activations cannot.
    """

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    RING = "ring"
    MATMUL = "matmul"


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor as a device holds it."""

    tensor: Tensor
    sharding: Sharding

    def __hash__(self) -> int:  # as of an operation
        return hash((self.tensor.name, self.sharding.splits))


@dataclass(frozen=True, slots=True)
class LocalOp:
    """An operation on local blocks.

    Args:
        op: the operation.
        inputs, output: its tensors as they are held while it runs; splits of one index agree among them.
        splits: index -> mesh axes, the sharding of the iteration space.
    """

    #: Tells it from a transfer without a call, for loops over all that placed blocks do.
    moves: ClassVar[Literal[False]] = False

    op: Op
    inputs: tuple[Held, ...]
    output: Held
    splits: tuple[tuple[str, tuple[str, ...]], ...]

    def __hash__(self) -> int:  # of what tells nearly all apart: all tensors would be looked through each time
        return hash((self.op.name, self.splits))


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective on one tensor.

    Args:
        tensor: what moves.
        collective: how.
        purpose: why.
        waits: the operation that cannot start before it ("" at the end of a step).
    """

    moves: ClassVar[Literal[True]] = True

    tensor: Tensor
    collective: Collective
    purpose: Purpose
    waits: str

    def __hash__(self) -> int:  # as of an operation
        return hash((self.tensor.name, self.waits))


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """One block on a mesh.

    Args:
        block: what was placed.
        forward: operations and transfers of one forward pass, in order.
        weights: as stored; those tied to another block's are left out.
        tied: weights that another block owns; a pipeline stage without that block holds a copy.
        gathered: weights as used, between their gathering and their last use.
        caches: what stays between steps of serving, as it is held.
        backward: operations and transfers of one backward pass, recomputation first; none in serving, as all below.
        recomputed: names of the operations in `backward` that repeat the forward pass.
        kept: activations held between the two passes.
        workspace: activations made again, alive during one block's backward pass.
        tied_gradients: of tied weights, as this block leaves them for the owner to add to its own.
        gradients, optimizer: the training state as stored, of the block's own weights.
        step: transfers once a step, of the block's own weights: gradients to where the optimizer wants them, new
            weights back to where they are stored.
    """

    block: Block
    forward: tuple[LocalOp | Transfer, ...]
    weights: tuple[Held, ...]
    tied: tuple[Held, ...]
    gathered: tuple[Held, ...]
    caches: tuple[Held, ...] = ()
    backward: tuple[LocalOp | Transfer, ...] = ()
    recomputed: frozenset[str] = frozenset()
    kept: tuple[Held, ...] = ()
    workspace: tuple[Held, ...] = ()
    tied_gradients: tuple[Held, ...] = ()
    gradients: tuple[Held, ...] = ()
    optimizer: tuple[Held, ...] = ()
    step: tuple[Transfer, ...] = ()
