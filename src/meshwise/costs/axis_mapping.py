"""Which physical dimensions of a network a mesh axis lies on, for meshes that a user writes down, and what steps carry.

Not here: the search's own assignment of layouts (`planning`), and the price of a wire (`network`, `collectives`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from meshwise.core.dtypes import DType
from meshwise.core.errors import ClusterError
from meshwise.costs.fabric import Fabric
from meshwise.sharding import Collective, CollectiveKind, Mesh

#: Mesh axis -> its extent on each dimension of a fabric, innermost mesh axis first.
AxisMapping = dict[str, tuple[int, ...]]


def wirings(mesh: Mesh, fabric: Fabric) -> Iterator[AxisMapping]:
    """List every way to lay the axes of `mesh` along the dimensions of `fabric`; a mesh may use a part of it.

    An axis takes a factor of each dimension; the last mesh axis is the innermost.

    >>> from meshwise.hardware import parse_cluster
    >>> fabric = Fabric.of(parse_cluster("v5e:16x16"))
    >>> list(wirings(Mesh.of(X=16, Y=16), fabric))[0]
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


def best_wiring(mesh: Mesh, fabric: Fabric, cost: Callable[[AxisMapping], float]) -> AxisMapping:
    """Choose a wiring: on a torus one that spreads mesh axes least (X=16 means one axis of 16), then of least `cost`.

    Raises:
        ClusterError: when the mesh does not fit on the network.
    """

    def spread(wiring: AxisMapping) -> int:
        """Count the torus axes that mesh axes are spread over, each time."""
        return sum(
            e > 1 and d.torus for extents in wiring.values() for d, e in zip(fabric.dimensions, extents, strict=True)
        )

    found = list(wirings(mesh, fabric))
    least = min(map(spread, found), default=0)
    best = min((w for w in found if spread(w) == least), key=cost, default=None)
    if best is None:
        shape = " x ".join(f"{d.name} {d.size}" for d in fabric.dimensions)
        raise ClusterError(
            f"mesh {mesh} of {mesh.num_devices} devices cannot be laid on {shape} ({math.prod(fabric.sizes)} chips): "
            "each mesh axis must be a product of divisors of these sizes"
        )
    return best


def parse_wiring(text: str, mesh: Mesh, fabric: Fabric) -> AxisMapping:
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
