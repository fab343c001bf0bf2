"""Sharded matrix multiplication as one rule: to place an einsum is to choose a sharding of its iteration space.

Inputs are moved to the part of it that they see; what comes out is split as the output's indices are, and still to be
summed over the mesh axes of the contracted ones. Not here: seconds; whoever has them passes a cost (`cheapest`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product

from meshwise.core.dtypes import DType
from meshwise.core.errors import ShardingError
from meshwise.sharding.mesh import Mesh, Sharding
from meshwise.sharding.notation import Expression
from meshwise.sharding.reshard import Collective, nominal_bytes_sent, reshard

#: What a placement costs, in any unit: seconds, bytes. The `costs` layer brings its own.
PlacementCost = Callable[["MatmulPlacement"], float]


@dataclass(frozen=True, slots=True)
class Indices:
    """The index pattern of an einsum: which indices each input has, and the output.

    >>> Indices((("I", "J"), ("J", "K")), ("I", "K")).contracted
    ('J',)

    Raises:
        ShardingError: for an output index that no input has, or an index twice in one tensor.
    """

    inputs: tuple[tuple[str, ...], ...]
    output: tuple[str, ...]

    def __post_init__(self) -> None:
        missing = [i for i in self.output if i not in set(chain(*self.inputs))]
        if missing:
            raise ShardingError(f"output index {', '.join(missing)} is in no input")
        for axes in (*self.inputs, self.output):
            if len(set(axes)) != len(axes):
                raise ShardingError(f"an index stands twice in one tensor: {', '.join(axes)}")

    @classmethod
    def of(cls, expression: Expression) -> Indices:
        """Take the indices of an expression; a size without a name is an index of its own."""
        named = [
            tuple(a if isinstance(a, str) else f"{a}@{d}" for d, a in enumerate(t.axes)) for t in expression.tensors
        ]
        return cls(tuple(named[:-1]), named[-1])

    @property
    def all(self) -> tuple[str, ...]:
        """Every index, output's first, each once."""
        return tuple(dict.fromkeys(chain(self.output, *self.inputs)))

    @property
    def contracted(self) -> tuple[str, ...]:
        """Indices that are summed over."""
        return tuple(i for i in self.all if i not in self.output)


