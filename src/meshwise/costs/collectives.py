"""Time of a collective: bytes through a wire, or hops when the bytes are few. Not here: which collectives a plan needs.

All times are of the array's bytes as the book counts them; `Wire` holds what the network contributes.
"""

from __future__ import annotations

from typing import Any

from meshwise.costs.arithmetic import maximum
from meshwise.costs.network import Wire
from meshwise.sharding import CollectiveKind

__all__ = ["collective_time", "latency", "scheduled_time", "wire_time"]


def wire_time(kind: CollectiveKind, num_bytes: Any, wire: Wire, *, efficiency: float = 1.0) -> Any:
    """Seconds by bandwidth alone: what no schedule on this wire can beat by more than its hops allow.

    Args:
        kind: the collective.
        num_bytes: of the whole array of one group: AllGather, as gathered; ReduceScatter and AllReduce, as each chip
            holds it before; AllToAll, all chips together; permute, what one chip sends.
        wire: of the group.
        efficiency: achieved share of the link bandwidth.

    Source: book, Sharded matrices, "summary": AllGather and ReduceScatter V/W, AllReduce twice that, AllToAll a
        quarter.
    """
    match kind:
        case CollectiveKind.ALL_GATHER | CollectiveKind.REDUCE_SCATTER:
            return num_bytes * (wire.gather / efficiency)
        case CollectiveKind.ALL_REDUCE:
            return num_bytes * (wire.all_reduce / efficiency)
        case CollectiveKind.ALL_TO_ALL:
            return num_bytes * (wire.exchange / efficiency)
        case CollectiveKind.PERMUTE:
            return num_bytes * (wire.send / efficiency)
        case CollectiveKind.SLICE:
            return num_bytes * 0.0


def scheduled_time(kind: CollectiveKind, num_bytes: Any, wire: Wire, *, efficiency: float = 1.0) -> Any:
    """Seconds by bandwidth of the schedule that is really run; arguments as in `wire_time`, which no schedule beats."""
    if kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER):
        return num_bytes * (wire.scheduled / efficiency)
    return wire_time(kind, num_bytes, wire, efficiency=efficiency)


def latency(kind: CollectiveKind, wire: Wire) -> Any:
    """Seconds that the collective takes however few its bytes."""
    match kind:
        case CollectiveKind.ALL_GATHER | CollectiveKind.REDUCE_SCATTER:
            return wire.gather_latency
        case CollectiveKind.ALL_REDUCE:
            return 2 * wire.gather_latency
        case CollectiveKind.ALL_TO_ALL:
            return wire.exchange_latency
        case CollectiveKind.PERMUTE:
            return wire.send_latency
        case CollectiveKind.SLICE:
            return 0.0


def collective_time(kind: CollectiveKind, num_bytes: Any, wire: Wire, *, efficiency: float = 1.0) -> Any:
    """Seconds: hops of at least their latency each, or the bytes through the links, whichever is longer.

    Arguments as in `wire_time`. Source: book, Sharded matrices, "when latency-bound".
    """
    return maximum(latency(kind, wire), scheduled_time(kind, num_bytes, wire, efficiency=efficiency))
