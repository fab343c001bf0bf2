"""Every layout of one engine that is searched, for a step, as arrays: mesh sizes, choices, and places on the network.

What is searched: engines of every number of chips that divides the cluster's, and of whole nodes besides (see
`engine_sizes`); of these, every product of
tensor x cache x width x expert x stage (generation) or tensor x width x context x expert x fsdp x stage (prefill), and
every way to lay it on the network. Left out are layouts that only copy: more ways than twice the heads, a cache split
otherwise while there are key/value heads left to split, more expert shards than experts, more stages than layers; and
width together with experts, context or gathered weights, context together with gathered weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwise.costs.fabric import AxisMapping, Fabric
from meshwise.costs.problem import ServingProblem, Step
from meshwise.costs.serving.estimate import engine_axis_mappings
from meshwise.models import Model
from meshwise.models.spec import SelfAttention
from meshwise.search.candidates import Array, Index
from meshwise.search.tables import Recent
from meshwise.sharding.serving import SERVING_AXES, WEIGHT_AXES, ServingLayout, ServingLayoutChoices

Integers: TypeAlias = NDArray[np.integer[Any]]

_AXES: dict[Step, tuple[str, ...]] = {
    "decode": ("tensor", "cache", "width", "expert", "stage"),
    "prefill": ("tensor", "width", "context", "expert", "fsdp", "stage"),
}


@dataclass(frozen=True, slots=True)
class Candidates:
    """Layouts of one structure: meshes, and the places that each of them can have on the network.

    Args:
        structure: the choices that are no sizes.
        layouts: one for each mesh, without wires.
        places: of all meshes on the network: which mesh each is of; those of a mesh follow one another.
        extents: [axis, dimension of the network, place].
        mesh: mesh axis -> sizes, of each mesh.
        chips: of an engine, of each mesh.
        stored: how a mesh stores weights: equal for those that can share a copy.
        cached: how it splits caches: equal where `ServingSetup.one_layout` says so.
    """

    structure: ServingLayoutChoices
    layouts: tuple[ServingLayout, ...]
    places: Index
    extents: Integers
    mesh: dict[str, Array]
    chips: Array
    stored: tuple[object, ...]
    cached: tuple[object, ...]

    @property
    def factors(self) -> dict[str, list[Array]]:
        """Mesh axis -> extents on each dimension of the network, of each place."""
        return {a: list(own.astype(float)) for a, own in zip(SERVING_AXES, self.extents, strict=True)}

    def place(self, i: int) -> tuple[ServingLayout, AxisMapping]:
        """The layout of a place, and where its axes lie."""
        layout = self.layouts[int(self.places[i])]
        each = dict(zip(SERVING_AXES, self.extents[..., i].tolist(), strict=True))
        return layout, {a: tuple(each[a]) for a in reversed(SERVING_AXES) if layout.sizes[a] > 1}

    def blocks(self, most: int) -> Iterator[Candidates]:
        """The same, in blocks of whole meshes with at most so many places, or one mesh."""
        begins = np.append(np.flatnonzero(np.diff(self.places, prepend=-1)), len(self.places))  # of each mesh's places
        begin, number = 0, len(self.chips)
        while begin < number:
            at = int(begins[begin])
            end = max(int(np.searchsorted(begins, at + most, side="right")) - 1, begin + 1)
            places, meshes = slice(at, int(begins[end])), slice(begin, end)
            yield Candidates(
                self.structure,
                self.layouts[meshes],
                self.places[places].astype(int) - begin,
                self.extents[..., places],
                {a: sizes[meshes] for a, sizes in self.mesh.items()},
                self.chips[meshes],
                self.stored[meshes],
                self.cached[meshes],
            )
            begin = end


@cache
def divisors(n: int) -> tuple[int, ...]:
    """Numbers that divide `n`, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    return tuple(d for d in range(1, n + 1) if n % d == 0)


#: Numbers of nodes up to which all are tried: two kinds of engines share few nodes out well in unequal parts (six that
#: prefill, two that generate). Beyond, the next power of two or thrice one has at least three quarters of them.
_NODES = 8


