"""The steps that change how a tensor is spread over a mesh: what each kind does, as values.

A step says which sharding it leads from and to. Not here: choosing steps (`reshard`), or their time (`costs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from meshwise.core.dtypes import DType
from meshwise.sharding.mesh import Mesh, Sharding


class CollectiveKind(StrEnum):
    """What a step does. All but SLICE move data between devices."""

    ALL_GATHER = "all-gather"  # the minor-most axes of a dimension are dropped: devices exchange blocks
    REDUCE_SCATTER = "reduce-scatter"  # addends are summed, and the sum split along a dimension
    ALL_REDUCE = "all-reduce"  # addends are summed, every device gets the sum
    ALL_TO_ALL = "all-to-all"  # the minor-most axes of a dimension move to the minor end of another
    PERMUTE = "permute"  # whole blocks change devices: the axes of a dimension change order
    SLICE = "slice"  # each device keeps its part of what it holds: free, local


@dataclass(frozen=True, slots=True)
class Collective:
    """One step of a reshard.

    Args:
        kind: what happens.
        mesh_axes: the mesh axes whose devices take part, major to minor as they stand in the split.
        before, after: the sharding that the step finds and leaves.
    """

    kind: CollectiveKind
    mesh_axes: tuple[str, ...]
    before: Sharding
    after: Sharding

    def __str__(self) -> str:
        return f"{self.kind} over {','.join(self.mesh_axes)}: {self.before} -> {self.after}"

    @property
    def moves_data(self) -> bool:
        """Whether devices exchange anything."""
        return self.kind is not CollectiveKind.SLICE

    def group_size(self, mesh: Mesh) -> int:
        """Devices that take part in one instance: the product of the sizes of `mesh_axes`."""
        return mesh.size(*self.mesh_axes)

    def bytes_sent(self, shape: Sequence[int], mesh: Mesh, dtype: DType) -> float:
        """Bytes that each device sends, by the best known algorithm on a network without multicast.

        With n devices a group: (n-1)/n of the gathered block for an AllGather, (n-1)/n of the block before for a
        ReduceScatter or AllToAll, twice that for an AllReduce; at most one block for a permute.

        >>> step = Collective(CollectiveKind.ALL_GATHER, ("X",), Sharding((("X",),)), Sharding(((),)))
        >>> step.bytes_sent((1024,), Mesh.of(X=4), DType.BF16)
        1536.0
        """
        others = 1 - 1 / self.group_size(mesh)
        match self.kind:
            case CollectiveKind.SLICE:
                return 0.0
            case CollectiveKind.ALL_GATHER:
                return self.after.local_bytes(shape, mesh, dtype) * others
            case CollectiveKind.ALL_REDUCE:
                return 2 * self.before.local_bytes(shape, mesh, dtype) * others
            case CollectiveKind.PERMUTE if others:
                return self.before.local_bytes(shape, mesh, dtype)
            case _:
                return self.before.local_bytes(shape, mesh, dtype) * others