@dataclass(frozen=True, slots=True)
class MatmulPlacement:
    """One way to compute a sharded einsum.

    Args:
        indices: the einsum.
        space: index -> mesh axes that split it while computing; indices that are whole are left out.
        inputs: how each input is held before.
        local_inputs: how each is held while computing.
        input_steps: per input, the steps between the two.
        local_output: what the local einsum leaves.
        output_steps: the steps from there to `output`.
        output: how the output is wanted.
    """

    indices: Indices
    space: tuple[tuple[str, tuple[str, ...]], ...]
    inputs: tuple[Sharding, ...]
    local_inputs: tuple[Sharding, ...]
    input_steps: tuple[tuple[Collective, ...], ...]
    local_output: Sharding
    output_steps: tuple[Collective, ...]
    output: Sharding

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Every step that moves data, in order."""
        return tuple(step for _, step in self.moves)

    @property
    def moves(self) -> tuple[tuple[tuple[str, ...], Collective], ...]:
        """Every step that moves data, with the indices of the tensor that moves."""
        pairs = [*zip(self.indices.inputs, self.input_steps, strict=True), (self.indices.output, self.output_steps)]
        return tuple((axes, step) for axes, steps in pairs for step in steps if step.moves_data)

    def num_parts(self, mesh: Mesh) -> int:
        """In how many parts the work is cut; devices beyond that repeat each other's work."""
        return math.prod(mesh.size(*axes) for _, axes in self.space)

    def local_flops(self, sizes: Mapping[str, int], mesh: Mesh) -> float:
        """FLOPs of one device: two per point of its part of the iteration space, padded parts in full."""
        split = dict(self.space)
        return 2.0 * math.prod(-(-sizes[i] // mesh.size(*split.get(i, ()))) for i in self.indices.all)

    def bytes_sent(self, sizes: Mapping[str, int], mesh: Mesh, dtype: DType) -> float:
        """Bytes that each device sends, all tensors of one dtype; see `Collective.bytes_sent`."""
        return sum(c.bytes_sent([sizes[i] for i in axes], mesh, dtype) for axes, c in self.moves)


def place_einsum(
    indices: Indices, space: Mapping[str, Sequence[str]], inputs: Sequence[Sharding], output: Sharding
) -> MatmulPlacement:
    """Place an einsum with its iteration space split as `space` says.

    A sum that is pending on one input alone, over a mesh axis that `space` does not use, is carried through: the einsum
    is linear in that input, so the sum is taken on the output.

    >>> i = Indices((("I", "J"), ("J", "K")), ("I", "K"))
    >>> a, b, c = Sharding(((), ("X",))), Sharding((("X",), ())), Sharding(((), ("X",)))
    >>> print(*place_einsum(i, {"J": "X"}, [a, b], c).collectives)
    reduce-scatter over X: [, ]{U_X} -> [, X]

    Raises:
        ShardingError: for a mesh axis on two indices, a wrong number of inputs, or an output that cannot be reached.
    """
    if len(inputs) != len(indices.inputs):
        raise ShardingError(f"the einsum has {len(indices.inputs)} inputs, shardings are given for {len(inputs)}")
    split = {i: tuple(axes) for i, axes in space.items() if axes}
    unknown = [i for i in split if i not in indices.all]
    if unknown:
        raise ShardingError(
            f"index {', '.join(unknown)} is not in the einsum; its indices are {', '.join(indices.all)}"
        )
    Sharding(tuple(split.values()))  # refuses a mesh axis that is used twice
    working = frozenset(chain(*split.values()))
    carried = _carried(inputs, working)
    local = tuple(
        Sharding.of(axes, split, source.unreduced & carried)
        for axes, source in zip(indices.inputs, inputs, strict=True)
    )
    pending = carried.union(*(split.get(i, ()) for i in indices.contracted))
    local_output = Sharding.of(indices.output, split, pending)
    return MatmulPlacement(
        indices=indices,
        space=tuple((i, split[i]) for i in indices.all if i in split),
        inputs=tuple(inputs),
        local_inputs=local,
        input_steps=tuple(reshard(s, t) for s, t in zip(inputs, local, strict=True)),
        local_output=local_output,
        output_steps=reshard(local_output, output),
        output=output,
    )


def _carried(inputs: Sequence[Sharding], working: frozenset[str]) -> frozenset[str]:
    """Mesh axes over which exactly one input is a partial sum, and which the computation does not use."""
    pending = [a for s in inputs for a in s.unreduced]
    return frozenset(a for a in pending if pending.count(a) == 1 and a not in working)


@lru_cache(maxsize=4096)
def alternatives(indices: Indices, inputs: tuple[Sharding, ...], output: Sharding) -> tuple[MatmulPlacement, ...]:
    """List the ways to compute a sharded einsum, best first by structure alone.

    Each mesh axis that an input or the output names goes to one index, or to none (then its devices repeat each other's
    work, or carry an input's pending sum through). Where several go to one index, they stand in the order in which some
    tensor has them. The list's order: fewest bytes sent, all tensors taken as equally large; then the least repeated
    work; then fewest steps. With sizes at hand use `cheapest`.

    >>> i = Indices((("I", "J"), ("J", "K")), ("I", "K"))
    >>> options = alternatives(i, (Sharding(((), ("X",))), Sharding.replicated(2)), Sharding.replicated(2))
    >>> [[str(c.kind) for c in p.collectives] for p in options if len(p.collectives) == 1]
    [['all-gather'], ['all-reduce']]

    Raises:
        ShardingError: when the output cannot be had: it is to stay unreduced over a mesh axis that sums nothing.
    """
    found: dict[tuple[tuple[str, tuple[str, ...]], ...], MatmulPlacement] = {}
    reasons: list[str] = []
    for space in _spaces(indices, inputs, output):
        try:
            placement = place_einsum(indices, space, inputs, output)
        except ShardingError as error:
            reasons.append(str(error))
            continue
        found.setdefault(placement.space, placement)
    if not found:
        raise ShardingError(f"no way to compute this einsum with the output {output}: {reasons[0]}")
    return tuple(sorted(found.values(), key=_structural_merit))


def cheapest(placements: Iterable[MatmulPlacement], cost: PlacementCost) -> MatmulPlacement:
    """Pick the placement of least `cost`; of equals the first."""
    return min(placements, key=cost)


def book_case(indices: Indices, inputs: Sequence[Sharding]) -> int:
    """Tell which of the four cases of the book (chapter "Sharded matrices") the inputs make.

    1: no contracted index is split. 2: one input is split on it, or both over different mesh axes. 3: both are, over
    the same mesh axes. 4: two inputs use a mesh axis for different indices of the output.

    >>> i = Indices((("I", "J"), ("J", "K")), ("I", "K"))
    >>> X, whole = Sharding((("X",), ())), Sharding.replicated(2)
    >>> book_case(i, [X, whole]), book_case(i, [whole, X]), book_case(i, [Sharding(((), ("X",))), X])
    (1, 2, 3)
    >>> book_case(i, [X, Sharding(((), ("X",)))]), book_case(i, [X, X])
    (4, 2)
    """
    held = [
        (index, split)
        for axes, sharding in zip(indices.inputs, inputs, strict=True)
        for index, split in zip(axes, sharding.splits, strict=True)
    ]
    uses = {(axis, index) for index, split in held if index not in indices.contracted for axis in split}
    if len({axis for axis, _ in uses}) < len(uses):
        return 4
    splits = [{split for i, split in held if i == index} for index in indices.contracted]
    if any(len(found) > 1 for found in splits):
        return 2
    return 3 if any(found != {()} for found in splits) else 1


def _structural_merit(placement: MatmulPlacement) -> tuple[float, int, int]:
    steps = [*chain(*placement.input_steps, placement.output_steps)]
    working = sum(len(axes) for _, axes in placement.space)
    return sum(map(nominal_bytes_sent, steps)), -working, len(steps)


def _spaces(indices: Indices, inputs: Sequence[Sharding], output: Sharding) -> Iterator[dict[str, tuple[str, ...]]]:
    """List the shardings of the iteration space over the mesh axes in sight."""
    held = [*zip(indices.inputs, inputs, strict=True), (indices.output, output)]
    mesh_axes = sorted(frozenset().union(*(s.mesh_axes for _, s in held)))
    for chosen in product([*indices.all, None], repeat=len(mesh_axes)):
        owners = {i: [a for a, j in zip(mesh_axes, chosen, strict=True) if j == i] for i in chosen if i is not None}
        orders = [_orders(index, axes, held) for index, axes in owners.items()]
        for order in product(*orders):
            yield dict(zip(owners, order, strict=True))


def _orders(
    index: str, mesh_axes: list[str], held: Sequence[tuple[tuple[str, ...], Sharding]]
) -> list[tuple[str, ...]]:
    """Major-to-minor orders of `mesh_axes` on `index`: as in each tensor that splits it, the others after."""
    orders: dict[tuple[str, ...], None] = {}
    for axes, sharding in held:
        if index in axes:
            split = [a for a in sharding.splits[axes.index(index)] if a in mesh_axes]
            orders[(*split, *(a for a in mesh_axes if a not in split))] = None
    return list(orders)
