"""Candidates before they are laid on a network: meshes and cuts of the batch, as parallel columns.

Not here: placements (`space`), what candidates cost (`pricing`), or which are worth it (`search`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

from meshwise.costs.layout_choices import Candidates, LocalSizes
from meshwise.jobs import TrainingJob
from meshwise.sharding.layout import MESH_AXES

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class CandidateTable:
    """Every mesh with every cut of the batch, as parallel columns.

    Args:
        meshes: [meshes, axes] sizes.
        mesh_id: number of the mesh.
        micro_batch, num_microbatches: how the batch is cut.
        local: index into `sizes`.
        sizes: the distinct sizes that one device's own work depends on.
    """

    meshes: Array
    mesh_id: Index
    micro_batch: Array
    num_microbatches: Array
    local: Index
    sizes: LocalSizes

    def __len__(self) -> int:
        return len(self.mesh_id)

    def axis(self, name: str, at: Index | slice = slice(None)) -> Array:
        """Sizes of one mesh axis, in rows `at`."""
        sizes: Array = self.meshes[:, MESH_AXES.index(name)][self.mesh_id[at]]
        return sizes

    def axes(self, mesh: Index | slice = slice(None)) -> dict[str, Array]:
        """Sizes of all mesh axes, of some of the meshes."""
        return {a: self.meshes[mesh, k] for k, a in enumerate(MESH_AXES)}

    def candidates(self, at: Index, *, remat_share: float = 1.0, offload_share: float = 1.0) -> Candidates:
        """What the evaluator takes of rows `at`."""
        return Candidates(
            **{a: self.axis(a, at) for a in MESH_AXES},  # type: ignore[arg-type]  # the schedule is no axis
            micro_batch=self.micro_batch[at],
            num_microbatches=self.num_microbatches[at],
            remat_share=remat_share,
            offload_share=offload_share,
        )


@dataclass(slots=True)
class Columns:
    """Base of dataclasses whose fields are parallel columns: arrays of one length."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def take(self, index: Index | Mask | slice) -> Self:
        """Some of the rows, or other ones."""
        return type(self)(*(getattr(self, f.name)[index] for f in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, one after the other."""
        return cls(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)))


@dataclass(slots=True)
class CandidateBatch(Columns):
    """Candidates, as parallel columns.

    Args:
        at: row of the table.
        choices, schedule, offload: which of the layout choices, of the pipeline's variants, and of what is offloaded.
        bound: lower bound of the seconds per token.
        memory: bytes per chip.
    """

    at: Index
    choices: Index
    schedule: Index
    offload: Index
    bound: Array
    memory: Array

    @classmethod
    def none(cls) -> CandidateBatch:
        """Without a candidate."""
        index, number = np.zeros(0, int), np.zeros(0)
        return cls(index, index, index, index, number, number)

    @classmethod
    def of(cls, at: Index, choices: int, schedule: Index, bound: Array) -> CandidateBatch:
        """Candidates that offload nothing and whose memory is not known yet."""
        n = len(at)
        return cls(at, np.full(n, choices), schedule, np.zeros(n, int), bound, np.zeros(n))

    def where(self, condition: Mask) -> CandidateBatch:
        """Those for which the condition holds."""
        return self if condition.all() else self.take(np.flatnonzero(condition))

    def by_bound(self) -> CandidateBatch:
        """The same, smallest bound first."""
        return self.take(np.argsort(self.bound, kind="stable"))


def candidate_table(
    job: TrainingJob, meshes: Index, *, micro_batch: int | None = None, num_microbatches: int | None = None
) -> CandidateTable:
    """Every cut of the batch on `meshes`.

    Args:
        job: with its batch.
        meshes: [meshes, axes] sizes.
        micro_batch, num_microbatches: what the user fixed, or None.
    """
    replicas = np.prod([meshes[:, MESH_AXES.index(a)] for a in ("fsdp", "data", "expert")], axis=0)
    counts, which = np.unique(replicas, return_inverse=True)
    chosen = (_chosen_cuts(job, int(r), micro_batch, num_microbatches) for r in counts)
    cuts = [np.array(c, float).reshape(-1, 2) for c in chosen]
    number = np.array([len(c) for c in cuts], int)[which] if len(meshes) else np.zeros(0, int)
    mesh_id = np.repeat(np.arange(len(meshes)), number)
    cut = np.concatenate([cuts[w] for w in which]) if len(meshes) else np.zeros((0, 2))
    names = [f.name for f in fields(LocalSizes) if f.name in MESH_AXES]
    columns = {a: meshes[:, MESH_AXES.index(a)][mesh_id].astype(float) for a in names}
    first, local = distinct((cut[:, 0], *columns.values()))
    sizes = LocalSizes(cut[first, 0], **{a: column[first] for a, column in columns.items()})
    return CandidateTable(meshes.astype(float), mesh_id, cut[:, 0], cut[:, 1], local, sizes)


def distinct(columns: Sequence[Array | Index]) -> tuple[Index, Index]:
    """First place of each distinct combination of whole numbers, and which of them stands where."""
    # One number for each combination: rows are found faster than columns are compared.
    keys: Array | Index = columns[0]
    for column in columns[1:]:
        keys = keys * (column.max(initial=0) + 1) + column
    _, first, index = np.unique(keys, return_index=True, return_inverse=True)
    return first, index


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
