"""Which pairs of a query and a key attention weighs, and which blocks of pairs hold any.

Positions count from the beginning of the sequence, so that a device may hold any part of it. Not here: scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


@dataclass(frozen=True, slots=True)
class Masks:
    """Which keys a query sees, and what happens to its logits.

    Args:
        causal, window, chunk: as in `tensors.Attention`.
        scale: factor of q . k.
        cap: c of c tanh(x / c), or None.
    """

    causal: bool
    window: int | None
    chunk: int | None
    scale: float
    cap: float | None = None

    @property
    def everything(self) -> bool:
        """Whether every query sees every key."""
        return not self.causal and self.window is None and self.chunk is None

    def seen(self, queries: Any, keys: Any) -> Any:
        """Whether each query position [T] sees each key position [S]: [T, S]."""
        return self.sees(queries[:, None], keys[None, :])

    def sees(self, q: Any, k: Any) -> Any:
        """Whether queries see keys, both positions in arrays that broadcast."""
        seen = k <= q if self.causal else (k <= q) | (k > q)
        if self.window is not None:
            seen &= k > q - self.window
        if self.chunk is not None:
            seen &= k // self.chunk == q // self.chunk
        return seen

    def logits(self, scores: jax.Array, unit: float = 1.0) -> tuple[jax.Array, jax.Array | None]:
        """Logits of q . k times `unit`, and what they grow by as it grows, over scale and unit; None without a cap."""
        if self.cap is None:
            return scores * (self.scale * unit), None
        bent = jnp.tanh(scores * (self.scale / self.cap))
        return self.cap * unit * bent, 1 - bent * bent

    def key_range(self, first: Any, last: Any, start: Any, length: int) -> tuple[Any, Any]:
        """Bounds of the keys that any query of a block may see: from the first to before the second.

        >>> Masks(True, 4, None, 1.0).key_range(8, 11, 0, 32)
        (5, 12)

        Args:
            first, last: positions of the block's first and last query.
            start, length: position of the first key, and number of keys; bounds count from it.
        """
        low, high = 0 * start, 0 * start + length
        if self.causal:
            high = _clipped(last + 1 - start, length)
        if self.window is not None:
            low = _clipped(first + 1 - self.window - start, length)
        if self.chunk is not None:
            low = _larger(low, _clipped(first // self.chunk * self.chunk - start, length))
            high = _smaller(high, _clipped((last // self.chunk + 1) * self.chunk - start, length))
        return low, high

    def query_range(self, first: Any, last: Any, start: Any, length: int) -> tuple[Any, Any]:
        """Bounds of the queries that may see any key of a block, as in `key_range`.

        >>> Masks(True, 4, None, 1.0).query_range(8, 11, 0, 32)
        (8, 15)
        """
        low, high = 0 * start, 0 * start + length
        if self.causal:
            low = _clipped(first - start, length)
            if self.window is not None:
                high = _clipped(last + self.window - start, length)
            if self.chunk is not None:
                high = _smaller(high, _clipped((last // self.chunk + 1) * self.chunk - start, length))
        return low, high

    def whole_key_range(self, first: Any, last: Any, start: Any, length: int) -> tuple[Any, Any]:
        """Bounds of the keys that all queries of a block see, as in `key_range`; the first may be beyond the second.

        >>> Masks(True, 6, None, 1.0).whole_key_range(8, 11, 0, 32)
        (6, 9)
        """
        return self.key_range(last, first, start, length)

    def whole_query_range(self, first: Any, last: Any, start: Any, length: int) -> tuple[Any, Any]:
        """Bounds of the queries that see all keys of a block, as in `whole_key_range`.

        >>> Masks(True, 6, None, 1.0).whole_query_range(8, 11, 0, 32)
        (11, 14)
        """
        low, high = self.query_range(last, first, start, length)
        return (low, high) if self.causal else (low, low)  # bounds of the others hold more than what is seen

    def num_pairs(self, offset: int, num_queries: int, num_keys: int, size: tuple[int, int] = (1, 1)) -> int:
        """Count pairs in blocks that hold any that is seen: with blocks of one pair, those that are seen.

        >>> Masks(True, 3, None, 1.0).num_pairs(0, 4, 4), Masks(True, 3, None, 1.0).num_pairs(0, 4, 4, (2, 2))
        (9, 12)

        Args:
            offset: of the first query after the first key, which begins a chunk.
            num_queries, num_keys: how many there are.
            size: queries and keys of a block.
        """
        rows, columns = size
        total = 0
        for first in range(offset, offset + num_queries, rows):
            low, high = self.key_range(first, first + rows - 1, 0, num_keys)
            total += rows * columns * max(0, -(-high // columns) - low // columns)
        return total


def _clipped(x: Any, most: int) -> Any:
    return max(0, min(x, most)) if isinstance(x, int) else jnp.clip(x, 0, most)


def _larger(a: Any, b: Any) -> Any:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)


def _smaller(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


class Documents(NamedTuple):
    """Documents one after the other in a sequence, where attention is causal: a query sees keys of its own alone.

    Args:
        queries, keys: position with which the document of each begins, in the order of queries and of keys: int32
            [B, T] and [B, S].
    """

    queries: jax.Array
    keys: jax.Array


@dataclass(frozen=True, slots=True)
class Pairs:
    """The queries and keys of one device, each in runs of equal length, and which of them meet.

    Args:
        masks: which pairs are seen.
        queries, keys: position of the first of each run, as numbers or as values of the program.
        offsets: all that `queries - keys` can be, for each run of queries those of all keys; empty where it is not
            known as the program is traced.
        number: which of these it is, on this device.
    """

    masks: Masks
    queries: tuple[Any, ...] = (0,)
    keys: tuple[Any, ...] = (0,)
    offsets: tuple[tuple[int, ...], ...] = ((0,),)
    number: Any = 0

    @property
    def known(self) -> bool:
        """Whether all is known as the program is traced."""
        return all(isinstance(x, int) for x in (*self.queries, *self.keys, self.number))

    def runs(self, q: Any, k: Any) -> tuple[int, int]:
        """Queries and keys of a run, of those in q [B, T, N, H] and k [B, S, K, H]."""
        return int(q.shape[1]) // len(self.queries), int(k.shape[1]) // len(self.keys)
