"""NumPy devices that hold only their own block, and collectives done literally with what devices hold.

Test support: the referee of the algebra, so it shares no code with it beyond the values. Not here: any choice of steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

from meshwise.sharding import Collective, CollectiveKind, Mesh, Sharding

Coordinates = tuple[int, ...]  # one per mesh axis, in the mesh's order
Blocks = dict[Coordinates, np.ndarray]


@dataclass(frozen=True)
class Devices:
    """What every device of a mesh holds of one tensor."""

    mesh: Mesh
    blocks: Blocks

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> Devices:
        """The same local computation on every device."""
        return Devices(self.mesh, {c: change(block) for c, block in self.blocks.items()})


@cache
def all_coordinates(mesh: Mesh) -> tuple[Coordinates, ...]:
    return tuple(product(*(range(size) for _, size in mesh.axes)))


def part_of(mesh: Mesh, device: Coordinates, axes: Sequence[str]) -> tuple[int, int]:
    """Which part, of how many, the device stands for along `axes`, major to minor."""
    return parts_of(mesh, tuple(axes))[device]


def group_of(mesh: Mesh, device: Coordinates, axes: Sequence[str]) -> list[Coordinates]:
    """The devices that differ from `device` only along `axes`, ordered by their part."""
    return _groups(mesh, tuple(axes))[device]


@cache
def parts_of(mesh: Mesh, axes: tuple[str, ...]) -> dict[Coordinates, tuple[int, int]]:
    """Every device's part: worked out once for all devices, because a run asks millions of times."""
    positions, sizes, count = [mesh.names.index(a) for a in axes], [mesh.size(a) for a in axes], mesh.size(*axes)
    parts = {}
    for device in all_coordinates(mesh):
        index = 0
        for position, size in zip(positions, sizes, strict=True):
            index = index * size + device[position]
        parts[device] = (index, count)
    return parts


@cache
def _groups(mesh: Mesh, axes: tuple[str, ...]) -> dict[Coordinates, list[Coordinates]]:
    """Every device's group, ordered by part."""
    positions = [mesh.names.index(axis) for axis in axes]
    groups: dict[Coordinates, dict[int, Coordinates]] = {}
    for device, (index, _) in parts_of(mesh, axes).items():
        others = tuple(-1 if i in positions else x for i, x in enumerate(device))
        groups.setdefault(others, {})[index] = device
    ordered = {others: [members[i] for i in range(len(members))] for others, members in groups.items()}
    return {d: ordered[tuple(-1 if i in positions else x for i, x in enumerate(d))] for d in all_coordinates(mesh)}


def take_part(block: np.ndarray, dimension: int, part: tuple[int, int]) -> np.ndarray:
    index, count = part
    assert block.shape[dimension] % count == 0, f"{block.shape} does not divide by {count} along {dimension}"
    width = block.shape[dimension] // count
    return block[(slice(None),) * dimension + (slice(index * width, (index + 1) * width),)]


def blocks_of(arrays: dict[Coordinates, np.ndarray], splits: Sequence[Sequence[str]], mesh: Mesh) -> Blocks:
    """The part of its own array that each device keeps, cut along each dimension by these axes."""
    blocks = arrays
    for dimension, split in enumerate(splits):
        if split:
            parts = parts_of(mesh, tuple(split))
            blocks = {d: take_part(block, dimension, parts[d]) for d, block in blocks.items()}
    return blocks


def distribute(
    array: np.ndarray, sharding: Sharding, mesh: Mesh, numbers: np.random.Generator | None = None
) -> Devices:
    """Put a global array on devices; over unreduced axes as random addends (integers, so that sums are exact)."""
    if not sharding.unreduced:
        return Devices(mesh, blocks_of(dict.fromkeys(all_coordinates(mesh), array), sharding.splits, mesh))
    numbers = numbers or np.random.default_rng(0)
    pending = [a for a in mesh.names if a in sharding.unreduced]
    count = mesh.size(*pending)
    addends = numbers.integers(-9, 10, (count, *array.shape)).astype(array.dtype)
    addends[-1] = array - addends[:-1].sum(axis=0)
    own = {d: addends[part] for d, (part, _) in parts_of(mesh, tuple(pending)).items()}
    return Devices(mesh, blocks_of(own, sharding.splits, mesh))


def collect(
    devices: Devices, sharding: Sharding, same: Callable[[np.ndarray, np.ndarray], bool] = np.array_equal
) -> np.ndarray:
    """The global array that devices hold under `sharding`; fails when copies are not the `same`."""
    mesh = devices.mesh
    first = next(iter(devices.blocks.values()))
    shape = tuple(n * mesh.size(*split) for n, split in zip(first.shape, sharding.splits, strict=True))
    pending = [a for a in mesh.names if a in sharding.unreduced]
    addends = np.zeros((mesh.size(*pending), *shape), first.dtype)
    written = np.zeros(addends.shape, bool)
    addend, *parts = (parts_of(mesh, tuple(axes)) for axes in (pending, *sharding.splits))
    for device, block in devices.blocks.items():
        assert block.shape == first.shape, f"device {device} holds {block.shape}, others {first.shape}"
        starts = [part[device][0] * width for part, width in zip(parts, block.shape, strict=True)]
        place = (addend[device][0], *(slice(s, s + n) for s, n in zip(starts, block.shape, strict=True)))
        if written[place].any():
            assert same(addends[place], block), f"device {device} holds another copy than its peers"
        addends[place] = block
        written[place] = True
    assert written.all(), "some part of the array is on no device"
    return addends.sum(axis=0)


