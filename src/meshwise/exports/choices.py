"""The choices of a plan that have an effect, the arithmetic of devices and batches that every tool wants, the headers.

Not here: any tool's own names.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

from pydantic import BaseModel

from meshwise.costs.calibration import Calibration
from meshwise.costs.fabric import Fabric
from meshwise.costs.hidden import hidden, overlap_words
from meshwise.costs.layout_choices import LayoutChoices
from meshwise.costs.problem import TrainingProblem
from meshwise.exports.exported import Refusals, Rule
from meshwise.exports.overlapping import Overlap
from meshwise.hardware import Chip
from meshwise.jobs import PRECISIONS, TrainingJob
from meshwise.models import Model
from meshwise.models.spec import Mixture
from meshwise.runtime.overlap import network_flag, overlap_options
from meshwise.sharding.layout import MESH_AXES, Layout
from meshwise.sharding.strategy import Strategy

T = TypeVar("T")

#: Fields of a layout that every target answers for, by an option, a note or a refusal.
_ANSWERED = {
    *("data", "fsdp", "expert", "context", "ulysses", "tensor", "stage", "zero", "fully_sharded"),
    *("sequence_parallel", "expert_tensor_parallel", "context_method", "schedule", "virtual_stages"),
    *("remat", "remat_layers", "offload", "offload_layers", "micro_batch", "num_microbatches", "wires"),
    "loss",
}

#: Fields of a job that every target answers for, or that say nothing about how the model is trained.
_ANSWERED_OF_JOBS = {"batch_tokens", "seq_len", "tokens", "batch_slack", "precision", "optimizer"} | {
    "expert_imbalance",  # an assumption about the data, not a choice
    "capacity_factor",
}


@dataclass(frozen=True)
class Choices:
    """A layout for a job, read by what its choices mean.

    Args:
        problem: model, job, cluster.
        layout: sizes and choices; sizes may be arrays, an entry a layout, where only rules read them.
        network: its levels, innermost first, as far as the layout uses them.
        known: what rules worked out of the job, for all its layouts.
        overlap: the row of the tool that it is written for.
    """

    problem: TrainingProblem
    layout: Layout
    network: Fabric
    known: dict[Any, Any] = field(default_factory=dict)
    overlap: Overlap | None = None

    @cached_property
    def calibration(self) -> Calibration:
        """What the tool is set up to hide: as the plan was priced where the tool can, else as it can."""
        priced = self.problem.calibration
        own = priced if self.overlap is None else self.overlap.of(priced, self.chip)
        return own.of_slices(self.problem.cluster.num_slices)

    @cached_property
    def hidden(self) -> Mapping[str, str]:
        """What the layout sends -> what it hides behind in the tool, "" for nothing; as in `costs.hidden`."""
        return hidden(self.calibration, self.layout)

    @property
    def model(self) -> Model:
        """What is trained."""
        return self.problem.model

    @property
    def job(self) -> TrainingJob:
        """How much of it."""
        return self.problem.job

    @property
    def chip(self) -> Chip:
        """What it runs on."""
        return self.problem.cluster.chip

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence."""
        return int(self.job.seq_len)

    @cached_property
    def mixture(self) -> bool:
        """Whether the model has experts."""
        return any(isinstance(g.layer.ffn, Mixture) for g in self.model.spec.groups)

    @property
    def positions_ways(self) -> int:
        """Ways in which the positions of a sequence are split, but for sequence parallelism."""
        return self.layout.context * self.layout.ulysses

    @property
    def batch_ways(self) -> int:
        """Groups of devices that see different sequences."""
        return self.layout.data * self.layout.fsdp * self.layout.expert

    @property
    def others(self) -> int:
        """Devices of the axes that `fully_sharded` is about."""
        return self.positions_ways * self.layout.expert

    @property
    def sharded_ways(self) -> int:
        """Ways in which a weight that all devices use is split between steps, but for tensor parallelism."""
        return self.layout.fsdp * (self.others if self.layout.fully_sharded else 1)

    @property
    def replicas(self) -> int:
        """Devices that see different tokens."""
        return self.batch_ways * self.positions_ways

    @property
    def strategy(self) -> Strategy:
        """The rule tables; those of a search's candidates, where sizes are arrays."""
        of_candidates: Strategy | None = getattr(self.layout, "strategy", None)
        return of_candidates or LayoutChoices.of(self.layout).strategy

    @cached_property
    def kv_heads(self) -> int | None:
        """Fewest key/value heads of a layer; None where latents are kept instead."""
        heads = (getattr(g.layer.attention, "kv_heads", None) for g in self.model.spec.groups)
        return min((int(n) for n in heads if n), default=None)

    @property
    def state_whole(self) -> bool:
        """Whether every replica holds all of the optimizer's state."""
        return (self.sharded_ways == 1) & ((self.layout.zero == 0) | (self.replicas == 1))

    @property
    def leaves_axes_out(self) -> bool:
        """Whether weights are sharded over fsdp alone beside context, ulysses or expert; most tools shard over all."""
        return (not self.layout.fully_sharded) & (self.others > 1)

    @property
    def experts_on_tensor(self) -> bool:
        """Whether the tensor axis splits the number of experts."""
        return (self.mixture and not self.layout.expert_tensor_parallel) & (self.layout.tensor > 1)

    @property
    def expert_ways(self) -> int:
        """Devices that hold different experts: expert, and tensor too where it splits their number."""
        return self.layout.expert * (1 + (self.layout.tensor - 1) * self.experts_on_tensor)

    @property
    def remat_layers(self) -> int | None:
        """Layers that compute again, None for all."""
        layers = self.layout.remat_layers
        return None if layers is None or layers >= self.model.num_layers else layers

    @property
    def offload_layers(self) -> int | None:
        """Layers whose activations live on the host, None for all, or where none do."""
        layers = self.layout.offload_layers
        return None if layers is None or layers >= self.model.num_layers else layers

    @property
    def schedule(self) -> str:
        """Of the pipeline; "" without one. One virtual stage of an interleaved schedule is plain 1F1B."""
        return "" if self.layout.stage == 1 else self.order

    @property
    def order(self) -> str:
        """The same, whether there is a pipeline or not."""
        interleaved = self.layout.schedule == "interleaved"
        return "1f1b" if interleaved and self.layout.virtual_stages == 1 else self.layout.schedule

    @property
    def whole_rounds(self) -> int:
        """Microbatches, rounded up to a multiple of the stages."""
        return -(-self.layout.num_microbatches // self.layout.stage) * self.layout.stage

    @cached_property
    def factors(self) -> tuple[tuple[str, int], ...]:
        """Mesh axes as they nest in the network, innermost first: (axis, extent), an axis once for each dimension.

        Within one dimension they nest in the order of `MESH_AXES`.
        """
        wires = dict(self.layout.wires or ())
        number = len(self.network.dimensions)
        placed = [(a, wires[a][d]) for d in range(number) for a in MESH_AXES if a in wires and wires[a][d] > 1]
        merged: list[tuple[str, int]] = []
        for axis, extent in placed:
            if merged and merged[-1][0] == axis:
                merged[-1] = (axis, merged[-1][1] * extent)
            else:
                merged.append((axis, extent))
        return tuple(merged)

    @property
    def placements(self) -> tuple[tuple[str, str], ...]:
        """Mesh axis -> where it lies, in words ("nvlink 8 x leaf 2"), innermost first."""
        names = [d.name for d in self.network.dimensions]
        return tuple(
            (axis, extents_words(names, extents)) for axis, extents in self.layout.wires or () if max(extents) > 1
        )

    def placement_note(self, numbered: tuple[tuple[str, ...], ...], who: str) -> str:
        """Where axes lie, where a tool would number its ranks otherwise; "" where it would not.

        Args:
            numbered: groups of mesh axes as the tool nests them, innermost first.
            who: what numbers them.
        """
        group = {axis: number for number, axes in enumerate(numbered) for axis in axes}
        order = [group[axis] for axis, _ in self.factors]
        if order == sorted(order):
            return ""
        placed = "; ".join(f"{axis} on {where}" for axis, where in self.placements)
        return f"{who}; the plan lies otherwise ({placed}): order the hosts so"

    @property
    def precision(self) -> str:
        """Name of the preset that has these roles, or "" where none has."""
        formats = self.job.formats
        for preset in PRECISIONS.values():
            if replace(formats, name=preset.name, meaning=preset.meaning) == preset:
                return preset.name
        return ""

    def check_known(self, refusals: Refusals) -> None:
        """Refuse what no target knows of: a choice that is newer than this code."""
        refusals.add_unanswered(field_values(self.layout, Layout()), _ANSWERED)
        refusals.add_unanswered(given_values(self.job), _ANSWERED_OF_JOBS)
        if self.layout.expert > 1 and not self.mixture:
            refusals.add(
                f"expert={self.layout.expert}", f"{self.model.name} has no experts", "the same number of data or fsdp"
            )

    def optimizer_in(self, known: Mapping[str, T], refusals: Refusals, why: str) -> T | None:
        """What a tool calls the optimizer; refuse one that it does not offer."""
        kind = self.job.optimizer_kind.name
        if kind not in known:
            refusals.add(f"optimizer={kind}", why, "--optimizer adamw")
        return known.get(kind)

    def precision_in(self, known: Mapping[str, T], refusals: Refusals, *, bf16: str, other: str) -> T | None:
        """What a tool says for the precision; refuse one that it cannot express.

        Args:
            known: name of a preset -> the tool's settings.
            refusals: where a precision that is not there is noted.
            bf16: why the tool has no pure bf16.
            other: why it has none of the others.
        """
        if self.precision not in known:
            why = bf16 if self.precision == "book" else other
            refusals.add(f"precision={self.job.precision}", why, "--precision mixed")
        return known.get(self.precision)


def field_values(value: Any, default: Any) -> list[tuple[str, Any, Any]]:
    """(field, value, default) of a dataclass."""
    return [(f.name, getattr(value, f.name), getattr(default, f.name)) for f in fields(value)]


def given_values(job: BaseModel) -> list[tuple[str, Any, Any]]:
    """(field, value, default) of a job or a load."""
    return [(name, getattr(job, name), info.default) for name, info in type(job).model_fields.items()]


def extents_words(names: Iterable[str], extents: Sequence[int]) -> str:
    """Where a mesh axis lies in the network: "nvlink 8 x leaf 2"."""
    return " x ".join(f"{n} {e}" for n, e in zip(names, extents, strict=True) if e > 1)


def exact(number: float) -> float | int:
    """`number`, as an integer if it is one."""
    return int(number) if number == int(number) else number


def unknown_choices(layout: Layout) -> bool:
    """Whether a layout makes a choice that no target answers for."""
    return any(getattr(layout, f.name) != f.default for f in fields(Layout) if f.name not in _ANSWERED)


#: What XLA hides, by its own schedulers: nothing in the file says so, options of the compiler do (`runtime.overlap`).
XLA_OVERLAP = Overlap(
    ("xla",),
    {
        "tensor": "collective matmuls, on TPUs (Wang et al. 2023; XLA's default)",
        "ring": "sends of a loop run beside the attention that does not need them (XLA's latency-hiding scheduler)",
        "fsdp": "the latency-hiding scheduler; on TPUs asynchronous collective fusion (MaxText, xla_flags_library.py)",
        "gathers": "likewise",
        "gradients": "likewise",
        "weights": "likewise",
    },
)


def xla_note(choices: Choices) -> str:
    """With which options of the compiler collectives run beside compute, "" where the defaults do."""
    tpu = choices.chip.vendor == "google"
    options = overlap_options("tpu" if tpu else "gpu", choices.layout)
    if not options or not any(choices.hidden.values()):
        return ""
    network = network_flag(choices.problem.cluster)
    words = " ".join([*(f"--{name}={str(value).lower()}" for name, value in options.items()), *filter(None, [network])])
    return f"what is hidden is so with {'LIBTPU_INIT_ARGS' if tpu else 'XLA_FLAGS'}='{words}' in the environment"


#: Of tools that offload the activations of all layers.
OFFLOADS_ALL: Rule[Choices] = Rule(
    lambda c: c.offload_layers is not None,
    "offload_layers={c.offload_layers}", "activations of all layers are offloaded", "all layers",
)  # fmt: skip

#: Of tools with one policy of recomputation.
REMAT_OF_ALL: Rule[Choices] = Rule(
    lambda c: c.remat_layers is not None,
    "remat_layers={c.remat_layers}", "one policy is for all layers", "all layers",
)  # fmt: skip

#: Of tools that have no loss in chunks, or make their logits again for the backward pass.
LOGITS_AT_ONCE: Rule[Choices] = Rule(
    lambda c: c.layout.loss != "whole",
    "loss={c.layout.loss}", "logits of a microbatch are made at once", "loss=whole",
)  # fmt: skip

#: Of tools where Ulysses goes with a ring.
RING_WITH_ULYSSES: Rule[Choices] = Rule(
    lambda c: (c.layout.context_method == "gather") & (c.layout.context > 1) & (c.layout.ulysses > 1),
    "context_method=gather with ulysses", "Ulysses goes with a ring only", "context_method=ring",
)  # fmt: skip

#: Of JAX, where a chip may be several devices.
SHARED_CHIPS: Rule[Choices] = Rule(
    lambda c: c.layout.micro_batch % c.chip.devices_per_chip > 0,
    "micro_batch={c.layout.micro_batch}", "JAX's {c.chip.devices_per_chip} devices of a chip split its sequences",
    "micro_batch={c.chip.devices_per_chip}",
)  # fmt: skip


def shared_chips_note(choices: Choices) -> Iterator[str]:
    """How the devices of a chip share its work, where there are several."""
    if (devices := choices.chip.devices_per_chip) > 1:
        yield (
            f"JAX sees {devices} devices in a chip: they are the innermost part of the axis fsdp, and share a chip's "
            "sequences; each gathers weights for itself, which the plan counts once a chip"
        )


JAX_CHIPS: Rule[Choices] = Rule(
    lambda c: c.chip.vendor == "intel", "chip {c.chip.title}", "JAX does not run on it", "--tool none"
)

#: Where a tool stores weights otherwise than the precision `mixed` says.
ONE_COPY = "weights are stored once, in fp32; the plan counts a bf16 copy beside the fp32 master, and so holds more"

#: Where a tool computes the update on the host.
HOST_UPDATE = "the update of what is offloaded is computed by the host, too; the plan streams it through the chip"

#: Of models that have such modules.
MTP_NOTE = "multi-token-prediction modules of the model are in no plan, and left out"


def header_lines(choices: Choices, title: str, version: str, notes: Iterable[str]) -> list[str]:
    """What a file is: the plan, the tool's version it was written for, and every note."""
    cluster, words = choices.problem.cluster, overlap_words(choices.calibration, choices.layout)
    priced = choices.problem.calibration
    own = choices.calibration.software == priced.software
    other = "" if own else f"; the plan is priced as {priced.software or priced.name} overlaps, --tool prices it so"
    return [
        f"{choices.model.name} on {choices.layout.num_chips:,} x {cluster.chip.title}, a plan of meshwise",
        f"layout: {choices.layout.line(experts=choices.mixture)}",
        f"batch: {choices.layout.sequences:,} sequences of {choices.seq_len:,} tokens a step",
        f"precision {choices.job.precision}, optimizer {choices.job.optimizer}",
        *([f"overlap: {words}{other}"] if words else []),
        f"written for {title}: {version}",
        *(f"note: {note}" for note in notes),
    ]


def commented(lines: Iterable[str], mark: str = "# ", width: int = 110) -> str:
    """Write lines as comments, wrapped, with a hanging indent."""
    out: list[str] = []
    for line in lines:
        out += textwrap.wrap(
            line,
            width,
            initial_indent=mark,
            subsequent_indent=f"{mark}  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(out) + "\n"
