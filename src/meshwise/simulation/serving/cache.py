"""A replica's KV cache: requests, the blocks that they take as they grow, and the prefixes that they share.

Growth is in closed form over any number of steps. Prefixes are a radix tree of named parts of prompts; least recently
used blocks go first. Not here: who gets blocks (`replica`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

Path = tuple[tuple[str, int], ...]


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
        offered: whether it is among those that may be evicted; it has one entry there, maybe of an earlier use.
    """

    __slots__ = ("begin", "children", "name", "offered", "parent", "pins", "tokens", "used")

    def __init__(self, parent: Node | None, name: str, begin: int) -> None:
        self.parent, self.name, self.begin = parent, name, begin
        self.tokens = self.pins = self.used = 0
        self.children: dict[str, Node] = {}
        self.offered = False

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


@dataclass(slots=True, eq=False)
class Request:
    """A request and where it stands.

    Attributes:
        index: its number in the load.
        arrival: seconds.
        prompt, output: tokens.
        prefix, keep_as: as in `Demand`.
        started: when a step first worked on it; before, below 0.
        first: when its first token came.
        produced: tokens of its output when it was last taken in or joined those that decode.
        cached: tokens of it that the cache held then.
        joined, last: of the replica's decode steps, those before which it began and after which it is done.
        serial: number of its joining; 0 while it does not decode.
        offset: what `Decoding` adds to the number of steps to have the tokens it attends to.
        node: end of what it shares of the prefix cache.
        shared: blocks up to there.
        preemptions: how often it gave way.
    """

    index: int
    arrival: float
    prompt: int
    output: int
    prefix: Path
    keep_as: str | None
    started: float = -1.0
    first: float = -1.0
    produced: int = 0
    cached: float = 0
    joined: int = 0
    last: int = 0
    serial: int = 0
    offset: float = 0
    node: Node | None = None
    shared: int = 0
    preemptions: int = 0


class Pages:
    """Requests that grow by one token a step: a new block when the last one is full.

    A request at offset o holds o + S - 1 tokens before decode step S, and needs a block for this step where that is a
    multiple of the block size. How many do in any step follows from how many offsets leave which remainder.

    Args:
        block_tokens: tokens of a block.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.remainders = [0] * block_tokens

    def held(self, tokens: int) -> int:
        """Blocks of a request with so many tokens."""
        return -(-tokens // self.block_tokens)

    def most_tokens(self, blocks: int) -> int:
        """Tokens of a request that so many blocks hold."""
        return blocks * self.block_tokens

    def join(self, offset: int) -> None:
        """Count a request in."""
        self.remainders[offset % self.block_tokens] += 1

    def leave(self, offset: int) -> None:
        """Count a request out."""
        self.remainders[offset % self.block_tokens] -= 1

    def grown(self, count: int, step: int, steps: int) -> int:
        """Blocks that `count` requests take in `steps` steps from step number `step`."""
        cycles, rest = divmod(steps, self.block_tokens)
        blocks = cycles * count
        if rest:
            top = (1 - step) % self.block_tokens
            bottom = top - rest + 1
            if bottom >= 0:
                return blocks + sum(self.remainders[bottom : top + 1])
            return blocks + sum(self.remainders[: top + 1]) + sum(self.remainders[bottom:])
        return blocks

    def steps_within(self, count: int, step: int, blocks: int) -> int:
        """Steps from step number `step` for which so many blocks are enough."""
        cycles, left = divmod(blocks, count)
        steps = cycles * self.block_tokens
        while (needed := self.remainders[(1 - step - steps) % self.block_tokens]) <= left:
            left -= needed
            steps += 1
        return steps


class FluidPages:
    """Requests that grow by a mean number of tokens a step, which need not be whole.

    Each is taken to hold one block that is partly full beside its full ones.

    Args:
        block_tokens: tokens of a block.
        growth: tokens a step.
    """

    def __init__(self, block_tokens: int, growth: float) -> None:
        self.block_tokens = block_tokens
        self.growth = growth

    def held(self, tokens: float) -> float:
        """Blocks of a request with so many tokens."""
        return tokens / self.block_tokens + 1

    def most_tokens(self, blocks: int) -> int:
        """Tokens of a request that so many blocks hold."""
        return (blocks - 1) * self.block_tokens

    def join(self, offset: float) -> None:
        """Count a request in: nothing depends on where it stands."""

    def leave(self, offset: float) -> None:
        """Count a request out."""

    def grown(self, count: int, step: int, steps: int) -> float:  # noqa: ARG002  (the same in every step)
        """Blocks that `count` requests take in `steps` steps."""
        return count * steps * self.growth / self.block_tokens

    def steps_within(self, count: int, step: int, blocks: float) -> int:  # noqa: ARG002
        """Steps for which so many blocks are enough."""
        return int(blocks * self.block_tokens / (count * self.growth))


class PrefixCache:
    """The tree of one replica.

    Args:
        block_tokens: tokens of a block.

    Attributes:
        blocks: that it holds.
        pinned: of these, blocks that requests use now; the others can be had by evicting.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.root = Node(None, "", 0)
        self.blocks = self.pinned = 0
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
            self._offer(parent)

    def _offer(self, node: Node) -> None:
        """Put a part among those that may be evicted, if it is one."""
        if not node.pins and not node.children and node.parent is not None and not node.offered:
            node.offered = True
            self._pushed += 1
            heapq.heappush(self._leaves, (node.used, self._pushed, node))


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
        """Allocate blocks; unused prefixes are evicted to make room."""
        self.used += blocks
        if self.prefixes is not None:
            over = self.used + self.prefixes.blocks - self.blocks
            if over > 0:
                self.prefixes.evict(math.ceil(over))

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
