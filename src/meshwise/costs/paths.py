"""How the bytes of a collective go, and by which algorithm: for explanations, which parts of the network they cross.

Every number is `make_group_link`'s, of the same network with its other parts infinitely fast; the evaluator takes the
fastest algorithm without names (`collectives.collective_time`). Not here: what a link costs (`network`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwise.costs.calibration import Links
from meshwise.costs.collectives import scheduled_time, schedules
from meshwise.costs.estimate import layout_factors
from meshwise.costs.fabric import Fabric
from meshwise.costs.network import make_group_link
from meshwise.costs.routing import Routing
from meshwise.sharding import CollectiveKind
from meshwise.sharding.layout import Layout

#: Bytes/s of a part of the network that is left out of account.
_AT_ONCE = 1e250


@dataclass(frozen=True, slots=True)
class Lane:
    """One torus axis.

    Args:
        name: "x", "y" or "z".
        extent: members of the group along it.
        links: how many links' worth of bandwidth the collective gets there: 2 on a ring, n/(n-1) on a line; groups that
            are interleaved share them.
    """

    name: str
    extent: int
    links: float


@dataclass(frozen=True, slots=True)
class Leg:
    """One part of the network: the torus axes together, or one level of switches.

    Args:
        name: "torus", or the level's.
        bandwidth_one_way: of one link (torus), or of one chip into the level.
        lanes: torus only.
        extent: switches only: children of the level that hold members of the group.
        parts: switches only: into how many parts the group falls at this level's ports, of which one is at hand.
        below: switches only: members in each child.
        adds: its switches add.
        seconds_per_byte: what a byte of the collective would take if the rest of the network were infinitely fast.
    """

    name: str
    bandwidth_one_way: float
    lanes: tuple[Lane, ...]
    extent: int
    parts: int
    below: int
    adds: bool
    seconds_per_byte: float


@dataclass(frozen=True, slots=True)
class Path:
    """All legs that a collective of this kind crosses.

    Args:
        kind: of the collective.
        size: chips of the group.
        legs: those that it crosses, innermost first.
        algorithm: its name, one of `algorithms.offered`.
        routing: of a dispatch or combine that sends one copy of a token to each destination, else None.
    """

    kind: CollectiveKind
    size: int
    legs: tuple[Leg, ...]
    algorithm: str
    routing: Routing | None = None

    @property
    def flat_ring(self) -> bool:
        """Whether switches are crossed by a flat ring."""
        return self.algorithm == "flat ring"

    @property
    def slowest(self) -> Leg:
        """The leg that decides."""
        return max(self.legs, key=lambda leg: leg.seconds_per_byte)


def paths(
    kind: CollectiveKind,
    fabric: Fabric,
    layout: Layout,
    mesh_axes: tuple[str, ...],
    *,
    algorithm: int = 0,
    routing: Routing | None = None,
) -> Path:
    """Find the legs of a collective.

    Args:
        kind: of the collective.
        fabric: the network.
        layout: with wires.
        mesh_axes: of the group, of more than one chip.
        algorithm: which of those that `collectives.schedules` gives.
        routing: of tokens that are sent once to each destination, not once for each expert.
    """
    factors = layout_factors(fabric, layout)
    key = tuple(sorted(mesh_axes))
    extents = [math.prod(int(factors[a][i]) for a in key) for i in range(len(fabric.dimensions))]
    torus = [i for i, d in enumerate(fabric.dimensions) if d.torus]
    parts = ([torus] if torus else []) + [[i] for i, d in enumerate(fabric.dimensions) if not d.torus]

    def alone(part: list[int]) -> float:
        """Seconds of a byte with every dimension but `part` infinitely fast."""
        dims = (d if i in part else replace(d, bandwidth_one_way=_AT_ONCE) for i, d in enumerate(fabric.dimensions))
        wire = make_group_link(replace(fabric, dimensions=tuple(dims)), factors, key, routing=routing)
        return float(schedules(kind, wire.carrying(routed=routing is not None))[algorithm].per_byte)

    legs = []
    for part in parts:
        if math.prod(extents[i] for i in part) == 1:
            continue
        first = fabric.dimensions[part[0]]
        lanes = tuple(
            Lane(d.name, extents[i], 1 / (_lane(kind, fabric, factors, key, i) * d.bandwidth_one_way))
            for i in part
            for d in [fabric.dimensions[i]]
            if d.torus and extents[i] > 1
        )
        below = math.prod(extents[: part[0]])
        name = "torus" if first.torus else first.name
        extent = extents[part[0]]
        parts_of_group = extent if part[0] == 0 else math.prod(extents) // below
        legs.append(Leg(name, first.bandwidth_one_way, lanes, extent, parts_of_group, below, first.adds, alone(part)))
    return Path(kind, math.prod(extents), tuple(legs), offered(kind, fabric)[algorithm], routing)


def _lane(
    kind: CollectiveKind, fabric: Fabric, factors: dict[str, list[float]], axes: tuple[str, ...], i: int
) -> float:
    """Price a gathered byte on one torus axis, were it the whole network; AllToAll and sends as they are."""
    simple = kind if kind in (CollectiveKind.ALL_TO_ALL, CollectiveKind.PERMUTE) else CollectiveKind.ALL_GATHER
    dim = fabric.dimensions[i]
    if dim.twisted:  # a ring only where the group spans the long axes whole
        long = [n for n, d in enumerate(fabric.dimensions) if d.torus and not d.twisted]
        whole = all(math.prod(factors[a][n] for a in axes) == fabric.dimensions[n].size for n in long)
        dim = replace(dim, twisted=False, wraps=whole)
    wire = make_group_link(Fabric((dim,)), {a: [f[i]] for a, f in factors.items()}, axes)
    return float(scheduled_time(simple, 1.0, wire))


_GATHERS = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to run a collective of some size over some group.

    Args:
        name: "rings", "level by level", "flat ring", "trees", "switches add", "direct" or "send".
        offered: whether the software has it.
        hops: seconds of hops.
        transfer: seconds of the bytes at full bandwidth.
        fill: seconds that a large message takes besides.
        seconds: expected, start-up and achieved bandwidth included.
    """

    name: str
    offered: bool
    hops: float
    transfer: float
    fill: float
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
        for name, (per_byte, hops, fill) in zip(offered(kind, view), schedules(kind, wire), strict=True):
            transfer = float(num_bytes * per_byte)
            seconds = float(links.seconds(float(hops), transfer, wire.size > 1, fill))
            found.setdefault(name, Algorithm(name, view is fabric, float(hops), transfer, float(fill), seconds))
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
