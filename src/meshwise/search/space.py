"""The search space: meshes of so many chips, their placements on a network, and the parts of it that a plan may use.

Not here: costs of a step (`costs.evaluate`), or choosing (`search`, `limits`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from meshwise.costs.fabric import Fabric
from meshwise.costs.network import GroupLink, PlacedWires, make_group_link
from meshwise.costs.routing import Routing, routing_of
from meshwise.sharding.layout import MESH_AXES

Array = NDArray[np.float64]

#: What a wire costs, in the order of its fields: everything but its size.
_PRICES = tuple(f.name for f in fields(GroupLink) if f.name != "size")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a mesh may look like, from model and job.

    Args:
        largest: mesh axis -> largest size.
        max_replicas: bound on data x fsdp x expert, from the batch.
        divides: mesh axis -> length that it must divide evenly.
        fixed: mesh axis -> size that the user fixed, whatever `largest` says.
        most_axes: how many axes may have more than one device.
    """

    largest: Mapping[str, int]
    max_replicas: float
    divides: Mapping[str, int] = field(default_factory=dict)
    fixed: Mapping[str, int] = field(default_factory=dict)
    most_axes: int = len(MESH_AXES)


def meshes(num_chips: int, limits: Limits) -> NDArray[np.int64]:
    """Every mesh of exactly `num_chips` within the limits: [meshes, axes], axes in the order of MESH_AXES."""
    divisors = np.array([d for d in range(1, num_chips + 1) if num_chips % d == 0])
    rows = np.ones((1, 0), int)
    rest = np.array([num_chips])
    order = [a for a in MESH_AXES if a != "fsdp"] + ["fsdp"]  # the axis with most freedom takes the rest
    for axis in order[:-1]:
        choices = divisors[divisors <= limits.largest[axis]]
        if axis in limits.divides:
            choices = choices[limits.divides[axis] % choices == 0]
        if axis in limits.fixed:
            choices = divisors[divisors == limits.fixed[axis]]
        i, j = np.nonzero(rest[:, None] % choices[None, :] == 0)
        rows = np.hstack([rows[i], choices[j][:, None]])
        rest = rest[i] // choices[j]
    rows = np.hstack([rows, rest[:, None]])
    rows = rows[:, [order.index(a) for a in MESH_AXES]]
    size = {axis: rows[:, i] for i, axis in enumerate(MESH_AXES)}
    fsdp = size["fsdp"]
    ok = fsdp <= limits.fixed.get("fsdp", limits.largest["fsdp"])
    ok &= fsdp * size["data"] * size["expert"] <= limits.max_replicas
    # Ulysses splits the heads that tensor parallelism leaves, and positions together with context.
    ok &= (size["ulysses"] == 1) | (size["ulysses"] * size["tensor"] <= limits.largest["ulysses"])
    ok &= (size["ulysses"] == 1) | (size["ulysses"] * size["context"] <= limits.largest["context"])
    if "fsdp" in limits.fixed:
        ok &= fsdp == limits.fixed["fsdp"]
    ok &= (rows > 1).sum(axis=1) <= limits.most_axes
    return rows[ok]


