"""Serving layouts: how many chips each mesh axis of an engine has, how many engines, the choices, and the rule tables.

A frozen value that reads and prints as users write it and round-trips through JSON. As in training, nothing here knows
a communication pattern: `place` derives every collective. Not here: what it costs.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from meshwise.core.errors import LayoutError
from meshwise.sharding.layout import CONTEXT_METHODS
from meshwise.sharding.layout_fields import ALIASES, LayoutFields, MeshLayout, Wires
from meshwise.sharding.strategy import STORAGE_AXES, TENSOR_AXES, Rule, Strategy, context, expert, fsdp

#: Mesh axes of one engine, innermost first.
SERVING_AXES = ("tensor", "cache", "width", "context", "expert", "fsdp", "stage")

#: Those that split the weights of a layer, but experts.
WEIGHT_AXES = ("tensor", "cache", "width", "fsdp")

#: What `cache` and `width` split of a cache: its heads (copies, where there are too few), sequences, or positions.
CACHE_SPLITS = ("heads", "batch", "sequence")

_SWITCH = (False, True)

#: How the residual stream stands between matmuls: whole on every device of the tensor axis, its positions split over
#: it, or its width.
RESIDUALS = ("whole", "positions", "width")

#: Axes of heads and feed-forward widths; K is split only as far as the key/value heads go.
_HEADS_AND_WIDTHS = tuple(a for a in TENSOR_AXES if a != "K")

#: Sequences are split over these first, so that what attention moves is the minor-most.
_SEQUENCES = (Rule(("B",), "fsdp"), Rule(("B",), "expert"))


def tensor_and_cache(cache_split: str, experts: tuple[str, ...]) -> Strategy:
    """Split heads, feed-forward widths and the vocabulary over `tensor`, then over `cache`.

    Over `cache` attention itself splits something else: the sequences of the batch (Pope et al. 2022, section 3.3;
    book, Inference, "sharding the KV cache"), or the positions of the cache, whose partial sums are then added up.
    """
    compute = tuple(Rule((a,), axis) for axis in ("tensor", "cache") for a in (*_HEADS_AND_WIDTHS, *experts))
    keys = (Rule(("K",), "tensor"),)
    heads = Rule(("N",), "tensor")
    return Strategy(
        compute=(*compute, *keys),
        attention=(*_SEQUENCES, heads, *_cache_rules(cache_split, "cache")),
        caches=(*keys, *_state_rules("cache")),
    )


def width(cache_split: str) -> Strategy:
    """Split the residual width over an axis of its own, so that weights are split both ways (2D weight-stationary).

    Feed-forward activations are scattered over it between their matmuls, the residual stream over the tensor axis.
    Source: Pope et al. 2022, section 3.2.2.
    """
    return Strategy(
        compute=(Rule(STORAGE_AXES, "width"),),
        fallback=tuple(Rule((a,), "width") for a in (*_HEADS_AND_WIDTHS, "Fe")),
        attention=_cache_rules(cache_split, "width"),
        caches=_state_rules("width"),
    )


def _cache_rules(cache_split: str, axis: str) -> tuple[Rule, ...]:
    split = {"heads": "N", "batch": "B", "sequence": "S"}[cache_split]
    return (Rule((split,), axis),)


def _state_rules(axis: str) -> tuple[Rule, ...]:
    """Heads of caches without sequences or positions to split, and of recurrences' states."""
    return (Rule(("Nr",), axis), Rule(("Cr",), axis), Rule(("K",), axis))


@lru_cache(maxsize=256)
def serving_strategy(
    *,
    cache_split: str = "heads",
    residual: str = "whole",
    wide: bool = False,
    ring: bool = False,
    experts: tuple[str, ...] = ("Fe",),
) -> Strategy:
    """Compose the rule tables of one engine over the mesh axes of SERVING_AXES (size 1: not used).

    Args:
        cache_split: one of CACHE_SPLITS.
        residual: one of RESIDUALS.
        wide: whether there is an axis `width`; the residual stream is then split over its width.
        ring: whether keys and values go round a ring of the context axis.
        experts: what the tensor axes split of a mixture: ("Fe",), the width of every expert, or ("E", "C"), their
            number.
    """
    positions = Strategy(caches=(Rule(("S",), "context"),))
    around = context(sharded=False, ring=ring) | expert(sharded=False)
    # Weights that are stored in parts are gathered as in FSDP, while sequences are split (Pope et al. 2022, 3.2.3).
    whole = fsdp() | around | positions | tensor_and_cache(cache_split, experts)
    if experts == ("E",):  # before `expert`, whose exchange then moves a suffix
        whole = Strategy(compute=tuple(Rule(experts, axis) for axis in ("tensor", "cache"))) | whole
    if wide:
        whole |= width(cache_split)
    split = {"whole": (), "positions": ("T",), "width": ("D",)}[residual]
    return whole | Strategy(fallback=tuple(Rule((a,), axis) for axis in ("tensor", "cache") for a in split))


FIELDS = LayoutFields(
    axes=(*SERVING_AXES, "replicas"),
    aliases=ALIASES | {
        "dcp": "cache", "kv": "cache", "dp_attention": "cache", "kv_split": "cache_split",
        "pcp": "context", "gather": "fsdp", "weight_gathered": "fsdp",
        "dp": "replicas", "replica": "replicas", "data": "replicas", "engines": "replicas",
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
            experts=("Fe",) if self.expert_tensor_parallel else ("E", "C") if split else ("E",),
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
    def ranks(self) -> int:
        """Groups of chips of one engine whose attention sees different requests."""
        return self.expert * self.fsdp * (self.cache if self.cache_split == "batch" else 1)

    @property
    def weight_ways(self) -> int:
        """Into how many parts the weights of a layer (but experts) are stored."""
        return math.prod(getattr(self, axis) for axis in WEIGHT_AXES)

    @property
    def structure(self) -> ServingLayoutChoices:
        """The choices that are not sizes, with defaults for those without effect on this mesh."""
        made = {name: getattr(self if means else ServingLayout, name) for name, means in self._choices.items()}
        return ServingLayoutChoices(**made, wide=self.width > 1)

    @property
    def _choices(self) -> dict[str, bool]:
        """Whether each choice has a meaning on this mesh."""
        ways = self.tensor * self.cache
        return {
            "cache_split": self.cache * self.width > 1,
            "sequence_parallel": ways > 1,
            "expert_tensor_parallel": ways * self.expert > 1,
            "context_method": self.context > 1,
        }

    def variants(self, given: Collection[str]) -> Iterator[ServingLayout]:
        """The layout, then with the other values of choices that have a meaning on this mesh and are not `given`."""
        known = {
            **{name: words for name, (_, words) in FIELDS.words.items()},
            **dict.fromkeys(FIELDS.switches, _SWITCH),
        }
        left = {name: known[name] for name, means in self._choices.items() if means and name not in given}
        own = [getattr(self, name) for name in left]
        values = (dict.fromkeys((one, *words)) for one, words in zip(own, left.values(), strict=True))
        for chosen in itertools.product(*values):
            with contextlib.suppress(LayoutError):
                yield self.replace(**dict(zip(left, chosen, strict=True)))

    def __str__(self) -> str:
        return self.written([a for a in FIELDS.axes if getattr(self, a) > 1] or ["tensor"], self._choices)


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
    given = FIELDS.parse(text, num_chips)
    layout = ServingLayout(**given)
    FIELDS.check_chips(text, given, num_chips)
    return layout
