"""A layout as the evaluator takes it: choices that are no sizes (`LayoutChoices`), and sizes, of one or of many.

Not here: what they cost (`evaluate`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import prod

from meshwise.costs.arithmetic import Num, where
from meshwise.costs.own_program import LOOPED_BY
from meshwise.costs.pipeline import Pipeline
from meshwise.sharding.layout import MESH_AXES, Layout
from meshwise.sharding.strategy import Strategy, training_strategy


@dataclass(frozen=True, slots=True)
class LayoutChoices:
    """The choices of a layout that are not sizes. Placing depends on nothing else.

    Args:
        zero, sequence_parallel, remat, fully_sharded, expert_tensor_parallel, context_method: as in `Layout`.
        collective_matmul, loss: likewise.
        partial_remat: whether only `Candidates.remat_share` of the layers follow `remat`; the others keep everything.
        offload: as in `Layout`; placing does not depend on it.
        exchanges: whether there is an axis `expert`, so that tokens leave for their experts from where the residual
            stream has them; else they are gathered first, once for all their experts.
    """

    zero: int
    sequence_parallel: bool
    remat: str
    fully_sharded: bool = True
    expert_tensor_parallel: bool = True
    context_method: str = "gather"
    exchanges: bool = False
    partial_remat: bool = False
    offload: tuple[str, ...] = ()
    collective_matmul: str = "compiler"
    loss: str = "whole"

    @classmethod
    def of(cls, layout: Layout) -> LayoutChoices:
        """Read the choices of a layout; those that mean nothing on its mesh as if they had not been made."""
        own = {name: getattr(layout, name) for name in _CHOICES}
        shared = layout.context * layout.ulysses * layout.expert > 1
        own["fully_sharded"] = layout.fully_sharded or not shared
        own["zero"] = layout.zero if layout.data > 1 or not own["fully_sharded"] else 0
        own["collective_matmul"] = layout.collective_matmul if layout.tensor > 1 else "compiler"
        return cls(**own, exchanges=layout.expert > 1, partial_remat=layout.remat_layers is not None)

    @property
    def strategy(self) -> Strategy:
        """The rule tables."""
        return training_strategy(
            zero=self.zero,
            sequence=self.sequence_parallel,
            fully_sharded=self.fully_sharded,
            experts=self._experts,
            ring=self.context_method == "ring",
            exchanges=self.exchanges,
            pieces=self.collective_matmul != "compiler",
        )

    @property
    def stored_plainly(self) -> LayoutChoices:
        """What stands for all choices that differ only in what they store where: they compute and keep alike."""
        return self.but(zero=0, fully_sharded=True)

    def but(self, **changes: object) -> LayoutChoices:
        """The same with other choices, of which a search asks for the same few all the time."""
        return _but(self, tuple(changes.items()))

    @property
    def _experts(self) -> tuple[str, ...]:
        """What the tensor axis splits of a mixture, as `strategy.tensor` takes it."""
        if not self.expert_tensor_parallel:
            return ("E", "C")
        return ("Fe", "C") if self.exchanges and self.sequence_parallel else ("Fe",)


@lru_cache(maxsize=4096)
def _but(choices: LayoutChoices, changes: tuple[tuple[str, object], ...]) -> LayoutChoices:
    return replace(choices, **dict(changes))  # type: ignore[arg-type]  # fields by name


#: Those that are fields of a layout, too.
_CHOICES = tuple(f.name for f in fields(LayoutChoices) if f.name not in ("exchanges", "partial_remat"))


@dataclass(frozen=True, slots=True)
class Candidates:
    """Sizes of layouts that share a structure: floats, or arrays of one length.

    `remat_share` is the share of layers that follow the remat policy, above 0 and up to 1, where the structure is
    `partial_remat`; on every stage alike, of fractions of a layer where it comes to that. `offload_share` is likewise
    the share of layers whose activations are offloaded, where the structure offloads activations. All have one
    `schedule` of the pipeline.
    """

    data: Num
    fsdp: Num
    context: Num
    tensor: Num
    stage: Num
    micro_batch: Num
    num_microbatches: Num
    expert: Num = 1.0
    ulysses: Num = 1.0
    remat_share: Num = 1.0
    offload_share: Num = 1.0
    virtual_stages: Num = 1.0
    schedule: str = "1f1b"

    @property
    def mesh(self) -> Mapping[str, Num]:
        """Mesh axis -> size."""
        return {a: getattr(self, a) for a in MESH_AXES}

    @property
    def pipeline(self) -> Pipeline:
        """The schedule of the pipeline and its sizes."""
        return Pipeline.of(self.schedule, self.stage, self.num_microbatches, self.virtual_stages)

    @property
    def replicas(self) -> Num:
        """Groups of devices that see different sequences."""
        return self.data * self.fsdp * self.expert

    @property
    def sequences(self) -> Num:
        """Sequences per step."""
        return self.micro_batch * self.num_microbatches * self.replicas

    @property
    def local(self) -> LocalSizes:
        """What one device's own work depends on."""
        looped = where(prod(getattr(self, size) for size in LOOPED_BY) > 1, 1.0, 0.0)
        return LocalSizes(self.micro_batch, self.context, self.ulysses, self.expert, self.tensor, looped)


@dataclass(frozen=True, slots=True)
class LocalSizes:
    """The sizes that one device's work on one microbatch depends on: floats, or arrays of one length.

    `looped` is 1 where a size of `LOOPED_BY` is above 1, else 0; all may have 0 where that makes no difference
    (`TrainingProblem.loops_differ`).
    """

    micro_batch: Num
    context: Num = 1.0
    ulysses: Num = 1.0
    expert: Num = 1.0
    tensor: Num = 1.0
    looped: Num = 0.0

    @property
    def mesh(self) -> dict[str, Num]:
        """Mesh axis -> size, of those that split this work."""
        return {"context": self.context, "ulysses": self.ulysses, "expert": self.expert, "tensor": self.tensor}
