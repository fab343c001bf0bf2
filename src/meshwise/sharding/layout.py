"""A layout: how many devices each mesh axis has, and the choices that go with it. What the search varies lives here.

A frozen value that reads and prints as users write it and round-trips through JSON. Not here: what it costs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from meshwise.core.errors import LayoutError
from meshwise.sharding.layout_fields import (
    ALIASES,
    LayoutFields,
    MeshLayout,
    Wires,
    check_count,
    check_word,
    is_whole,
    read_count,
)
from meshwise.sharding.remat import RematRequest, parse_remat, remat_policy

#: Mesh axes in the order in which they nest in the hardware unless told otherwise: innermost (fastest wires) first.
MESH_AXES = ("tensor", "ulysses", "context", "expert", "fsdp", "data", "stage")

#: How keys and values of other positions reach attention over the context axis.
CONTEXT_METHODS = ("gather", "ring")

#: Who sees to it that collectives of the tensor axis run beside the products that need them: the compiler, where it
#: does; or the program, which sends pieces round the axis one way, or both ways at once.
COLLECTIVE_MATMULS = ("compiler", "unidirectional", "bidirectional")

#: How tokens are given to experts: in slots, as many for each expert; as they are, sorted, however many; or the better
#: of both where the program runs (`Layout.dispatch`).
EXPERT_DISPATCHES = ("auto", "slots", "ragged")

#: How the head makes its logits: all of a microbatch, or those of a chunk of positions, whose gradients follow at once.
LOSSES = ("whole", "chunked")

#: Positions of a chunk on one device. A gradient of the head's weights is added up in fp32, read and written for each
#: chunk, 8 bytes an element: 2 x 2,048 / 8 = 512 FLOPs a byte keep the matrix units of most chips busy.
CHUNK_POSITIONS = 2048

#: Orders in which pipeline stages work through microbatches; `costs.schedules` prices them.
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe", "dualpipe-v")

#: Choices that are printed even where they are the default: an estimate would choose them if they were left out.
_ALWAYS = ("micro_batch", "num_microbatches", "remat", "zero", "fully_sharded", "context_method", "schedule")

#: What can live in the host's memory.
OFFLOADABLE = ("optimizer", "parameters", "activations")

FIELDS = LayoutFields(
    axes=MESH_AXES,
    aliases=ALIASES | {
        "dp": "data", "data_parallel": "data", "replica": "data", "zero3": "fsdp", "model": "tensor",
        "cp_ulysses": "ulysses", "ulysses_parallel": "ulysses", "mbs": "micro_batch", "microbatch": "micro_batch",
        "ga": "num_microbatches", "accumulation": "num_microbatches", "microbatches": "num_microbatches",
        "recompute": "remat", "vpp": "virtual_stages", "pipeline_schedule": "schedule",
    },
    example="fsdp=64,tensor=4",
    counts=("zero", "micro_batch", "num_microbatches", "virtual_stages", "remat_layers", "offload_layers"),
    switches={
        "sequence_parallel": "; to split positions over an axis of their own use context",
        "expert_tensor_parallel": "; on splits each expert over the whole tensor axis, off leaves experts whole",
        "fully_sharded": "; the axis of that name is fsdp",
    },
    words={
        "context_method": ("context method", CONTEXT_METHODS),
        "collective_matmul": ("collective matmul", COLLECTIVE_MATMULS),
        "expert_dispatch": ("expert dispatch", EXPERT_DISPATCHES),
        "loss": ("loss", LOSSES),
        "schedule": ("pipeline schedule", SCHEDULES),
    },
    texts=("remat", "offload"),
)  # fmt: skip


@dataclass(frozen=True, repr=False)
class Layout(MeshLayout):
    """Sizes of the mesh axes and the choices of a training plan.

    Args:
        data: replicas that see different sequences and keep whole weights (see `zero`).
        fsdp: fully sharded data parallelism (ZeRO-3).
        expert: the experts of mixtures; to all other weights it is one more axis of replicas that see other sequences.
        context: the positions of a sequence; attention needs the keys and values of all (`context_method`).
        ulysses: the positions of a sequence too, exchanged for heads around attention (DeepSpeed-Ulysses).
        tensor: heads, feed-forward width, vocabulary.
        stage: pipeline stages.
        zero: what `data` replicas share out: 0 nothing, 1 optimizer state, 2 also gradients.
        fully_sharded: whether `context`, `ulysses` and `expert` share out the weights that all their devices use, as
            `fsdp` does; else they keep them whole and follow `zero`, as `data` does.
        sequence_parallel: split the residual stream's positions over `tensor` between matmuls.
        expert_tensor_parallel: whether `tensor` splits the width of an expert; else it splits their number, as `expert`
            does.
        context_method: one of CONTEXT_METHODS.
        collective_matmul: of the tensor axis, one of COLLECTIVE_MATMULS.
        expert_dispatch: one of EXPERT_DISPATCHES; what is executed: plans price the tokens themselves.
        loss: how logits are made, one of LOSSES.
        schedule, virtual_stages: of the pipeline, one of SCHEDULES; pieces of the model that each stage holds.
        remat: what is computed again in the backward pass; see `sharding.remat`.
        remat_layers: how many layers do so, the others keep everything; None for all.
        offload: which of OFFLOADABLE live in the host's memory.
        offload_layers: of how many layers, spread evenly, the activations do; None for all.
        micro_batch: sequences that one group of data x fsdp x expert works on at a time.
        num_microbatches: microbatches per step: in flight in a pipeline, accumulated otherwise.
        wires: mesh axis -> its extent on each physical dimension of the network, or None to choose the best.

    Raises:
        LayoutError: a size below one, an unknown choice.
    """

    FIELDS: ClassVar[LayoutFields] = FIELDS

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    ulysses: int = 1
    tensor: int = 1
    stage: int = 1
    zero: int = 0
    fully_sharded: bool = True
    sequence_parallel: bool = True
    expert_tensor_parallel: bool = True
    context_method: str = "gather"
    collective_matmul: str = "compiler"
    expert_dispatch: str = "auto"
    loss: str = "whole"
    schedule: str = "1f1b"
    virtual_stages: int = 1
    remat: str = "full"
    remat_layers: int | None = None
    offload: tuple[str, ...] = ()
    offload_layers: int | None = None
    micro_batch: int = 1
    num_microbatches: int = 1
    wires: Wires | None = None

    def __post_init__(self) -> None:
        self.check_fields()
        for name in ("micro_batch", "num_microbatches", "virtual_stages", "remat_layers", "offload_layers"):
            value = getattr(self, name)
            if value is not None or not name.endswith("_layers"):
                check_count(name, value)
        if not is_whole(self.zero) or self.zero not in (0, 1, 2):
            hint = f"; ZeRO-3 is the axis fsdp (fsdp={self.data}, not data={self.data})" if self.zero == 3 else ""
            raise LayoutError(f"layout: zero must be 0, 1 or 2, found {self.zero!r}{hint}")
        if not isinstance(self.remat, str):
            raise LayoutError(f"layout: remat must be the name of a policy, found {self.remat!r}")
        remat_policy(self.remat)
        for place in self.offload:
            check_word("part to offload", place, OFFLOADABLE)
        self._check_combination()

    def _check_combination(self) -> None:
        """Refuse choices that contradict each other, whatever the model."""
        if self.remat == "none" and self.remat_layers is not None:
            raise LayoutError(
                f"layout: remat_layers={self.remat_layers} of remat=none recompute nothing; write remat=full, "
                "or another policy, or leave remat_layers out"
            )
        if self.offload_layers is not None and "activations" not in self.offload:
            raise LayoutError(
                f"layout: offload_layers={self.offload_layers} is of activations, which stay on the chip; write "
                f"offload=activations:{self.offload_layers}, or leave it out"
            )
        if len(set(self.offload)) < len(self.offload):
            raise LayoutError(f"layout: offload names a part twice: {'+'.join(self.offload)}")
        if self.virtual_stages > 1 and self.schedule != "interleaved":
            raise LayoutError(
                f"layout: virtual_stages={self.virtual_stages} is for schedule=interleaved, found {self.schedule}; "
                "write schedule=interleaved, or leave virtual_stages out"
            )
        if self.tensor > 1 and not self.sequence_parallel and not self.expert_tensor_parallel:
            raise LayoutError(
                "layout: expert_tensor_parallel=off deals the positions of the residual stream to whole experts, which "
                "needs sequence_parallel=on"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis -> size, innermost first."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    @property
    def num_chips(self) -> int:
        """Chips that the layout uses."""
        return math.prod(self.sizes.values())

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Mesh axes over which whole experts are spread."""
        spread = {"expert": self.expert > 1, "tensor": self.tensor > 1 and not self.expert_tensor_parallel}
        return tuple(axis for axis, here in spread.items() if here)

    def dispatch(self, *, dropless: bool, grouped: bool) -> str:
        """How a program gives tokens to experts: "slots" or "ragged".

        Args:
            dropless: whether no token may be dropped.
            grouped: whether it runs on chips that have the kernels of ragged products (`Chip.has_grouped_products`).
        """
        if self.expert_dispatch != "auto":
            return self.expert_dispatch
        return "ragged" if dropless and grouped and len(self.expert_axes) <= 1 else "slots"

    @property
    def sequences(self) -> int:
        """Sequences per step."""
        return self.data * self.fsdp * self.expert * self.micro_batch * self.num_microbatches

    @cached_property
    def used_axes(self) -> tuple[str, ...]:
        """Axes of more than one device, outermost first."""
        return tuple(a for a in reversed(MESH_AXES) if self.sizes[a] > 1)

    def __repr__(self) -> str:
        return f"<Layout: {self}>"

    def __str__(self) -> str:
        return self.line(experts=self.expert > 1)

    def line(self, *, experts: bool) -> str:
        """The layout as `--layout` reads it, with every choice that means something on its mesh but the wires.

        Args:
            experts: whether the model has any, so that it matters how the tensor axis splits them.
        """
        partners = self.context * self.ulysses * self.expert > 1
        return self.written(
            self.used_axes or ("data",),
            {
                "zero": self.data > 1 or (not self.fully_sharded and partners),
                "fully_sharded": partners,
                "sequence_parallel": self.tensor > 1,
                "expert_tensor_parallel": self.tensor > 1,
                "context_method": self.context > 1,
                "collective_matmul": self.tensor > 1,
                "expert_dispatch": True,
                "loss": True,
                "schedule": self.stage > 1,
                "virtual_stages": True,
                **dict.fromkeys(("micro_batch", "num_microbatches", "remat", "remat_layers"), True),
                **dict.fromkeys(("offload", "offload_layers"), True),
            },
            (*_ALWAYS, "expert_tensor_parallel") if experts else _ALWAYS,
        )


