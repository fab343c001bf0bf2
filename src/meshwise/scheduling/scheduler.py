"""What an engine does next: continuous batching over a paged cache, one step at a time.

`begin` decides a step, `settle` says how it ended. There is no clock here, and nobody's lengths are known before their
end: the engine tells ends as it sees them, the simulator as it knows them, and both decide by this code. Not here:
which of several replicas a request goes to.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import Generic

from meshwise.scheduling.cache import PagedCache
from meshwise.scheduling.limits import Scheduling
from meshwise.scheduling.requests import Piece, R
from meshwise.scheduling.running import Running


class Step(Generic[R]):
    """A step that begins.

    Attributes:
        decoding: how many requests decode in it: all that run, or none.
        chunks: pieces of prompts, each with its tokens in this step; the pieces say what was done before.
        moved: tokens of each request whose cache moves to or from the host before.
        alone: whether it is decided for one step only; else, while nobody arrives or ends and blocks are there, the
            next one is the same.
    """

    __slots__ = ("alone", "chunks", "decoding", "moved")

    def __init__(
        self, decoding: int, chunks: Sequence[tuple[Piece[R], int]], moved: Sequence[int], alone: bool
    ) -> None:
        self.decoding = decoding
        self.chunks = chunks
        self.moved = moved
        self.alone = alone


class Scheduler(Generic[R]):
    """The scheduler of one replica.

    Args:
        scheduling: its policy and limits.
        caches: the blocks of each of its ranks.
        running: requests that decode; none yet.
        hand_over: takes a request that is prefilled, and the blocks it still holds of its rank, where others decode;
            they are freed by `used` of the cache. None: requests decode here.

    Attributes:
        waiting: requests to be prefilled, in order.
        ready: requests whose cache is elsewhere: swapped out, or sent by another replica.
        prefilling: requests that are prefilled.
        hit_tokens: of prompts that the prefix cache had.
        preemptions: how often a request gave way.
    """

    def __init__(
        self,
        scheduling: Scheduling,
        caches: Sequence[PagedCache],
        running: Running[R],
        hand_over: Callable[[R, float], None] | None = None,
    ) -> None:
        self.scheduling, self.caches, self.running = scheduling, caches, running
        self.waiting: deque[R] = deque()
        self.ready: deque[R] = deque()
        self.prefilling: deque[Piece[R]] = deque()
        self.hit_tokens = self.preemptions = 0
        self._policy = scheduling.policy
        self._watermark = math.ceil(scheduling.watermark * caches[0].blocks)
        self._hand_over = hand_over
        self._filling = True
        self._moved: list[int] = []

    # Requests that come and go

    def add(self, request: R) -> None:
        """Take in a request; its cache was sent along where it has produced a token."""
        (self.ready if request.produced else self.waiting).append(request)

    def takes_another(self) -> bool:
        """Whether the one request that waits may be taken in before one is done; its blocks aside."""
        return (
            (self._policy != "decode-first" or bool(self.ready))
            and len(self.ready) + len(self.waiting) == 1
            and self.running.count < self.scheduling.max_batch
        )

    def cancel(self, request: R) -> bool:
        """Drop a request and free its blocks, between steps only; False if it is not here any more."""
        cache = self.caches[request.rank]
        if request.serial:
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        elif request in self.ready:
            self.ready.remove(request)
        else:
            piece = next((piece for piece in self.prefilling if piece.request is request), None)
            if piece is None:
                return False
            self.prefilling.remove(piece)
            cache.used -= cache.unshare(request, piece.tokens)
        return True

    # What to do next

    def begin(self) -> Step[R] | None:
        """Begin what comes next; None if nothing can be done."""
        if self.ready:
            self._resume()
        if self._policy == "chunked":
            return self._begin_mixed()
        if self._policy == "prefill-first":
            return (self._begin_prefill() if self.waiting else None) or self._begin_decode()
        step = None
        if self._filling or not self.running.count:
            step = self._begin_prefill()
        self._filling = step is not None
        return step or self._begin_decode()

    def _begin_mixed(self) -> Step[R] | None:
        """Begin a step of pieces of prompts beside those that decode; one of decoding alone where there are none."""
        running = self.running
        if not self.prefilling and not self.waiting:
            return self._begin_decode()
        gave = self._make_way()
        budget = self.scheduling.max_step_tokens - running.count * self.scheduling.tokens_each
        chunks: list[tuple[Piece[R], int]] = []
        for piece in chain(tuple(self.prefilling), iter(self._admit, None)):
            chunks.append((piece, min(piece.tokens - piece.done, budget)))
            budget -= chunks[-1][1]
            if not budget:
                break
        if not chunks:
            return self._begin_decode(gave=gave)
        return self._begun(running.count, chunks)

    def _begin_prefill(self) -> Step[R] | None:
        """Begin a step of whole prompts, as many as the limits allow; None if none."""
        if not self.waiting or (piece := self._admit()) is None:
            return None
        budget = self.scheduling.max_step_tokens
        chunks = []
        while piece is not None:
            chunks.append((piece, piece.tokens - piece.done))
            budget -= chunks[-1][1]
            piece = self._admit(budget) if budget > 0 and self.waiting else None
        return self._begun(0, chunks)

    def _begin_decode(self, *, gave: bool = False) -> Step[R] | None:
        """Begin a decode step; None if nothing decodes. `gave`: whether a request gave way for it already."""
        running = self.running
        if not running.count:
            return None
        for count, cache in zip(running.counts, self.caches, strict=True):
            if count * running.growth > cache.available:  # a block has a token at least
                gave = self._make_way() or gave
                break
        if self.caches[0].prefixes is None and not self._moved:
            return Step(running.count, (), (), gave)
        return self._begun(running.count, (), gave)

    def _begun(self, decoding: int, chunks: Sequence[tuple[Piece[R], int]], alone: bool = False) -> Step[R]:
        if decoding and self.caches[0].prefixes is not None:
            for rank, cache in enumerate(self.caches):
                cache.clear(self.running.next_blocks(rank))
        moved: Sequence[int] = ()
        if self._moved:
            moved, self._moved = self._moved, []
        return Step(decoding, chunks, moved, alone)

    def _make_way(self) -> bool:
        """Preempt requests until those that decode have blocks for their next step; whether any gave way."""
        running, gave = self.running, False
        for rank, cache in enumerate(self.caches):
            while running.next_blocks(rank) > cache.available and (running.counts[rank] > 1 or self._last_piece(rank)):
                self._preempt(rank)
                gave = True
        return gave

    # What happens at the end

    def settle(self, step: Step[R], ended: Collection[R]) -> None:
        """A step is over.

        Args:
            step: as it began.
            ended: requests whose last token it gave.
        """
        if step.decoding:
            self.advance(1)
        self.finish(step, ended)

    def advance(self, steps: int) -> None:
        """All that decode have done so many steps alike, one where their step was `alone` or had chunks."""
        for cache, blocks in zip(self.caches, self.running.advance(steps), strict=True):
            cache.take(blocks)

    def finish(self, step: Step[R], ended: Collection[R]) -> None:
        """Let those go that are done, and those decode that are prefilled; after `advance`, where any decode."""
        for request in ended:
            if request.serial:
                if kept := request.kept():
                    self.caches[request.rank].share(request, kept)
                self._release(request)
        for piece, new in step.chunks:
            piece.done += new
            if piece.done == piece.tokens:  # pieces are worked on in order: the first is done first
                self.prefilling.popleft()
                self._prefilled(piece.request, piece.tokens, ended)

    def _prefilled(self, request: R, tokens: int, ended: Collection[R]) -> None:
        """A prompt is in the cache, and the next token is there."""
        cache = self.caches[request.rank]
        request.produced += 1
        if cache.prefixes is not None:
            cache.share(request, request.prefix)
        if request in ended:
            cache.share(request, request.kept())
            cache.used -= cache.unshare(request, tokens)
        elif self._hand_over is not None:
            self._hand_over(request, cache.unshare(request, tokens))
        else:
            self.running.join(request, tokens)

    def _release(self, request: R) -> None:
        """Take a request from those that decode, and free its blocks."""
        cache, running = self.caches[request.rank], self.running
        tokens = running.tokens(request)
        running.leave(request)
        cache.used -= cache.unshare(request, tokens)

    # Blocks

    def _open(self) -> list[tuple[int, int]]:
        """Requests of the ranks that may have another one, with their numbers; those with the fewest first."""
        if self.running.count + len(self.prefilling) >= self.scheduling.max_batch:
            return []
        counts, most = list(self.running.counts), self.scheduling.rank_batch
        for piece in self.prefilling:
            counts[piece.request.rank] += 1
        return sorted((count, rank) for rank, count in enumerate(counts) if count < most)

    def _spare(self, rank: int, requests: int) -> float:
        """Blocks of a rank with some requests that must stay free when one is taken in."""
        return self._watermark + self.running.next_blocks(rank) if requests else 0

    def _admit(self, most: int | None = None) -> Piece[R] | None:
        """Take in the first waiting request, or None where there is none, or too few blocks on every rank.

        Args:
            most: tokens that its prefill may have.
        """
        if not self.waiting or (self.ready and self.ready[0].index < self.waiting[0].index):
            return None
        ranks, prefix = self._open(), self.waiting[0].prefix
        if len(ranks) > 1 and prefix:  # of those with equally few requests first the one that has most of the prompt
            ranks.sort(key=lambda of: (of[0], -self.caches[of[1]].matched(prefix)))
        pieces = (self._admit_to(rank, requests, most) for requests, rank in ranks)
        return next((piece for piece in pieces if piece is not None), None)

    def _admit_to(self, rank: int, requests: int, most: int | None) -> Piece[R] | None:
        """Take in the first waiting request to a rank that has some, if there are blocks."""
        request, cache = self.waiting[0], self.caches[rank]
        request.rank = rank
        hit = 0 if cache.prefixes is None else cache.pin_prefix(request)
        piece = Piece(request, hit)
        blocks = cache.held(piece.tokens) - request.shared
        if (most is not None and piece.tokens - hit > most) or blocks + self._spare(rank, requests) > cache.available:
            if hit:
                cache.unshare(request, 0)
            return None
        cache.take(blocks)
        self.hit_tokens += hit
        self.waiting.popleft()
        self.prefilling.append(piece)
        return piece

    def _last_piece(self, rank: int) -> Piece[R] | None:
        """Of the requests of a rank that are prefilled the one that was taken in last."""
        return next((piece for piece in reversed(self.prefilling) if piece.request.rank == rank), None)

    def _preempt(self, rank: int) -> None:
        """Let the request of a rank that was taken in last give way."""
        self.preemptions += 1
        cache = self.caches[rank]
        if (piece := self._last_piece(rank)) is not None:
            request = piece.request
            self.prefilling.remove(piece)
            cache.used -= cache.unshare(request, request.prompt + request.produced)
            self.waiting.appendleft(request)
        else:
            running = self.running
            assert running.counts[rank] > 1, "a request that fits alone was to give way"
            request = running.last_joined(rank)
            tokens = running.tokens(request)
            request.produced = running.produced(request)
            self._release(request)
            if self.scheduling.preemption == "swap":
                request.cached = tokens
                self._moved.append(math.ceil(tokens))
                self.ready.appendleft(request)
            else:
                self.waiting.appendleft(request)
        request.preemptions += 1

    def _resume(self) -> None:
        """Let requests go on whose cache is elsewhere, the oldest first, as long as blocks are there."""
        while self.ready and not (self.waiting and self.waiting[0].index < self.ready[0].index):
            request = self.ready[0]
            tokens = request.cached or request.prompt
            blocks = self.caches[0].held(tokens + 1)
            fitting = (r for n, r in self._open() if blocks + self._spare(r, n) <= self.caches[r].available)
            rank = next(fitting, None)
            if rank is None:
                return
            request.rank, cache = rank, self.caches[rank]
            self.ready.popleft()
            cache.take(cache.held(tokens))
            if request.preemptions:
                self._moved.append(math.ceil(tokens))
            self.running.join(request, tokens)
