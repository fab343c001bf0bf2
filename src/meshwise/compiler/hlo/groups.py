"""Who talks to whom: the mesh of a program, its replica groups in each form that XLA writes, and their mesh axes.

Numbers are partitions: places in the device order that the program was compiled with, which is the mesh, flattened.
Not here: bytes (`traffic`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from meshwise.compiler.hlo.reader import Instruction
from meshwise.core.errors import CompilerError

Groups = tuple[tuple[int, ...], ...]

_LIST = re.compile(r"\{([\d,\s]*)\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_BARE_IOTA = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_USED_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def groups_of(instruction: Instruction, num_partitions: int) -> Groups:
    """Read who takes part in a collective; without groups, all do."""
    text = instruction.attributes.get("replica_groups", "")
    device_ids = instruction.attributes.get("device_ids", "")
    found = parse_groups(text, device_ids)
    return found or (tuple(range(num_partitions)),)


@lru_cache(maxsize=4096)
def parse_groups(text: str, device_ids: str = "") -> Groups:
    """Read replica groups: a list, an iota, or axes of a mesh.

    >>> parse_groups("{{0,1},{2,3}}")
    ((0, 1), (2, 3))
    >>> parse_groups("[2,2]<=[2,2]T(1,0)")
    ((0, 2), (1, 3))
    >>> parse_groups("mesh['a'=2,'b'=2] {'a'}")
    ((0, 2), (1, 3))
    >>> parse_groups("mesh['a'=2,'b'=2]", "([2,2]T(1,0)) {'a'}")
    ((0, 1), (2, 3))

    Raises:
        CompilerError: another form.
    """
    if text.startswith("mesh"):
        return _mesh_groups(text, device_ids)
    if text.startswith("["):
        match = _IOTA.match(text)
        if match is None:
            raise CompilerError(f"HLO text: cannot read the replica groups {text[:80]!r}")
        shape = _sizes(match[1])
        return _rows(_iota(_sizes(match[2]), match[3]).reshape(shape))
    if text.startswith("{"):
        inner = text[1:-1] if text.startswith("{{") else text
        return tuple(tuple(_sizes(group)) for group in _LIST.findall(inner) if group.strip())
    if text:
        raise CompilerError(f"HLO text: cannot read the replica groups {text[:80]!r}")
    return ()


def _sizes(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n.strip()]


def _iota(sizes: Sequence[int], order: str | None) -> np.ndarray:
    """0, 1, 2, ... in this shape, transposed."""
    array = np.arange(math.prod(sizes)).reshape(sizes)
    return array.transpose(_sizes(order)) if order else array


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(int(n) for n in row) for row in array.reshape(array.shape[0], -1))


def _mesh_groups(text: str, device_ids: str) -> Groups:
    """`mesh['a'=2,'b'=4] {'a'}`; parts of an axis are written `'b':(1)2`, 2 of it after 1."""
    described, _, used = text.partition("]")
    ids, _, after = device_ids.partition(")) ")
    sizes = {name: int(n) for name, n in _MESH_AXIS.findall(described)}
    array = np.arange(math.prod(sizes.values()))
    if ids:
        inner = ids.strip("() ")
        match = _BARE_IOTA.match(inner + ")" if inner.count("(") > inner.count(")") else inner)
        if match is not None:
            array = _iota(_sizes(match[1]), match[2]).reshape(-1)
        else:
            array = np.array(_sizes(inner.strip("[]")))
    wanted = _USED_AXIS.findall(after if ids else used)
    return _along(array, sizes, [(name, int(pre or 1), int(n or 0)) for name, pre, n in wanted])


def _along(array: np.ndarray, sizes: Mapping[str, int], wanted: Sequence[tuple[str, int, int]]) -> Groups:
    """Groups along (parts of) axes, in the order in which they are written."""
    extents: list[int] = []
    places: dict[tuple[str, int, int], int] = {}
    for name, size in sizes.items():
        cuts = sorted({1, size, *(p for w, pre, n in wanted if w == name and n for p in (pre, pre * n))})
        for low, high in pairwise(cuts):
            places[name, low, high // low] = len(extents)
            extents.append(high // low)
        if len(cuts) == 1:  # an axis of size one
            places[name, 1, 1] = len(extents)
            extents.append(1)
    chosen: list[int] = []
    for name, pre, n in wanted:
        low, high = (pre, pre * n) if n else (1, sizes[name])
        chosen += [p for (w, at, m), p in places.items() if w == name and at >= low and at * m <= high]
    others = [d for d in range(len(extents)) if d not in chosen]
    moved = array.reshape(extents).transpose([*others, *chosen])
    return _rows(moved.reshape(math.prod([extents[d] for d in others]), -1))


def axes_of_groups(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Find the mesh axes that groups run along: the coordinates in which members of a group differ.

    Proven, not guessed: the groups must be all lines along exactly these axes. Where a group holds a part of an axis
    only, the axis is written with its share, `tensor/2` (every second one, or half of it).

    >>> axes_of_groups(((0, 1), (2, 3)), {"data": 2, "tensor": 2})
    ('tensor',)
    >>> axes_of_groups(((0, 1), (2, 3)), {"tensor": 4})
    ('tensor/2',)

    Args:
        groups: partitions that talk to each other.
        mesh: axis -> size, outermost first, of the mesh whose flattened order the partitions have.

    Returns: axes, outermost first; ("?",) where groups are no lines along axes.
    """
    names, sizes = tuple(mesh), tuple(mesh.values())
    found = {_varied(group, names, sizes) for group in groups if len(group) > 1}
    if not found:
        return ()
    return found.pop() if len(found) == 1 else ("?",)


