"""The steps that change how a tensor is spread over a mesh, and the cheapest ones from one sharding to another.

From the structure alone: a shortest path over shardings. A step must be possible with what the devices hold, so only
the minor-most axes of a dimension can be gathered, moved or added. Not here: sizes and seconds; those are priced
afterwards (`costs`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import combinations, count, pairwise

from meshwise.core.dtypes import DType
from meshwise.core.errors import ShardingError
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
        before, after = (held.local_bytes(shape, mesh, dtype) for held in (self.before, self.after))
        devices = self.group_size(mesh)
        return _sent(self.kind, 1 - 1 / devices, before, after) if devices > 1 else 0.0


def _sent(kind: CollectiveKind, others: float, before: float, after: float) -> float:
    """What each device sends of the block that it holds before or after, where `others` have that share of a group."""
    match kind:
        case CollectiveKind.SLICE:
            return 0.0
        case CollectiveKind.ALL_GATHER:
            return after * others
        case CollectiveKind.ALL_REDUCE:
            return 2 * before * others
        case CollectiveKind.PERMUTE:
            return before
        case _:
            return before * others


#: Every mesh axis counts as this many devices. A power of two, so that sums of costs are exact and ties are ties.
_NOMINAL_SIZE = 8.0

_Splits = tuple[tuple[str, ...], ...]
_State = tuple[_Splits, frozenset[str]]
_Step = tuple[CollectiveKind, tuple[str, ...], _State]


@lru_cache(maxsize=65536)
def reshard(source: Sharding, target: Sharding) -> tuple[Collective, ...]:
    """Find the steps that turn `source` into `target`, cheapest by this order of merit.

    1. Bytes that a device sends, with every mesh axis counted as 8 devices: slicing is free, a ReduceScatter costs half
       an AllReduce, an AllToAll or a permute moves one block where an AllGather fetches all of them.
    2. Number of collectives: axes with the same fate go together, in one AllGather, AllToAll or reduction.
    3. Number of slices.

    A mesh axis only ever goes where the target wants it, and what already stands right is never moved.

    >>> for step in reshard(Sharding((("X",), ()), frozenset("Y")), Sharding(((), ("Y",)))):
    ...     print(step)
    reduce-scatter over Y: [X, ]{U_Y} -> [X, Y]
    all-gather over X: [X, Y] -> [, Y]

    Raises:
        ShardingError: when the ranks differ, or the target is unreduced over an axis that the source is not: a sum
            cannot be taken apart.
    """
    if source == target:
        return ()
    if source.ndim != target.ndim:
        raise ShardingError(f"cannot reshard {source} to {target}: {source.ndim} dimensions against {target.ndim}")
    if not target.unreduced <= source.unreduced:
        extra = ", ".join(sorted(target.unreduced - source.unreduced))
        raise ShardingError(
            f"cannot reshard {source} to {target}: over {extra} the value is not a partial sum any more"
        )
    path = _cheapest_path((source.splits, source.unreduced), _Moves(target))
    held = [source, *(Sharding(*state) for _, _, state in path)]
    return tuple(Collective(kind, axes, *ends) for (kind, axes, _), ends in zip(path, pairwise(held), strict=True))


def _cheapest_path(start: _State, moves: _Moves) -> tuple[_Step, ...]:
    """Dijkstra from `start` to the target of `moves`; ties fall to the path found first: one answer, always."""
    order = count()
    queue: list[tuple[tuple[float, int, int], int, _State, tuple[_Step, ...]]] = [((0.0, 0, 0), next(order), start, ())]
    done: set[_State] = set()
    while queue:
        (sent, collectives, slices), _, state, path = heapq.heappop(queue)
        if state == moves.target:
            return path
        if state in done:
            continue
        done.add(state)
        before = _block(state)
        for step in moves.from_state(state):
            if step[2] not in done:
                moves_data = step[0] is not CollectiveKind.SLICE
                merit = (sent + _bytes_sent(step, before), collectives + moves_data, slices + (not moves_data))
                heapq.heappush(queue, (merit, next(order), step[2], (*path, step)))
    raise AssertionError(f"no way from {start} to {moves.target}")


def nominal_bytes_sent(step: Collective) -> float:
    """Bytes that each device sends when every mesh axis has 8 devices, in units of the whole tensor."""
    after = (step.after.splits, step.after.unreduced)
    return _bytes_sent((step.kind, step.mesh_axes, after), _block((step.before.splits, step.before.unreduced)))


def nearest(sources: Iterable[Sharding], targets: Iterable[Sharding]) -> Sharding:
    """Find the source from which all `targets` together have the least to move; the first of those that tie.

    A target that is unreduced where a source is not counts as reduced: the source has the sum.

    >>> exchanged, made = Sharding((("X",), ())), Sharding(((), ("X",)))
    >>> nearest([made, exchanged], [exchanged]) == exchanged
    True
    """
    wanted = tuple(targets)

    def moved(source: Sharding) -> float:
        there = (t.replace(unreduced=t.unreduced & source.unreduced) for t in wanted)
        return sum(nominal_bytes_sent(step) for target in there for step in reshard(source, target))

    return min(sources, key=moved)


def _bytes_sent(step: _Step, before: float) -> float:
    kind, axes, after = step
    return _sent(kind, 1 - _NOMINAL_SIZE ** -len(axes), before, _block(after))


def _block(state: _State) -> float:
    """One device's share of the tensor."""
    return float(_NOMINAL_SIZE ** -sum(map(len, state[0])))


