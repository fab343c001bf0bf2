"""What a training step or a serving layout is asked of: a model, a job or a load, a cluster and its calibration.

Not here: layouts, or what a step costs (`evaluate`, `serving.step`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from meshwise.core.errors import LayoutError
from meshwise.core.tensors import Attention, Fused, Op, Program
from meshwise.costs.arithmetic import Num, is_zero
from meshwise.costs.calibration import Calibration
from meshwise.costs.compute import ComputeRates, OperationPrices, PassCompute, published_precision
from meshwise.costs.fabric import Fabric
from meshwise.costs.layout_choices import LayoutChoices
from meshwise.costs.lower import Lowered, LoweredServingBlock, LoweredTrainingBlock, lowered_serving, lowered_training
from meshwise.costs.own_program import OwnProgram, writes_layers_out
from meshwise.costs.routing import Routing
from meshwise.costs.spread import uncertainty_sources
from meshwise.hardware import Cluster, Torus
from meshwise.jobs import ServingLoad, TrainingJob, parse_serving_precision
from meshwise.models import Model
from meshwise.sharding.remat import remat_policy
from meshwise.sharding.serving import ServingLayoutChoices


class _Problem:
    """What training and serving have in common."""

    model: Model
    cluster: Cluster
    calibration: Calibration

    @property
    def routing(self) -> Routing | None:
        """How the model's router spreads tokens over experts; None without experts.

        Of several kinds of mixtures the one whose tokens reach most experts.
        """
        kinds = [Routing(m.experts, m.top_k, m.router.groups, m.router.groups_limit) for m in self.model.mixtures]
        return max(kinds, key=lambda r: (r.top_k, r.reachable), default=None)

    @property
    def network(self) -> Fabric:
        """The cluster's network as the software of the calibration sees it."""
        return Fabric.of(self.cluster, flat_rings=self.calibration.flat_rings)


