"""From a cluster's network and the placing of mesh axes on it to the few numbers that price a collective.

A network is a list of physical dimensions, innermost first: torus axes, then levels of switches. A mesh axis takes a
factor of each; what a group of chips can send follows from its factors. Not here: bytes, or which collective
(`collectives`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwise.costs.arithmetic import Condition, Num, doublings, floor, is_one, maximum, where
from meshwise.costs.fabric import Dimension, Fabric, twisted_distance
from meshwise.costs.routing import Routing, routing_of

#: Gain that an AllReduce which switches add up themselves is seen to have. Source: book, GPUs, "in-network reductions":
#: about 30 % in practice where the ideal would be nearly twofold. Bounds take the ideal.
IN_NETWORK_GAIN = 1.3

#: Stands below a division for the rate of a group that sends nothing.
_NO_RATE = 1e-300


@dataclass(frozen=True, slots=True)
class GroupLink:
    """What a group of chips along some mesh axes can do. Numbers, or arrays with one entry per candidate.

    Args:
        size: chips in the group.
        gather: seconds per byte of the gathered array, which no schedule beats; a ReduceScatter costs the same, an
            AllReduce twice that.
        gather_latency: seconds that an AllGather takes however small.
        exchange: seconds per byte of the whole array (over all chips of the group) for an AllToAll.
        exchange_latency: seconds that an AllToAll takes however small.
        send: seconds per byte that every chip sends to its neighbour in the group.
        send_latency: seconds that a send takes however small.
        all_reduce: seconds per byte of an AllReduce, level by level: twice an AllGather, or once the array where the
            switches add.
        scheduled: as `gather`, but by the schedule that is really run. On a torus whole shards go hop by hop. Level by
            level, a child of a level lacks (d-1)/d of the bytes; a flat ring over n members carries (n-1)/n of them
            across every boundary, whatever the level. NCCL gathers and scatters by flat rings.
        scheduled_latency: as `gather_latency`, by that schedule: a flat ring takes n - 1 hops.
        ring_hops: of them, those of flat rings between nodes, and in all nodes but one.
        tree: seconds per byte of an AllReduce along trees (switches that add included), as NCCL's that is no ring.
        tree_latency: seconds that it takes however small.
        tree_hops: up and down the trees, where these leave the innermost level; else 0.
        routed: seconds per byte of all slots (top_k copies of every token, over all chips of the group) for a dispatch
            or combine of a mixture that sends one copy to each different destination; as `exchange` without routing.
    """

    size: Num
    gather: Num
    gather_latency: Num
    exchange: Num
    exchange_latency: Num
    send: Num
    send_latency: Num
    all_reduce: Num
    scheduled: Num
    scheduled_latency: Num
    ring_hops: Num
    tree: Num
    tree_latency: Num
    tree_hops: Num
    routed: Num

    def carrying(self, *, routed: bool) -> GroupLink:
        """The wire as an AllToAll finds it: with `routed` one that sends a token once to each of its destinations."""
        return replace(self, exchange=self.routed) if routed else self


#: A wire that takes no time.
NO_WIRE = GroupLink(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def make_group_link(
    fabric: Fabric, factors: Mapping[str, Sequence[Num]], axes: tuple[str, ...], *, routing: Routing | None = None
) -> GroupLink:
    """Price the group of chips along mesh `axes`.

    On a torus axis of length s, a group of extent F whose members are `stride` apart forms a ring when it spans the
    whole of an axis that wraps, else a line; `stride` groups share each link. A chip lacks (n-1)/n of the bytes, which
    come through all its links in the group: no AllGather is faster, and one that halves the shard of the chip opposite
    is as fast. The schedule that is run sends whole shards floor(F/2) hops on a ring, F - 1 on a line (book, Sharded
    matrices); several torus axes share the bytes. The short axes of a twisted torus close only for groups that span its
    long ones whole. On a level of switches with d children and m members of the group in each, every chip takes its
    share of the (d-1)/d that comes from the other children (book, GPUs, collectives across levels); ports above the
    innermost level also carry what goes further out. The slowest level decides.

    Args:
        fabric: the network.
        factors: mesh axis -> its extent on each dimension; axes in the order in which they nest on a torus axis,
            inner first.
        axes: the mesh axes of the group.
        routing: of a mixture whose experts are spread over the group, for `GroupLink.routed`.

    Returns: the wire; arrays where a factor is an array.
    """
    return _wire_of(fabric, _spans_of(fabric, _nested(fabric, factors), axes), routing)


#: Extent and stride of a group on every dimension of a network.
_Spans = Sequence[tuple[Num, Num]]

#: Mesh axis -> for every dimension of a network its extent, and the product of what nests inside it.
_Nested = Mapping[str, Sequence[tuple[Num, Num]]]


def _nested(fabric: Fabric, factors: Mapping[str, Sequence[Num]]) -> _Nested:
    nested: dict[str, list[tuple[Num, Num]]] = {}
    inside: list[Num] = [1.0] * len(fabric.dimensions)
    for axis, extents in factors.items():
        along = list(zip(extents, inside, strict=False))
        nested[axis] = along
        inside = [product * extent for extent, product in along]
    return nested


def _spans_of(fabric: Fabric, nested: _Nested, axes: tuple[str, ...]) -> _Spans:
    """Extent of a group on every dimension, and the distance of its members: the product of what nests inside it.

    Where other axes nest between those of the group, its members are not equally far apart, but links are shared by as
    many groups as if they were: the product of all that nests inside the group's outermost axis and is not of it.
    """
    members = [spans for axis, spans in nested.items() if axis in axes]
    if len(members) < 2:
        return members[0] if members else [(1.0, 1.0)] * len(fabric.dimensions)
    return [_span(along) for along in zip(*members, strict=True)]


def _span(members: Iterable[tuple[Num, Num]]) -> tuple[Num, Num]:
    """Extent and stride on one dimension of a group of axes, each with its extent and what nests inside it."""
    extent: Num = 1.0
    stride: Num = 1.0
    for own, inside in members:
        stride = where(own > 1, inside / extent, stride)
        extent = extent * own
    return extent, stride


def _wire_of(fabric: Fabric, spans: _Spans, routing: Routing | None) -> GroupLink:
    if all(is_one(extent) for extent, _ in spans):
        return NO_WIRE
    ring = _TorusSums(_twist_of(fabric, spans))
    tree = _TreeSums(not fabric.dimensions[0].torus, fabric.flat_rings)
    size: Num = 1.0
    send: Num = 0.0
    send_latency: Num = 0.0
    for dim, (extent, stride) in zip(fabric.dimensions, spans, strict=True):
        if dim.torus and ring.twist is None and is_one(extent):
            continue
        used = extent > 1
        if dim.torus:
            ring.add(dim, extent, stride)
            send = maximum(send, used * (stride / dim.bandwidth_one_way))
            send_latency = maximum(send_latency, used * (stride * dim.latency))
        else:
            tree.add(dim, extent, size, used)
            send = where(used, 1 / dim.bandwidth_one_way, send)
            send_latency = where(used, dim.latency, send_latency)
        size = size * extent
    tree.finish(size)
    exchange = ring.exchange / size
    gather, by_hops = ring.gather(), ring.by_hops()
    all_reduce, hops_twice, gather_latency = 2 * gather, 2 * by_hops, ring.latency
    if tree.crossings:
        gather, by_hops = maximum(gather, tree.gather), maximum(by_hops, tree.gather)
        all_reduce, hops_twice = maximum(all_reduce, tree.all_reduce), maximum(hops_twice, tree.all_reduce)
        gather_latency, exchange = gather_latency + tree.latency, maximum(exchange, tree.exchange)
    flat = fabric.flat_rings
    return GroupLink(
        size=size,
        gather=gather,
        gather_latency=gather_latency,
        exchange=exchange,
        exchange_latency=maximum(tree.exchange_latency, ring.latency),
        send=send,
        send_latency=send_latency,
        all_reduce=all_reduce,
        scheduled=maximum(by_hops, tree.boundary * (1 - 1 / size)) if flat else by_hops,
        scheduled_latency=_flat_ring_latency(fabric, spans, size) + ring.latency if flat else gather_latency,
        ring_hops=size - spans[0][0] if flat else 0.0,
        tree=maximum(2 * ring.by_hops(), tree.by_trees) if flat else hops_twice,
        tree_latency=tree.tree_latency + 2 * ring.latency if flat else 2 * gather_latency,
        tree_hops=where(size > spans[0][0], tree.tree_hops, 0.0),
        routed=exchange
        if routing is None
        else _routed(routing, ring.exchange if fabric.dimensions[0].torus else None, tree.crossings, size),
    )


def _flat_ring_latency(fabric: Fabric, spans: Sequence[tuple[Num, Num]], size: Num) -> Num:
    """Seconds of the n - 1 hops of a ring over all members of a group; most stay inside the innermost level."""
    latency: Num = 0.0
    units = size
    for dim, (extent, _) in zip(fabric.dimensions, spans, strict=True):
        outer = units / extent
        if not dim.torus:
            latency = latency + (units - outer) * dim.latency
        units = outer
    return latency


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A level of switches that a group crosses: seconds per byte of a chip, members in a child, children."""

    seconds: Num
    below: Num
    extent: Num


