"""Requests that decode together, counted in decode steps: any number of steps is one addition.

A request that joins before step S with x tokens cached attends to x + 1 in its first step and to one more in each
later one: to offset + S, where its offset never changes. With speculation a step gives `growth` tokens on average
instead of one. Not here: how long steps take, and when a request is done.
"""

from __future__ import annotations

from typing import Generic

from meshwise.scheduling.limits import Speculation
from meshwise.scheduling.pages import FluidPages, Pages
from meshwise.scheduling.requests import R


class Running(Generic[R]):
    """The requests of a replica that decode.

    Args:
        block_tokens: tokens of a block of the cache.
        speculation: what drafts there are.

    Attributes:
        pages: how they take blocks.
        steps: decode steps done.
        count: requests.
        members: the requests, in the order of joining, by the number of their joining.
    """

    def __init__(self, block_tokens: int, speculation: Speculation | None = None) -> None:
        self.growth: float = 1 if speculation is None else speculation.tokens_per_step
        self.pages: Pages | FluidPages = (
            Pages(block_tokens) if speculation is None else FluidPages(block_tokens, self.growth)
        )
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
        self.pages.join(offset)  # type: ignore[arg-type]

    def leave(self, request: R) -> None:
        """Let a request go; `tokens` and `produced` of it must be asked before."""
        self.count -= 1
        self.pages.leave(request.offset)  # type: ignore[arg-type]
        del self.members[request.serial]
        request.serial = 0

    def tokens(self, request: R) -> float:
        """Tokens of a request that the cache holds now."""
        return request.offset + self.growth * self.steps - 1

    def produced(self, request: R) -> int:
        """Tokens of its output that a request has now."""
        return request.produced + self.steps - request.joined

    def last_joined(self) -> R:
        """Find the one that joined last."""
        return self.members[next(reversed(self.members))]

    def next_blocks(self) -> float:
        """Blocks that they take in the next step."""
        return self.pages.next(self.count, self.steps)

    def advance(self, steps: int) -> float:
        """Do steps; give the blocks that they took."""
        blocks = self.pages.grown(self.count, self.steps, steps)
        self.steps += steps
        return blocks
