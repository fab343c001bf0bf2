"""Parallelism strategies as small rule tables: which named tensor axis is split over which mesh axis.

`fsdp() | tensor()` is the whole of mixed FSDP and tensor parallelism. Nothing here knows a communication pattern:
`place` derives every collective from these tables. Not here: sizes, bytes or seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from meshwise.sharding.mesh import Sharding

__all__ = ["Rule", "Strategy", "apply_rules", "context", "data", "fsdp", "tensor", "training_strategy"]

#: The axes of a weight that storage-only splits (FSDP, ZeRO) use, in order of preference; the residual width comes
#: first because nearly every weight has it. A weight with none of them (a bias of heads) is small and stays whole.
_STORAGE_AXES = ("D", "Dw", "Rq", "Rkv", "P")

#: The axes that tensor parallelism splits: query heads, key/value heads, every feed-forward width, the vocabulary.
_TENSOR_AXES = ("N", "K", "F", "Fe", "Fs", "V")


@dataclass(frozen=True, slots=True)
class Rule:
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
    """

    compute: tuple[Rule, ...] = ()
    weights: tuple[Rule, ...] = ()
    gradients: tuple[Rule, ...] = ()
    optimizer: tuple[Rule, ...] = ()
    fallback: tuple[Rule, ...] = ()

    def __or__(self, other: Strategy) -> Strategy:
        return Strategy(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def splits(self, axes: Iterable[str], *, sequence: bool = True) -> dict[str, tuple[str, ...]]:
        """Find the sharding of an iteration space (or activation) with these axes.

        Args:
            axes: tensor axis names.
            sequence: whether the fallback may be used (it may not while routing).

        Returns: axis name -> mesh axes, major to minor; each mesh axis at most once.
        """
        return apply_rules((*self.compute, *(self.fallback if sequence else ())), tuple(axes))

    def home(self, axes: tuple[str, ...]) -> Sharding:
        """Where an activation lives between the operations that use it."""
        return _sharding(axes, self.splits(axes))

    def stored(self, axes: tuple[str, ...], part: str) -> Sharding:
        """How a weight ("weights"), its accumulated gradient ("gradients") or its "optimizer" state is stored."""
        return _sharding(axes, apply_rules((*self.compute, *getattr(self, part)), axes))


def apply_rules(rules: tuple[Rule, ...], axes: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Apply `rules` in order to a tensor or iteration space with `axes`."""
    bases = {a.partition(".")[0]: a for a in reversed(axes)}
    splits: dict[str, tuple[str, ...]] = {}
    used: set[str] = set()
    for rule in rules:
        axis = next((bases[a] for a in rule.axes if a in bases), None)
        if axis is not None and rule.mesh_axis not in used:
            splits[axis] = (*splits.get(axis, ()), rule.mesh_axis)
            used.add(rule.mesh_axis)
    return splits


def _sharding(axes: tuple[str, ...], splits: dict[str, tuple[str, ...]]) -> Sharding:
    return Sharding(tuple(splits.get(a, ()) for a in axes))


def data(axis: str = "data", *, zero: int = 0) -> Strategy:
    """Replicas that see different sequences.

    Args:
        axis: the mesh axis.
        zero: 0 keeps everything whole on each replica (one AllReduce of the gradients a step); 1 splits the optimizer
            state (ReduceScatter of gradients, AllGather of new weights, once a step); 2 also the accumulated gradients
            (a ReduceScatter each microbatch). Source: Rajbhandari et al. 2020, ZeRO.
    """
    split = (Rule(_STORAGE_AXES, axis),)
    return Strategy(
        compute=(Rule(("B", "C"), axis),),
        gradients=split if zero >= 2 else (),
        optimizer=split if zero >= 1 else (),
    )


def fsdp(axis: str = "fsdp") -> Strategy:
    """Fully sharded data parallelism (ZeRO-3): the whole training state is split, weights are gathered when used."""
    split = (Rule(_STORAGE_AXES, axis),)
    return Strategy(compute=(Rule(("B", "C"), axis),), weights=split, gradients=split, optimizer=split)


def context(axis: str = "context") -> Strategy:
    """Split the positions of a sequence; attention gathers keys and values. The training state is stored as in FSDP."""
    split = (Rule(_STORAGE_AXES, axis),)
    return Strategy(compute=(Rule(("T", "C"), axis),), weights=split, gradients=split, optimizer=split)


def tensor(axis: str = "tensor", *, sequence: bool = True) -> Strategy:
    """Tensor (Megatron) parallelism over heads, feed-forward width and vocabulary.

    Args:
        axis: the mesh axis.
        sequence: split the residual stream's positions over the same axis between the sharded matmuls, so that an
            AllReduce becomes a ReduceScatter and an AllGather and norms are not repeated (Korthikanti et al. 2022).
    """
    # N and K never meet in one tensor; in attention's iteration space they are one axis, N = K x G: `place` knows.
    return Strategy(
        compute=tuple(Rule((a,), axis) for a in _TENSOR_AXES),
        fallback=(Rule(("T",), axis),) if sequence else (),
    )


def training_strategy(*, zero: int, sequence: bool) -> Strategy:
    """Compose all training strategies, over the mesh axes `fsdp`, `context`, `data`, `tensor` (size 1: not used)."""
    # On weights `data` stays minor-most, so that ZeRO's AllGather of new weights is over a suffix.
    return fsdp() | context() | data(zero=zero) | tensor(sequence=sequence)
