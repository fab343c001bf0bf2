"""A layout: how many devices each mesh axis has, and the choices that go with it. What the search varies lives here.

A frozen value that reads and prints as users write it and round-trips through JSON. Not here: what it costs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from meshwise.core.errors import LayoutError, UnknownNameError
from meshwise.sharding.remat import remat_policy
from meshwise.sharding.remat_names import RematRequest, parse_remat

#: Mesh axes in the order in which they nest in the hardware unless told otherwise: innermost (fastest wires) first.
MESH_AXES = ("tensor", "ulysses", "context", "expert", "fsdp", "data", "stage")

#: How keys and values of other positions reach attention over the context axis.
CONTEXT_METHODS = ("gather", "ring")

#: Who sees to it that collectives of the tensor axis run beside the products that need them: the compiler, where it
#: does; or the program, which sends pieces round the axis one way, or both ways at once.
COLLECTIVE_MATMULS = ("compiler", "unidirectional", "bidirectional")

#: How tokens are given to experts: in slots, as many for each expert; or as they are, sorted, however many.
EXPERT_DISPATCHES = ("slots", "ragged")

#: Orders in which pipeline stages work through microbatches; `costs.schedules` prices them.
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe", "dualpipe-v")

#: What can live in the host's memory.
OFFLOADABLE = ("optimizer", "parameters", "activations")

_ALIASES = {
    "dp": "data", "data_parallel": "data", "replica": "data",
    "zero3": "fsdp",
    "cp": "context", "context_parallel": "context",
    "ep": "expert", "expert_parallel": "expert", "experts": "expert",
    "cp_ulysses": "ulysses", "ulysses_parallel": "ulysses",
    "tp": "tensor", "mp": "tensor", "model": "tensor", "tensor_parallel": "tensor",
    "pp": "stage", "pipeline": "stage", "stages": "stage", "pipeline_parallel": "stage",
    "mbs": "micro_batch", "microbatch": "micro_batch",
    "ga": "num_microbatches", "accumulation": "num_microbatches", "microbatches": "num_microbatches",
    "sp": "sequence_parallel", "recompute": "remat", "etp": "expert_tensor_parallel",
    "vpp": "virtual_stages", "pipeline_schedule": "schedule",
}  # fmt: skip
_COUNTS = ("zero", "micro_batch", "num_microbatches", "virtual_stages", "remat_layers", "offload_layers")
_SWITCHES = ("sequence_parallel", "expert_tensor_parallel", "fully_sharded")
_WORDS = ("remat", "context_method", "schedule", "collective_matmul", "expert_dispatch")
#: What to say when a switch is given a size.
_NOT_AN_AXIS = {
    "sequence_parallel": "; to split positions over an axis of their own use context",
    "fully_sharded": "; the axis of that name is fsdp",
    "expert_tensor_parallel": "; on splits each expert over the whole tensor axis, off leaves experts whole",
}
_SWITCH = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}


@dataclass(frozen=True)
class Layout:
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
    expert_dispatch: str = "slots"
    schedule: str = "1f1b"
    virtual_stages: int = 1
    remat: str = "full"
    remat_layers: int | None = None
    offload: tuple[str, ...] = ()
    offload_layers: int | None = None
    micro_batch: int = 1
    num_microbatches: int = 1
    wires: tuple[tuple[str, tuple[int, ...]], ...] | None = None

    def __post_init__(self) -> None:
        counts = ["micro_batch", "num_microbatches", "virtual_stages"]
        counts += [name for name in ("remat_layers", "offload_layers") if getattr(self, name) is not None]
        for name in (*MESH_AXES, *counts):
            value = getattr(self, name)
            if not _is_whole(value) or value < 1:
                raise LayoutError(f"layout: {name} must be a whole number of at least 1, found {value!r}")
        if not _is_whole(self.zero) or self.zero not in (0, 1, 2):
            hint = f"; ZeRO-3 is the axis fsdp (fsdp={self.data}, not data={self.data})" if self.zero == 3 else ""
            raise LayoutError(f"layout: zero must be 0, 1 or 2, found {self.zero!r}{hint}")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise LayoutError(f"layout: {name} must be true or false, found {getattr(self, name)!r}")
        if not isinstance(self.remat, str):
            raise LayoutError(f"layout: remat must be the name of a policy, found {self.remat!r}")
        remat_policy(self.remat)
        _check_word("context method", self.context_method, CONTEXT_METHODS)
        _check_word("collective matmul", self.collective_matmul, COLLECTIVE_MATMULS)
        _check_word("expert dispatch", self.expert_dispatch, EXPERT_DISPATCHES)
        _check_word("pipeline schedule", self.schedule, SCHEDULES)
        for place in self.offload:
            _check_word("part to offload", place, OFFLOADABLE)
        self._check_combination()
        for axis, extents in self.wires or ():
            if axis not in MESH_AXES:
                raise UnknownNameError("mesh axis", axis, MESH_AXES)
            if not all(_is_whole(n) and n >= 1 for n in extents):
                found = ", ".join(map(repr, extents))
                raise LayoutError(f"layout: wires of {axis} must be whole numbers of at least 1, found {found}")
            if math.prod(extents) != getattr(self, axis):
                raise LayoutError(
                    f"layout: wires of {axis} multiply to {math.prod(extents)}, but {axis} is {getattr(self, axis)}"
                )

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
    def sequences(self) -> int:
        """Sequences per step."""
        return self.data * self.fsdp * self.expert * self.micro_batch * self.num_microbatches

    @cached_property
    def used_axes(self) -> tuple[str, ...]:
        """Axes of more than one device, outermost first."""
        return tuple(a for a in reversed(MESH_AXES) if self.sizes[a] > 1)

    def __str__(self) -> str:
        parts = [f"{a}={self.sizes[a]}" for a in self.used_axes] or ["data=1"]
        replicas = self.data > 1 or (not self.fully_sharded and self.context * self.ulysses * self.expert > 1)
        if self.zero and replicas:
            parts.append(f"zero={self.zero}")
        if not self.fully_sharded and self.context * self.ulysses * self.expert > 1:
            parts.append("fully_sharded=off")
        if self.tensor > 1 and not self.sequence_parallel:
            parts.append("sequence_parallel=off")
        if self.tensor > 1 and not self.expert_tensor_parallel:
            parts.append("expert_tensor_parallel=off")
        words = {"context_method": self.context > 1, "collective_matmul": self.tensor > 1, "expert_dispatch": True}
        unusual = (name for name, means in words.items() if means and getattr(self, name) != getattr(Layout, name))
        parts += [f"{name}={getattr(self, name)}" for name in unusual]
        if self.stage > 1 and self.schedule != "1f1b":
            parts.append(f"schedule={self.schedule}")
        if self.virtual_stages > 1:
            parts.append(f"virtual_stages={self.virtual_stages}")
        parts += [f"micro_batch={self.micro_batch}", f"num_microbatches={self.num_microbatches}", f"remat={self.remat}"]
        if self.remat_layers is not None:
            parts.append(f"remat_layers={self.remat_layers}")
        if self.offload:
            parts.append(f"offload={'+'.join(self.offload)}")
        if self.offload_layers is not None:
            parts.append(f"offload_layers={self.offload_layers}")
        return ",".join(parts)

    def replace(self, **changes: Any) -> Layout:
        """Copy with other choices."""
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """All fields, wires as a mapping; `from_json` reads it back."""
        return {**layout_json(self), "offload": list(self.offload)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Layout:
        """Read what `to_json` wrote.

        Raises:
            LayoutError: for what is no mapping, or a value that a field cannot have.
            UnknownNameError: for a field that a layout does not have.
        """
        changes = layout_fields(cls, value)
        if isinstance(changes.get("offload"), list):
            changes["offload"] = tuple(changes["offload"])
        return cls(**changes)


def layout_json(layout: Any) -> dict[str, Any]:
    """All fields of a layout of any kind, its wires as a mapping; `layout_fields` reads it back."""
    out: dict[str, Any] = {f.name: getattr(layout, f.name) for f in fields(layout)}
    wires = layout.wires
    out["wires"] = None if wires is None else {axis: list(extents) for axis, extents in wires}
    return out


def layout_fields(kind: type, value: Any) -> dict[str, Any]:
    """Fields of a layout of the class `kind`, from what `layout_json` gave.

    Raises:
        LayoutError: for what is no mapping, or wires that are none.
        UnknownNameError: for a field that such a layout does not have.
    """
    if not isinstance(value, Mapping):
        raise LayoutError(f"layout: expected a mapping of fields, found {value!r}")
    known = {f.name for f in fields(kind)}
    for name in value:
        if name not in known:
            raise UnknownNameError("layout field", str(name), known)
    wires = value.get("wires")
    return {**value, "wires": None if wires is None else _read_wires(wires)}


def _check_word(what: str, word: object, known: tuple[str, ...]) -> None:
    if word not in known:
        raise UnknownNameError(what, str(word), known)


def _is_whole(value: object) -> bool:
    """Whether a value is an integer, which True is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _read_wires(value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Mesh axis -> extents, from JSON."""
    if not isinstance(value, Mapping) or not all(isinstance(extents, list | tuple) for extents in value.values()):
        raise LayoutError(f"layout: wires must map a mesh axis to a list of extents, found {value!r}")
    return tuple((axis, tuple(extents)) for axis, extents in value.items())


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
    name = _ALIASES.get(word.lower(), word.lower())
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
    given: dict[str, Any] = {}
    remat: RematRequest | None = None
    for part in _parts(text):
        match = re.fullmatch(r"([A-Za-z_0-9]+)\s*[=:]\s*(\S+)", part)
        if match is None:
            raise LayoutError(
                f"layout: expected name=value (such as fsdp=64 or remat=full), found {part!r} in {text!r}"
            )
        name = _ALIASES.get(match[1].lower(), match[1].lower())
        if name in given:
            raise LayoutError(f"layout: {name} is given twice in {text!r}")
        if name == "remat":
            remat = parse_remat(match[2])
        if name == "offload" and (counted := re.search(r"activations:([0-9]+)", match[2].lower())):
            if "offload_layers" in given:
                raise LayoutError(f"layout: offload_layers is given twice in {text!r}")
            given["offload_layers"] = int(counted[1])
        given[name] = _value(name, match[2], part) if remat is None or name != "remat" else remat.policy
    if not given:
        raise LayoutError(f"layout: expected name=value such as fsdp=64,tensor=4, found {text!r}")
    _fill_rest(given, num_chips)
    if remat is not None:
        _add_remat(given, remat, text)
    sizes = {a: given.get(a, 1) for a in MESH_AXES}
    choices = {name: value for name, value in given.items() if name not in MESH_AXES}
    Layout(**sizes, **choices)  # checks every value
    request = LayoutRequest(sizes, choices, tuple(a for a in MESH_AXES if a in given))
    if request.num_chips > num_chips:
        raise LayoutError(
            f"layout {text!r} needs {request.num_chips:,} chips, the cluster has {num_chips:,}; "
            "lower an axis, or write -1 for one to let it take the rest"
            + ("; expert is an axis of its own, not a part of data" if request.sizes["expert"] > 1 else "")
        )
    return request


def _parts(text: str) -> list[str]:
    """Split at commas, but not at those within brackets or within the list of a remat policy."""
    parts: list[str] = []
    outside_brackets = r",(?![^()]*\))"
    for written in (p.strip() for p in re.split(outside_brackets, text) if p.strip()):
        part = re.sub(r"\s", "", written) if "(" in written else written
        if parts and re.match(r"(remat|recompute)\s*[=:]\s*\w+:", parts[-1].lower()) and not set("=:") & set(part):
            parts[-1] += f"+{part}"
        else:
            parts.append(part)
    return parts


def _add_remat(given: dict[str, Any], remat: RematRequest, text: str) -> None:
    """Add what a remat policy says besides its name: how many layers follow it, whether what is kept is offloaded."""
    if remat.layers is not None:
        if "remat_layers" in given:
            raise LayoutError(f"layout: remat_layers is given twice in {text!r}")
        pieces = given.get("stage", 1) * given.get("virtual_stages", 1) if remat.of_each_stage else 1
        given["remat_layers"] = remat.layers * pieces
    if remat.offloads:
        given["offload"] = tuple(dict.fromkeys((*given.get("offload", ()), "activations")))


def _fill_rest(given: dict[str, Any], num_chips: int) -> None:
    """Replace the -1 of one axis by what the others leave."""
    rest = [a for a in MESH_AXES if given.get(a) == -1]
    if len(rest) > 1:
        raise LayoutError(f"layout: only one axis can be -1 (the rest), found {' and '.join(rest)}")
    if rest:
        others = math.prod(v for a, v in given.items() if a in MESH_AXES and a != rest[0])
        if num_chips % others:
            raise LayoutError(
                f"layout: {rest[0]}=-1 cannot fill {num_chips:,} chips: the other axes multiply to {others:,}, "
                f"which does not divide {num_chips:,}"
            )
        given[rest[0]] = num_chips // others


def _value(name: str, text: str, part: str) -> Any:
    """Read a size, a switch or a word; `part` is what the user typed."""
    if name in _WORDS:
        return text.lower()
    if name == "offload":
        words = re.sub(r"(activations):[0-9]+", r"\1", text.lower()).split("+")
        return tuple(word for word in words if word != "none")
    if name in _SWITCHES:
        if text.lower() not in _SWITCH:
            raise LayoutError(f"layout: {name} is on or off, found {part!r}{_NOT_AN_AXIS.get(name, '')}")
        return _SWITCH[text.lower()]
    if name not in (*MESH_AXES, *_COUNTS):
        known = (*MESH_AXES, *_COUNTS, *_WORDS, *_SWITCHES, "offload")
        raise UnknownNameError("layout axis or choice", name, known)
    if not re.fullmatch(r"-?[0-9]+", text):
        raise LayoutError(f"layout: {name} must be a whole number, found {part!r}")
    size = int(text)
    if name in MESH_AXES and size < 1 and size != -1:
        raise LayoutError(f"layout: {name} must be at least 1, or -1 for the rest, found {part!r}")
    return size
