"""Candidates before they are laid on a network: meshes, cuts of the batch and choices, as parallel columns.

Choices of a layout that are no sizes are those that are worth trying, on the meshes where they mean anything. Not here:
placements (`space`), what candidates cost (`pricing`), or which are worth it (`search`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from meshwise.costs.layout_choices import Candidates, LayoutChoices, LocalSizes
from meshwise.costs.own_program import LOOPED_BY
from meshwise.costs.pipeline import Pipeline, fills
from meshwise.costs.problem import TrainingProblem
from meshwise.jobs import TrainingJob
from meshwise.models import Model
from meshwise.sharding.layout import CONTEXT_METHODS, LOSSES, MESH_AXES, Layout
from meshwise.sharding.remat import REMAT_POLICIES

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: Rows of a table about which meshes are searched in blocks.
_BLOCK = 1 << 19


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
        return len(getattr(self, next(iter(self.__dataclass_fields__))))  # searches ask by the hundred thousand

    def take(self, index: Index | Mask | slice) -> Self:
        """Some of the rows, or other ones."""
        return type(self)(*[getattr(self, name)[index] for name in self.__dataclass_fields__])

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, one after the other."""
        return cls(*[np.concatenate([getattr(p, name) for p in parts]) for name in cls.__dataclass_fields__])


@dataclass(slots=True)
class CandidateBatch(Columns):
    """Candidates, as parallel columns.

    Args:
        at: row of the table.
        choices, schedule, saving: which of the layout choices, of the pipeline's variants, and of what saves memory.
        bound: lower bound of the seconds per token.
        memory: bytes per chip.
        placed: whether the bound is of its best placement.
    """

    at: Index
    choices: Index
    schedule: Index
    saving: Index
    bound: Array
    memory: Array
    placed: Mask

    @classmethod
    def none(cls) -> CandidateBatch:
        """Without a candidate."""
        index, number = np.zeros(0, int), np.zeros(0)
        return cls(index, index, index, index, number, number, np.zeros(0, bool))

    @classmethod
    def of(cls, at: Index, choices: Index, schedule: Index, bound: Array) -> CandidateBatch:
        """Candidates that save nothing and whose memory is not known yet."""
        number = len(at)
        return cls(at, choices, schedule, np.zeros(number, int), bound, np.zeros(number), np.zeros(number, bool))

    def where(self, condition: Mask) -> CandidateBatch:
        """Those for which the condition holds."""
        return self if condition.all() else self.take(np.flatnonzero(condition))

    def by_bound(self) -> CandidateBatch:
        """The same, smallest bound first."""
        return self.take(np.argsort(self.bound, kind="stable"))


def candidate_table(
    problem: TrainingProblem, meshes: Index, *, micro_batch: int | None = None, num_microbatches: int | None = None
) -> CandidateTable:
    """Every cut of the batch on `meshes`.

    Args:
        problem: whose job has a batch.
        meshes: [meshes, axes] sizes.
        micro_batch, num_microbatches: what the user fixed, or None.
    """
    cuts, which = _cuts_of(problem.job, meshes, micro_batch, num_microbatches)
    number = np.array([len(c) for c in cuts], int)[which] if len(meshes) else np.zeros(0, int)
    mesh_id = np.repeat(np.arange(len(meshes)), number)
    cut = np.concatenate([cuts[w] for w in which]) if len(meshes) else np.zeros((0, 2))
    names = [f.name for f in fields(LocalSizes) if f.name in MESH_AXES]
    columns = {a: meshes[:, MESH_AXES.index(a)][mesh_id].astype(float) for a in names}
    looping = np.prod(meshes[:, [MESH_AXES.index(a) for a in LOOPED_BY if a in MESH_AXES]], axis=1)
    looped = looping[mesh_id] * cut[:, 1] > 1  # the batch is cut into microbatches
    columns["looped"] = (looped & problem.loops_differ).astype(float)
    first, local = distinct((cut[:, 0], *columns.values()))
    sizes = LocalSizes(cut[first, 0], **{a: column[first] for a, column in columns.items()})
    return CandidateTable(meshes.astype(float), mesh_id, cut[:, 0], cut[:, 1], local, sizes)


