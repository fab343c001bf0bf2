"""Where a layout does not divide a model: axes that are padded, heads that several chips hold.

Nothing of it is ignored by the cost model; this names it. Not here: seconds or bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshwise.costs.estimate import layout_candidate
from meshwise.costs.evaluate import whole_extents
from meshwise.costs.extents import NEVER_PADDED
from meshwise.costs.problem import TrainingProblem
from meshwise.sharding.layout import Layout
from meshwise.sharding.placed import Held, LocalOp, PlacedBlock


@dataclass(frozen=True, slots=True)
class Padding:
    """One axis that one split does not divide.

    Args:
        axis: of the tensor, with its letter of the nomenclature.
        size: of it, whole.
        mesh_axes: of more than one device, that split it; ways: their product.
        local: elements that each device is given.
        tensors: names of what is split so, in order of appearance.
    """

    axis: str
    size: int
    mesh_axes: tuple[str, ...]
    ways: int
    local: int
    tensors: tuple[str, ...]

    @property
    def padded(self) -> int:
        """Elements that all devices together are given."""
        return self.local * self.ways

    @property
    def waste(self) -> float:
        """What is added, as a share of the axis."""
        return self.padded / self.size - 1

    @property
    def repeated(self) -> bool:
        """Whether these are key/value heads, fewer than the ways: chips hold copies of them, counted as padding."""
        return self.axis.partition(".")[0] == "K" and self.ways > self.size


def paddings(problem: TrainingProblem, layout: Layout) -> tuple[Padding, ...]:
    """Find every (axis, split) of the placed program that does not divide, the largest waste first.

    Args:
        problem: model, job, cluster, calibration.
        layout: sizes and choices.
    """
    structure, candidate = layout_candidate(problem.model, layout)
    extents = whole_extents(problem, structure, candidate)
    sizes = layout.sizes
    found: dict[tuple[str, tuple[str, ...]], dict[str, None]] = {}
    for block in problem.lowered.training(structure):
        for held in _held(block.placed):
            for axis, split in zip(held.tensor.axes, held.sharding.splits, strict=True):
                used = tuple(a for a in split if sizes[a] > 1)
                ways = math.prod(sizes[a] for a in used)
                if axis not in NEVER_PADDED and extents.sizes[axis] % ways:
                    found.setdefault((axis, used), {})[held.tensor.name] = None
    rows = (
        Padding(
            axis=axis,
            size=int(extents.sizes[axis]),
            mesh_axes=used,
            ways=math.prod(sizes[a] for a in used),
            local=int(extents.length(axis, used)),
            tensors=tuple(names),
        )
        for (axis, used), names in found.items()
    )
    return tuple(sorted(rows, key=lambda p: -p.waste))


def _held(block: PlacedBlock) -> Iterator[Held]:
    """Everything that a device holds of a block."""
    stored: Iterable[Held] = (*block.weights, *block.tied, *block.gradients, *block.optimizer)
    yield from stored
    for item in (*block.forward, *block.backward):
        if isinstance(item, LocalOp):
            yield from (*item.inputs, item.output)