@dataclass(frozen=True, slots=True)
class LayoutRequest:
    """A layout as a user wrote it: mesh axes in full, and only those choices that were written.

    Args:
        sizes: mesh axis -> size; axes that were not written have size 1.
        choices: the other fields of `Layout` (zero, remat, micro_batch, schedule, ...), where written.
        written: the mesh axes that were written.
    """

    sizes: Mapping[str, int]
    choices: Mapping[str, Any]
    written: tuple[str, ...] = ()

    @property
    def num_chips(self) -> int:
        """Chips that it asks for."""
        return math.prod(self.sizes.values())


def axis_of(word: str) -> str | None:
    """The mesh axis that a word names, by its own name or a usual one; None for other words.

    >>> axis_of("pipeline"), axis_of("TP"), axis_of("remat")
    ('stage', 'tensor', None)
    """
    name = FIELDS.full_name(word)
    return name if name in MESH_AXES else None


def parse_layout(text: str, *, num_chips: int) -> LayoutRequest:
    """Read a layout as users write it, `-1` for "the rest".

    >>> request = parse_layout("dp=2,fsdp=-1,tp=4,remat=full", num_chips=64)
    >>> request.sizes["fsdp"], request.sizes["tensor"], request.choices
    (8, 4, {'remat': 'full'})

    Args:
        text: `axis=size` and `choice=value`, separated by commas; the usual short names (dp fsdp tp sp cp ep pp) are
            accepted.
        num_chips: of the cluster; what `-1` fills up to.

    Raises:
        LayoutError: not of that form, an axis given twice, sizes that do not multiply to at most `num_chips`.
        UnknownNameError: an axis or choice that does not exist.
    """
    given = FIELDS.parse(text, num_chips, {"remat": _read_remat, "offload": _read_offload})
    if "remat" in given:
        remat: RematRequest = given["remat"]
        given["remat"] = remat.policy
        if remat.of_each_stage:
            given["remat_layers"] *= given.get("stage", 1) * given.get("virtual_stages", 1)
        if remat.offloads:
            given["offload"] = tuple(dict.fromkeys((*given.get("offload", ()), "activations")))
    sizes = {a: given.get(a, 1) for a in MESH_AXES}
    choices = {name: value for name, value in given.items() if name not in MESH_AXES}
    Layout(**sizes, **choices)  # checks every value
    hint = "; expert is an axis of its own, not a part of data" if sizes["expert"] > 1 else ""
    FIELDS.check_chips(text, given, num_chips, hint)
    return LayoutRequest(sizes, choices, tuple(a for a in MESH_AXES if a in given))