class _Moves:
    """Every step worth taking towards one target."""

    def __init__(self, target: Sharding) -> None:
        self.target: _State = (target.splits, target.unreduced)
        self.home = {axis: d for d, split in enumerate(target.splits) for axis in split}
        self.rank = {axis: position for split in target.splits for position, axis in enumerate(split)}

    def from_state(self, state: _State) -> Iterator[_Step]:
        """List the steps that `state` allows."""
        for steps in (self._slices, self._reductions, self._exchanges, self._gathers, self._permutes):
            yield from steps(state)

    def _slices(self, state: _State) -> Iterator[_Step]:
        """Split over axes whose devices hold copies: one or several of a dimension, in the target's order."""
        splits, unreduced = state
        used = unreduced.union(*splits)
        for d, wanted in enumerate(self.target[0]):
            for axes in _subsets(a for a in wanted if a not in used):
                yield CollectiveKind.SLICE, axes, (_append(splits, d, axes), unreduced)

    def _reductions(self, state: _State) -> Iterator[_Step]:
        """Sum over axes: scattered where the target wants them split, else everywhere."""
        splits, unreduced = state
        for d, wanted in enumerate(self.target[0]):
            for axes in _subsets(a for a in wanted if a in unreduced):
                yield CollectiveKind.REDUCE_SCATTER, axes, (_append(splits, d, axes), unreduced.difference(axes))
        everywhere = tuple(sorted(a for a in unreduced - self.target[1] if a not in self.home))
        if everywhere:
            yield CollectiveKind.ALL_REDUCE, everywhere, (splits, unreduced.difference(everywhere))

    def _exchanges(self, state: _State) -> Iterator[_Step]:
        """Move the minor-most axes of a dimension to the dimension where the target wants all of them."""
        splits, unreduced = state
        for d, split in enumerate(splits):
            for axes in _suffixes(split):
                home = self.home.get(axes[0])
                if home is None or home == d or self.home.get(axes[-1]) != home:
                    break
                yield CollectiveKind.ALL_TO_ALL, axes, (_append(_drop(splits, d, axes), home, axes), unreduced)

    def _gathers(self, state: _State) -> Iterator[_Step]:
        """Gather the minor-most axes of a dimension, except those already placed as in the target."""
        splits, unreduced = state
        for d, (split, wanted) in enumerate(zip(splits, self.target[0], strict=True)):
            settled = next((i for i, (a, b) in enumerate(zip(split, wanted, strict=False)) if a != b), None)
            for axes in _suffixes(split[min(len(split), len(wanted)) if settled is None else settled :]):
                yield CollectiveKind.ALL_GATHER, axes, (_drop(splits, d, axes), unreduced)

    def _permutes(self, state: _State) -> Iterator[_Step]:
        """Put the axes of every dimension in order: those that stay as in the target, then those that leave it."""
        splits, unreduced = state
        ordered = tuple(self._in_order(split, d) for d, split in enumerate(splits))
        moved = tuple(axis for old, new in zip(splits, ordered, strict=True) for axis in _span_that_moves(old, new))
        if moved:
            yield CollectiveKind.PERMUTE, moved, (ordered, unreduced)

    def _in_order(self, split: tuple[str, ...], dimension: int) -> tuple[str, ...]:
        """Sort axes: those at home, those to be gathered, those to be moved by dimension; in the target's order."""

        def place(axis: str) -> tuple[int, int]:
            home = self.home.get(axis)
            if home is None:
                return (1, 0)
            return (0 if home == dimension else 2 + home, self.rank[axis])

        return tuple(sorted(split, key=place))


def _subsets(axes: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Non-empty subsets, largest first, each in the given order."""
    pool = tuple(axes)
    for size in range(len(pool), 0, -1):
        yield from combinations(pool, size)


def _suffixes(split: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Non-empty suffixes, shortest first."""
    return (split[i:] for i in range(len(split) - 1, -1, -1))


def _span_that_moves(old: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, ...]:
    """Axes from the first to the last that changes; one in between takes part, because its neighbours' sizes differ."""
    changed = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    return old[changed[0] : changed[-1] + 1] if changed else ()


def _append(splits: _Splits, dimension: int, axes: tuple[str, ...]) -> _Splits:
    return (*splits[:dimension], splits[dimension] + axes, *splits[dimension + 1 :])


def _drop(splits: _Splits, dimension: int, axes: tuple[str, ...]) -> _Splits:
    return (*splits[:dimension], splits[dimension][: -len(axes)], *splits[dimension + 1 :])
