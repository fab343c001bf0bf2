"""Time of a collective: by the fastest algorithm there is, or by the fastest that the software offers.

All times are of the array's bytes as the book counts them; `GroupLink` holds what the network contributes, `Links` what
the software achieves of it. Not here: which collectives a plan needs.
"""

from __future__ import annotations

from meshwise.costs.arithmetic import Num, floor, maximum, minimum
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


def schedules(kind: CollectiveKind, wire: GroupLink) -> tuple[tuple[Num, Num], ...]:
    """The algorithms that the software offers: (seconds per byte at full bandwidth, seconds of hops) of each.

    One, but for AllReduces: a ring (ReduceScatter and AllGather), or trees and switches that add.
    """
    match kind:
        case CollectiveKind.ALL_GATHER | CollectiveKind.REDUCE_SCATTER:
            return ((wire.scheduled, wire.scheduled_latency),)
        case CollectiveKind.ALL_REDUCE:
            trees = (wire.tree, wire.tree_latency)
            if wire.scheduled_latency is wire.gather_latency:  # level by level: a ring of the same cannot be faster
                return (trees,)
            return (2 * wire.scheduled, 2 * wire.scheduled_latency), trees
        case CollectiveKind.ALL_TO_ALL:
            return ((wire.exchange, wire.exchange_latency),)
        case CollectiveKind.PERMUTE:
            return ((wire.send, wire.send_latency),)
        case CollectiveKind.SLICE:
            return ((0.0, 0.0),)


def scheduled_time(kind: CollectiveKind, num_bytes: Num, wire: GroupLink) -> Num:
    """Seconds by bandwidth of the schedules that are really run; arguments as in `wire_time`, which none beats."""
    first, *others = (num_bytes * per_byte for per_byte, _ in schedules(kind, wire))
    return minimum(first, others[0]) if others else first


def latency(kind: CollectiveKind, wire: GroupLink) -> Num:
    """Seconds of hops that the collective takes however few its bytes."""
    first, *others = (hops for _, hops in schedules(kind, wire))
    return minimum(first, others[0]) if others else first


def collective_time(kind: CollectiveKind, num_bytes: Num, wire: GroupLink, *, links: Links = IDEAL_LINKS) -> Num:
    """Expected seconds: of the fastest algorithm that the software offers, for this size.

    On ideal links hops of at least their latency each, or the bytes through the links, whichever is longer (book,
    Sharded matrices, "when latency-bound"). Arguments as in `wire_time`, and what the software achieves.
    """
    return fastest(starts(kind, wire, links), num_bytes, links)


def starts(kind: CollectiveKind, wire: GroupLink, links: Links) -> tuple[tuple[Num, Num], ...]:
    """The algorithms of `schedules`, each with its seconds per byte and those it takes however few; none of a slice."""
    if kind is CollectiveKind.SLICE:
        return ()
    busy = wire.size > 1
    return tuple((per_byte, links.start(hops, busy)) for per_byte, hops in schedules(kind, wire))


def fastest(algorithms: tuple[tuple[Num, Num], ...], num_bytes: Num, links: Links) -> Num:
    """Expected seconds of `num_bytes` by the fastest of the `algorithms` that `starts` returns."""
    seconds: Num | None = None
    for per_byte, start in algorithms:
        own = links.seconds_after(start, num_bytes * per_byte)
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