@dataclass(frozen=True)
class TrainingProblem(_Problem):
    """What is given: everything but the layout."""

    model: Model
    job: TrainingJob
    cluster: Cluster
    calibration: Calibration
    in_step: bool = False
    """Whether the stages of a pipeline work in step, as those of meshwise's own runtime do."""

    @cached_property
    def on_slices(self) -> Calibration:
        """The calibration with what it hides on the cluster's slices.

        In our own programs for TPUs nothing runs beside the collectives of a tensor group: compiled ones say so
        (docs/verify.md), where measured ones of MaxText on 16x16 hide them. Where sums stand alone, gathers do, too.
        Over all of a slice of three dimensions, or of a square one, gradients are summed by AllReduces. SparseCores
        take sums, but XLA starts most of them where it waits for them.
        """
        if not (self.own_program and self.cluster.chip.vendor == "google"):
            return self.calibration.of_slices(self.cluster.num_slices)
        found = replace(self.calibration, sums_alone=True).of_slices(self.cluster.num_slices)
        network = self.cluster.network
        lengths = [axis.size for axis in network.axes] if isinstance(network, Torus) else []
        whole = len(lengths) == 3 or (len(lengths) == 2 and lengths[0] == lengths[1])
        sums = network.num_chips if whole and self.cluster.num_slices == 1 else 0
        return replace(
            found, collective_matmul=False, in_turn=True, slice_sums=sums, late_gathers=False, beside_sums=False
        )

    def calibration_of(self, structure: LayoutChoices) -> Calibration:
        """The calibration as far as the choices of a layout let its software overlap."""
        calibration = self.on_slices
        if calibration.fused_sequences and not structure.sequence_parallel:
            calibration = replace(calibration, collective_matmul=False)
        if "whole" in calibration.late_once and not calibration.sums_at_end(structure.zero):
            calibration = replace(calibration, late_once=tuple(w for w in calibration.late_once if w != "whole"))
        return calibration

    @property
    def own_program(self) -> bool:
        """Whether what runs is a step of meshwise's own runtime, compiled by XLA."""
        return self.in_step and self.calibration.compiled

    @cached_property
    def xla_leaves(self) -> OwnProgram | None:
        """What XLA leaves of our own programs, which their bounds count; None for other software."""
        return OwnProgram.on(self.cluster.chip) if self.own_program else None

    def held_as(self, choices: LayoutChoices) -> LayoutChoices:
        """The choices that hold the same state where a step is one microbatch, and no pipeline.

        Our own programs then scatter gradients as they are made, with ZeRO-1 as with ZeRO-2; whatever the remat policy.
        """
        return choices.but(zero=2) if self.own_program and choices.zero == 1 else choices

    def writes_layers_out(self, remat: str) -> bool:
        """Whether our own program has the layers written out, where no size of `LOOPED_BY` is above 1."""
        if self.xla_leaves is None or not self.xla_leaves.writes_out:
            return False
        known = self._written_out
        if remat not in known:
            known[remat] = writes_layers_out(self.model.train_program(), remat_policy(remat))
        return known[remat]

    @property
    def loops_differ(self) -> bool:
        """Whether some layers are written out, as they never are where a size of `LOOPED_BY` is above 1."""
        return self.writes_layers_out("none")

    @cached_property
    def _written_out(self) -> dict[str, bool]:
        """The same by remat policy."""
        return {}

    def kept_copies(self, structure: LayoutChoices, block: LoweredTrainingBlock, kept: Num, looped: Num) -> Num:
        """Bytes read and written where what a layer keeps is copied into its stack, and as many where it comes out.

        Of rows of experts that is all that there is room for.

        Args:
            structure: the choices that are not sizes.
            block: of the program; kept: bytes that one of its layers keeps.
            looped: 1 where layers are never written out, else 0 (`LocalSizes`).
        """
        if not (self.xla_leaves and self.xla_leaves.copies and block.role == "layer"):
            return 0.0
        return 2 * kept * (looped if self.writes_layers_out(structure.remat) else 1.0)

    def with_copies(
        self,
        structure: LayoutChoices,
        block: LoweredTrainingBlock,
        passes: Mapping[str, PassCompute],
        kept: Num,
        *,
        looped: Num,
        bounded: bool,
    ) -> Mapping[str, PassCompute]:
        """Passes of a block with those copies, which bounds for all remat policies leave out."""
        copied = self.kept_copies(structure, block, kept, looped)
        if is_zero(copied):
            return passes
        seconds = copied * self.compute_rates.byte
        alone = PassCompute(seconds=seconds)
        if bounded:
            alone = PassCompute(least_bytes=copied, seconds=seconds, serial_seconds=seconds)
        return {**passes} | {name: passes[name] + alone for name in ("forward", "backward")}

    @property
    def has_dropless_capacity(self) -> bool:
        """Whether programs have room for all rows that could come to a device's experts.

        Those of XLA for NVIDIA's GPUs, where no token may be dropped, and our own for TPUs.
        """
        chip = self.cluster.chip
        ragged = chip.has_grouped_products and (chip.vendor == "nvidia" or self.in_step)
        return self.calibration.compiled and ragged and not self.job.capacity_factor

    @property
    def made_in_step(self) -> float | None:
        """Bytes of a gradient as it is made over those of a sum, where stages of a compiled program work in step."""
        formats = self.job.formats
        return formats.reductions.bytes / formats.gradients.bytes if self.own_program else None

    def train_program(self) -> Program:
        """The model's program as the job trains it: with conversions to narrow formats, and with adapters."""
        return self.lowered.program

    @cached_property
    def lowered(self) -> Lowered:
        """The same program, lowered."""
        return lowered_training(self.model, self.job.formats, self.job.tuning, self.job.optimizer_kind)

    @cached_property
    def mixing(self) -> tuple[tuple[int, Op], ...]:
        """Operations of the model that mix positions by matmuls, each with the number of its copies."""
        every = [(b.repeat, op) for b in self.model.train_program() for op in b.ops]
        return tuple((repeat, op) for repeat, op in every if op.matmul and isinstance(op, Attention | Fused))

    @property
    def bucketed(self) -> bool:
        """Whether a layer's gradients are scattered together, while the layer before is at work."""
        return self.cluster.chip.vendor != "google"

    @cached_property
    def compute_rates(self) -> ComputeRates:
        """What operations take on the chip."""
        return ComputeRates.of(self.cluster.chip, self.job.formats, self.calibration)

    @cached_property
    def operation_prices(self) -> dict[tuple[float, ...], OperationPrices]:
        """Prices of operations of the sizes of single layouts, as `local_prices` keeps them."""
        return {}

    @property
    def uncertainty_sources(self) -> tuple[str, ...]:
        """Causes of uncertainty, whatever is known of the layout."""
        return uncertainty_sources(self.calibration, self.model, self.job.formats.compute)


