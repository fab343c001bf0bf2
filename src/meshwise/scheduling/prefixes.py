"""Beginnings of prompts that stay in the cache for later ones: a radix tree of named parts.

Least recently used blocks go first. Not here: blocks that belong to requests (`cache`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

#: Parts that a prompt begins with, each with its tokens. An engine has one part a block, named by the block's exact
#: tokens: no two different ones ever share a name, as hashes might.
Path = tuple[tuple[str | bytes, int], ...]


class Node:
    """A part of prompts in the cache.

    Attributes:
        parent: the part before it.
        name: what it is known by there.
        begin: tokens before it.
        tokens: of it that are cached, counted from its begin; fewer than it has where its end was evicted.
        pins: requests that use it or what comes after it.
        used: when it was last used, a counter.
        children: what may come after it.
        page: that holds it, where it is one block of an engine; else below 0.
        offered: whether it is among those that may be evicted; it has one entry there, maybe of an earlier use.
    """

    __slots__ = ("begin", "children", "name", "offered", "page", "parent", "pins", "tokens", "used")

    def __init__(self, parent: Node | None, name: str | bytes, begin: int) -> None:
        self.parent, self.name, self.begin = parent, name, begin
        self.tokens = self.pins = self.used = 0
        self.children: dict[str | bytes, Node] = {}
        self.offered = False
        self.page = -1

    @property
    def end(self) -> int:
        """Tokens up to where it is cached."""
        return self.begin + self.tokens

    def path(self) -> Iterator[Node]:
        """The part and those before it, up to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


class PrefixCache:
    """The tree of one replica.

    Args:
        block_tokens: tokens of a block.

    Attributes:
        blocks: that it holds.
        pinned: of these, blocks that requests use now; the others can be had by evicting.
        freed: takes the pages of what is evicted, where parts have pages.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.root = Node(None, "", 0)
        self.blocks = self.pinned = 0
        self.freed: list[int] | None = None
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []
        self._pushed = 0

    def _size(self, node: Node) -> int:
        """Whole blocks that end in a part."""
        return node.end // self.block_tokens - node.begin // self.block_tokens

    def match(self, path: Path) -> tuple[Node, int]:
        """Find the last part of a path that is cached, and how many tokens up to there are."""
        node, tokens = self.root, 0
        for name, size in path:
            child = node.children.get(name)
            if child is None:
                break
            node, tokens = child, child.begin + min(child.tokens, size)
            if child.tokens < size:
                break
        return node, tokens

    def pin(self, node: Node) -> None:
        """Keep a part and those before it from being evicted, and mark them as just used."""
        self._clock += 1
        for step in node.path():
            if not step.pins:
                self.pinned += self._size(step)
            step.pins += 1
            step.used = self._clock

    def unpin(self, node: Node) -> None:
        """Undo one `pin`."""
        for step in node.path():
            step.pins -= 1
            if not step.pins:
                self.pinned -= self._size(step)
                self._offer(step)

    def insert(self, path: Path) -> Node:
        """Put a path into the cache, pinned; the caller's blocks of it are the tree's from now on.

        Parts that are there already stay; blocks that both had are to be freed by the caller.
        """
        node = self.root
        for name, size in path:
            child = node.children.get(name)
            if child is None:
                child = node.children[name] = Node(node, name, node.end)
            node = child
            if node.tokens < size:
                if node.children:
                    break  # others went on from a shorter part of this name
                before, node.tokens = self._size(node), size
                grown = self._size(node) - before
                self.blocks += grown
                self.pinned += grown if node.pins else 0
        self.pin(node)
        return node

    def evict(self, blocks: int) -> None:
        """Free blocks, those least recently used, from the ends of paths.

        The caller makes sure that so many are not pinned.
        """
        while blocks > 0 and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            node.offered = False
            if node.used != used:
                self._offer(node)
                continue
            if node.pins or node.children or node.parent is None:
                continue  # it is offered again when that changes
            size = self._size(node)
            if size > blocks:
                node.tokens = (node.begin // self.block_tokens + size - blocks) * self.block_tokens - node.begin
                self.blocks -= blocks
                self._offer(node)
                return
            self.blocks -= size
            blocks -= size
            parent, node.parent = node.parent, None
            del parent.children[node.name]
            if self.freed is not None:
                self.freed.append(node.page)
            self._offer(parent)

    def _offer(self, node: Node) -> None:
        """Put a part among those that may be evicted, if it is one."""
        if not node.pins and not node.children and node.parent is not None and not node.offered:
            node.offered = True
            self._pushed += 1
            heapq.heappush(self._leaves, (node.used, self._pushed, node))