def engine_sizes(fabric: Fabric) -> tuple[int, ...]:
    """Numbers of chips of the engines that are searched: those that divide the network's, and whole nodes.

    Of nodes these are all small numbers and, as models divide best into powers of two, those, though other nodes may
    stay idle; and, where no number that divides is within a factor of two below, thrice the powers of two. Through
    switches alone, as axes lie on divisors of a torus; where all chips are on one switch each is a node.
    """
    inner, nodes = math.prod(fabric.sizes[:-1]), fabric.sizes[-1]
    found = {*divisors(inner * nodes)}
    if not fabric.dimensions[-1].torus:
        powers = {2**k for k in range(nodes.bit_length())}
        thrice = {3 * p for p in powers if not any(d <= 3 * p < 2 * d for d in divisors(nodes))}
        found |= {inner * n for n in {*range(1, _NODES + 1)} | powers | thrice if n <= nodes}
    return tuple(sorted(found))


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a model has to split."""

    heads: int
    kv_heads: int
    experts: int
    layers: int

    @classmethod
    def of(cls, model: Model) -> EngineLimits:
        """Of all layers: the most heads that any of them has."""
        mixers = [g.layer.attention for g in model.spec.groups if g.layer.attention is not None]
        heads = [getattr(m, "heads", 0) or getattr(m, "channels", 0) for m in mixers]
        kv = [m.kv_heads for m in mixers if isinstance(m, SelfAttention)]
        experts = max((m.experts for m in model.mixtures), default=1)
        return cls(max(heads, default=1), max(kv, default=1), experts, model.num_layers)


def _meshes(chips: int, step: Step, limits: EngineLimits) -> Iterator[dict[str, int]]:
    """Sizes of the axes of a step whose product is `chips`."""

    def fill(axes: tuple[str, ...], left: int) -> Iterator[dict[str, int]]:
        if len(axes) == 1:
            yield {axes[0]: left}
            return
        for size in divisors(left):
            for rest in fill(axes[1:], left // size):
                yield {axes[0]: size, **rest}

    for sizes in fill(_AXES[step], chips):
        if _makes_sense(sizes, limits):
            yield sizes


def _makes_sense(sizes: dict[str, int], limits: EngineLimits) -> bool:
    ways = sizes["tensor"] * sizes.get("cache", 1)
    wide = sizes["width"] > 1
    others = sizes["expert"] * sizes.get("context", 1) * sizes.get("fsdp", 1)
    return (
        sizes["tensor"] <= limits.heads
        and ways < 2 * limits.heads
        and (sizes.get("cache", 1) == 1 or ways > limits.kv_heads)
        and sizes["expert"] <= limits.experts
        and sizes["stage"] <= limits.layers
        and not (wide and others > 1)
        and not (sizes.get("context", 1) > 1 and sizes.get("fsdp", 1) > 1)
    )


def _choices(sizes: dict[str, int], step: Step, limits: EngineLimits) -> Iterator[dict[str, object]]:
    """Choices of a mesh that are no sizes."""
    ways = sizes["tensor"] * sizes.get("cache", 1)
    splits: tuple[str, ...] = ("heads",)
    if sizes.get("cache", 1) > 1:
        splits = ("batch", "sequence")
    elif sizes["width"] > 1 and step == "decode":
        splits = ("heads", "batch")
    positions = (False, True) if step == "prefill" and ways > 1 and sizes["width"] == 1 else (False,)
    shared = ways > 1 and sizes["width"] == 1 and ways * sizes["expert"] <= limits.experts
    whole = limits.experts > 1 and shared
    for split in splits:
        for along in positions:
            for width_of_experts in (True, False) if whole else (True,):
                if width_of_experts or not along:
                    yield {
                        "cache_split": split,
                        "sequence_parallel": along,
                        "expert_tensor_parallel": width_of_experts,
                    }


#: Searches of one cluster in other formats, or with other targets, have the same candidates.
_known = Recent[tuple[Candidates, ...]](16)


def candidates(  # noqa: PLR0917 -- what is searched, and until when
    problem: ServingProblem,
    fabric: Fabric,
    step: Step,
    sizes: tuple[int, ...],
    forbid: tuple[str, ...] = (),
    tick: Callable[[], None] = lambda: None,
) -> tuple[Candidates, ...]:
    """Every layout of engines of so many chips, by structure.

    Args:
        problem, fabric, step: as in `estimate_serving`.
        sizes: chips of an engine.
        forbid: axes that are not used.
        tick: called now and then; raises what ends the search.
    """
    limits = EngineLimits.of(problem.model)
    key = limits, fabric, step, sizes, forbid
    return _known(key, lambda: _candidates(*key, tick))


def _candidates(  # noqa: PLR0917 -- as `candidates`
    limits: EngineLimits,
    fabric: Fabric,
    step: Step,
    sizes: tuple[int, ...],
    forbid: tuple[str, ...],
    tick: Callable[[], None],
) -> tuple[Candidates, ...]:
    found: dict[ServingLayoutChoices, list[tuple[ServingLayout, _Laid]]] = {}
    laid: dict[tuple[int, ...], Integers] = {}
    structures: dict[tuple[object, ...], ServingLayoutChoices] = {}
    for chips in sizes:
        for mesh in _meshes(chips, step, limits):
            tick()
            if any(mesh.get(axis, 1) > 1 for axis in forbid):
                continue
            ways = _laid(mesh, fabric, laid)
            if not len(ways.extents):
                continue
            for choice in _choices(mesh, step, limits):
                # What a choice means depends on the axes that are used, not on their sizes.
                key = (*ways.axes, *choice.values())
                layout = ServingLayout.unchecked(**mesh, **choice)
                if key not in structures:
                    structures[key] = layout.structure
                found.setdefault(structures[key], []).append((layout, ways))
    return tuple(_arrays(structure, meshes, len(fabric.dimensions)) for structure, meshes in found.items())


def _distinct(mesh: dict[str, int], fabric: Fabric) -> list[AxisMapping]:
    """Ways to lay a mesh on the network; of those that differ by a permutation of equal dimensions, one."""
    whole = {a: mesh.get(a, 1) for a in SERVING_AXES}
    alike = [(d.size, d.torus, d.wraps, d.bandwidth_one_way, d.twisted) for d in fabric.dimensions]
    if len(set(alike)) == len(alike):
        return list(engine_axis_mappings(whole, fabric))
    seen: dict[object, AxisMapping] = {}
    for wiring in engine_axis_mappings(whole, fabric):
        columns = [(kind, tuple(e[i] for e in wiring.values())) for i, kind in enumerate(alike)]
        torus = tuple(sorted(c for c in columns if c[0][1]))
        rest = tuple(c for c in columns if not c[0][1])
        seen.setdefault((torus, rest), wiring)
    return list(seen.values())


class _Laid(NamedTuple):
    """Every way to lay a mesh on the network: axes that it uses, by number, and extents [way, axis, dimension]."""

    axes: tuple[int, ...]
    extents: Integers


def _laid(mesh: dict[str, int], fabric: Fabric, laid: dict[tuple[int, ...], Integers]) -> _Laid:
    """Every way to lay a mesh on the network; there may be millions.

    Axes of the same sizes in the same order are laid alike, whatever they are for: `laid` keeps those of each sizes.
    """
    used = tuple([i for i, axis in enumerate(SERVING_AXES) if mesh.get(axis, 1) > 1])
    sizes = tuple([mesh[SERVING_AXES[i]] for i in used])
    if sizes not in laid:
        laid[sizes] = _of_axes([SERVING_AXES[i] for i in used], _distinct(mesh, fabric), len(fabric.dimensions))
    return _Laid(used, laid[sizes])


def _of_axes(axes: list[str], mappings: list[AxisMapping], dimensions: int) -> Integers:
    """Extents of these axes, [way, axis, dimension]."""
    each = [[wiring[a] for a in axes] for wiring in mappings]
    kind = np.min_scalar_type(max(itertools.chain.from_iterable(itertools.chain.from_iterable(each)), default=1))
    return np.array(each, dtype=kind).reshape(len(mappings), len(axes), dimensions)


def _whole(ways: Sequence[_Laid], dimensions: int) -> tuple[Index, Integers]:
    """The mesh of each of all ways, and extents of all axes, [axis, dimension, way]."""
    number = np.array([len(own.extents) for own in ways])
    begins = np.cumsum(number) - number
    places: Index = np.repeat(np.arange(len(ways), dtype=np.int32), number)
    kind = np.result_type(*{own.extents.dtype for own in ways})
    extents = np.ones((len(SERVING_AXES), dimensions, len(places)), kind)
    alike: dict[tuple[int, ...], list[int]] = {}
    for mesh, own in enumerate(ways):
        alike.setdefault(own.axes, []).append(mesh)
    for axes, meshes in alike.items():
        if axes:
            each = number[meshes]
            rows = np.repeat(begins[meshes] - (np.cumsum(each) - each), each) + np.arange(each.sum())
            these = np.concatenate([ways[mesh].extents for mesh in meshes])
            extents[np.ix_(np.array(axes), np.arange(dimensions), rows)] = these.transpose(1, 2, 0)
    return places, extents


def _arrays(structure: ServingLayoutChoices, found: list[tuple[ServingLayout, _Laid]], dimensions: int) -> Candidates:
    layouts = tuple([layout for layout, _ in found])
    sizes = {a: np.array([getattr(x, a) for x in layouts]) for a in SERVING_AXES}
    columns = {a: own.tolist() for a, own in sizes.items()}
    chips = np.prod(list(sizes.values()), axis=0)
    ways = np.prod([sizes[a] for a in WEIGHT_AXES], axis=0)
    choices = [_cached_as(x, structure) for x in layouts]
    places, extents = _whole([own for _, own in found], dimensions)
    return Candidates(
        structure,
        layouts,
        places,
        extents,
        {a: own.astype(float) for a, own in sizes.items()},
        chips.astype(float),
        tuple(zip(chips.tolist(), ways.tolist(), columns["expert"], columns["stage"], strict=True)),
        tuple([(*own, *words) for *own, words in zip(*columns.values(), choices, strict=True)]),
    )


def _cached_as(x: ServingLayout, structure: ServingLayoutChoices) -> tuple[object, ...]:
    """What of a layout, besides its sizes, says how it splits a cache."""
    return structure.cache_split, x.expert_tensor_parallel, x.context_method
