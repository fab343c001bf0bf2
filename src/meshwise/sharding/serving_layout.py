"""A serving layout: how many chips each mesh axis of an engine has, how many engines, and the choices that go with it.

A frozen value that reads and prints as users write it and round-trips through JSON. Not here: what it costs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwise.core.errors import LayoutError, UnknownNameError
from meshwise.sharding.layout import CONTEXT_METHODS, layout_fields, layout_json
from meshwise.sharding.serving import CACHE_SPLITS, SERVING_AXES, serving_strategy
from meshwise.sharding.strategy import Strategy

_ALIASES = {
    "tp": "tensor", "mp": "tensor", "tensor_parallel": "tensor",
    "dcp": "cache", "kv": "cache", "dp_attention": "cache",
    "cp": "context", "pcp": "context", "context_parallel": "context",
    "ep": "expert", "expert_parallel": "expert", "experts": "expert",
    "gather": "fsdp", "weight_gathered": "fsdp",
    "pp": "stage", "pipeline": "stage", "stages": "stage", "pipeline_parallel": "stage",
    "dp": "replicas", "replica": "replicas", "data": "replicas", "engines": "replicas",
    "sp": "sequence_parallel", "kv_split": "cache_split", "etp": "expert_tensor_parallel",
}  # fmt: skip
_SIZES = (*SERVING_AXES, "replicas")
_SWITCHES = ("sequence_parallel", "expert_tensor_parallel")
_WORDS = {"cache_split": CACHE_SPLITS, "context_method": CONTEXT_METHODS}
_SWITCH = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}


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
class ServingLayout:
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
    wires: tuple[tuple[str, tuple[int, ...]], ...] | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LayoutError(f"layout: {name} must be a whole number of at least 1, found {value!r}")
        for name, known in _WORDS.items():
            if getattr(self, name) not in known:
                raise UnknownNameError(name.replace("_", " "), str(getattr(self, name)), known)
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
        for axis, extents in self.wires or ():
            if axis not in _SIZES:
                raise UnknownNameError("mesh axis", axis, _SIZES)
            if math.prod(extents) != getattr(self, axis):
                raise LayoutError(
                    f"layout: wires of {axis} multiply to {math.prod(extents)}, but {axis} is {getattr(self, axis)}"
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
        parts = [f"{a}={getattr(self, a)}" for a in _SIZES if getattr(self, a) > 1] or ["tensor=1"]
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

    def replace(self, **changes: Any) -> ServingLayout:
        """Copy with other choices."""
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """All fields, wires as a mapping; `from_json` reads it back."""
        return layout_json(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ServingLayout:
        """Read what `to_json` wrote.

        Raises:
            LayoutError: for what is no mapping, or a value that a field cannot have.
            UnknownNameError: for a field that a layout does not have.
        """
        return cls(**layout_fields(cls, value))


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
    for part in (p.strip() for p in text.split(",") if p.strip()):
        match = re.fullmatch(r"([A-Za-z_0-9]+)\s*[=:]\s*(\S+)", part)
        if match is None:
            raise LayoutError(f"layout: expected name=value (such as tensor=8), found {part!r} in {text!r}")
        name = _ALIASES.get(match[1].lower(), match[1].lower())
        if name in given:
            raise LayoutError(f"layout: {name} is given twice in {text!r}")
        given[name] = _value(name, match[2], part)
    if not given:
        raise LayoutError(f"layout: expected name=value such as tensor=8,replicas=4, found {text!r}")
    rest = [a for a in _SIZES if given.get(a) == -1]
    if len(rest) > 1:
        raise LayoutError(f"layout: only one axis can be -1 (the rest), found {' and '.join(rest)}")
    if rest:
        others = math.prod(v for a, v in given.items() if a in _SIZES and a != rest[0])
        if num_chips % others:
            raise LayoutError(
                f"layout: {rest[0]}=-1 cannot fill {num_chips:,} chips: the other axes multiply to {others:,}, "
                f"which does not divide {num_chips:,}"
            )
        given[rest[0]] = num_chips // others
    layout = ServingLayout(**given)
    if layout.num_chips > num_chips:
        raise LayoutError(
            f"layout {text!r} needs {layout.num_chips:,} chips, the cluster has {num_chips:,}; lower an axis, or write "
            "-1 for one to let it take the rest"
        )
    return layout


def _value(name: str, text: str, part: str) -> Any:
    """Read a size, a switch or a word; `part` is what the user typed."""
    if name in _WORDS:
        return text.lower()
    if name in _SWITCHES:
        if text.lower() not in _SWITCH:
            raise LayoutError(f"layout: {name} is on or off, found {part!r}")
        return _SWITCH[text.lower()]
    if name not in _SIZES:
        raise UnknownNameError("layout axis or choice", name, (*_SIZES, *_SWITCHES, *_WORDS))
    if not re.fullmatch(r"-?[0-9]+", text):
        raise LayoutError(f"layout: {name} must be a whole number, found {part!r}")
    size = int(text)
    if size < 1 and size != -1:
        raise LayoutError(f"layout: {name} must be at least 1, or -1 for the rest, found {part!r}")
    return size
