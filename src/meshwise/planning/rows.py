"""Candidates before they are laid on a network: meshes, cuts of the batch and structures, as parallel columns.

Not here: placements (`space`), and what candidates cost or which are worth it (`search`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.costs.evaluate import Candidates, LocalBlock, LocalSizes, Structure, TrainingProblem, evaluate_local
from meshwise.jobs import TrainingJob
from meshwise.sharding.layout import MESH_AXES

__all__ = ["Rows", "batch_cuts", "candidate_rows"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(slots=True)
class Rows:
    """Parallel columns.

    Args:
        meshes: [meshes, axes] sizes; shared, not a column.
        mesh_id: number of the row's mesh.
        micro_batch, num_microbatches: how the batch is cut.
        local: index into the table of distinct `LocalSizes`.
        structure: index into the structures.
        bound: lower bound of the seconds per token.
        memory: bytes per chip.
    """

    meshes: Array
    mesh_id: Index
    micro_batch: Array
    num_microbatches: Array
    local: Index
    structure: Index
    bound: Array
    memory: Array

    def __len__(self) -> int:
        return len(self.mesh_id)

    def take(self, index: Any) -> Rows:
        """Other rows of the same table."""
        return Rows(self.meshes, *(getattr(self, f.name)[index] for f in fields(self)[1:]))

    @property
    def mesh(self) -> Array:
        """[rows, axes] sizes."""
        return self.meshes[self.mesh_id]

    def candidates(self) -> Candidates:
        """What the evaluator takes."""
        columns: dict[str, Any] = {a: self.meshes[:, i][self.mesh_id] for i, a in enumerate(MESH_AXES)}
        return Candidates(**columns, micro_batch=self.micro_batch, num_microbatches=self.num_microbatches)

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """Rows of one table, one after the other."""
        columns = (np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)[1:])
        return cls(parts[0].meshes, *columns)


def candidate_rows(
    problem: TrainingProblem,
    structures: Sequence[Structure],
    table: Index,
    *,
    micro_batch: int | None = None,
    num_microbatches: int | None = None,
) -> tuple[list[Rows], list[tuple[LocalBlock, ...]]]:
    """Every cut of the batch on the meshes of `table`, and what devices do on their own; both for each structure.

    Args:
        problem: model, job, cluster, calibration.
        structures: ZeRO stages and remat policies.
        table: [meshes, axes] sizes.
        micro_batch, num_microbatches: what the user fixed, or None.
    """
    replicas = np.prod([table[:, MESH_AXES.index(a)] for a in ("fsdp", "data", "expert")], axis=0)
    distinct, which = np.unique(replicas, return_inverse=True)
    chosen = (_chosen_cuts(problem.job, int(r), micro_batch, num_microbatches) for r in distinct)
    cuts = [np.array(c, float).reshape(-1, 2) for c in chosen]
    number = np.array([len(c) for c in cuts], int)[which] if len(table) else np.zeros(0, int)
    mesh_id = np.repeat(np.arange(len(table)), number)
    cut = np.concatenate([cuts[w] for w in which]) if len(table) else np.zeros((0, 2))
    data = table[:, MESH_AXES.index("data")][mesh_id]
    # One number for each distinct combination: rows are found faster than columns are compared.
    names = [f.name for f in fields(LocalSizes) if f.name in MESH_AXES]
    columns = {a: table[:, MESH_AXES.index(a)][mesh_id] for a in names}
    keys = cut[:, 0]
    for column in columns.values():
        keys = keys * (column.max(initial=0) + 1) + column
    _, first, index = np.unique(keys, return_index=True, return_inverse=True)
    own = LocalSizes(cut[first, 0], **{a: column[first].astype(float) for a, column in columns.items()})
    blank = np.zeros(len(mesh_id))
    base = Rows(table.astype(float), mesh_id, cut[:, 0], cut[:, 1], index, np.zeros(len(mesh_id), int), blank, blank)
    parts, local = [], []
    for s, structure in enumerate(structures):
        # Without replicas the ZeRO stage means nothing: one of them stands for all.
        part = base.take(np.flatnonzero((data > 1) | (structure.zero == min(s.zero for s in structures))))
        part.structure = np.full(len(part), s)
        parts.append(part)
        local.append(evaluate_local(problem, structure, own) if len(part) else ())
    return parts, local


def _chosen_cuts(job: TrainingJob, replicas: int, b: int | None, n: int | None) -> list[tuple[int, int]]:
    """Cuts of the batch that agree with the microbatch size and number that the user fixed, if any."""
    if b is not None and n is not None:
        within = abs(b * n * replicas - job.sequences) <= job.sequences * job.batch_slack + 1e-9
        return [(b, n)] if within else []
    unit = b or n or 1
    cuts = batch_cuts(job.sequences, job.batch_slack, replicas, unit)
    return [c for c in cuts if b in (None, c[0]) and n in (None, c[1])]


def batch_cuts(sequences: float, slack: float, replicas: int, multiple: int = 1) -> list[tuple[int, int]]:
    """Ways to cut a batch over `replicas`: (sequences per microbatch, microbatches).

    The batch may be rounded within `slack`. For each power of two, the nearest batch whose share per replica it
    divides is tried, so that shares without divisors do not rule out accumulation or pipelines; all shares are a
    multiple of `multiple`.

    >>> batch_cuts(1024, 0.1, 1120), batch_cuts(16, 0, 4), batch_cuts(1024, 0, 1120)
    ([(1, 1)], [(1, 4), (2, 2), (4, 1)], [])
    """
    low, high = sequences * (1 - slack) / replicas, sequences * (1 + slack) / replicas
    shares = set()
    for unit in (multiple * p for p in (1, 2, 4, 8, 16, 32, 64)):
        nearest = max(1, round(sequences / replicas / unit)) * unit
        if low - 1e-9 <= nearest <= high + 1e-9:
            shares.add(nearest)
    return sorted({(b, share // b) for share in shares for b in _divisors(share)})


def _divisors(number: int) -> set[int]:
    """All divisors."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return {*small, *(number // d for d in small)}
