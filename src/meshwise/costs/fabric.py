"""A cluster's network as a list of physical dimensions, innermost first: torus axes, then levels of switches.

Not here: what a group of chips can send over them (`network`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwise.hardware import Cluster, Torus, Tree


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
