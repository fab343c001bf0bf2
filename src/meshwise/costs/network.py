"""From a cluster's network and the placing of mesh axes on it to the few numbers that price a collective.

A network is a list of physical dimensions, innermost first: torus axes, then levels of switches. A mesh axis takes a
factor of each; what a group of chips can send follows from its factors. Not here: bytes, or which collective
(`collectives`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwise.costs.arithmetic import ceil, log2, maximum, where
from meshwise.costs.routing import Routing
from meshwise.hardware import Cluster, Torus, Tree

__all__ = ["NO_WIRE", "Dimension", "Fabric", "Wire", "make_wire"]

#: Gain of an AllReduce that switches add up themselves. Source: book, GPUs, "in-network reductions": about 30 % in
#: practice where the ideal would be nearly twofold.
IN_NETWORK_GAIN = 1.3


@dataclass(frozen=True, slots=True)
class Dimension:
    """One physical dimension of a network.

    Args:
        name: "x", "y", "z", or a level's name ("nvlink", "leaf", "spine", "dcn").
        size: chips along a torus axis, or children of one switch group.
        torus: point-to-point links between neighbours, else a switch.
        wraps: a torus axis whose ends are joined.
        bandwidth_one_way: of one link (torus), or of one chip into this level (switch), bytes/s.
        latency: of one hop, or of crossing the level, seconds.
    """

    name: str
    size: int
    torus: bool
    wraps: bool
    bandwidth_one_way: float
    latency: float


@dataclass(frozen=True, slots=True)
class Fabric:
    """The dimensions of a cluster, innermost first; their sizes multiply to its number of chips.

    Args:
        dimensions: of the network.
        in_network_reduction: switches add.
        flat_rings: AllGather and ReduceScatter run as flat rings over all members, not level by level.
    """

    dimensions: tuple[Dimension, ...]
    in_network_reduction: bool = False
    flat_rings: bool = False

    @classmethod
    def of(cls, cluster: Cluster, *, flat_rings: bool = False) -> Fabric:
        """Read the network of `cluster`; several slices add a level of data-center network on top.

        Args:
            cluster: chips and their network.
            flat_rings: whether switches are crossed by flat rings, as NCCL does; see `Wire.scheduled`.
        """
        net = cluster.network
        if isinstance(net, Torus):
            dims = [
                Dimension(name, a.size, True, a.wraps, net.link_bandwidth_one_way, net.hop_latency)
                for name, a in zip("xyz", net.axes, strict=False)
            ]
            reduction = False
        else:
            dims = _switch_dimensions(net)
            reduction = net.in_network_reduction
        if cluster.num_slices > 1:
            bandwidth = cluster.dcn_bandwidth_per_chip_one_way
            assert bandwidth, "Cluster checks that several slices have a network between them"
            dims.append(Dimension("dcn", cluster.num_slices, False, False, bandwidth, cluster.dcn_latency))
        return cls(tuple(dims), reduction, flat_rings)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return tuple(d.size for d in self.dimensions)


def _switch_dimensions(net: Tree) -> list[Dimension]:
    """Levels as dimensions; levels of the same bandwidth per chip are one switch to a collective (a fat tree)."""
    dims: list[Dimension] = []
    for v in net.levels:
        if dims and dims[-1].bandwidth_one_way == v.bandwidth_per_chip_one_way:
            inner = dims.pop()
            dims.append(
                replace(
                    inner,
                    name=f"{inner.name}+{v.name}",
                    size=inner.size * v.degree,
                    latency=max(inner.latency, v.latency),
                )
            )
        else:
            dims.append(Dimension(v.name, v.degree, False, False, v.bandwidth_per_chip_one_way, v.latency))
    return dims


@dataclass(frozen=True, slots=True)
class Wire:
    """What a group of chips along some mesh axes can do. Numbers, or arrays with one entry per candidate.

    Args:
        size: chips in the group.
        gather: seconds per byte of the gathered array; a ReduceScatter costs the same, an AllReduce twice that.
        gather_latency: seconds that an AllGather takes however small.
        exchange: seconds per byte of the whole array (over all chips of the group) for an AllToAll.
        exchange_latency: seconds that an AllToAll takes however small.
        send: seconds per byte that every chip sends to its neighbour in the group.
        send_latency: seconds that a send takes however small.
        all_reduce: seconds per byte of an AllReduce: twice an AllGather, or less where the switches add.
        scheduled: as `gather`, but by the schedule that is really run. Level by level, a child of a level lacks
            (d-1)/d of the bytes; a flat ring over n members carries (n-1)/n of them across every boundary, whatever
            the level. NCCL gathers and scatters by flat rings; it reduces by trees, level by level.
        routed: seconds per byte of all slots (top_k copies of every token, over all chips of the group) for a dispatch
            or combine of a mixture that sends one copy to each different destination; as `exchange` without routing.
    """

    size: Any
    gather: Any
    gather_latency: Any
    exchange: Any
    exchange_latency: Any
    send: Any
    send_latency: Any
    all_reduce: Any
    scheduled: Any
    routed: Any

    @property
    def dispatched(self) -> Any:
        """As `routed`, were every slot sent on its own: the seconds per byte of a plain AllToAll."""
        return self.exchange


#: A wire that takes no time.
NO_WIRE = Wire(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def make_wire(
    fabric: Fabric, factors: Mapping[str, Sequence[Any]], axes: tuple[str, ...], *, routing: Routing | None = None
) -> Wire:
    """Price the group of chips along mesh `axes`.

    On a torus axis of length s, a group of extent F whose members are `stride` apart forms a ring when it spans the
    whole of an axis that wraps, else a line; `stride` groups share each link. An AllGather takes floor(F/2) hops on a
    ring, F - 1 on a line, each carrying one shard (book, Sharded matrices); several torus axes share the bytes. On a
    level of switches with d children and m members of the group in each, every chip takes its share of the (d-1)/d
    that comes from the other children (book, GPUs, collectives across levels); the slowest level decides.

    Args:
        fabric: the network.
        factors: mesh axis -> its extent on each dimension; axes in the order in which they nest on a torus axis,
            inner first.
        axes: the mesh axes of the group.
        routing: of a mixture whose experts are spread over the group, for `Wire.routed`.

    Returns: the wire; arrays where a factor is an array.
    """
    ring = _TorusSums()
    size: Any = 1.0
    switch_gather: Any = 0.0
    switch_reduce: Any = 0.0
    boundary: Any = 0.0  # seconds per byte that crosses the narrowest boundary between children
    gather_latency: Any = 0.0
    crossings: list[_Crossing] = []
    exchange_latency: Any = 0.0
    send: Any = 0.0
    send_latency: Any = 0.0
    for i, dim in enumerate(fabric.dimensions):
        extent, stride = _extent_and_stride(factors, axes, i)
        used = extent > 1
        if dim.torus:
            ring.add(dim, extent, stride)
            send = maximum(send, where(used, stride / dim.bandwidth_one_way, 0.0))
            send_latency = maximum(send_latency, where(used, stride * dim.latency, 0.0))
        else:
            seconds = 1 / dim.bandwidth_one_way
            missing = 1 - 1 / extent
            share = seconds / size
            switch_gather = maximum(switch_gather, missing * share)
            boundary = maximum(boundary, where(used, share, 0.0))
            switch_reduce = maximum(switch_reduce, _all_reduce_share(missing, used, fabric) * share)
            crossings.append(_Crossing(where(used, seconds, 0.0), size, extent))
            steps = ceil(log2(extent))
            gather_latency = gather_latency + steps * dim.latency
            exchange_latency = maximum(exchange_latency, where(used, dim.latency, 0.0))
            send = where(used, seconds, send)
            send_latency = where(used, dim.latency, send_latency)
        size = size * extent
    exchange = ring.exchange / size
    for c in crossings:
        exchange = maximum(exchange, c.seconds * (1 - c.below / size) / size)
    gather = maximum(ring.gather(), switch_gather)
    return Wire(
        size=size,
        gather=gather,
        gather_latency=gather_latency + ring.latency,
        exchange=exchange,
        exchange_latency=maximum(exchange_latency, ring.latency),
        send=send,
        send_latency=send_latency,
        all_reduce=maximum(2 * ring.gather(), switch_reduce),
        scheduled=maximum(gather, boundary * (1 - 1 / size)) if fabric.flat_rings else gather,
        routed=exchange
        if routing is None
        else _routed(routing, ring.exchange if fabric.dimensions[0].torus else None, crossings, size),
    )


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A level of switches that a group crosses: seconds per byte of a chip, members in a child, children."""

    seconds: Any
    below: Any
    extent: Any


