"""Which mesh axes split which index of an operation: the rule tables applied to its iteration space.

Not here: collectives between operations (`place`).
"""

from __future__ import annotations

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
from meshwise.sharding.strategy import Strategy


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
        return strategy.splits(tokens, sequence=strategy.routes_sequence_shards) | {"C": _slots(strategy)}
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
