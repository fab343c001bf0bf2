"""A serving layout: how many chips each mesh axis of an engine has, how many engines, and the choices that go with it.

A frozen value that reads and prints as users write it and round-trips through JSON. Not here: what it costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from meshwise.core.errors import LayoutError
from meshwise.sharding.layout import CONTEXT_METHODS
from meshwise.sharding.layout_fields import LayoutFields, MeshLayout, Wires
from meshwise.sharding.serving import CACHE_SPLITS, SERVING_AXES, serving_strategy
from meshwise.sharding.strategy import Strategy

FIELDS = LayoutFields(
    axes=(*SERVING_AXES, "replicas"),
    aliases={
        "tp": "tensor", "mp": "tensor", "tensor_parallel": "tensor",
        "dcp": "cache", "kv": "cache", "dp_attention": "cache",
        "cp": "context", "pcp": "context", "context_parallel": "context",
        "ep": "expert", "expert_parallel": "expert", "experts": "expert",
        "gather": "fsdp", "weight_gathered": "fsdp",
        "pp": "stage", "pipeline": "stage", "stages": "stage", "pipeline_parallel": "stage",
        "dp": "replicas", "replica": "replicas", "data": "replicas", "engines": "replicas",
        "sp": "sequence_parallel", "kv_split": "cache_split", "etp": "expert_tensor_parallel",
    },
    example="tensor=8,replicas=4",
    switches={"sequence_parallel": "", "expert_tensor_parallel": ""},
    words={
        "cache_split": ("cache split", CACHE_SPLITS),
        "context_method": ("context method", CONTEXT_METHODS),
    },
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServingLayoutChoices:
    """The choices of a serving layout that are no sizes. Placing depends on nothing else.

    Args:
        cache_split, sequence_parallel, expert_tensor_parallel, context_method: as in `ServingLayout`.
        wide: whether the axis `width` is used.
    """

    cache_split: str = "heads"
    sequence_parallel: bool = False
    expert_tensor_parallel: bool = True
    context_method: str = "gather"
    wide: bool = False

    def strategy(self, step: str) -> Strategy:
        """The rule tables of a step; generated tokens are too few for their positions to be split."""
        split = self.sequence_parallel and step == "prefill"
        return serving_strategy(
            cache_split=self.cache_split,
            residual="width" if self.wide else "positions" if split else "whole",
            wide=self.wide,
            ring=self.context_method == "ring",
            experts=("Fe",) if self.expert_tensor_parallel else ("E", "C"),
        )


@dataclass(frozen=True)
class ServingLayout(MeshLayout):
    """Sizes of the mesh axes of one engine, the number of engines, and the choices of a serving plan.

    Args:
        tensor: heads, feed-forward widths, vocabulary.
        cache: the same weights again, while attention splits its cache otherwise (`cache_split`).
        width: the residual width, so that weights are split both ways (2D weight-stationary).
        context: the positions of a prompt (prefill only).
        expert: the experts of mixtures; attention sees other sequences on each of its devices (data-parallel
            attention).
        fsdp: weights are stored in parts and gathered when used, while sequences are split (weight-gathered).
        stage: pipeline stages.
        replicas: engines that work apart.
        cache_split: what `cache` and `width` split of the cache: "heads" (copies where there are too few), "batch" or
            "sequence".
        sequence_parallel: split the positions of a prompt over the tensor axes between matmuls.
        expert_tensor_parallel: whether the tensor axes split the width of an expert; else their number, as `expert`.
        context_method: how keys and values reach attention over `context`: "gather" or "ring".
        wires: mesh axis -> its extent on each physical dimension of the network, or None to choose the best.

    Raises:
        LayoutError: a size below one, choices that contradict each other.
        UnknownNameError: an unknown word or axis.
    """

    FIELDS: ClassVar[LayoutFields] = FIELDS

    tensor: int = 1
    cache: int = 1
    width: int = 1
    context: int = 1
    expert: int = 1
    fsdp: int = 1
    stage: int = 1
    replicas: int = 1
    cache_split: str = "heads"
    sequence_parallel: bool = False
    expert_tensor_parallel: bool = True
    context_method: str = "gather"
    wires: Wires | None = None

    def __post_init__(self) -> None:
        self.check_fields()
        if self.cache > 1 and self.cache_split == "heads":
            raise LayoutError(
                f"layout: cache={self.cache} splits the cache by sequences or positions: write cache_split=batch or "
                f"cache_split=sequence; for copies of heads write tensor={self.tensor * self.cache}"
            )
        if self.width > 1 and self.sequence_parallel:
            raise LayoutError(
                f"layout: width={self.width} splits the residual width already: leave sequence_parallel out"
            )
        if self.width > 1 and not self.expert_tensor_parallel:
            raise LayoutError(
                f"layout: width={self.width} splits what experts read, expert_tensor_parallel=off the experts: leave "
                "one of them out"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis of one engine -> size, innermost first."""
        return {axis: getattr(self, axis) for axis in SERVING_AXES}

    @property
    def engine_chips(self) -> int:
        """Chips of one engine."""
        return math.prod(self.sizes.values())

    @property
    def num_chips(self) -> int:
        """Chips of all engines."""
        return self.engine_chips * self.replicas

    @property
    def weight_ways(self) -> int:
        """Into how many parts the weights of a layer (but experts) are stored."""
        return self.tensor * self.cache * self.width * self.fsdp

    @property
    def structure(self) -> ServingLayoutChoices:
        """The choices that are no sizes; those that mean nothing on this mesh as if they had not been made."""
        ways = self.tensor * self.cache
        return ServingLayoutChoices(
            cache_split=self.cache_split if self.cache * self.width > 1 else "heads",
            sequence_parallel=self.sequence_parallel and ways > 1,
            expert_tensor_parallel=self.expert_tensor_parallel or ways * self.expert == 1,
            context_method=self.context_method if self.context > 1 else "gather",
            wide=self.width > 1,
        )

    def __str__(self) -> str:
        parts = [f"{a}={getattr(self, a)}" for a in FIELDS.axes if getattr(self, a) > 1] or ["tensor=1"]
        s = self.structure
        if s.cache_split != "heads":
            parts.append(f"cache_split={s.cache_split}")
        if s.sequence_parallel:
            parts.append("sequence_parallel=on")
        if not s.expert_tensor_parallel:
            parts.append("expert_tensor_parallel=off")
        if s.context_method != "gather":
            parts.append(f"context_method={s.context_method}")
        return ",".join(parts)


def parse_serving_layout(text: str, *, num_chips: int) -> ServingLayout:
    """Read a layout as users write it, `-1` for "the rest".

    >>> str(parse_serving_layout("tp=8,dp=-1", num_chips=32))
    'tensor=8,replicas=4'

    Args:
        text: `axis=size` and `choice=value`, separated by commas; the usual short names (tp cp ep pp dp) are accepted.
        num_chips: of the cluster; what `-1` fills up to.

    Raises:
        LayoutError: not of that form, an axis given twice, sizes that need more than `num_chips`.
        UnknownNameError: an axis or choice that does not exist.
    """
    given: dict[str, Any] = {}
    for name, value, part in FIELDS.split(text):
        if name in given:
            raise LayoutError(f"layout: {name} is given twice in {text!r}")
        given[name] = FIELDS.read(name, value, part)
    FIELDS.fill_rest(given, num_chips)
    layout = ServingLayout(**given)
    if layout.num_chips > num_chips:
        raise LayoutError(
            f"layout {text!r} needs {layout.num_chips:,} chips, the cluster has {num_chips:,}; lower an axis, or write "
            "-1 for one to let it take the rest"
        )
    return layout
