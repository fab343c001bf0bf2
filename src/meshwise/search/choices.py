"""Which choices of a layout that are not sizes are worth trying, and on which meshes they mean anything.

Not here: sizes (`space`, `candidates`), or what any choice costs (`costs.evaluate`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwise.costs.layout_choices import LayoutChoices
from meshwise.costs.pipeline import Pipeline
from meshwise.models import Model
from meshwise.sharding.layout import CONTEXT_METHODS
from meshwise.sharding.remat import REMAT_POLICIES

Mask = NDArray[np.bool_]
Axis = Callable[[str], NDArray[np.float64]]

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
        offload: tried in this order where a layout does not fit in memory with the first.
        offload_layers: whose activations are offloaded; None for all.
        sequence_parallel: whether the residual stream is split over the tensor axis between matmuls; never worse, so
            on.
        collective_matmul: as in `Layout`; tried where it is asked for, as what compilers do by themselves depends on
            their version.
        expert_dispatch: as in `Layout`, which plans price alike.
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
    expert_dispatch: str = "slots"

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
    can = pipeline.schedule.allows(pipeline.shape) & (pipeline.num_chunks <= layers)
    return np.asarray(can & ((pipeline.shape.stages > 1) | (variant == first)), bool)


@dataclass(frozen=True)
class ComputeVariant:
    """Layout choices that share arithmetic and activations, and differ only in what they store where.

    Args:
        own: one of them, which stands for all where storage does not count.
        remat_layers: how many layers follow the remat policy; None for all.
        stored: all of them.
        asked: the choices of the search that they were made of.
    """

    own: LayoutChoices
    remat_layers: int | None
    stored: tuple[LayoutChoices, ...]
    asked: Choices

    def applies(self, axis: Axis) -> Mask:
        """On which meshes (axis -> sizes) it is one of its own: where the axes of its choices are used."""
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
    mixture = bool(model.mixtures)
    asked = asked if mixture else replace(asked, expert_tensor_parallel=(True,), expert_dispatch="slots")
    found = []
    ways = asked.expert_tensor_parallel
    # Those that differ in remat alone follow one another: they share the prices of their operations.
    each = itertools.product(ways, asked.context_method, (False, True), asked.remats(model.num_layers))
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
        stages, sharings = dict.fromkeys((0, *asked.zero)), dict.fromkeys((True, *asked.fully_sharded))
        stored = tuple(replace(own, zero=z, fully_sharded=f) for z, f in itertools.product(stages, sharings))
        found.append(ComputeVariant(own, layers, stored, asked))
    return tuple(found)
