"""What XLA leaves to do in training steps of our own runtime: bytes that no fusion takes, products computed again.

Not here: what other software does (`calibration`), or how long anything takes (`compute`).
"""

from __future__ import annotations

from typing import NamedTuple

from meshwise.core.tensors import Program, Route
from meshwise.costs.arithmetic import Num, maximum, minimum, where
from meshwise.costs.extents import Extents
from meshwise.costs.local_ops import LoweredOp
from meshwise.hardware import Chip
from meshwise.hardware.kernels import ATTENTION
from meshwise.jobs.precision import is_projection
from meshwise.sharding.remat import RematPolicy

#: Shares of a TPU's VMEM: arrays that fill less than the first stay there between operations of a compiled training
#: step, those that fill the second do not, and between them a part does. On v5e and v6e (128 MiB) those of 24 MiB stay,
#: those of 32 MiB do not.
_STAYS, _LEAVES = 3 / 16, 1 / 4

#: Sizes of a layout of which one above 1 leaves loops over layers as they are.
LOOPED_BY = ("stage", "num_microbatches", "tensor", "ulysses", "context")

#: Layers of a model that are written out at most: XLA takes one to two seconds to compile each.
_WRITTEN_OUT = 36


class HeldOnChip(NamedTuple):
    """What an engine may keep on a chip between operations.

    Args:
        capacity: bytes of each activation; infinite where nobody publishes what the chip holds.
    """

    capacity: float

    @property
    def some_stay(self) -> bool:
        """Whether any activation may stay on the chip."""
        return self.capacity > 0

    def hbm_bytes(self, num_bytes: Num) -> Num:
        """Bytes of an activation, read or written, that go to the memory or come from it."""
        return maximum(num_bytes - self.capacity, 0.0)


class OwnProgram(NamedTuple):
    """What XLA leaves of a step of our own runtime.

    Args:
        stays: bytes of an activation that may stay on the chip between operations; leaves: of one that does not.
        blocks: positions in a block of attention's kernel, the most first; none where they hardly matter.
        copies: whether what a layer of a loop keeps is copied into stacks of all layers, and out of them again.
        writes_out: whether loops over few layers are written out (`writes_layers_out`).
        fuses_loss: whether the head's products make its elementwise gradients, the logits' above all, as they read,
            and capped ones' are written over the logits.
    """

    stays: float
    leaves: float
    blocks: tuple[int, ...]
    copies: bool
    writes_out: bool
    fuses_loss: bool

    @classmethod
    def on(cls, chip: Chip) -> OwnProgram:
        """On a kind of chip.

        On TPUs arrays of some megabytes stay in VMEM, and products read and write the stacks (docs/verify.md). On GPUs
        what a cache holds is still asked of the memory, kernels take small blocks, products have arrays of their own.
        """
        if chip.vendor == "google":
            vmem = chip.onchip_capacity or 0.0
            sizes = ATTENTION[chip.vendor].sizes
            return cls(_STAYS * vmem, _LEAVES * vmem, sizes, copies=False, writes_out=False, fuses_loss=True)
        return cls(0.0, 0.0, (), copies=True, writes_out=chip.vendor == "nvidia", fuses_loss=False)

    @property
    def some_stay(self) -> bool:
        """Whether any activation may stay on the chip."""
        return self.leaves > 0

    def makes_as_read(self, role: str, when: str) -> bool:
        """Whether products of a pass of a block make what they read."""
        return self.fuses_loss and (role, when) == ("head", "backward")

    def hbm_bytes(self, num_bytes: Num) -> Num:
        """Bytes of an activation, read or written, that go to the memory or come from it."""
        if not self.some_stay:
            return num_bytes
        return num_bytes * minimum(maximum((num_bytes - self.stays) / (self.leaves - self.stays), 0.0), 1.0)


def computed_again(op: LoweredOp, extents: Extents, own: OwnProgram) -> Num:
    """Products that our kernels compute over those that attention needs; 1 for other operations.

    Backward, one kernel is for the gradients of queries and one for those of keys and values, and both make the scores
    and their gradients: seven products, where five would do. Blocks of positions are multiplied whole, with what
    causality masks of those on the diagonal; a device's positions are two runs where they are dealt out.
    """
    if op.attention is None:
        return 1.0
    attention, splits = op.attention
    twice = 7 / 5 if attention.gradient else 1.0
    if not own.blocks or not attention.causal or attention.window is not None or attention.chunk is not None:
        return twice
    positions = extents.sizes[attention.key_axis]
    shared = dict.fromkeys(m for a, split in splits if a.partition(".")[0] == attention.query_axis for m in split)
    devices = extents.devices(tuple(shared))
    run, block = positions / where(devices > 1, 2 * devices, 1), own.blocks[-1]
    for size in reversed(own.blocks):
        block = where(run % size == 0, size, block)
    return twice * (positions + block) / (positions + 1)


def keeps_products(program: Program, policy: RematPolicy) -> bool:
    """Whether layers keep what all their weights are multiplied to."""
    products = (op for block in program if block.role == "layer" for op in block.ops if is_projection(op))
    return all(map(policy.keeps, products))


def writes_layers_out(program: Program, policy: RematPolicy) -> bool:
    """Whether a step on NVIDIA GPUs has its layers written out, not in loops, where no size of `LOOPED_BY` is above 1.

    What layers of a loop keep XLA copies into stacks of all layers, which it fills with zeros before, and out of them;
    layers that are written out have arrays of their own. Only where much is kept: what several layers compute again a
    compiler may hold all at once. In a loop over microbatches it holds each layer's weights beside their stack; of
    activations that travel it hides less, and holds more of what they become (docs/runtime.md). Layers with experts
    take longest to compile, and their collectives are set up for loops.

    Args:
        program: of the model; policy: that its layers follow.
    """
    layers = [block for block in program if block.role == "layer"]
    if sum(block.repeat for block in layers) > _WRITTEN_OUT:
        return False
    return keeps_products(program, policy) and not any(isinstance(op, Route) for b in layers for op in b.ops)
