"""Which blocks a request has, behind the counts of the cache: an engine writes to numbered pages.

A prefix has one part a block, so that each node of the tree is a page. Not here: how many blocks (`cache`).
"""

from __future__ import annotations

from meshwise.scheduling.cache import PagedCache
from meshwise.scheduling.limits import Scheduling
from meshwise.scheduling.pages import Pages
from meshwise.scheduling.prefixes import Node, Path
from meshwise.scheduling.requests import R, Request
from meshwise.scheduling.running import Running


def block_path(tokens: bytes, width: int, block_tokens: int, salt: bytes = b"") -> Path:
    """Name each whole block of some tokens by these, `width` bytes each; the first by the salt, too.

    >>> block_path(b"abcdefg", 1, 3, b"mine:")
    ((b'mine:abc', 3), (b'def', 3))
    """
    each = width * block_tokens
    parts = [tokens[k : k + each] for k in range(0, len(tokens) - each + 1, each)]
    return tuple((part if k else salt + part, block_tokens) for k, part in enumerate(parts))


class BlockTable(PagedCache):
    """A cache whose blocks are numbered pages.

    Args:
        pages: how requests take blocks.
        blocks: that there are.
        keeps_prefixes: whether beginnings of prompts stay; each part of a path must be one block.
        first: number of the first page.

    Attributes:
        numbers: of its pages.
        free: pages that nobody has.
        tables: pages of each request, in the order of positions.
    """

    def __init__(self, pages: Pages, blocks: int, *, keeps_prefixes: bool, first: int = 0) -> None:
        super().__init__(pages, blocks, keeps_prefixes=keeps_prefixes)
        self.numbers = range(first, first + blocks)
        self.free = list(self.numbers)[::-1]
        self.tables: dict[Request, list[int]] = {}
        if self.prefixes is not None:
            self.prefixes.freed = self.free

    def grow(self, request: Request, tokens: int) -> list[int]:
        """Pages of a request that holds so many tokens, with new ones where it needs them; when a step begins."""
        table = self.tables.setdefault(request, [])
        for _ in range(int(self.held(tokens)) - len(table)):
            table.append(self.free.pop())
        return table

    def pin_prefix(self, request: Request) -> int:
        """Keep what is cached of a prompt, whose pages are the request's first."""
        hit = super().pin_prefix(request)
        if hit:
            self.tables[request] = [node.page for node in _nodes(request)]
            del self.tables[request][request.shared :]
        return hit

    def share(self, request: Request, path: Path) -> None:
        """Put what a request has of a path into the prefix cache; of a block that both had, one page stays."""
        super().share(request, path)
        if self.prefixes is None or not path:
            return
        table = self.tables[request]
        for place, node in enumerate(_nodes(request)):
            if node.page < 0:
                node.page = table[place]
            elif node.page != table[place]:
                self.free.append(table[place])
                table[place] = node.page

    def unshare(self, request: Request, tokens: float) -> float:
        """Let go of all pages of a request, those of its own at once."""
        shared = request.shared
        self.free += self.tables.pop(request, [])[shared:]
        return super().unshare(request, tokens)

    def check(self) -> None:
        """Assert that every page is free, or has one owner, and that counts agree; for tests, between steps."""
        nodes: list[Node] = [] if self.prefixes is None else [self.prefixes.root]
        kept = []
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            kept += [] if node.parent is None else [node.page]
        own = [page for request, table in self.tables.items() for page in table[request.shared :]]
        assert sorted([*self.free, *kept, *own]) == list(self.numbers), "a page was lost, or has two owners"
        assert len(own) == self.used, "pages and blocks differ"


def rank_tables(running: Running[R], blocks: int, scheduling: Scheduling) -> list[BlockTable]:
    """The caches of an engine's ranks, which share its blocks out and number them on."""
    each, made = blocks // scheduling.ranks, []
    for rank, pages in enumerate(running.pages):
        assert isinstance(pages, Pages), "refused before: drafts"
        made.append(BlockTable(pages, each, keeps_prefixes=scheduling.prefix_cache, first=rank * each))
    return made


def _nodes(request: Request) -> list[Node]:
    """Nodes of what a request shares, in order, without the root."""
    assert request.node is not None, "it shares something"
    return [node for node in request.node.path() if node.parent is not None][::-1]
