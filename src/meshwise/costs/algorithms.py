"""Which algorithms there are for a collective on a network, which of them software offers, and the fastest for a size.

For workings and explanations; the evaluator takes the minimum without names (`collectives.collective_time`).
Not here: what a wire costs (`network`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwise.costs.collectives import schedules
from meshwise.costs.fabric import Fabric
from meshwise.costs.links import Links
from meshwise.costs.network import make_group_link
from meshwise.sharding import CollectiveKind

_GATHERS = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to run a collective of some size over some group.

    Args:
        name: "rings", "level by level", "flat ring", "trees", "switches add", "direct" or "send".
        offered: whether the software has it.
        hops: seconds of hops.
        transfer: seconds of the bytes at full bandwidth.
        seconds: expected, start-up and achieved bandwidth included.
    """

    name: str
    offered: bool
    hops: float
    transfer: float
    seconds: float


def offered(kind: CollectiveKind, fabric: Fabric) -> tuple[str, ...]:
    """Name the algorithms that `collectives.schedules` prices on this fabric, in its order."""
    switched = any(not d.torus for d in fabric.dimensions)
    own = "level by level" if switched else "rings"
    if kind in _GATHERS:
        return ("flat ring" if switched and fabric.flat_rings else own,)
    if kind is CollectiveKind.ALL_REDUCE:
        adding = "switches add" if fabric.in_network_reduction else None
        return ("flat ring", adding or "trees") if fabric.flat_rings else (adding or own,)
    return ("send" if kind is CollectiveKind.PERMUTE else "direct",)


def algorithms(
    kind: CollectiveKind,
    num_bytes: float,
    fabric: Fabric,
    factors: Mapping[str, Sequence[float]],
    axes: tuple[str, ...],
    *,
    links: Links,
) -> tuple[Algorithm, ...]:
    """Price every algorithm, those that the software does not offer included; the offered ones first.

    Args:
        kind, num_bytes: the collective, as in `collectives.wire_time`.
        fabric: the network, as the software sees it.
        factors, axes: the group, as in `network.make_group_link`.
        links: what the software achieves.
    """
    found: dict[str, Algorithm] = {}
    for view in (fabric, *_others(fabric)):
        wire = make_group_link(view, factors, axes)
        for name, (per_byte, hops) in zip(offered(kind, view), schedules(kind, wire), strict=True):
            transfer = float(num_bytes * per_byte)
            seconds = float(links.seconds(float(hops), transfer, wire.size > 1))
            found.setdefault(name, Algorithm(name, view is fabric, float(hops), transfer, seconds))
    return tuple(found.values())


def _others(fabric: Fabric) -> list[Fabric]:
    """The same network under other software: level by level, NCCL's algorithms, switches that add and that do not."""
    if all(d.torus for d in fabric.dimensions):
        return []
    silent = tuple(replace(d, adds=False) for d in fabric.dimensions)
    return [Fabric(silent, flat_rings=flat) for flat in (False, True)]


def fastest(found: Sequence[Algorithm]) -> Algorithm:
    """The fastest that the software offers."""
    return min((a for a in found if a.offered), key=lambda a: a.seconds)