def _routed(routing: Routing, torus: Num | None, crossings: Sequence[_Crossing], size: Num) -> Num:
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


def _twist_of(fabric: Fabric, spans: Sequence[tuple[Num, Num]]) -> _Twist | None:
    """How far a group can use the twist of a torus; None where there is none."""
    torus = [(d, extent) for d, (extent, _) in zip(fabric.dimensions, spans, strict=True) if d.torus]
    if not any(d.twisted for d, _ in torus):
        return None
    closes: Condition = True
    whole: Condition = True
    for d, extent in torus:
        closes = closes & ((extent == d.size) | d.twisted)
        whole = whole & (extent == d.size)
    short = min(d.size for d, _ in torus)
    doubled = sum(d.size > short for d, _ in torus)
    return _Twist(closes, whole, twisted_distance(short, doubled))


def shares_links(
    fabric: Fabric, factors: Mapping[str, Sequence[Num]], one: tuple[str, ...], other: tuple[str, ...]
) -> Condition:
    """Whether collectives over two groups of mesh axes need the same links: run at once, their times then add up.

    They do where both extend along one torus axis (a group with others nested between its members crosses the links
    inside of theirs), where both cross the innermost level of switches (one port a chip), and where both go beyond it
    (one port to the outside, whatever the level).

    Args:
        fabric: the network.
        factors: as in `make_group_link`.
        one, other: mesh axes of the two groups.

    Returns: whether; an array where a factor is one.

    >>> from meshwise.hardware import parse_cluster
    >>> pod = Fabric.of(parse_cluster("v5p:4x4x8"))
    >>> factors = {"tensor": (4, 1, 2), "fsdp": (1, 4, 1), "data": (1, 1, 4)}
    >>> [shares_links(pod, factors, ("tensor",), (b,)) for b in ("fsdp", "data")]
    [False, True]
    """
    nested = _nested(fabric, factors)
    return _share_links(fabric, *(_spans_of(fabric, nested, axes) for axes in (one, other)))


