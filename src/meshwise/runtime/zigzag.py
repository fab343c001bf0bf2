"""The order in which devices that split a sequence hold its positions, so that each has as many pairs to attend to.

A causal query sees what stands before it, so that of runs in order the last has most pairs. Of twice as many runs each
device holds one from the front and one from the back (Dubey et al. 2024, The Llama 3 Herd of Models, section 3.3.2).
Not here: attention (`attention_placed`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from meshwise.core.tensors import Attention, Program
from meshwise.runtime.attention import Kernel
from meshwise.runtime.shardings import Placement


@dataclass(frozen=True, slots=True)
class Zigzag:
    """Two runs of positions for each device: number i of n has runs i and 2 n - 1 - i.

    Args:
        devices: how many split a sequence.
    """

    devices: int

    @classmethod
    def of(cls, program: Program, placement: Placement, length: int) -> Zigzag | None:
        """The order of a model's positions; None where they stay as they are.

        They stay where nothing splits them, where attention is not causal or within chunks, and where so short runs do
        not fill the blocks of the platform's kernel.
        """
        ops = [op for block in program for op in block.ops if isinstance(op, Attention)]
        devices = max((placement.ways(placement.splits(op).get(op.query_axis, ())) for op in ops), default=1)
        causal = all(op.causal and op.chunk is None for op in ops)
        fills = length % (2 * devices * Kernel(placement.platform).least) == 0
        return cls(devices) if devices > 1 and causal and fills else None

    def starts(self, device: Any, run: int) -> tuple[Any, Any]:
        """Positions with which the two runs of a device begin, each as long as `run`.

        >>> [Zigzag(2).starts(device, 8) for device in (0, 1)]
        [(0, 24), (8, 16)]
        """
        return device * run, (2 * self.devices - 1 - device) * run

    def positions(self, length: int) -> NDArray[np.int32]:
        """All positions, device by device.

        >>> Zigzag(2).positions(8)
        array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
        """
        run = length // (2 * self.devices)
        starts = [start for device in range(self.devices) for start in self.starts(device, run)]
        return np.concatenate([np.arange(start, start + run, dtype=np.int32) for start in starts])

    def by_position(self, x: jax.Array) -> jax.Array:
        """What all devices hold of a sequence [B, S, ...] in the order of its positions."""
        apart = x.reshape(x.shape[0], self.devices, 2, -1, *x.shape[2:])
        return jnp.concatenate([apart[:, :, 0], apart[:, ::-1, 1]], axis=1).reshape(x.shape)
