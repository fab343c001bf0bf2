"""What one device does on its own under each structure, for the few distinct sizes that a search asks for.

Not here: what depends on the whole mesh or on wires (`pricing`), or what bounds are made of it (`bounds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from meshwise.costs.evaluate import LocalBlock, evaluate_local
from meshwise.costs.layout_choices import LayoutChoices, LocalSizes
from meshwise.costs.problem import TrainingProblem
from meshwise.search.structures import Work

Index = NDArray[np.int64]


class LocalTables:
    """One table for each structure, made when first asked for.

    Args:
        problem: model, job, cluster, calibration.
        works: structures that share their work share its price.
        sizes: the distinct sizes there are.
    """

    def __init__(self, problem: TrainingProblem, works: Sequence[Work], sizes: LocalSizes) -> None:
        self.problem = problem
        self.sizes = sizes
        self.own = {s: work.own for work in works for s in work.structures}
        self.tables: dict[LayoutChoices, _LocalTable] = {}

    def __call__(self, structure: LayoutChoices) -> _LocalTable:
        """The table of a structure."""
        if structure not in self.tables:
            own = self.own.get(structure, structure)
            known = None if structure == own else self(own)
            self.tables[structure] = _LocalTable(self.problem, structure, self.sizes, known)
        return self.tables[structure]


class _LocalTable:
    """What one device does on its own under one structure, for the distinct sizes that were asked for so far."""

    def __init__(
        self, problem: TrainingProblem, structure: LayoutChoices, sizes: LocalSizes, known: _LocalTable | None
    ) -> None:
        self.problem = problem
        self.known = known  # that of a structure with the same work
        self.structure = structure
        self.sizes = sizes
        self.position = np.full(len(sizes.micro_batch), -1)
        self.number = 0
        self.blocks: tuple[LocalBlock, ...] = ()

    def __call__(self, local: Index) -> tuple[LocalBlock, ...]:
        """One row for each of `local`, indices into the distinct sizes."""
        missing = np.unique(local[self.position[local] < 0])
        if len(missing):
            sizes = LocalSizes(*(getattr(self.sizes, f.name)[missing] for f in fields(self.sizes)))
            known = None if self.known is None else self.known(missing)
            new = evaluate_local(self.problem, self.structure, sizes, known)
            numbers = (self.number, len(missing))
            pairs = zip(self.blocks, new, strict=True)
            self.blocks = tuple(a.joined(b, numbers) for a, b in pairs) if self.number else new
            self.position[missing] = self.number + np.arange(len(missing))
            self.number += len(missing)
        at = self.position[local]
        return tuple(block.take(at) for block in self.blocks)
