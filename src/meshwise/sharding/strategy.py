"""Parallelism strategies as small rule tables: which named tensor axis is split over which mesh axis.

`fsdp() | tensor()` is the whole of mixed FSDP and tensor parallelism. Nothing here knows a communication pattern:
`iteration_space` applies the tables to an operation, and `place` derives every collective. Not here: sizes, bytes or
seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from meshwise.core.tensors import (
    Attention,
    AttentionGradient,
    CacheUpdate,
    Elementwise,
    Fused,
    FusedGradient,
    Op,
    Route,
)
from meshwise.sharding.mesh import Sharding

#: The axes of a weight that storage-only splits (FSDP, ZeRO) use, in order of preference; the residual width comes
#: first because nearly every weight has it. A weight with none of them (a bias of heads) is small and stays whole.
STORAGE_AXES = ("D", "Dw", "Rq", "Rkv", "Rt", "Dl", "Ro", "P")

#: The axes that tensor parallelism splits: query heads, key/value heads, feed-forward widths but those of experts (Fe),
#: the vocabulary; heads, groups of heads and channels of recurrences.
TENSOR_AXES = ("N", "K", "F", "Fs", "V", "Nr", "Kr", "Cr")


class Rule(NamedTuple):
    """Split the first of `axes` that a tensor has over `mesh_axis`, unless the tensor already uses that mesh axis.

    Axes are compared without their variant suffix: "F" covers "F.1".
    """

    axes: tuple[str, ...]
    mesh_axis: str


@dataclass(frozen=True, slots=True)
class Strategy:
    """Rule tables of a way to parallelise; `|` composes them, earlier rules first (major).

    Args:
        compute: for activations, and for the iteration space of every operation.
        weights, gradients, optimizer: for the parts of the training state as they are *stored*; each follows the
            tensor-parallel rules of `compute` first and adds its own.
        fallback: for what `compute` leaves whole: used where no rule of it has taken the mesh axis (the positions of
            the residual stream, in sequence parallelism).
        attention: rules that attention itself follows first (heads instead of positions, in Ulysses).
        caches: for what attention and recurrences keep between steps of serving, after the rules of attention:
            positions and heads that attention itself does not split so.
        ring: whether keys and values go round a ring while attention works on those at hand, instead of being
            gathered before.
        pieces: whether gathers and scatters beside products of the tensor axis go round a ring in pieces (collective
            matmuls that the program spells out).
    """

    compute: tuple[Rule, ...] = ()
    weights: tuple[Rule, ...] = ()
    gradients: tuple[Rule, ...] = ()
    optimizer: tuple[Rule, ...] = ()
    fallback: tuple[Rule, ...] = ()
    attention: tuple[Rule, ...] = ()
    caches: tuple[Rule, ...] = ()
    ring: bool = False
    pieces: bool = False

    def __or__(self, other: Strategy) -> Strategy:
        return Strategy(
            compute=self.compute + other.compute,
            weights=self.weights + other.weights,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
            fallback=self.fallback + other.fallback,
            attention=self.attention + other.attention,
            caches=self.caches + other.caches,
            ring=self.ring or other.ring,
            pieces=self.pieces or other.pieces,
        )

    def splits(self, axes: Iterable[str], *, sequence: bool = True) -> dict[str, tuple[str, ...]]:
        """Find the sharding of an iteration space (or activation) with these axes.

        Args:
            axes: tensor axis names.
            sequence: whether the fallback may be used (it may not while routing).

        Returns: axis name -> mesh axes, major to minor; each mesh axis at most once.
        """
        return apply_rules((*self.compute, *(self.fallback if sequence else ())), tuple(axes))

    def attention_splits(self, axes: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Find the sharding of attention's iteration space; arguments and result as in `splits`."""
        return apply_rules((*self.attention, *self.compute, *self.fallback), tuple(axes))

    def cache_splits(self, axes: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Find the sharding of a cache, or of what is written to it; arguments and result as in `splits`."""
        return apply_rules((*self.attention, *self.caches, *self.compute), tuple(axes))

    def cached(self, axes: tuple[str, ...]) -> Sharding:
        """Where a cache lives."""
        return Sharding.of(axes, self.cache_splits(axes))

    @property
    def routes_sequence_shards(self) -> bool:
        """Whether tokens go to experts from where the residual stream has them, split over the fallback's axes too."""
        split = {rule.mesh_axis for rule in self.fallback}
        return any("C" in rule.axes and rule.mesh_axis in split for rule in self.compute)

    def home(self, axes: tuple[str, ...]) -> Sharding:
        """Where an activation lives between the operations that use it."""
        return _home(self, axes)

    def stored(self, axes: tuple[str, ...], part: str) -> Sharding:
        """How a weight ("weights"), its accumulated gradient ("gradients") or its "optimizer" state is stored."""
        return _stored(self, axes, part)


@lru_cache(maxsize=65536)
def _home(strategy: Strategy, axes: tuple[str, ...]) -> Sharding:
    return Sharding.of(axes, strategy.splits(axes))


@lru_cache(maxsize=65536)
def _stored(strategy: Strategy, axes: tuple[str, ...], part: str) -> Sharding:
    return Sharding.of(axes, apply_rules((*strategy.compute, *getattr(strategy, part)), axes))


def apply_rules(rules: tuple[Rule, ...], axes: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Apply `rules` in order to a tensor or iteration space with `axes`."""
    return dict(_applied(rules, axes))


@lru_cache(maxsize=65536)  # few tables, few kinds of tensors
def _applied(rules: tuple[Rule, ...], axes: tuple[str, ...]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    bases = {a.partition(".")[0]: a for a in reversed(axes)}
    splits: dict[str, tuple[str, ...]] = {}
    used: set[str] = set()
    for own, mesh_axis in rules:
        if mesh_axis in used:
            continue
        for a in own:
            if a in bases:
                axis = bases[a]
                splits[axis] = (*splits[axis], mesh_axis) if axis in splits else (mesh_axis,)
                used.add(mesh_axis)
                break
    return tuple(splits.items())


def data(axis: str = "data", *, zero: int = 0) -> Strategy:
    """Replicas that see different sequences.

    Args:
        axis: the mesh axis.
        zero: 0 keeps everything whole on each replica (one AllReduce of the gradients a step); 1 splits the optimizer
            state (ReduceScatter of gradients, AllGather of new weights, once a step); 2 also the accumulated gradients
            (a ReduceScatter each microbatch). Source: Rajbhandari et al. 2020, ZeRO.
    """
    return _replicas(axis, Rule(("B", "C"), axis), sharded=False, zero=zero)


def fsdp(axis: str = "fsdp") -> Strategy:
    """Fully sharded data parallelism (ZeRO-3): the whole training state is split, weights are gathered when used."""
    return _replicas(axis, Rule(("B", "C"), axis), sharded=True, zero=0)


def _replicas(axis: str, compute: Rule, *, sharded: bool, zero: int) -> Strategy:
    """An axis whose devices use the same weights: they share them out as FSDP does, or keep them and follow ZeRO."""
    split = (Rule(STORAGE_AXES, axis),)
    return Strategy(
        compute=(compute,),
        weights=split if sharded else (),
        gradients=split if sharded or zero >= 2 else (),
        optimizer=split if sharded or zero >= 1 else (),
    )


def context(axis: str = "context", *, sharded: bool = True, zero: int = 0, ring: bool = False) -> Strategy:
    """Split the positions of a sequence; attention needs the keys and values of all of them.

    Args:
        axis: the mesh axis.
        sharded: whether its devices share out the training state, as in FSDP; else they follow `zero`, as in `data`.
        zero: see `data`.
        ring: keys and values go round a ring (Liu et al. 2023, Ring Attention) instead of being gathered.
    """
    return replace(_replicas(axis, Rule(("T", "C"), axis), sharded=sharded, zero=zero), ring=ring)


def ulysses(axis: str = "ulysses", *, sharded: bool = True, zero: int = 0) -> Strategy:
    """Split the positions of a sequence, but heads within attention: AllToAlls before and after it.

    Source: Jacobs et al. 2023, DeepSpeed Ulysses. Args: as in `context`.
    """
    # Heads are split over the tensor axis first: what the projections made stays where it is.
    whole = _replicas(axis, Rule(("T", "C"), axis), sharded=sharded, zero=zero)
    return replace(whole, attention=(Rule(("N",), axis),))


def expert(axis: str = "expert", *, sharded: bool = True, zero: int = 0) -> Strategy:
    """Split the experts of mixtures; for all else the axis is one more axis of replicas that see other sequences.

    Tokens leave for the experts they chose, and come back: AllToAlls. The gradients of experts are reduced over the
    other axes of replicas only. Args: as in `context`.

    Source: Lepikhin et al. 2020, GShard; book, Training, "expert parallelism".
    """
    return _replicas(axis, Rule(("B", "E", "C"), axis), sharded=sharded, zero=zero)


def tensor(axis: str = "tensor", *, sequence: bool = True, experts: tuple[str, ...] = ("Fe",)) -> Strategy:
    """Tensor (Megatron) parallelism over heads, feed-forward width and vocabulary.

    Args:
        axis: the mesh axis.
        sequence: split the residual stream's positions over the same axis between the sharded matmuls, so that an
            AllReduce becomes a ReduceScatter and an AllGather and norms are not repeated (Korthikanti et al. 2022).
        experts: what it splits of a mixture. ("Fe",): the width of every expert. ("Fe", "C"): that too, but tokens
            leave for their experts from where the residual stream has them, and are gathered there: fewer bytes where
            experts live on other devices. ("E", "C"): the experts, each whole on a device. The last two need
            `sequence`.
    """
    # N and K never meet in one tensor; in attention's iteration space they are one axis, N = K x G: `place` knows.
    return Strategy(
        compute=(*(Rule((a,), axis) for a in TENSOR_AXES), Rule(experts, axis)),
        fallback=(Rule(("T",), axis),) if sequence else (),
        attention=(Rule(("N",), axis),),
    )


@lru_cache(maxsize=256)
def training_strategy(
    *,
    zero: int = 0,
    sequence: bool = True,
    fully_sharded: bool = True,
    experts: tuple[str, ...] = ("Fe",),
    ring: bool = False,
    exchanges: bool = True,
    pieces: bool = False,
) -> Strategy:
    """Compose all training strategies, over the mesh axes of a layout (size 1: not used).

    Args:
        zero: of the replicas that keep whole weights; see `data`.
        sequence, experts: see `tensor`.
        fully_sharded: whether context, ulysses and expert axes share out weights as fsdp does.
        ring: see `context`.
        exchanges: whether there is an axis `expert`. Where it is named but has size 1, experts and other weights would
            go in two groups of the same devices instead of in one.
        pieces: see `Strategy`.
    """
    # On weights `data` stays minor-most, so that ZeRO's AllGather of new weights is over a suffix; heads are split over
    # `tensor` before `ulysses`, so that attention's AllToAll moves a suffix.
    heads = Strategy(attention=tensor().attention)
    positions = context(sharded=fully_sharded, zero=zero, ring=ring) | heads | ulysses(sharded=fully_sharded, zero=zero)
    around = positions | expert(sharded=fully_sharded, zero=zero) if exchanges else positions
    whole = fsdp() | around | data(zero=zero) | tensor(sequence=sequence, experts=experts)
    return replace(whole, pieces=pieces)


def iteration_space(strategy: Strategy, op: Op) -> dict[str, tuple[str, ...]]:  # noqa: PLR0911 -- a rule a kind
    """Which mesh axes split which index of `op`: placing an operation is choosing this.

    Returns: axis name -> mesh axes, major to minor; axes that are not split are left out.
    """
    if isinstance(op, Attention | AttentionGradient):
        attention = op.source if isinstance(op, AttentionGradient) else op
        heads, kv_heads = attention.heads_axis, attention.kv_heads_axis
        splits = strategy.attention_splits([a for a in op.axes if a == heads or a != kv_heads])
        if heads in splits:  # N = K x G: a group of query heads goes with its key/value head
            splits[kv_heads] = splits[heads]
        return splits
    if isinstance(op, FusedGradient):
        return iteration_space(strategy, op.source)
    if isinstance(op, Fused):
        return _kernel_space(strategy, op)
    if isinstance(op, Route):
        tokens = [a for a in op.axes if _base(a) not in ("E", "C")]
        slots, experts = _slots(strategy), strategy.splits(["E"], sequence=False).get("E", ())
        # Experts that are split where tokens and slots are not: each device has all tokens, and adds up its part.
        own = {"E": tuple(m for m in experts if m not in slots)}
        return strategy.splits(tokens, sequence=strategy.routes_sequence_shards) | {"C": slots} | own
    if isinstance(op, CacheUpdate):
        return strategy.cache_splits(op.axes)
    if isinstance(op, Elementwise):
        return strategy.splits([a for a in op.axes if a not in op.reduced])
    return strategy.splits(op.axes)


def _kernel_space(strategy: Strategy, op: Fused) -> dict[str, tuple[str, ...]]:
    """Split a kernel: where it needs all of an axis, the mesh axes that would split it split another one further."""
    leading = [a for a in op.axes if a not in op.together]
    splits = strategy.splits([a for a in leading if a not in op.whole])
    if op.instead is not None:
        used = {m for split in splits.values() for m in split}
        freed = [m for a in op.whole for m in strategy.splits(leading).get(a, ()) if m not in used]
        if freed:
            splits[op.instead] = (*splits.get(op.instead, ()), *freed)
    return splits | {a: splits[leader] for a, leader in op.together.items() if leader in splits}


def _base(axis: str) -> str:
    """The axis without its variant suffix."""
    return axis.partition(".")[0]


def _slots(strategy: Strategy) -> tuple[str, ...]:
    """Mesh axes of the slots that a device fills from its own tokens.

    Those that split the experts come last: what leaves for them is a suffix, which one AllToAll moves.
    """
    slots = strategy.splits(["C"], sequence=False).get("C", ())
    experts = strategy.splits(["E"], sequence=False).get("E", ())
    return (*(m for m in slots if m not in experts), *(m for m in experts if m in slots))
