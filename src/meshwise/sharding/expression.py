"""Sharded tensors and einsums as written on paper: names, axes, shardings; and how they are printed.

What is printed here is read back by `notation`. Not here: how an einsum is computed on a mesh (`matmul`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshwise.core.dtypes import DType
from meshwise.core.errors import ShardingError
from meshwise.sharding.mesh import Mesh, Sharding

#: Unicode subscript -> mesh axis. There is no subscript Y (the Greek gamma stands in, as people write it) and no Z.
SUBSCRIPTS = dict(zip("ₐₑₕⱼₖₗₘₙₒₚₛₜₓᵢᵣᵤᵥᵧ", "AEHJKLMNOPSTXIRUVY", strict=True))

_TO_SUBSCRIPT = {axis: mark for mark, axis in SUBSCRIPTS.items()}


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor with its sharding: `A[I_X, J]` or `bf16[1024, 4096_X]`.

    >>> print(ShardedTensor(("I", "J"), Sharding((("X",), ()), frozenset("Y")), name="A"))
    A[I_X, J]{U_Y}

    Args:
        axes: per dimension its index name, or its size where it has no name.
        sharding: of as many dimensions.
        name: "" when it was written without one.
        dtype: None when none was written.
    """

    axes: tuple[str | int, ...]
    sharding: Sharding
    name: str = ""
    dtype: DType | None = None

    def __str__(self) -> str:
        return self.format()

    def format(self, *, unicode: bool = False) -> str:
        """Print in ASCII, or with Unicode subscripts wherever they exist.

        >>> print(ShardedTensor(("I", "J"), Sharding((("X",), ("Z",))), name="A").format(unicode=True))
        A[Iₓ, J_Z]
        """
        head = ":".join(part for part in (self.name, self.dtype.value if self.dtype else "") if part)
        pairs = zip(self.axes, self.sharding.splits, strict=True)
        inside = ", ".join(f"{axis}{format_subscript(split, unicode=unicode)}" for axis, split in pairs)
        pending = format_subscript(sorted(self.sharding.unreduced), unicode=unicode)
        return f"{head}[{inside}]" + (f"{{U{pending}}}" if pending else "")

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Global shape, with the sizes of the named indices.

        Raises:
            ShardingError: for an index without a size.
        """
        missing = [a for a in self.axes if isinstance(a, str) and a not in sizes]
        if missing:
            raise ShardingError(f"{self}: no size is known for {', '.join(missing)}; set it, as in {missing[0]}=4096")
        return tuple(a if isinstance(a, int) else sizes[a] for a in self.axes)

    def local_shape(self, mesh: Mesh, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of one device's block.

        >>> ShardedTensor((1024, 4096), Sharding(((), ("X",)))).local_shape(Mesh.of(X=16), {})
        (1024, 256)
        """
        return self.sharding.local_shape(self.shape(sizes), mesh)


@dataclass(frozen=True, slots=True)
class Expression:
    """A product of sharded tensors summed over the indices that the output lacks: `A[I_X, J] * B[J, K] -> C[I_X, K]`.

    With one input and the same indices on both sides it is a plain reshard.
    """

    inputs: tuple[ShardedTensor, ...]
    output: ShardedTensor

    def __str__(self) -> str:
        return self.format()

    def format(self, *, unicode: bool = False) -> str:
        """Print in ASCII, or with Unicode subscripts, a middle dot and an arrow."""
        dot, arrow = ("·", "→") if unicode else ("*", "->")
        left = f" {dot} ".join(t.format(unicode=unicode) for t in self.inputs)
        return f"{left} {arrow} {self.output.format(unicode=unicode)}"

    @property
    def tensors(self) -> tuple[ShardedTensor, ...]:
        """Inputs, then the output."""
        return (*self.inputs, self.output)

    @property
    def is_reshard(self) -> bool:
        """Whether nothing is computed: one input, the same indices in the same order."""
        return len(self.inputs) == 1 and self.inputs[0].axes == self.output.axes


def format_subscript(mesh_axes: Iterable[str], *, unicode: bool = False) -> str:
    """Print the mesh axes that split an index, "" for none.

    >>> format_subscript(["X", "Y"]), format_subscript(["data"]), format_subscript(["data", "X"])
    ('_XY', '_data', '_(data,X)')
    """
    axes = tuple(mesh_axes)
    if not axes:
        return ""
    if unicode and all(a in _TO_SUBSCRIPT for a in axes):
        return "".join(_TO_SUBSCRIPT[a] for a in axes)
    if all(len(a) == 1 and a.isupper() for a in axes):
        return "_" + "".join(axes)
    if len(axes) == 1 and axes[0].isalnum() and not axes[0].isupper():
        return f"_{axes[0]}"
    return f"_({','.join(axes)})"