def _share_links(fabric: Fabric, one: _Spans, other: _Spans) -> Condition:
    shared: Condition = False
    outside: tuple[Condition, Condition] = (False, False)
    for i, dim in enumerate(fabric.dimensions):
        uses = one[i][0] > 1, other[i][0] > 1
        if dim.torus or i == 0:
            shared = shared | (uses[0] & uses[1])
        else:
            outside = (outside[0] | uses[0], outside[1] | uses[1])
    return shared | (outside[0] & outside[1])


class PlacedWires:
    """Mesh axes -> wire, of one placement or of many; each made when first asked for.

    Args:
        fabric: the network.
        factors: as in `make_group_link`.
        routing: of a mixture, for groups that hold its experts.
    """

    def __init__(self, fabric: Fabric, factors: Mapping[str, Sequence[Num]], routing: Routing | None = None) -> None:
        self.fabric = fabric
        self.factors = factors
        self.routing = routing
        self._nested: _Nested = _nested(fabric, factors)
        self._spans: dict[tuple[str, ...], _Spans] = {}
        self._made: dict[tuple[str, ...], GroupLink] = {}  # by axes in any order, as they are asked for
        self._shared: dict[tuple[tuple[str, ...], tuple[str, ...]], Condition] = {}

    def __call__(self, axes: tuple[str, ...]) -> GroupLink:
        """Look up the wire of the group along `axes`, in any order."""
        if axes not in self._made:
            key = tuple(sorted(axes))
            if key not in self._made:
                self._made[key] = _wire_of(self.fabric, self._spans_along(key), routing_of(key, self.routing))
            self._made[axes] = self._made[key]
        return self._made[axes]

    def share_links(self, one: tuple[str, ...], other: tuple[str, ...]) -> Condition:
        """Whether two groups need the same links; see `shares_links`."""
        if (one, other) not in self._shared:
            spans = (self._spans_along(tuple(sorted(axes))) for axes in (one, other))
            self._shared[one, other] = _share_links(self.fabric, *spans)
        return self._shared[one, other]

    def _spans_along(self, axes: tuple[str, ...]) -> _Spans:
        if axes not in self._spans:
            self._spans[axes] = _spans_of(self.fabric, self._nested, axes)
        return self._spans[axes]


@dataclass(frozen=True, slots=True)
class _Twist:
    """Whether a group's rings close on the short axes, whether it is the whole torus, mean hops between its chips."""

    closes: Condition
    whole: Condition
    distance: float