def _read_remat(value: str) -> dict[str, Any]:
    """The policy, and how many layers follow it where that is said."""
    remat = parse_remat(value)
    return {"remat": remat} | ({} if remat.layers is None else {"remat_layers": remat.layers})


def _read_offload(value: str) -> dict[str, Any]:
    """The parts to offload; `activations:N` gives the number of layers, too."""
    counted = re.search(r"activations:([0-9]+)", value.lower())
    words = re.sub(r"(activations):[0-9]+", r"\1", value.lower()).split("+")
    parts = {"offload": tuple(word for word in words if word != "none")}
    return parts | ({"offload_layers": read_count("offload_layers", counted[1])} if counted else {})


def layout_words(layout: Layout) -> str:
    """The mesh as `--layout` reads it: axes longer than one, outermost first."""
    return ",".join(f"{a}={layout.sizes[a]}" for a in layout.used_axes) or "data=1"


def choice_words(layout: Layout) -> str:
    """What a layout has besides its mesh, in few words."""
    return ", ".join(choice_list(layout))


def choice_list(layout: Layout) -> list[str]:
    """The same, a choice each; the microbatches are the last."""
    shared = layout.context * layout.ulysses * layout.expert > 1
    pieces = f":{layout.virtual_stages}" if layout.virtual_stages > 1 else ""
    layers = f":{layout.remat_layers}" if layout.remat_layers is not None else ""
    said = {
        f"zero={layout.zero}": layout.zero and (layout.data > 1 or not layout.fully_sharded),
        "fully_sharded=off": shared and not layout.fully_sharded,
        f"{layout.schedule}{pieces}": layout.stage > 1,
        "ring": layout.context > 1 and layout.context_method == "ring",
        "whole experts": layout.tensor > 1 and not layout.expert_tensor_parallel,
        f"offload={'+'.join(layout.offload)}": layout.offload,
        "chunked loss": layout.loss == "chunked",
        f"remat={layout.remat}{layers}": True,
    }
    number = layout.num_microbatches
    microbatches = f"{number:,} microbatch{'es' if number > 1 else ''} of {layout.micro_batch:,}"
    return [*(words for words, holds in said.items() if holds), microbatches]
