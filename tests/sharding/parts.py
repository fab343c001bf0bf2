"""Parts of global arrays that one device holds, and what formulas do with their axes.

Test support: it knows positions in the global arrays, no mesh.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwise.core.tensors import Attention

Axes = tuple[str, ...]
EPSILON = 1e-3


@dataclass(frozen=True)
class Part:
    """A block of a global array: its values, the names of its axes, and where along each it starts."""

    axes: Axes
    values: np.ndarray
    starts: tuple[int, ...]

    def start(self, axis: str) -> int:
        return self.starts[self.axes.index(axis)]

    def size(self, axis: str) -> int:
        return self.values.shape[self.axes.index(axis)]

    def positions(self, axis: str) -> np.ndarray:
        return self.start(axis) + np.arange(self.size(axis))


def spread(values: np.ndarray, axes: Axes, onto: Axes) -> np.ndarray:
    """Order as `onto`, with length 1 where an axis is missing."""
    order = [axes.index(a) for a in onto if a in axes]
    assert len(order) == len(axes), f"{axes} does not fit {onto}"
    shape = [values.shape[axes.index(a)] if a in axes else 1 for a in onto]
    return values.transpose(order).reshape(shape)


def sum_to(values: np.ndarray, axes: Axes, keep: Axes) -> np.ndarray:
    """Sum over the axes that are not in `keep`, and order as `keep`."""
    rest = tuple(a for a in axes if a in keep)
    total = values.sum(axis=tuple(i for i, a in enumerate(axes) if a not in keep))
    return np.asarray(total).transpose([rest.index(a) for a in keep])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return (1 + np.tanh(x / 2)) / 2  # never overflows


def padded(values: np.ndarray, width: int) -> np.ndarray:
    """Zeros at the end of the last axis, up to `width`."""
    missing = width - values.shape[-1]
    return np.concatenate([values, np.zeros((*values.shape[:-1], missing))], axis=-1)


def mask(op: Attention, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    t, s = queries[:, None], keys[None, :]
    seen = (s <= t) if op.causal else np.ones((len(queries), len(keys)), bool)
    if op.window is not None:
        seen &= s > t - op.window
    if op.chunk is not None:
        seen &= s // op.chunk == t // op.chunk
    return np.asarray(seen)
