"""Requests that decode together, counted in decode steps: any number of steps is one addition.

A request that joins before step S with x tokens cached attends to x + 1 in its first step and to one more in each
later one: to offset + S, where its offset never changes. With speculation a step gives `growth` tokens on average
instead of one. Not here: how long steps take, and when a request is done.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic

from meshwise.scheduling.limits import Speculation
from meshwise.scheduling.pages import FluidPages, Pages
from meshwise.scheduling.requests import Piece, R


class Running(Generic[R]):
    """The requests of a replica that decode.

    Args:
        block_tokens: tokens of a block of the cache.
        speculation: what drafts there are.
        ranks: of the replica.

    Attributes:
        pages: how they take blocks, those of each rank.
        steps: decode steps done.
        count: requests.
        counts: of each rank.
        members: the requests, in the order of joining, by the number of their joining.
    """

    def __init__(self, block_tokens: int, speculation: Speculation | None = None, ranks: int = 1) -> None:
        self.growth: float = 1 if speculation is None else speculation.tokens_per_step
        self.pages: tuple[Pages | FluidPages, ...] = tuple(
            Pages(block_tokens) if speculation is None else FluidPages(block_tokens, self.growth) for _ in range(ranks)
        )
        self.counts = [0] * ranks
        self.steps = self.count = self.joins = 0
        self.members: dict[int, R] = {}

    def join(self, request: R, cached: float) -> None:
        """Take in a request whose cache holds `cached` tokens."""
        self.joins += 1
        self.members[self.joins] = request
        request.serial = self.joins
        request.cached = cached
        request.joined = self.steps
        request.offset = offset = cached + 1 - self.growth * self.steps
        self.count += 1
        self.counts[request.rank] += 1
        self.pages[request.rank].join(offset)  # type: ignore[arg-type]

    def leave(self, request: R) -> None:
        """Let a request go; `tokens` and `produced` of it must be asked before."""
        self.count -= 1
        self.counts[request.rank] -= 1
        self.pages[request.rank].leave(request.offset)  # type: ignore[arg-type]
        del self.members[request.serial]
        request.serial = 0

    def tokens(self, request: R) -> float:
        """Tokens of a request that the cache holds now."""
        return request.offset + self.growth * self.steps - 1

    def produced(self, request: R) -> int:
        """Tokens of its output that a request has now."""
        return request.produced + self.steps - request.joined

    def last_joined(self, rank: int) -> R:
        """Find the one of a rank that joined last."""
        return next(request for request in reversed(self.members.values()) if request.rank == rank)

    def next_blocks(self, rank: int) -> float:
        """Blocks that those of a rank take in the next step."""
        return self.pages[rank].next(self.counts[rank], self.steps)

    def advance(self, steps: int) -> list[float]:
        """Do steps; give the blocks that those of each rank took."""
        blocks = [pages.grown(n, self.steps, steps) for pages, n in zip(self.pages, self.counts, strict=True)]
        self.steps += steps
        return blocks

    @property
    def filled(self) -> int:
        """Requests, if each rank had as many as the one that has most: ranks wait for one another."""
        return max(self.counts) * len(self.counts)

    def filled_tokens(self, chunks: Iterable[tuple[Piece[R], int]]) -> int:
        """Tokens of prompts in a step, likewise."""
        return busiest(((piece.request.rank, new) for piece, new in chunks), len(self.counts))


def busiest(sizes: Iterable[tuple[int, int]], ranks: int) -> int:
    """Sum of sizes, each of a rank, if each of so many ranks had as much as the one that has most.

    >>> busiest([(0, 5), (1, 2), (1, 4)], 4)
    24
    """
    each = [0] * ranks
    for rank, size in sizes:
        each[rank] += size
    return max(each) * ranks
