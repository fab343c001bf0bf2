"""A cluster's network as a list of physical dimensions, innermost first, and which of them each mesh axis lies on.

Not here: what a group of chips can send over them (`network`), and the search's own mappings (`search`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from meshwise.core.dtypes import DType
from meshwise.core.errors import ClusterError
from meshwise.hardware import Cluster, Torus, Tree
from meshwise.sharding import Collective, CollectiveKind, Mesh


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
        twisted: the ends of this torus axis are joined half the long axes further on (twisted torus).
        adds: the switches of this level add up what they are sent, and copy what they send on.
    """

    name: str
    size: int
    torus: bool
    wraps: bool
    bandwidth_one_way: float
    latency: float
    twisted: bool = False
    adds: bool = False


@dataclass(frozen=True, slots=True)
class Fabric:
    """The dimensions of a cluster, innermost first; their sizes multiply to its number of chips.

    Args:
        dimensions: of the network.
        flat_rings: collectives run as NCCL runs them: AllGather and ReduceScatter as flat rings over all members,
            AllReduces as flat rings or along trees; not level by level.
    """

    dimensions: tuple[Dimension, ...]
    flat_rings: bool = False

    @classmethod
    def of(cls, cluster: Cluster, *, flat_rings: bool = False) -> Fabric:
        """Read the network of `cluster`; several slices add a level of data-center network on top.

        Args:
            cluster: chips and their network.
            flat_rings: whether the software is NCCL or its like; see `GroupLink.scheduled`. It lets switches of the
                innermost level add where they can (NVLS), asked for or not.
        """
        net = cluster.network
        if isinstance(net, Torus):
            short = min(net.shape)
            dims = [
                Dimension(
                    name, a.size, True, a.wraps, net.link_bandwidth_one_way, net.hop_latency,
                    twisted=net.twisted and a.size == short,
                )
                for name, a in zip("xyz", net.axes, strict=False)
            ]  # fmt: skip
        else:
            dims = _switch_dimensions(net, flat_rings)
        if cluster.num_slices > 1:
            bandwidth = cluster.dcn_bandwidth_per_chip_one_way
            assert bandwidth, "Cluster checks that several slices have a network between them"
            dims.append(Dimension("dcn", cluster.num_slices, False, False, bandwidth, cluster.dcn_latency))
        return cls(tuple(dims), flat_rings)

    @property
    def in_network_reduction(self) -> bool:
        """Whether the switches of some level add."""
        return any(d.adds for d in self.dimensions)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return tuple(d.size for d in self.dimensions)


def _switch_dimensions(net: Tree, nccl: bool) -> list[Dimension]:
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
                    adds=inner.adds and net.in_network_reduction,
                )
            )
        else:
            dims.append(
                Dimension(
                    v.name, v.degree, False, False, v.bandwidth_per_chip_one_way, v.latency,
                    adds=net.in_network_reduction or (nccl and v.switches_add),
                )
            )  # fmt: skip
    return dims


#: Mesh axis -> its extent on each dimension of a fabric, innermost mesh axis first.
AxisMapping = dict[str, tuple[int, ...]]