Step = Literal["prefill", "decode"]
STEPS: tuple[Step, Step] = ("prefill", "decode")


@dataclass(frozen=True)
class ServingProblem(_Problem):
    """What is given: everything but the layout."""

    model: Model
    load: ServingLoad
    cluster: Cluster
    calibration: Calibration

    @property
    def notes(self) -> tuple[str, ...]:
        """What users have to know of the model, and of requests beyond what it was made for."""
        made_for = self.model.max_seq_len
        if made_for is None or self.load.longest <= made_for:
            return self.model.notes
        return (
            f"requests of {self.load.longest:,.0f} tokens exceed the {made_for:,} that the model was made for",
            *self.model.notes,
        )

    @cached_property
    def as_published(self) -> bool:
        """Whether the model's checkpoint is quantised, and in these formats, but for the cache and the head."""
        found, asked = self.model.quantization, self.load.formats
        if found is None or found.weights is None:
            return False
        formats = parse_serving_precision(published_precision(self.model, self.cluster.chip))
        return replace(formats, name=asked.name, meaning=asked.meaning, kv=asked.kv, head=asked.head) == asked

    @cached_property
    def compute_rates(self) -> ComputeRates:
        """Rates of the chip for the load's formats, as the calibration says they are achieved."""
        rates = ComputeRates.of(self.cluster.chip, self.load.formats.formats, self.calibration)
        share = self.calibration.narrow_cache if self.load.formats.kv.bytes <= 1 else 1.0
        return rates if share == 1 else replace(rates, cache_byte=rates.cache_byte / share)

    @cached_property
    def _lowered(self) -> dict[tuple[Step, bool], Lowered]:
        return {}

    def lowered(self, step: Step, choices: ServingLayoutChoices) -> Lowered:
        """The program of a step in the load's formats, lowered."""
        key = step, choices.wide
        if key not in self._lowered:
            self._lowered[key] = lowered_serving(self.model, step, self.load.formats, wide=choices.wide)
        return self._lowered[key]

    def blocks(self, step: Step, choices: ServingLayoutChoices) -> tuple[LoweredServingBlock, ...]:
        """The lowered blocks of a step."""
        return self.lowered(step, choices).serving(step, choices)


def readable_context(model: Model, load: ServingLoad) -> float | None:
    """The most tokens of a request: what the model was made for, or what is asked for beyond; None without a limit."""
    if model.max_seq_len is None or "P" in model.sizes:  # learned positions end with their table
        return model.max_seq_len
    return max(model.max_seq_len, load.context or 0)


def check_context(model: Model, load: ServingLoad) -> None:
    """Refuse requests longer than what the model was made for, unless they are asked for (`ServingLoad.context`).

    Raises:
        LayoutError: with the longest prompt and output that it can read.
    """
    longest = readable_context(model, load)
    if longest is None or load.longest <= longest:
        return
    fix = "or a model that reads more"
    if "P" not in model.sizes:
        fix = f"or --context {load.longest:.0f} to serve it beyond that all the same"
    if load.mix is not None:
        raise LayoutError(
            f"prompt: {model.name} was made for {longest:,.0f} tokens, found requests of up to {load.longest:,.0f} "
            f"({load.mix.words}); cut them off at {longest:,.0f} together, {fix}"
        )
    room = max(longest - load.output, 0)
    shorter = f"use a prompt of {room:,.0f} or less" if room else f"use an output of less than {longest:,.0f}"
    raise LayoutError(
        f"prompt: {model.name} was made for {longest:,.0f} tokens, found {load.prompt:,.0f} of the prompt and "
        f"{load.output:,.0f} of the output; {shorter}, {fix}"
    )