def _routed(routing: Routing, torus: Any | None, crossings: Sequence[_Crossing], size: Any) -> Any:
    """Seconds per byte of all slots, when a token is sent once to each destination instead of once for each expert.

    Chips next to each other (the torus, or the innermost switch) forward to one another: a token crosses into each of
    the other domains that hold any of its experts once, to the chip in the place of its own, and there goes once to
    each chip that holds any. (DeepEP's kernels do so with InfiniBand and NVLink.) Domains further out do not forward.

    Args:
        routing: of tokens over the experts of the group.
        torus: seconds per local byte of a plain exchange on the torus, None where there is none.
        crossings: of levels of switches, innermost first.
        size: chips of the group.
    """
    chips = routing.distinct(size)  # that a token goes to; as many bytes per byte of a token
    tokens = 1 / (routing.top_k * size)  # one chip's tokens, per byte of all slots
    slowest = torus
    outer = crossings
    if slowest is None:
        inner, outer = crossings[0], crossings[1:]
        slowest = inner.seconds * (1 - 1 / inner.extent)
    slowest = slowest * chips
    for c in outer:
        domains = size / outer[0].below
        slowest = maximum(slowest, c.seconds * (1 - c.below / size) * routing.distinct(domains))
    return slowest * tokens


def _all_reduce_share(missing: Any, used: Any, fabric: Fabric) -> Any:
    """Bytes into a chip per byte reduced on one level: twice what is missing; switches that add send the sum once."""
    if not fabric.in_network_reduction:
        return 2 * missing
    return maximum(2 * missing / IN_NETWORK_GAIN, where(used, 1.0, 0.0))


