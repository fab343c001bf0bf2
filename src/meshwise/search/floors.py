"""Bytes that some chip holds at least, by what its activations alone take, and by what no offloading moves.

Not here: which candidates they are (`bounds`), or all that these hold (`memory`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from meshwise.costs.arithmetic import Num, maximum, minimum
from meshwise.costs.ends import End
from meshwise.costs.memory import RESERVE_SHARE, LocalMemory
from meshwise.costs.pipeline import Part


@dataclass(frozen=True, slots=True)
class HeldActivations:
    """Bytes of activations of one microbatch on one device (floats or arrays).

    Args:
        kept: role -> of all copies of its blocks; of the head, what it holds at work, at least.
        workspace: of the layer that needs most.
    """

    kept: Mapping[str, Num]
    workspace: Num


def held_activations(blocks: Iterable[tuple[Part, LocalMemory]]) -> HeldActivations:
    """Add up what one device holds of each block's activations."""
    kept: dict[str, Num] = {"embed": 0.0, "layer": 0.0, "head": 0.0}
    workspace: Num = 0.0
    for part, local in blocks:
        role, n = part.block.role, part.block.repeat * part.share
        head = minimum(local.beside, local.added_up[1]) if local.added_up else local.beside
        kept[role] = kept[role] + n * (head if role == "head" else local.kept)
        if role == "layer":
            workspace = maximum(workspace, local.workspace * (part.share > 0))
    return HeldActivations(kept, workspace)


def memory_floor(
    held: HeldActivations,
    ends: Iterable[End],
    hbm_capacity: float,
    *,
    offloaded: bool = False,
    state: Mapping[str, Num] | None = None,
) -> Num:
    """Bytes that some chip holds at least: activations, logits, training state, the reserve.

    Args:
        held: activations of all blocks.
        ends: the devices that may be the fullest.
        hbm_capacity: bytes; the reserve is a share of it.
        offloaded: whether kept activations may be in the host's memory, so that they do not count.
        state: of all copies of the blocks of a role, bytes in `STATE_CLASSES`; None counts none.
    """
    kept, floor = held.kept, 0.0
    for end in ends:
        head = end.head_share * end.counts["head"] * kept["head"]
        later = end.later * end.counts["layer"] * (state or {}).get("layer", 0.0)  # gradients of layers, and more
        most: Num = (end.logits_in_flight - 1) * head + maximum(head - later, held.workspace)
        if not offloaded:
            most = most + end.in_flight * (end.counts["layer"] * kept["layer"] + end.counts["embed"] * kept["embed"])
        for role, num_bytes in (state or {}).items():
            most = most + end.counts[role] * (1.0 if role == "layer" else end.state_share) * num_bytes
        floor = maximum(floor, most)
    return floor + RESERVE_SHARE * hbm_capacity


def leaner(one: LocalMemory, other: LocalMemory) -> LocalMemory:
    """A head of which bounds count no more than of either."""
    added_up = tuple(map(minimum, one.added_up, other.added_up))
    return replace(one, beside=minimum(one.beside, other.beside), added_up=added_up)
