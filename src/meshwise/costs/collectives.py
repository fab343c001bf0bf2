"""Time of a collective: by the fastest algorithm there is, or by the fastest that the software offers.

All times are of the array's bytes as the book counts them; `GroupLink` holds what the network contributes, `Links` what
the software achieves of it. Not here: which collectives a plan needs.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwise.costs.arithmetic import Num, floor, maximum, minimum, where
from meshwise.costs.calibration import IDEAL_LINKS, Links
from meshwise.costs.network import GroupLink
from meshwise.sharding import CollectiveKind


def wire_time(kind: CollectiveKind, num_bytes: Num, wire: GroupLink) -> Num:
    """Seconds by bandwidth alone, which no schedule on this wire beats.

    Args:
        kind: the collective.
        num_bytes: of the whole array of one group: AllGather, as gathered; ReduceScatter and AllReduce, as each chip
            holds it before; AllToAll, all chips together; permute, what one chip sends.
        wire: of the group.

    Source: book, Sharded matrices, "summary": AllGather and ReduceScatter V/W, AllReduce twice that, AllToAll a
        quarter; of the first three the (n-1)/n that a chip lacks.
    """
    return num_bytes * wire_rate(kind, wire)


def wire_rate(kind: CollectiveKind, wire: GroupLink) -> Num:
    """Seconds per byte."""
    match kind:
        case CollectiveKind.ALL_GATHER | CollectiveKind.REDUCE_SCATTER:
            return wire.gather
        case CollectiveKind.ALL_REDUCE:
            return wire.all_reduce
        case CollectiveKind.ALL_TO_ALL:
            return wire.exchange
        case CollectiveKind.PERMUTE:
            return wire.send
        case CollectiveKind.SLICE:
            return 0.0


#: Seconds of a hop of the first chunk of a large message along NCCL's trees, which hand on chunk after chunk; seconds
#: that a hop of its rings takes longer for a large message than for a small one. Source: NVIDIA NCCL 2.12 to 2.18,
#: src/graph/tuning.cc: Tree with the protocol Simple (of a chunk of 256 kB at 12 GB/s; later releases have 14 between
#: nodes and 4 within, with which sums of 32 MiB over EFA are half of what was measured); Ring, LL128 over LL. Which of
#: the table's protocols were taken was decided by what AWS and vTrain measured. RCCL is taken to wait alike.
TREE_HOP, RING_HOP = 28e-6, 1.3e-6


class Schedule(NamedTuple):
    """An algorithm: seconds per byte at full bandwidth, of hops, and of filling its links with a large message."""

    per_byte: Num
    hops: Num
    fill: Num = 0.0


def schedules(kind: CollectiveKind, wire: GroupLink) -> tuple[Schedule, ...]:
    """The algorithms that the software offers.

    One, but for AllReduces: a ring (ReduceScatter and AllGather), or trees and switches that add.
    """
    match kind:
        case CollectiveKind.ALL_GATHER | CollectiveKind.REDUCE_SCATTER:
            return (Schedule(wire.scheduled, wire.scheduled_latency, wire.ring_hops * RING_HOP),)
        case CollectiveKind.ALL_REDUCE:
            trees = Schedule(wire.tree, wire.tree_latency, wire.tree_hops * TREE_HOP)
            if wire.scheduled_latency is wire.gather_latency:  # level by level: a ring of the same cannot be faster
                return (trees,)
            fill = 2 * wire.ring_hops * RING_HOP
            return Schedule(2 * wire.scheduled, 2 * wire.scheduled_latency, fill), trees
        case CollectiveKind.ALL_TO_ALL:
            return (Schedule(wire.exchange, wire.exchange_latency),)
        case CollectiveKind.PERMUTE:
            return (Schedule(wire.send, wire.send_latency),)
        case CollectiveKind.SLICE:
            return (Schedule(0.0, 0.0),)


def scheduled_time(kind: CollectiveKind, num_bytes: Num, wire: GroupLink) -> Num:
    """Seconds by bandwidth of the schedules that are really run; arguments as in `wire_time`, which none beats."""
    first, *others = (num_bytes * one.per_byte for one in schedules(kind, wire))
    return minimum(first, others[0]) if others else first


def latency(kind: CollectiveKind, wire: GroupLink) -> Num:
    """Seconds of hops that the collective takes however few its bytes."""
    first, *others = (one.hops for one in schedules(kind, wire))
    return minimum(first, others[0]) if others else first


def collective_time(kind: CollectiveKind, num_bytes: Num, wire: GroupLink, *, links: Links = IDEAL_LINKS) -> Num:
    """Expected seconds: of the fastest algorithm that the software offers, for this size.

    On ideal links hops of at least their latency each, or the bytes through the links, whichever is longer (book,
    Sharded matrices, "when latency-bound"). Arguments as in `wire_time`, and what the software achieves.
    """
    return fastest(starts(kind, wire, links), num_bytes, links)


def starts(kind: CollectiveKind, wire: GroupLink, links: Links) -> tuple[Schedule, ...]:
    """The algorithms of `schedules`, each with all seconds that it takes however few its bytes; none of a slice."""
    if kind is CollectiveKind.SLICE:
        return ()
    busy, ways = wire.size > 1, schedules(kind, wire)
    if links.direct and kind is CollectiveKind.ALL_REDUCE:
        ways = (*ways, _one_shot(wire, ways[0]))
    return tuple(Schedule(b, links.start(hops, busy), fill) for b, hops, fill in ways)


def _one_shot(wire: GroupLink, usual: Schedule) -> Schedule:
    """Each chip reads the whole array of every other in its node; between nodes the usual schedule."""
    within = wire.ring_hops == 0
    per_byte = where(within, (wire.size - 1) * wire.send, usual.per_byte)
    return Schedule(per_byte, where(within, 0.0, usual.hops), usual.fill)


def fastest(algorithms: tuple[Schedule, ...], num_bytes: Num, links: Links) -> Num:
    """Expected seconds of `num_bytes` by the fastest of the `algorithms` that `starts` returns."""
    seconds: Num | None = None
    for per_byte, start, fill in algorithms:
        own = links.seconds_after(start, num_bytes * per_byte, fill)
        seconds = own if seconds is None else minimum(seconds, own)
    return num_bytes * 0.0 if seconds is None else seconds


def ring_time(num_bytes: Num, wire: GroupLink, *, both_ways: bool, links: Links = IDEAL_LINKS) -> Num:
    """Expected seconds of an AllGather or ReduceScatter in pieces that a program sends round a ring of the group.

    One way round n - 1 sends of a shard each, through one link of a chip in one direction. Both ways half as many
    sends, whose directions carry half of the bytes each: on a ring as fast as any schedule; on a line, and at a port of
    a switch, both directions share what one has. Each send starts up anew.

    Args:
        num_bytes: of the whole array.
        wire: of the group.
        both_ways: whether pieces go round in both directions.
        links: what the software achieves.

    Source: book, Sharded matrices, AllGather on a ring; Wang et al. 2023.
    """
    around = (1 - 1 / wire.size) * num_bytes * wire.send
    transfer = maximum(around / 2 if both_ways else around, num_bytes * wire.gather)
    sends = floor(wire.size / 2) if both_ways else wire.size - 1
    each = maximum(sends, 1.0)
    return each * links.seconds(wire.send_latency, transfer / each, wire.size > 1)