def _varied(group: Sequence[int], names: Sequence[str], sizes: Sequence[int]) -> tuple[str, ...]:
    coordinates = np.unravel_index(np.array(group), sizes)
    values = [np.unique(c).size for c in coordinates]
    if math.prod(values) != len(set(group)):  # not a product of ranges: a diagonal
        return ("?",)
    return tuple(
        name if value == size else f"{name}/{size // value}" if size % value == 0 else "?"
        for name, size, value in zip(names, sizes, values, strict=True)
        if value > 1
    )


def pairs_of(instruction: Instruction) -> tuple[tuple[int, int], ...]:
    """Read source and target of each send of a collective-permute."""
    text = instruction.attributes.get("source_target_pairs", "")
    return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", text))


def axes_of_pairs(pairs: Sequence[tuple[int, int]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Find the mesh axes along which a collective-permute sends: those in which a source differs from its target."""
    names, sizes = tuple(mesh), tuple(mesh.values())
    return tuple(_differing(pairs, names, sizes))


def _differing(pairs: Sequence[tuple[int, int]], names: Sequence[str], sizes: Sequence[int]) -> Iterator[str]:
    if not pairs:
        return
    sources = np.unravel_index(np.array([a for a, _ in pairs]), sizes)
    targets = np.unravel_index(np.array([b for _, b in pairs]), sizes)
    for name, a, b in zip(names, sources, targets, strict=True):
        if bool((a != b).any()):
            yield name


@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """A mesh.

    Args:
        sizes: axis -> size, outermost first.
        slices: slice of each place of the flattened mesh; empty where there is one.

    >>> mesh = DeviceMesh({"fsdp": 2, "tensor": 4}, (0, 0, 0, 0, 1, 1, 1, 1))
    >>> mesh.num_slices, mesh.slice_axes, mesh.partitions(4)
    (2, ('fsdp',), (0, 1, 2, 3))
    """

    sizes: Mapping[str, int]
    slices: Sequence[int] = ()

    @property
    def num_devices(self) -> int:
        """Places of the mesh."""
        return math.prod(self.sizes.values())

    @property
    def num_slices(self) -> int:
        """How many slices its devices lie in."""
        return len(set(self.slices)) or 1

    @property
    def slice_axes(self) -> tuple[str, ...]:
        """Mesh axes that cross slices, outermost first."""
        if self.num_slices == 1:
            return ()
        array = np.array(self.slices).reshape(tuple(self.sizes.values()))
        return tuple(name for d, name in enumerate(self.sizes) if bool((np.diff(array, axis=d) != 0).any()))

    def partitions(self, number: int) -> tuple[int, ...]:
        """Places of the mesh of the partitions that a program counts: all, or those of the first slice."""
        if number == self.num_devices or not self.slices:
            return tuple(range(number))
        return tuple(p for p, s in enumerate(self.slices) if s == min(self.slices))