def _extent_and_stride(factors: Mapping[str, Sequence[Any]], axes: tuple[str, ...], i: int) -> tuple[Any, Any]:
    """Extent of the group on dimension `i`, and the distance of its members: the product of what nests inside it."""
    extent: Any = 1.0
    inside: Any = 1.0
    stride: Any = 1.0
    for axis, factor in factors.items():
        if axis in axes:
            stride = where((extent == 1.0) & (factor[i] > 1), inside, stride)
            extent = extent * factor[i]
        inside = inside * factor[i]
    return extent, stride


class _TorusSums:
    """Sums over the torus axes of one group."""

    def __init__(self) -> None:
        self.size: Any = 1.0
        self.rate: Any = 0.0  # bytes/s of the hop-by-hop schedule, axes together
        self.ingress: Any = 0.0  # bytes/s that the worst-placed chip can receive
        self.latency: Any = 0.0
        self.exchange: Any = 0.0  # seconds per local byte of an AllToAll: the slowest axis

    def add(self, dim: Dimension, extent: Any, stride: Any) -> None:
        used = extent > 1
        ring = (extent * stride == dim.size) & dim.wraps
        hops = where(ring, extent // 2, extent - 1)
        link = dim.bandwidth_one_way / stride
        ways = where(ring, 2.0, 1.0)
        self.rate = self.rate + where(used, extent * link / maximum(hops, 1.0), 0.0)
        self.ingress = self.ingress + where(used, ways * link, 0.0)
        self.latency = self.latency + where(used, hops * stride * dim.latency, 0.0)
        # Book, Sharded matrices: V F / (4 N W) with W both ways round a ring, half of that on a line.
        self.exchange = maximum(self.exchange, where(used, extent / (4 * ways * link), 0.0))
        self.size = self.size * extent

    def gather(self) -> Any:
        """Seconds per gathered byte: the schedule's, but never less than the missing bytes through the chip's links."""
        rate = where(self.rate > 0, self.rate, 1.0)
        ingress = where(self.ingress > 0, self.ingress, 1.0)
        return where(self.size > 1, maximum(1 / rate, (1 - 1 / self.size) / ingress), 0.0)