@lru_cache(maxsize=65536)
def _extents(size: int, room: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Ways to write `size` as a product of one divisor of each entry of `room`."""
    if not room:
        return ((),) if size == 1 else ()
    found = []
    for d in range(1, min(size, room[0]) + 1):
        if size % d == 0 and room[0] % d == 0:
            found += [(d, *rest) for rest in _extents(size // d, room[1:])]
    return tuple(found)


@lru_cache(maxsize=4096)
def _extents_array(size: int, room: tuple[int, ...]) -> NDArray[np.int64]:
    """The same as an array, [ways, dimensions]."""
    return np.array(_extents(size, room), int).reshape(-1, len(room))


@lru_cache(maxsize=1024)  # of a large network, each is a few hundred kilobytes
def placements(room: tuple[int, ...], sizes: tuple[int, ...]) -> Array:
    """Every way to lay mesh axes of `sizes` over physical dimensions of `room`: [ways, axes, dimensions] extents.

    On a torus axis, mesh axes nest in the order of MESH_AXES (tensor innermost); on a switch their order makes no
    difference.
    """
    left = np.array([room])
    chosen = np.ones((1, len(sizes), len(room)))
    for axis, size in enumerate(sizes):
        if size > 1:
            extents = _extents_array(size, room)
            i, j = (left[:, None, :] % extents[None, :, :] == 0).all(axis=2).nonzero()
            chosen, left = chosen[i], left[i] // extents[j]
            chosen[:, axis] = extents[j]
    return chosen


class WireTable(PlacedWires):
    """Mesh axes -> wire, with one entry per placement.

    Args:
        fabric: the network.
        factors: [placements, axes, dimensions].
        routing: of a mixture, for groups that hold its experts.
    """

    def __init__(self, fabric: Fabric, factors: Array, routing: Routing | None = None) -> None:
        by_axis = {a: [factors[:, i, d] for d in range(factors.shape[2])] for i, a in enumerate(MESH_AXES)}
        super().__init__(fabric, by_axis, routing)


class IdealWires:
    """Mesh axes -> a wire that no placement beats: each group laid out as if it had the network to itself.

    So groups share no links, which no placement beats, either.

    Args:
        fabric: the network.
        sizes: mesh axis -> [rows] sizes.
        routing: of a mixture, for groups that hold its experts.
    """

    def __init__(self, fabric: Fabric, sizes: Mapping[str, Array], routing: Routing | None = None) -> None:
        self.fabric = fabric
        self.routing = routing
        self.sizes = sizes
        self.made: dict[tuple[str, ...], GroupLink] = {}

    def __call__(self, axes: tuple[str, ...]) -> GroupLink:
        """Look up the best wire of the group along `axes`."""
        key = tuple(sorted(axes))
        if key not in self.made:
            total = np.prod([self.sizes[a] for a in key], axis=0)
            unique, inverse = np.unique(total, return_inverse=True)
            routing = routing_of(key, self.routing)
            best = [_best_wire(self.fabric, int(n), routing) for n in unique]
            columns = (np.array(column)[inverse] for column in zip(*best, strict=True))
            self.made[key] = GroupLink(total, *columns)
        return self.made[key]

    def at(self, rows: NDArray[np.int64]) -> Callable[[tuple[str, ...]], GroupLink]:
        """The same for `rows` of the sizes."""

        def wire(axes: tuple[str, ...]) -> GroupLink:
            whole = self(axes)
            return GroupLink(*(getattr(whole, n)[rows] for n in ("size", *_PRICES)))

        return cache(wire)


@lru_cache(maxsize=65536)
def _best_wire(fabric: Fabric, size: int, routing: Routing | None) -> tuple[float, ...]:
    """The smallest of each of a wire's numbers over all ways to lay out one group of `size` chips."""
    extents = _extents(size, fabric.sizes)
    wires = [make_group_link(fabric, {"x": [float(e) for e in way]}, ("x",), routing=routing) for way in extents]
    return tuple(min(float(getattr(w, n)) for w in wires) for n in _PRICES)


def undominated(
    fabric: Fabric,
    factors: Array,
    starts: NDArray[np.int64],
    groups: Iterable[tuple[str, ...]],
    routing: Routing | None = None,
    *,
    at_once: Iterable[tuple[tuple[str, ...], tuple[str, ...]]] = (),
) -> NDArray[np.int64]:
    """Indices of placements for which no other of the same mesh has every wire at least as fast, and as unshared.

    Admissible because a step never gets slower when a wire gets faster, or when two groups no longer share links, which
    property tests hold.

    Args:
        fabric: the network.
        factors: [placements, axes, dimensions], those of one mesh adjacent.
        starts: where each mesh's placements begin.
        groups: the groups of mesh axes that a step communicates over, besides the sends between stages.
        routing: of a mixture, for groups that hold its experts.
        at_once: pairs of groups that send at the same time.
    """
    wires = WireTable(fabric, factors, routing)
    columns = []
    for group in groups:
        w = wires(group)
        columns += [w.gather, w.gather_latency, w.exchange, w.exchange_latency, w.scheduled]
        # Without flat rings, latencies are the gather's, and an AllReduce is twice a gather, which is there.
        flat = [w.scheduled_latency, w.ring_hops, w.tree, w.tree_latency, w.tree_hops]
        columns += flat if fabric.flat_rings else []
        columns += [w.all_reduce, w.tree] if fabric.in_network_reduction else []
        columns += [w.routed] if routing_of(group, routing) else []  # else the exchange, which is there
    columns += [wires.share_links(*pair) * 1.0 for pair in at_once]
    columns += [wires(("stage",)).send, wires(("stage",)).send_latency]
    costs = np.empty((len(factors), len(columns)))
    for i, column in enumerate(columns):
        costs[:, i] = column
    costs = _rounded(costs)
    ends = np.append(starts[1:], len(factors))
    return np.concatenate([b + _front(costs[b:e]) for b, e in zip(starts, ends, strict=True)])


def _rounded(values: Array) -> Array:
    """Nine digits, so that equal wires made by different arithmetic are equal."""
    scale = 10.0 ** (8 - np.floor(np.log10(np.where(values > 0, values, 1.0))))
    return np.round(values * scale) / scale


def _front(costs: Array) -> NDArray[np.int64]:
    """Indices of rows that no other row undercuts or equals in every column; one of equal rows.

    A row that undercuts another has no larger sum, so that taking rows by their sum finds the front from its good end.
    """
    left = np.argsort(costs.sum(axis=1), kind="stable")
    kept = []
    while len(left):
        best, left = left[0], left[1:]
        kept.append(best)
        left = left[(costs[left] < costs[best]).any(axis=1)]
    return np.sort(np.array(kept))


def shrunken(fabric: Fabric) -> list[Fabric]:
    """Smaller parts of a network worth a look: one dimension cut to a rounder size; most chips first.

    Sizes tried: the two largest powers of two, and three times a power of two, below the dimension's. A cut torus axis
    keeps its wraparound only where a slice of that shape has one: in a 3D torus, in whole cubes of four.
    """
    out = []
    for i, dim in enumerate(fabric.dimensions):
        powers = [2**k for k in range(dim.size.bit_length()) if 2**k < dim.size]
        sizes = {*powers[-2:], *(3 * p for p in powers if dim.size / 2 < 3 * p < dim.size)}
        out += [_cut(fabric, (*fabric.sizes[:i], size, *fabric.sizes[i + 1 :])) for size in sizes]
    return sorted(out, key=lambda f: -math.prod(f.sizes))


def parts_of(fabric: Fabric, num_chips: int) -> list[Fabric]:
    """Boxes of exactly `num_chips` within a network: dimensions cut short, innermost kept longest; at most 32 of them.

    Empty when no box has that many chips.
    """
    found: list[tuple[int, ...]] = []

    def cut(i: int, left: int, sizes: tuple[int, ...]) -> None:
        if i == len(fabric.dimensions):
            if left == 1:
                found.append(sizes)
            return
        for size in range(min(fabric.dimensions[i].size, left), 0, -1):
            if left % size == 0 and len(found) < 32:
                cut(i + 1, left // size, (*sizes, size))

    cut(0, num_chips, ())
    return [_cut(fabric, sizes) for sizes in found]


def _cut(fabric: Fabric, sizes: tuple[int, ...]) -> Fabric:
    """The box of `sizes`; see `shrunken` for the wraparound of a cut torus axis."""
    cubes = sum(d.torus for d in fabric.dimensions) == 3 and all(
        s % 4 == 0 for s, d in zip(sizes, fabric.dimensions, strict=True) if d.torus
    )
    dims = (
        replace(d, size=s, wraps=d.wraps and (s == d.size or cubes), twisted=d.twisted and sizes == fabric.sizes)
        for s, d in zip(sizes, fabric.dimensions, strict=True)
    )
    return replace(fabric, dimensions=tuple(dims))


#: Boxes of one number of chips that are tried.
_BOXES = 3


def network_parts(whole: Fabric) -> Iterator[Fabric]:
    """The network, then parts of fewer and fewer chips: the largest dimension halved, with a look around."""
    seen: set[tuple[int, ...]] = set()
    fabric = whole
    while True:
        for part in (fabric, *shrunken(fabric)):
            if part.sizes not in seen and _hosts_whole(part, whole):
                seen.add(part.sizes)
                yield part
        smaller = [f for f in shrunken(fabric) if math.prod(f.sizes) <= math.prod(fabric.sizes) / 2]
        if not smaller:
            return
        # The most even shape of a torus; of switches the outermost level is cut first, so that hosts stay whole.
        torus = fabric.dimensions[0].torus
        fabric = min(
            smaller,
            key=lambda f: (
                -math.prod(f.sizes),
                (max(f.sizes[:-1], default=0),) if torus else tuple(-s for s in f.sizes),
            ),
        )


def _hosts_whole(part: Fabric, whole: Fabric) -> bool:
    """Whether a part uses all chips of its hosts (nobody rents half of each), or lies within one host."""
    torus = whole.dimensions[0].torus
    return torus or part.sizes[0] == whole.sizes[0] or math.prod(part.sizes[1:]) == 1


def parts_up_to(whole: Fabric, max_chips: int | None) -> list[Fabric]:
    """Parts of at most so many chips, most chips first: boxes of just so many, and those of `network_parts`."""
    parts = list(network_parts(whole))
    if max_chips is None or max_chips >= math.prod(whole.sizes):
        return parts
    fewer = [*whole_parts_of(whole, max_chips), *(p for p in parts if math.prod(p.sizes) <= max_chips)]
    return sorted({p.sizes: p for p in fewer}.values(), key=lambda p: -math.prod(p.sizes))


def whole_parts_of(whole: Fabric, num_chips: int) -> list[Fabric]:
    """Boxes of exactly so many chips that leave no host half used; the most even few of them."""
    boxes = [p for p in parts_of(whole, num_chips) if _hosts_whole(p, whole)]
    return sorted(boxes, key=lambda p: max(p.sizes))[:_BOXES] if whole.dimensions[0].torus else boxes[:_BOXES]