def holds(devices: Devices, array: np.ndarray, sharding: Sharding) -> bool:
    """Whether the devices hold exactly `array` under `sharding`."""
    try:
        found = collect(devices, sharding)
    except AssertionError:
        return False
    return found.shape == array.shape and bool(np.array_equal(found, array))


def apply(collective: Collective, devices: Devices) -> Devices:
    """Do one step, literally: each device computes from its own block and those of its group.

    Which dimension a step works on follows from the two shardings; what the devices hold does not.
    """
    mesh, blocks = devices.mesh, devices.blocks
    if collective.kind in _OF_THE_GROUP:  # a group's devices make the same of the same blocks: it is made once
        make, made = _OF_THE_GROUP[collective.kind], {}
        for device in blocks:
            if device not in made:
                group = group_of(mesh, device, collective.mesh_axes)
                made.update(dict.fromkeys(group, make(collective, [blocks[m] for m in group])))
        if collective.kind is CollectiveKind.REDUCE_SCATTER:
            dimension, parts = _changed(collective.after, collective.before), parts_of(mesh, collective.mesh_axes)
            return Devices(mesh, {d: take_part(made[d], dimension, parts[d]) for d in blocks})
        return Devices(mesh, {d: made[d] for d in blocks})
    step = {CollectiveKind.ALL_TO_ALL: _all_to_all, CollectiveKind.PERMUTE: _permute, CollectiveKind.SLICE: _slice}
    return Devices(mesh, {d: step[collective.kind](collective, mesh, blocks, d) for d in blocks})


def apply_all(collectives: Sequence[Collective], devices: Devices) -> Devices:
    for collective in collectives:
        devices = apply(collective, devices)
    return devices


@cache
def _changed(longer: Sharding, shorter: Sharding) -> int:
    """The one dimension with more mesh axes in `longer`."""
    (dimension,) = (d for d, (a, b) in enumerate(zip(longer.splits, shorter.splits, strict=True)) if len(a) > len(b))
    return dimension


def _gathered(c: Collective, blocks: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(blocks, axis=_changed(c.before, c.after))


def _sum(c: Collective, blocks: Sequence[np.ndarray]) -> np.ndarray:
    return sum(blocks, np.zeros_like(blocks[0]))


_OF_THE_GROUP = {
    CollectiveKind.ALL_GATHER: _gathered,
    CollectiveKind.ALL_REDUCE: _sum,
    CollectiveKind.REDUCE_SCATTER: _sum,
}


def _slice(c: Collective, mesh: Mesh, blocks: Blocks, device: Coordinates) -> np.ndarray:
    return take_part(blocks[device], _changed(c.after, c.before), part_of(mesh, device, c.mesh_axes))


def _all_to_all(c: Collective, mesh: Mesh, blocks: Blocks, device: Coordinates) -> np.ndarray:
    mine = part_of(mesh, device, c.mesh_axes)
    target = _changed(c.after, c.before)
    received = [take_part(blocks[m], target, mine) for m in group_of(mesh, device, c.mesh_axes)]
    return np.concatenate(received, axis=_changed(c.before, c.after))


def _permute(c: Collective, mesh: Mesh, blocks: Blocks, device: Coordinates) -> np.ndarray:
    wanted = [part_of(mesh, device, split) for split in c.after.splits]
    group = group_of(mesh, device, c.mesh_axes)
    (sender,) = (m for m in group if [part_of(mesh, m, split) for split in c.before.splits] == wanted)
    return blocks[sender]


def local_einsum(inputs: Sequence[tuple[Sequence[str], Devices]], output: Sequence[str], mesh: Mesh) -> Devices:
    """Every device multiplies and sums the blocks it holds."""
    letters: dict[str, int] = {}
    operands = []
    for axes, _ in inputs:
        operands.append([letters.setdefault(a, len(letters)) for a in axes])
    result = [letters[a] for a in output]

    def compute(device: Coordinates) -> np.ndarray:
        arguments = [x for (_, held), axes in zip(inputs, operands, strict=True) for x in (held.blocks[device], axes)]
        return np.asarray(np.einsum(*arguments, result))

    return Devices(mesh, {d: compute(d) for d in all_coordinates(mesh)})


def global_einsum(inputs: Sequence[tuple[Sequence[str], np.ndarray]], output: Sequence[str]) -> np.ndarray:
    """The same on one device that holds everything."""
    one = Mesh(())
    held = [(axes, Devices(one, {(): array})) for axes, array in inputs]
    return local_einsum(held, output, one).blocks[()]


def random_array(numbers: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Distinct integers as float64: every sum is exact, and no two blocks are alike by chance."""
    count = int(np.prod(shape))
    return (numbers.permutation(count) - count // 2).reshape(shape).astype(np.float64)


def random_sharding(choose: random.Random, ndim: int, mesh: Mesh, pending: frozenset[str] = frozenset()) -> Sharding:
    """Every mesh axis on some dimension, unused, or (of `pending`) still to be summed; in any order."""
    splits: list[list[str]] = [[] for _ in range(ndim)]
    unreduced = []
    for axis in choose.sample(mesh.names, len(mesh.names)):
        place = choose.randrange(ndim + 1 + (axis in pending))
        if place < ndim:
            splits[place].append(axis)
        elif place > ndim:
            unreduced.append(axis)
    return Sharding(tuple(map(tuple, splits)), frozenset(unreduced))
