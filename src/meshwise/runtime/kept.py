"""What a layer's function that goes back has kept, but for weights, which are read again where they are stored.

Not here: where stages of a pipeline keep it (`stages`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from meshwise.runtime.watched import apart, together

_RUN = "run"


def backward_of(
    layer: Callable[[jax.Array, Any], Any], x: jax.Array, weights: Mapping[str, Any]
) -> tuple[jax.Array, Callable[..., tuple[jax.Array, Any]]]:
    """Run a layer, and find what goes back.

    Args:
        layer: from the stream and weights to the stream after it.
        x: stream.
        weights: by name, each an array, `Watched` or `Frozen`.

    Returns: what it makes, and a function from the gradient of that to those of `x` and of the weights that are
        trained, by name.
    """
    trained, frozen = apart({_RUN: weights})

    def one(x: jax.Array, own: Mapping[str, Any]) -> Any:
        return layer(x, together({_RUN: own}, frozen)[_RUN])

    return jax.vjp(one, x, trained.get(_RUN, {}))


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Weight:
    """In place of a weight: its number among the leaves."""

    number: int


def kept_of(back: Any, weights: Any) -> Any:
    """What a function that goes back has kept, a tree, without weights."""
    leaves = jax.tree.leaves(weights)

    def one(leaf: Any) -> Any:
        return next((_Weight(number) for number, weight in enumerate(leaves) if leaf is weight), leaf)

    return jax.tree.map(one, back)


def restored(kept: Any, weights: Any) -> Any:
    """The function that goes back, with weights that were read again."""
    leaves = jax.tree.leaves(weights)

    def one(leaf: Any) -> Any:
        return leaves[leaf.number] if isinstance(leaf, _Weight) else leaf

    return jax.tree.map(one, kept, is_leaf=lambda leaf: isinstance(leaf, _Weight))