def mesh_blocks(
    job: TrainingJob, meshes: Index, *, micro_batch: int | None = None, num_microbatches: int | None = None
) -> list[Index]:
    """Meshes in blocks whose tables have half a million rows or so, for their columns have to be held at once.

    Meshes on which one device's own work is alike stay together.

    Args:
        job: with its batch.
        meshes, micro_batch, num_microbatches: as of `candidate_table`.
    """
    cuts, which = _cuts_of(job, meshes, micro_batch, num_microbatches)
    number = np.array([len(c) for c in cuts], int)[which] if len(meshes) else np.zeros(0, int)
    if number.sum() <= _BLOCK:
        return [meshes]
    own = [meshes[:, MESH_AXES.index(f.name)] for f in fields(LocalSizes) if f.name in MESH_AXES]
    alike = distinct(own)[1]
    order = np.argsort(alike, kind="stable")
    before = np.cumsum(number[order]) - number[order]
    first = np.flatnonzero(np.diff(alike[order], prepend=-1))  # of those alike
    begins = first[1:][np.diff(before[first] // _BLOCK) > 0]
    return np.split(meshes[order], begins)


def _cuts_of(job: TrainingJob, meshes: Index, b: int | None, n: int | None) -> tuple[list[Array], Index]:
    """Cuts of the batch for each number of replicas, and which of them each mesh has."""
    replicas = np.prod([meshes[:, MESH_AXES.index(a)] for a in ("fsdp", "data", "expert")], axis=0)
    counts, which = np.unique(replicas, return_inverse=True)
    return [np.array(_chosen_cuts(job, int(r), b, n), float).reshape(-1, 2) for r in counts], which


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


Axis = Callable[[str], Array]

#: What is tried in the host's memory where a layout does not fit without, least traffic first.
OFFLOADS = ((), ("optimizer",), ("activations",), ("optimizer", "activations"), ("optimizer", "parameters"),
            ("optimizer", "parameters", "activations"))  # fmt: skip

#: Schedules that are tried: GPipe takes as long as 1F1B, and holds more.
SCHEDULED = ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe", "dualpipe-v")

#: Pieces of the model on a stage that interleaving tries.
_VIRTUAL_STAGES = (2, 3, 4, 5, 6, 8, 10, 12, 16)


@dataclass(frozen=True, slots=True)
class PipelineVariant:
    """An order in which pipeline stages work."""

    schedule: str
    virtual_stages: int = 1

    @property
    def layout_choices(self) -> dict[str, object]:
        """The choices as `Layout` names them."""
        return {"schedule": self.schedule, "virtual_stages": self.virtual_stages}


@dataclass(frozen=True, slots=True)
class Saving:
    """What a layout does to hold less in its HBM that leaves its work as it is; fields as in `Layout`."""

    loss: str
    offload: tuple[str, ...]

    def among(self, asked: Choices) -> bool:
        """Whether it is one of the choices of a search."""
        return self.loss in asked.loss and self.offload in asked.offload


@dataclass(frozen=True, slots=True)
class Choices:
    """What a search may choose besides sizes; fields as in `Layout`, each with the values to try.

    Args:
        remat: policies; remat_layers: for how many layers each is tried besides all of them, None for a few shares of
            "full".
        zero: of the replicas that keep whole weights. Stage 0 holds most, but its AllReduce hides behind the backward
            pass as a whole, where stage 1 has to hide the gathering of new weights behind the forward pass.
        fully_sharded, expert_tensor_parallel, context_method: as in `Layout`.
        schedule, virtual_stages: of the pipeline; virtual stages None for a list of them.
        offload: tried in this order where a layout does not fit in memory with the first, nor with another loss.
        offload_layers: whose activations are offloaded; None for all.
        sequence_parallel: whether the residual stream is split over the tensor axis between matmuls; never worse, so
            on.
        collective_matmul: as in `Layout`; tried where it is asked for, as what compilers do by themselves depends on
            their version.
        expert_dispatch: as in `Layout`, which plans price alike.
        loss: as in `Layout`; in chunks, which takes no other time, where a layout does not fit with whole logits.
    """

    remat: tuple[str, ...] = tuple(REMAT_POLICIES)
    remat_layers: tuple[int | None, ...] | None = None
    zero: tuple[int, ...] = (0, 1, 2)
    fully_sharded: tuple[bool, ...] = (True, False)
    expert_tensor_parallel: tuple[bool, ...] = (True, False)
    context_method: tuple[str, ...] = CONTEXT_METHODS
    schedule: tuple[str, ...] = SCHEDULED
    virtual_stages: tuple[int, ...] | None = None
    offload: tuple[tuple[str, ...], ...] = OFFLOADS
    offload_layers: int | None = None
    sequence_parallel: bool = True
    collective_matmul: str = "compiler"
    expert_dispatch: str = "auto"
    loss: tuple[str, ...] = LOSSES

    @property
    def usual(self) -> Choices:
        """Those that most people would try; where none of a kind is left, what there is."""
        schedule = tuple(s for s in self.schedule if s in ("1f1b", "interleaved", "gpipe"))
        return replace(
            self,
            fully_sharded=(True,) if True in self.fully_sharded else self.fully_sharded,
            schedule=schedule or self.schedule,
            remat_layers=self.remat_layers or (None,),
            offload=((),) if () in self.offload else self.offload,
            loss=self.loss[:1],
        )

    def include(self, layout: Layout) -> bool:
        """Whether a layout that a search found is among its `usual` ones, or its own."""
        return (
            layout.fully_sharded in self.fully_sharded
            and layout.schedule in self.schedule
            and layout.offload in self.offload
            and layout.loss in self.loss
            and (self.remat_layers is None or layout.remat_layers in self.remat_layers)
        )

    @property
    def variants(self) -> tuple[PipelineVariant, ...]:
        """Schedules of a pipeline, each with its virtual stages."""
        found = []
        for schedule in self.schedule:
            pieces = (self.virtual_stages or _VIRTUAL_STAGES) if schedule == "interleaved" else (1,)
            found += [PipelineVariant(schedule, v) for v in pieces]
        return tuple(found)

    def remats(self, layers: int) -> tuple[tuple[str, int | None], ...]:
        """Policies, each with the number of layers that follow it; None for all."""
        if self.remat_layers is not None:
            return tuple((policy, n) for policy in self.remat for n in self.remat_layers)
        shares = dict.fromkeys(n for n in (round(layers * s) for s in (0.25, 0.5, 0.75)) if 0 < n < layers)
        partly = tuple(("full", n) for n in shares) if {"full", "none"} <= set(self.remat) else ()
        return (*((policy, None) for policy in self.remat), *partly)


def allowed(variant: PipelineVariant, first: PipelineVariant, pipeline: Pipeline, layers: int) -> Mask:
    """Where a schedule can run and is no copy of another: no chunk is empty, and one stage has one schedule at most."""
    can = pipeline.schedule.allows(pipeline.shape) & fills(layers, pipeline)
    return np.asarray(can & ((pipeline.shape.stages > 1) | (variant == first)), bool)


@dataclass(frozen=True)
class ComputeVariant:
    """Layout choices that share arithmetic and activations, and differ only in what they store where.

    Args:
        own: one of them, which stands for all where storage does not count.
        remat_layers: how many layers follow the remat policy; None for all.
        stored: all of them.
        asked: the choices of the search that they were made of.
        needs_stages: whether on one stage another is never slower and holds no more (`rings`).
    """

    own: LayoutChoices
    remat_layers: int | None
    stored: tuple[LayoutChoices, ...]
    asked: Choices
    needs_stages: bool = False

    @property
    def layout_choices(self) -> dict[str, object]:
        """The choices that all of them share, as `Layout` names them."""
        names = "remat", "sequence_parallel", "expert_tensor_parallel", "context_method", "collective_matmul"
        shared = {name: getattr(self.own, name) for name in names}
        return shared | {"remat_layers": self.remat_layers, "expert_dispatch": self.asked.expert_dispatch}

    def with_remat(self, remat: str = "") -> LayoutChoices:
        """The choices with a remat policy for all layers; without one, what its remat policies share."""
        return self.own.but(remat=remat, partial_remat=False)

    def applies(self, axis: Axis) -> Mask:
        """On which meshes (axis -> sizes) it is worth trying."""
        return self.means(axis) & ((axis("stage") > 1) | (not self.needs_stages))

    def means(self, axis: Axis) -> Mask:
        """On which meshes it is one of its own: where the axes of its choices are used."""
        whole = self.own.expert_tensor_parallel == self.asked.expert_tensor_parallel[0]
        gathers = self.own.context_method == self.asked.context_method[0]
        exchanges: Mask = (axis("expert") > 1) == self.own.exchanges
        return exchanges & ((axis("tensor") > 1) | whole) & ((axis("context") > 1) | gathers)

    def differs(self, stored: LayoutChoices, axis: Axis) -> Mask:
        """On which meshes `stored` is one of the choices, and no copy of another.

        Where no axis is used that a choice is about, it is as if it had not been made: ZeRO stage 0, fully sharded.
        """
        shared = (axis("context") > 1) | (axis("ulysses") > 1) | (axis("expert") > 1)
        followers = (axis("data") > 1) | (shared & (not stored.fully_sharded))
        stage = np.where(followers, stored.zero in self.asked.zero, stored.zero == 0)
        sharded = np.where(shared, stored.fully_sharded in self.asked.fully_sharded, stored.fully_sharded)
        return np.asarray(stage & sharded, bool)


def compute_variants(model: Model, asked: Choices) -> tuple[ComputeVariant, ...]:
    """Every compute variant that the choices of a search allow for `model`."""
    return _compute_variants(bool(model.mixtures), model.num_layers, asked)


@lru_cache(maxsize=16)
def _compute_variants(mixture: bool, layers_of_model: int, asked: Choices) -> tuple[ComputeVariant, ...]:
    asked = asked if mixture else replace(asked, expert_tensor_parallel=(True,), expert_dispatch="auto")
    found = []
    ways = asked.expert_tensor_parallel
    # Those that differ in remat alone follow one another: they share the prices of their operations.
    each = itertools.product(ways, asked.context_method, (False, True), asked.remats(layers_of_model))
    for expert_tensor, method, exchanges, (remat, layers) in each:
        if (exchanges and not mixture) or not (expert_tensor or asked.sequence_parallel):
            continue
        own = LayoutChoices(
            zero=0,
            sequence_parallel=asked.sequence_parallel,
            remat=remat,
            fully_sharded=True,
            expert_tensor_parallel=expert_tensor,
            context_method=method,
            exchanges=exchanges,
            partial_remat=layers is not None,
            collective_matmul=asked.collective_matmul,
        )
        # Stage 1 may hold what stage 2 does (`SearchedNetwork.held_as`).
        stages = dict.fromkeys((0, *asked.zero, *((2,) if 1 in asked.zero else ())))
        sharings = dict.fromkeys((True, *asked.fully_sharded))
        stored = tuple(own.but(zero=z, fully_sharded=f) for z, f in itertools.product(stages, sharings))
        found.append(ComputeVariant(own, layers, stored, asked))
    return tuple(found)
