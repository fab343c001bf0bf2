"""A replica's KV cache: the blocks of its requests, and those of prefixes that they share.

Not here: who gets blocks (`scheduler`), which blocks those are (`blocks`).
"""

from __future__ import annotations

import math

from meshwise.scheduling.pages import FluidPages, Pages
from meshwise.scheduling.prefixes import Path, PrefixCache
from meshwise.scheduling.requests import Request


class PagedCache:
    """The blocks of a replica: those of its requests, and those of prefixes that stay for later ones.

    Args:
        pages: how requests take blocks.
        blocks: that there are.
        keeps_prefixes: whether beginnings of prompts stay.

    Attributes:
        used: blocks that requests have, those of prefixes not counted.
        prefixes: the tree; None without one.
    """

    def __init__(self, pages: Pages | FluidPages, blocks: int, *, keeps_prefixes: bool) -> None:
        self.pages, self.blocks = pages, blocks
        self.prefixes = PrefixCache(pages.block_tokens) if keeps_prefixes else None
        self.used: float = 0

    @property
    def in_use(self) -> float:
        """Blocks that requests use, those that they share included."""
        return self.used if self.prefixes is None else self.used + self.prefixes.pinned

    @property
    def available(self) -> float:
        """Blocks that are free, or can be had by evicting prefixes."""
        free = self.blocks - self.used
        return free if self.prefixes is None else free - self.prefixes.pinned

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest request that has room when it is alone."""
        return self.pages.most_tokens(self.blocks)

    def held(self, tokens: float) -> float:
        """Blocks of a request with so many tokens."""
        return self.pages.held(tokens)  # type: ignore[arg-type]

    def take(self, blocks: float) -> None:
        """Allocate blocks; unused prefixes are evicted for them."""
        self.used += blocks
        self.clear(0)

    def clear(self, blocks: float) -> None:
        """Evict unused prefixes until so many blocks are free."""
        if self.prefixes is not None:
            over = self.used + blocks + self.prefixes.blocks - self.blocks
            if over > 0:
                self.prefixes.evict(math.ceil(over))

    def matched(self, path: Path) -> int:
        """Tokens that a path begins with and that are cached."""
        return 0 if self.prefixes is None else self.prefixes.match(path)[1]

    def pin_prefix(self, request: Request) -> int:
        """Keep what is cached of a prompt, all but a last token at most; its tokens."""
        if self.prefixes is None:
            return 0
        node, found = self.prefixes.match(request.prefix)
        shared = min(found, request.prompt + request.produced - 1) // self.pages.block_tokens
        if shared:
            self.prefixes.pin(node)
            request.node, request.shared = node, shared
        return shared * self.pages.block_tokens

    def share(self, request: Request, path: Path) -> None:
        """Put what a request has of a path into the prefix cache."""
        if self.prefixes is None or not path:
            return
        node = self.prefixes.insert(path)
        if request.node is not None:
            self.prefixes.unpin(request.node)
        shared = min(node.end, sum(size for _, size in path)) // self.pages.block_tokens
        self.used -= shared - request.shared
        request.node, request.shared = node, shared

    def unshare(self, request: Request, tokens: float) -> float:
        """Let go of what a request with so many tokens shares; the blocks of its own."""
        own = self.held(tokens) - request.shared
        if request.node is not None:
            assert self.prefixes is not None
            self.prefixes.unpin(request.node)
            request.node, request.shared = None, 0
        return own
