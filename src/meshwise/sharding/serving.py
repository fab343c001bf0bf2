"""Rule tables of serving: how a step of prefill or of generation is spread over the chips of one engine.

As in training, nothing here knows a communication pattern: `place` derives every collective. Not here: sizes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from meshwise.sharding.strategy import STORAGE_AXES, TENSOR_AXES, Rule, Strategy, context, expert

#: Mesh axes of one engine, innermost first.
SERVING_AXES = ("tensor", "cache", "width", "context", "expert", "fsdp", "stage")

#: What `cache` and `width` split of a cache: its heads (copies, where there are too few), sequences, or positions.
CACHE_SPLITS = ("heads", "batch", "sequence")

#: How the residual stream stands between matmuls: whole on every device of the tensor axis, its positions split over
#: it, or its width.
RESIDUALS = ("whole", "positions", "width")

#: What heads and widths of feed-forward parts are split by: K only where there are so many key/value heads.
_HEADS_AND_WIDTHS = tuple(a for a in TENSOR_AXES if a != "K")

#: Sequences are split over these first, so that what attention moves is the minor-most.
_SEQUENCES = (Rule(("B",), "fsdp"), Rule(("B",), "expert"))

#: Axes of a matmul's depth or rows that the axis `width` splits.
_WIDTH_AXES = STORAGE_AXES


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
        compute=(Rule(_WIDTH_AXES, "width"),),
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


def gathered() -> Strategy:
    """Store weights in parts and gather those of a layer when they are used, while sequences are split.

    Source: Pope et al. 2022, section 3.2.3 (weight-gathered); in training it is FSDP.
    """
    return Strategy(compute=(Rule(("B", "C"), "fsdp"),), weights=(Rule(STORAGE_AXES, "fsdp"),))


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
    around = replace(context(sharded=False), ring=ring) | expert(sharded=False)
    positions = Strategy(caches=(Rule(("S",), "context"),))
    whole = gathered() | around | positions | tensor_and_cache(cache_split, experts)
    if wide:
        whole |= width(cache_split)
    split = {"whole": (), "positions": ("T",), "width": ("D",)}[residual]
    return whole | Strategy(fallback=tuple(Rule((a,), axis) for axis in ("tensor", "cache") for a in split))