def axis_mappings(mesh: Mesh, fabric: Fabric) -> Iterator[AxisMapping]:
    """List every way to lay the axes of `mesh` along the dimensions of `fabric`; a mesh may use a part of it.

    An axis takes a factor of each dimension; the last mesh axis is the innermost.

    >>> from meshwise.hardware import parse_cluster
    >>> fabric = Fabric.of(parse_cluster("v5e:16x16"))
    >>> list(axis_mappings(Mesh.of(X=16, Y=16), fabric))[0]
    {'Y': (16, 1), 'X': (1, 16)}
    """

    def place(axes: list[tuple[str, int]], room: tuple[int, ...]) -> Iterator[AxisMapping]:
        if not axes:
            yield {}
            return
        (name, size), *others = axes
        for extents in _factors(size, room):
            left = tuple(r // e for r, e in zip(room, extents, strict=True))
            for rest in place(others, left):
                yield {name: extents, **rest}

    yield from place(list(reversed(mesh.axes)), fabric.sizes)


@lru_cache(maxsize=4096)
def _factors(size: int, room: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Write `size` as a product of one divisor of each of `room`, large ones first."""
    if not room:
        return ((),) if size == 1 else ()
    common = math.gcd(size, room[0])
    extents = [d for d in range(common, 0, -1) if common % d == 0]
    return tuple((extent, *rest) for extent in extents for rest in _factors(size // extent, room[1:]))


def best_axis_mapping(mesh: Mesh, fabric: Fabric, cost: Callable[[AxisMapping], float]) -> AxisMapping:
    """Choose one wiring for all that a mesh does.

    On a torus mesh axes are spread least (X=16 means one axis of 16). Through switches the order of the mesh decides:
    the last axis is the innermost, as ranks of GPUs are numbered. What that leaves open is of least `cost`.

    Raises:
        ClusterError: when the mesh does not fit on the network.
    """

    def spread(wiring: AxisMapping) -> int:
        """Count the torus axes that mesh axes are spread over, each time."""
        return sum(
            e > 1 and d.torus for extents in wiring.values() for d, e in zip(fabric.dimensions, extents, strict=True)
        )

    def switched(wiring: AxisMapping) -> list[tuple[int, ...]]:
        """Extents on the levels of switches alone."""
        levels = [number for number, d in enumerate(fabric.dimensions) if not d.torus]
        return [tuple(extents[number] for number in levels) for extents in wiring.values()]

    found = list(axis_mappings(mesh, fabric))
    least = min(map(spread, found), default=0)
    found = [w for w in found if spread(w) == least]
    best = min((w for w in found if switched(w) == switched(found[0])), key=cost, default=None)
    if best is None:
        shape = " x ".join(f"{d.name} {d.size}" for d in fabric.dimensions)
        raise ClusterError(
            f"mesh {mesh} of {mesh.num_devices} devices cannot be laid on {shape} ({math.prod(fabric.sizes)} chips): "
            "each mesh axis must be a product of divisors of these sizes"
        )
    return best


def parse_axis_mapping(text: str, mesh: Mesh, fabric: Fabric) -> AxisMapping:
    """Read where mesh axes lie, `X=4x4,Y=1x4`: for each the extent on every dimension of the network, innermost first.

    Raises:
        ClusterError: an axis is missing, unknown or of another size, or a dimension is overfull.
    """
    given: AxisMapping = {}
    for part in text.split(","):
        name, _, extents = part.strip().partition("=")
        numbers = extents.lower().split("x")
        if (
            name not in mesh.sizes
            or len(numbers) != len(fabric.dimensions)
            or not all(n.isascii() and n.isdecimal() for n in numbers)
        ):
            form = "x".join(d.name for d in fabric.dimensions)
            raise ClusterError(f"wires: expected AXIS={form} in numbers, with an axis of {mesh}; found {part!r}")
        given[name] = tuple(int(n) for n in numbers)
    for name, size in mesh.axes:
        if math.prod(given.get(name, (1,))) != size:
            raise ClusterError(f"wires: the extents of {name} must multiply to {size}, found {given.get(name)}")
    for number, dimension in enumerate(fabric.dimensions):
        used = math.prod(extents[number] for extents in given.values())
        if used == 0 or dimension.size % used:
            raise ClusterError(f"wires: {used} on {dimension.name} do not divide its {dimension.size}")
    return {name: given[name] for name in reversed(mesh.names) if name in given}


def collective_bytes(step: Collective, shape: Sequence[int], mesh: Mesh, dtype: DType) -> float:
    """Count the bytes of one group's array, as `collectives.wire_time` wants them.

    AllGather: as gathered; ReduceScatter and AllReduce: as each chip holds it before; AllToAll: all chips of the group
    together; permute: what one chip sends.

    Args:
        step: the collective.
        shape: global shape of the array.
        mesh: sizes of the mesh axes.
        dtype: of the elements.
    """
    match step.kind:
        case CollectiveKind.SLICE:
            return 0.0
        case CollectiveKind.ALL_GATHER:
            return step.after.local_bytes(shape, mesh, dtype)
        case CollectiveKind.ALL_TO_ALL:
            return step.before.local_bytes(shape, mesh, dtype) * step.group_size(mesh)
        case _:
            return step.before.local_bytes(shape, mesh, dtype)


def twisted_distance(short: int, doubled: int) -> float:
    """Mean distance in hops of two chips of a twisted torus with `doubled` axes twice as long as the `short` others.

    Shortest ways use all its links alike. 7k/8 - 1/4k with one long axis, 35k/32 - 1/4k with two; without the twist
    they are k and 5k/4, and the long axes are the busiest. A test walks all ways of several tori.

    >>> round(8 / 8 / (twisted_distance(4, 1) / 6), 2), round(8 / 8 / (twisted_distance(4, 2) / 6), 2)  # AllToAll
    (1.75, 1.39)
    """
    return {1: 7 / 8, 2: 35 / 32}[doubled] * short - 1 / (4 * short)
