"""A request and where it stands. Not here: what it is to generate, or when it came."""

from __future__ import annotations

from typing import Generic, TypeVar

from meshwise.scheduling.prefixes import Node, Path

R = TypeVar("R", bound="Request")


class Request:
    """A request, as its scheduler sees it; those who send requests know more of theirs.

    Args:
        index: its number: the order of arrival.
        prompt: tokens.
        prefix: parts that the prompt begins with and that others may share.

    Attributes:
        produced: tokens of its output when it was last taken in or joined those that decode.
        cached: tokens of it that the cache held then.
        joined: of the scheduler's decode steps, those before which it began.
        serial: number of its joining; 0 while it does not decode.
        offset: what `Running` adds to the number of steps to have the tokens it attends to.
        node: end of what it shares of the prefix cache.
        shared: blocks up to there.
        preemptions: how often it gave way.
        rank: of the engine, that has its cache.
    """

    __slots__ = (
        "cached",
        "index",
        "joined",
        "node",
        "offset",
        "preemptions",
        "prefix",
        "produced",
        "prompt",
        "rank",
        "serial",
        "shared",
    )

    def __init__(self, index: int, prompt: int, prefix: Path = ()) -> None:
        self.index, self.prompt, self.prefix = index, prompt, prefix
        self.produced = self.joined = self.serial = self.shared = self.preemptions = self.rank = 0
        self.cached: float = 0
        self.offset: float = 0
        self.node: Node | None = None

    def kept(self) -> Path:
        """Parts that stay in the prefix cache when it is done; those of its prompt are there already."""
        return ()


class Piece(Generic[R]):
    """A request that is prefilled, and how many of its tokens are done."""

    __slots__ = ("done", "request", "tokens")

    def __init__(self, request: R, done: int) -> None:
        self.request, self.done = request, done
        self.tokens = request.prompt + request.produced
