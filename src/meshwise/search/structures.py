"""Which choices of a layout that are not sizes are worth trying, and on which meshes they mean anything.

Not here: sizes (`space`, `rows`), or what any choice costs (`costs.evaluate`).
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
class Variant:
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
    def variants(self) -> tuple[Variant, ...]:
        """Schedules of a pipeline, each with its virtual stages."""
        found = []
        for schedule in self.schedule:
            pieces = (self.virtual_stages or _VIRTUAL_STAGES) if schedule == "interleaved" else (1,)
            found += [Variant(schedule, v) for v in pieces]
        return tuple(found)

    def remats(self, layers: int) -> tuple[tuple[str, int | None], ...]:
        """Policies, each with the number of layers that follow it; None for all."""
        if self.remat_layers is not None:
            return tuple((policy, n) for policy in self.remat for n in self.remat_layers)
        shares = dict.fromkeys(n for n in (round(layers * s) for s in (0.25, 0.5, 0.75)) if 0 < n < layers)
        partly = tuple(("full", n) for n in shares) if {"full", "none"} <= set(self.remat) else ()
        return (*((policy, None) for policy in self.remat), *partly)


def allowed(variant: Variant, first: Variant, pipeline: Pipeline, layers: int) -> Mask:
    """Where a schedule can run and is no copy of another: no chunk is empty, and one stage has one schedule at most."""
    can = pipeline.schedule.allows(pipeline.shape) & (pipeline.num_chunks <= layers)
    mask: Mask = np.asarray(can & ((pipeline.shape.stages > 1) | (variant == first)), bool)
    return mask


@dataclass(frozen=True)
class Work:
    """Structures that share arithmetic and activations, and differ only in what they store where.

    Args:
        own: one of them, which stands for all where storage does not count.
        remat_layers: how many layers follow the remat policy; None for all.
        structures: all of them.
        choices: that they were made of.
    """

    own: LayoutChoices
    remat_layers: int | None
    structures: tuple[LayoutChoices, ...]
    choices: Choices

    def applies(self, axis: Axis) -> Mask:
        """On which meshes (axis -> sizes) this work is one of its own: where the axes of its choices are used."""
        whole = self.own.expert_tensor_parallel == self.choices.expert_tensor_parallel[0]
        gathers = self.own.context_method == self.choices.context_method[0]
        exchanges: Mask = (axis("expert") > 1) == self.own.exchanges
        return exchanges & ((axis("tensor") > 1) | whole) & ((axis("context") > 1) | gathers)

    def differs(self, structure: LayoutChoices, axis: Axis) -> Mask:
        """On which meshes `structure` is one of the choices, and no copy of another.

        Where no axis is used that a choice is about, it is as if it had not been made: ZeRO stage 0, fully sharded.
        """
        shared = (axis("context") > 1) | (axis("ulysses") > 1) | (axis("expert") > 1)
        followers = (axis("data") > 1) | (shared & (not structure.fully_sharded))
        stage = np.where(followers, structure.zero in self.choices.zero, structure.zero == 0)
        sharded = np.where(shared, structure.fully_sharded in self.choices.fully_sharded, structure.fully_sharded)
        mask: Mask = stage & sharded
        return mask


def works(model: Model, choices: Choices) -> tuple[Work, ...]:
    """Every kind of work that the choices allow for `model`, with its structures."""
    mixture = bool(model.mixtures)
    choices = choices if mixture else replace(choices, expert_tensor_parallel=(True,), expert_dispatch="slots")
    found = []
    ways = choices.expert_tensor_parallel
    kinds = itertools.product(choices.remats(model.num_layers), ways, choices.context_method, (False, True))
    for (remat, layers), expert_tensor, method, exchanges in kinds:
        if (exchanges and not mixture) or not (expert_tensor or choices.sequence_parallel):
            continue
        own = LayoutChoices(
            zero=0,
            sequence_parallel=choices.sequence_parallel,
            remat=remat,
            fully_sharded=True,
            expert_tensor_parallel=expert_tensor,
            context_method=method,
            exchanges=exchanges,
            partial_remat=layers is not None,
            collective_matmul=choices.collective_matmul,
        )
        stages, sharings = dict.fromkeys((0, *choices.zero)), dict.fromkeys((True, *choices.fully_sharded))
        stored = itertools.product(stages, sharings)
        structures = tuple(replace(own, zero=z, fully_sharded=f) for z, f in stored)
        found.append(Work(own, layers, structures, choices))
    return tuple(found)