class _TreeSums:
    """Sums over the levels of switches of one group; `nccl`: the schedules of `GroupLink.tree`, too.

    Args:
        own: whether the innermost level has ports of its own (NVLink), so that what goes further does not cross it;
            the ports of all other levels carry what goes further, too.
        nccl: see above.
    """

    def __init__(self, own: bool, nccl: bool) -> None:
        self.own, self.nccl = own, nccl
        self.crossings: list[_Crossing] = []
        self.adds: list[bool] = []
        self.gather: Num = 0.0
        self.all_reduce: Num = 0.0
        self.by_trees: Num = 0.0
        self.boundary: Num = 0.0  # seconds per byte that crosses the narrowest boundary between children
        self.latency: Num = 0.0
        self.tree_latency: Num = 0.0
        self.tree_hops: Num = 0.0
        self.exchange: Num = 0.0
        self.exchange_latency: Num = 0.0

    def add(self, dim: Dimension, extent: Num, below: Num, used: Condition) -> None:
        """Add a level on which the group has `extent` children (`used`: more than one) of `below` members each."""
        steps = doublings(extent)
        seconds = used / dim.bandwidth_one_way
        self.crossings.append(_Crossing(seconds, below, extent))
        self.adds.append(dim.adds)
        self.latency = self.latency + steps * dim.latency
        self.exchange_latency = maximum(self.exchange_latency, used * dim.latency)
        if self.nccl:  # in the innermost level NCCL's tree is a chain
            hops = extent - 1 if len(self.crossings) == 1 and not dim.adds else steps
            self.tree_latency = self.tree_latency + 2 * hops * dim.latency
            self.tree_hops = self.tree_hops + 2 * (used * 1.0 if dim.adds else hops)  # all add at once

    def finish(self, size: Num) -> None:
        """Price the levels, now that the members of the whole group are known."""
        for i, (c, adds) in enumerate(zip(self.crossings, self.adds, strict=True)):
            share = c.seconds / c.below
            missing = 1 - 1 / c.extent if self.own and i == 0 else 1 - c.below / size
            through = missing * share
            self.gather = maximum(self.gather, through)
            # Chips of the innermost level hand on what goes to others' places in other domains (PXN).
            self.exchange = maximum(self.exchange, missing * c.seconds / size)
            # Switches that add send each chip the sum, and take from it its own array: once each way (book, GPUs).
            self.all_reduce = maximum(self.all_reduce, share if adds else 2 * through)
            if self.nccl:
                self.boundary = maximum(self.boundary, share)
                self.by_trees = maximum(self.by_trees, _by_trees(c.extent, missing, share, adds=adds))


def _by_trees(extent: Num, missing: Num, share: Num, *, adds: bool) -> Num:
    """Seconds through a port for each byte of an AllReduce along trees.

    Two trees carry half of the array each, up and down; a child is inside one of them and a leaf of the other. Of two
    children each is the root of one.

    Args:
        extent: children.
        missing: share of the array that comes from the others.
        share: seconds per byte of the array through a child's ports.
        adds: whether the switches do.
    """
    if adds:
        return maximum(2 * missing / IN_NETWORK_GAIN, 1.0) * share
    return where(extent > 2, 2.0, 2 * missing) * share


class _TorusSums:
    """Sums over the torus axes of one group. Where a group does not use an axis, everything is 0 times something."""

    def __init__(self, twist: _Twist | None) -> None:
        self.twist = twist
        self.size: Num = 1.0
        self.rate: Num = 0.0  # bytes/s of the hop-by-hop schedule, axes together
        self.ingress: Num = 0.0  # bytes/s that the worst-placed chip can receive
        self.latency: Num = 0.0
        self.exchange: Num = 0.0  # seconds per local byte of an AllToAll: the slowest axis

    def add(self, dim: Dimension, extent: Num, stride: Num) -> None:
        used = extent > 1
        span = extent * stride
        ring: Condition = False
        if dim.wraps:
            ring = span == dim.size
            if dim.twisted and self.twist is not None:
                ring = ring & self.twist.closes
        hops = where(ring, floor(extent / 2), extent - 1)
        ways = ring + 1.0
        link = used / stride * dim.bandwidth_one_way
        self.rate = self.rate + extent * link / maximum(hops, 1.0)
        self.ingress = self.ingress + ways * link
        self.latency = self.latency + hops * dim.latency * stride
        # Book, Sharded matrices: V F / (4 N W) with W both ways round a ring, half of that on a line.
        self.exchange = maximum(self.exchange, span * used / (ways * (4 * dim.bandwidth_one_way)))
        if self.twist is not None:  # all three axes are in use alike, each with a link either way
            whole = self.twist.distance / (6 * dim.bandwidth_one_way)
            self.exchange = where(self.twist.whole, whole, self.exchange)
        self.size = self.size * extent

    def gather(self) -> Num:
        """Seconds per gathered byte: the missing ones through the links of the chip that has fewest."""
        return (1 - 1 / self.size) / maximum(self.ingress, _NO_RATE)

    def by_hops(self) -> Num:
        """The same when whole shards go hop by hop, which is never faster."""
        return maximum((self.size > 1) / maximum(self.rate, _NO_RATE), self.gather())
