"""Meshes and shardings: which mesh axes split which dimension of a tensor, and over which it is still to be summed.

Structure and counting only. Not here: text (`notation`), moving data (`reshard`), bandwidths (the `costs` layer).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from meshwise.core.dtypes import DType
from meshwise.core.errors import ShardingError, UnknownNameError

_AXIS_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Mesh:
    """Devices arranged in a grid with named axes, the first axis outermost.

    >>> mesh = Mesh.of(X=4, Y=8)
    >>> mesh.num_devices, mesh.size("Y"), str(mesh)
    (32, 8, 'X=4,Y=8')

    Args:
        axes: name and size of each axis, in the order in which devices are numbered (last axis fastest).

    Raises:
        ShardingError: for an axis given twice, a size below one or a name that is not a word.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        for name, size in self.axes:
            if not _AXIS_NAME.fullmatch(name):
                raise ShardingError(f"mesh axis {name!r}: expected a letter, then letters, digits or _ (X, data, tp2)")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ShardingError(f"mesh axis {name}: expected a whole number of devices, at least 1, found {size!r}")
        if len(self.sizes) != len(self.axes):
            raise ShardingError(f"mesh {self}: each axis may be given once")

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    @classmethod
    def of(cls, sizes: Mapping[str, int] | None = None, /, **more: int) -> Mesh:
        """Build from a mapping or keywords, in their order: `Mesh.of(X=4, Y=8)`."""
        return cls(tuple({**(sizes or {}), **more}.items()))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Axis name -> number of devices along it."""
        return dict(self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, outermost first."""
        return tuple(self.sizes)

    @property
    def num_devices(self) -> int:
        """Devices in the mesh: the product of the sizes."""
        return math.prod(size for _, size in self.axes)

    def size(self, *names: str) -> int:
        """Devices along one axis, or along several together (1 for none).

        Raises:
            UnknownNameError: for a name that is no axis of this mesh.
        """
        for name in names:
            if name not in self.sizes:
                raise UnknownNameError("mesh axis", name, self.names)
        return math.prod(self.sizes[name] for name in names)


@dataclass(frozen=True, slots=True)
class Sharding:
    """How one tensor is spread over a mesh; the mesh axes it does not name hold copies.

    >>> half_summed = Sharding((("X",), ()), unreduced=frozenset("Y"))
    >>> half_summed.local_shape((8, 6), Mesh.of(X=4, Y=2))
    (2, 6)

    Args:
        splits: per dimension, the mesh axes that split it, major to minor. ("X", "Y") cuts the dimension in X parts and
            each of them in Y parts; ("Y", "X") puts the same blocks on other devices.
        unreduced: mesh axes over which the devices hold addends of the value instead of the value: the book's {U_X}.

    Raises:
        ShardingError: for a mesh axis used more than once.
    """

    splits: tuple[tuple[str, ...], ...]
    unreduced: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        used = [*(axis for split in self.splits for axis in split), *self.unreduced]
        if len(set(used)) != len(used):
            twice = sorted({axis for axis in used if used.count(axis) > 1})
            raise ShardingError(
                f"sharding {self}: mesh axis {', '.join(twice)} is used more than once; "
                "one mesh axis can split one dimension, or be summed over, not both"
            )

    def __str__(self) -> str:
        dimensions = ", ".join("".join(s) if all(len(a) == 1 for a in s) else f"({','.join(s)})" for s in self.splits)
        pending = f"{{U_{','.join(sorted(self.unreduced))}}}" if self.unreduced else ""
        return f"[{dimensions}]{pending}"

    @classmethod
    def replicated(cls, ndim: int) -> Sharding:
        """Every device holds the whole tensor of `ndim` dimensions."""
        return cls(((),) * ndim)

    @classmethod
    def of(cls, axes: Iterable[str], rules: Mapping[str, Sequence[str]], unreduced: Iterable[str] = ()) -> Sharding:
        """Split each named tensor axis over the mesh axes that `rules` gives it (none where it is silent).

        >>> str(Sharding.of(("B", "D"), {"B": ("X",), "F": ("Y",)}))
        '[X, ]'
        """
        splits = tuple([tuple(rules[axis]) if axis in rules else () for axis in axes])
        return _sharding(splits, frozenset(unreduced))

    @property
    def ndim(self) -> int:
        """Number of tensor dimensions."""
        return len(self.splits)

    @property
    def mesh_axes(self) -> frozenset[str]:
        """Every mesh axis named: splitting or still to be summed over."""
        return frozenset(axis for split in self.splits for axis in split) | self.unreduced

    @property
    def splitting_axes(self) -> frozenset[str]:
        """The mesh axes that split a dimension."""
        return frozenset(axis for split in self.splits for axis in split)

    def replace(self, **changes: Any) -> Sharding:
        """Copy with other splits or other unreduced axes."""
        return replace(self, **changes)

    def num_shards(self, mesh: Mesh) -> int:
        """Distinct blocks of the tensor: the product of the sizes of the axes that split it."""
        return math.prod(mesh.size(*split) for split in self.splits)

    def divides(self, shape: Sequence[int], mesh: Mesh) -> bool:
        """Whether every dimension is cut into equal parts; if not, the last parts are padded."""
        self._check_rank(shape)
        return all(n % mesh.size(*split) == 0 for n, split in zip(shape, self.splits, strict=True))

    def local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """Shape of one device's block of an array of `shape`; parts that are not equal are padded, as XLA pads them.

        >>> Sharding((("X", "Y"), ())).local_shape((16, 3), Mesh.of(X=2, Y=4))
        (2, 3)
        """
        self._check_rank(shape)
        return tuple(-(-n // mesh.size(*split)) for n, split in zip(shape, self.splits, strict=True))

    def local_bytes(self, shape: Sequence[int], mesh: Mesh, dtype: DType) -> float:
        """Bytes of one device's block."""
        return math.prod(self.local_shape(shape, mesh)) * dtype.bytes

    def _check_rank(self, shape: Sequence[int]) -> None:
        if len(shape) != self.ndim:
            raise ShardingError(
                f"sharding {self} is of {self.ndim} dimensions, the array of {len(shape)}: {tuple(shape)}"
            )


@lru_cache(maxsize=65536)  # placing a program asks for the same few by the thousand
def _sharding(splits: tuple[tuple[str, ...], ...], unreduced: frozenset[str]) -> Sharding:
    return Sharding(splits, unreduced)
