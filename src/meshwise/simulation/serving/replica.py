"""One replica of an engine: continuous batching over a paged cache, from event to event.

A replica is always at the end of what it does next: `clock` is when the running step, or run of decode steps, is
over, and `_settle` what happens then. A run goes on to the next finish, or until blocks run out; a request that arrives
meanwhile and could be taken in cuts it at the end of the step that is running.

Not here: which requests come to this replica (`fleet`), and sums over steps (`decoding`).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable

import numpy as np

from meshwise.costs.engine import EngineCosts, query_key_pairs
from meshwise.simulation.serving.decoding import Decoding
from meshwise.simulation.serving.pages import PrefixCache
from meshwise.simulation.serving.recording import Activity, Recorder
from meshwise.simulation.serving.scheduling import Request, Scheduling


class Piece:
    """A request that is prefilled, and how many of its tokens are done."""

    __slots__ = ("done", "request", "tokens")

    def __init__(self, request: Request, done: int) -> None:
        self.request, self.done = request, done
        self.tokens = request.prompt + request.produced


class Replica:
    """One replica.

    Args:
        number: of the replica.
        costs: of its steps.
        scheduling: what its scheduler is told.
        recorder: is told of requests that are done, and of what was done when.
        seed: of what speculation draws.
        hand_over: takes requests that are prefilled, and the time, where others decode; it gives the time at which
            their cache has been sent, and may be dropped here.
        begins: when it is there, seconds.

    Attributes:
        clock: when what it does now is over.
        outstanding: requests that it has and that are not done.
        in_use_begun, in_use_ended: blocks in use when this began, and at its end before requests leave.
    """

    def __init__(
        self,
        number: int,
        costs: EngineCosts,
        scheduling: Scheduling,
        recorder: Recorder,
        *,
        seed: int = 0,
        hand_over: Callable[[Request, float], float] | None = None,
        begins: float = 0.0,
    ) -> None:
        self.number, self.costs, self.scheduling, self.recorder = number, costs, scheduling, recorder
        self.clock = self.begins = begins
        self.outstanding = 0
        self.decoding = Decoding(costs, scheduling.speculation)
        self.pages = self.decoding.pages
        self.waiting: deque[Request] = deque()
        self.ready: deque[Request] = deque()  # their cache is elsewhere: swapped out, or sent by another replica
        self.prefilling: deque[Piece] = deque()
        self.cache = PrefixCache(costs.block_tokens) if scheduling.prefix_cache else None
        self.used: float = 0  # blocks that requests have, those of the prefix cache not counted
        self.activity = Activity()
        self._watermark = math.ceil(scheduling.watermark * costs.kv_blocks)
        self._random = np.random.default_rng((seed, number < 0, abs(number)))
        self._hand_over = hand_over
        self._sent: list[tuple[float, float]] = []  # when blocks of requests that were handed over may be dropped
        self._start = {
            "prefill-first": self._start_prefill_first,
            "decode-first": self._start_decode_first,
            "chunked": self._start_chunked,
        }[scheduling.policy]
        self._swaps = scheduling.preemption == "swap"
        self._joins_runs = scheduling.policy != "decode-first"
        self._filling = True
        self._settle: Callable[[], None] | None = None
        self._begun = begins
        self.in_use_begun = self.in_use_ended = 0.0  # of the running step, or run
        self._moving = 0.0  # seconds of swapping that the next step takes besides
        self._run_begun = 0.0
        self._run_steps = 0
        self._running = False
        self._chunks: list[tuple[Piece, int]] = []  # of the step that is running, with how many tokens

    # Time

    def run_until(self, time: float) -> None:
        """Do all that begins before `time`."""
        while self.clock <= time:
            if self._settle is not None:
                settle, self._settle = self._settle, None
                settle()
            if self.clock >= time:
                return  # what arrives now is seen by what begins now
            if not self._begin():
                return

    def enqueue(self, request: Request, time: float) -> None:
        """Take in a request that arrives at `time`, up to which all was done.

        Its cache is sent along where it has produced a token.
        """
        self.outstanding += 1
        if self._settle is None:
            self.clock = max(self.clock, time)
        queue = self.ready if request.produced else self.waiting
        queue.append(request)
        if self._running and self._could_join():
            steps = self.decoding.steps_until(time, self._run_begun, self._run_steps)
            if steps < self._run_steps:
                self._run_steps = steps
                self.clock = self._run_begun + self.decoding.seconds(steps)

    def _could_join(self) -> bool:
        """Whether one more request may be taken in before one is done; its blocks aside."""
        return (
            self._joins_runs
            and self.decoding.count < self.scheduling.max_batch
            and len(self.ready) + len(self.waiting) == 1
        )

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest request that has room when it is alone."""
        return self.pages.most_tokens(self.costs.kv_blocks)

    # What to do next

    def _begin(self) -> bool:
        """Begin what comes next, if there is anything."""
        if self._sent:
            self._drop_sent()
        elif not self.decoding.count and not self.prefilling:
            self.used = 0  # no rounding is carried on
        if self.ready:
            self._resume()
        return self._start()

    def _start_prefill_first(self) -> bool:
        return self._begin_prefill() or self._begin_run()

    def _start_decode_first(self) -> bool:
        self._filling = (self._filling or not self.decoding.count) and self._begin_prefill()
        return self._filling or self._begin_run()

    def _start_chunked(self) -> bool:
        decoding = self.decoding
        if not self.prefilling and not self.waiting:
            return self._begin_run()
        while self._next_blocks() > self._available() and (self.prefilling or decoding.count > 1):
            self._preempt()
        budget = self.scheduling.max_step_tokens - decoding.count * self.scheduling.tokens_each
        chunks: list[tuple[Piece, int]] = []
        for piece in self.prefilling:
            if budget:
                chunks.append((piece, min(piece.tokens - piece.done, budget)))
                budget -= chunks[-1][1]
        while budget and (piece := self._admit()) is not None:  # type: ignore[assignment]
            chunks.append((piece, min(piece.tokens - piece.done, budget)))
            budget -= chunks[-1][1]
        if not chunks:
            return self._begin_run()
        tokens = sum(new for _, new in chunks)
        seconds = decoding.step_seconds_of(decoding.count, tokens) + decoding.attention_seconds()
        self._occupy(seconds + self._take(chunks), self._settle_mixed)
        return True

    def _begin_prefill(self) -> bool:
        """Begin a step of whole prompts, as many as there is room for; False if for none."""
        if not self.waiting or (piece := self._admit()) is None:
            return False
        budget = self.scheduling.max_step_tokens
        chunks = []
        while piece is not None:
            chunks.append((piece, piece.tokens - piece.done))
            budget -= chunks[-1][1]
            piece = self._admit(budget) if budget > 0 and self.waiting else None
        seconds = self.decoding.prefill_seconds(self.scheduling.max_step_tokens - budget)
        self._occupy(seconds + self._take(chunks), self._settle_prefill)
        return True

    def _take(self, chunks: list[tuple[Piece, int]]) -> float:
        """Make pieces of prompts those of the running step; give the seconds in which they attend."""
        self._chunks = chunks
        seconds = 0.0
        for kind in self.costs.attention:
            pairs = 0
            for piece, new in chunks:
                pairs += query_key_pairs(piece.done, new, kind.window)
            seconds += kind.seconds_per_pair * pairs
        return seconds

    def _begin_run(self) -> bool:
        """Begin decode steps, up to the next finish; False if nothing decodes and nothing is to wait for."""
        decoding = self.decoding
        if not decoding.count:
            if self._sent and self.waiting:
                self._occupy(self._sent[0][0] - self.clock, self._settle_nothing)
                return True
            assert not self.outstanding, "a request that fits alone was not taken in"
            return False
        steps = decoding.longest_run(self._available())
        while not steps:
            self._preempt()
            steps = min(decoding.longest_run(self._available()), 1)  # then there may be room for who gave way
        self._run_steps = steps
        self._run_begun = self.clock + self._moving
        self._running = True
        self._occupy(decoding.seconds(steps), self._settle_run)
        return True

    def _occupy(self, seconds: float, settle: Callable[[], None]) -> None:
        """Be busy with a step or a run."""
        self._begun = self.clock
        self.in_use_begun = self.in_use_ended = self.used if self.cache is None else self.in_use
        self.clock = self.clock + self._moving + seconds
        self._moving = 0.0
        self._settle = settle

    # What happens at the end

    def _settle_run(self) -> None:
        self._running = False
        count = self.decoding.count
        self._advance(self._run_steps)
        self.recorder.did(self, self._begun, "decode", decoding=count, steps=self._run_steps, tokens=0)

    def _settle_prefill(self) -> None:
        tokens = self._prefill_chunks()
        self.recorder.did(self, self._begun, "prefill", decoding=0, steps=0, tokens=tokens)

    def _settle_mixed(self) -> None:
        count = self.decoding.count
        if count:
            self._advance(1)
        tokens = self._prefill_chunks()
        kind = "mixed" if count else "prefill"
        self.recorder.did(self, self._begun, kind, decoding=count, steps=1 if count else 0, tokens=tokens)

    def _prefill_chunks(self) -> int:
        """The pieces of the running step are in the cache; give their tokens."""
        tokens = 0
        for piece, new in self._chunks:
            tokens += new
            piece.done += new
            if piece.done == piece.tokens:  # pieces are worked on in order: the first is done first
                self.prefilling.popleft()
                self._prefilled(piece.request)
        return tokens

    def _settle_nothing(self) -> None:
        """Time has passed; blocks were sent."""

    def _advance(self, steps: int) -> None:
        """All that decode have done `steps` steps."""
        decoding = self.decoding
        self.used += decoding.advance(steps)
        self.in_use_ended = self.in_use
        for request in decoding.finished():
            tokens = decoding.tokens(request)
            decoding.leave(request)
            self._leave(request, tokens)
        if self.cache is not None:
            self._evict()

    def _prefilled(self, request: Request) -> None:
        """A prompt is in the cache, and the next token is there."""
        tokens = request.prompt + request.produced
        request.produced += 1
        if request.produced == 1:
            request.first = self.clock
        if self.cache is not None and request.prefix:
            self._share(request, request.prefix)
        remaining = request.output - request.produced
        if not remaining:
            self._leave(request, tokens)
        elif self._hand_over is not None:
            own = self._unshare(request, tokens)
            heapq.heappush(self._sent, (self._hand_over(request, self.clock), own))
            self.outstanding -= 1
        else:
            self._join(request, tokens)

    def _join(self, request: Request, tokens: float) -> None:
        """Let a request decode."""
        steps = request.output - request.produced
        if self.scheduling.speculation is not None:
            steps = self.scheduling.speculation.steps(self._random, steps)
        self.decoding.join(request, tokens, steps)

    def _leave(self, request: Request, tokens: float) -> None:
        """A request is done."""
        if self.cache is not None and request.keep_as is not None:
            own = request.prompt + request.output - 1 - sum(size for _, size in request.prefix)
            self._share(request, (*request.prefix, (request.keep_as, own)))
        self.used -= self._unshare(request, tokens)
        self.outstanding -= 1
        self.recorder.done(request, self.clock)

    # Blocks

    @property
    def in_use(self) -> float:
        """Blocks that requests use, those that they share included."""
        return self.used if self.cache is None else self.used + self.cache.pinned

    def _available(self) -> float:
        """Blocks that are free, or can be had by evicting prefixes."""
        free = self.costs.kv_blocks - self.used
        return free if self.cache is None else free - self.cache.pinned

    def _evict(self) -> None:
        """Make room where requests have grown into prefixes that nobody uses."""
        assert self.cache is not None
        over = self.used + self.cache.blocks - self.costs.kv_blocks
        if over > 0:
            self.cache.evict(math.ceil(over))

    def _next_blocks(self) -> float:
        """Blocks that those that decode need for their next step."""
        decoding = self.decoding
        return self.pages.grown(decoding.count, decoding.steps, 1)

    def _spare(self, running: int) -> float:
        """Blocks that must stay free when a request is taken in."""
        return self._watermark + self._next_blocks() if running else 0

    def _admit(self, most: int | None = None) -> Piece | None:
        """Take in the first waiting request, or None where there is none, or no room.

        Args:
            most: tokens that its prefill may have.
        """
        running = self.decoding.count + len(self.prefilling)
        if not self.waiting or running >= self.scheduling.max_batch:
            return None
        request = self.waiting[0]
        if self.ready and self.ready[0].index < request.index:
            return None
        hit = 0 if self.cache is None else self._pin_prefix(request)
        piece = Piece(request, hit)
        blocks = self.pages.held(piece.tokens) - request.shared
        if (most is not None and piece.tokens - hit > most) or blocks + self._spare(running) > self._available():
            if hit:
                self._unshare(request, 0)
            return None
        self.used += blocks
        if self.cache is not None:
            self._evict()
            self.activity.hit_tokens += hit
        self.waiting.popleft()
        self.prefilling.append(piece)
        if request.started < 0:
            request.started = self.clock
        return piece

    def _pin_prefix(self, request: Request) -> int:
        """Find what is cached of a prompt, all but a last token at most, and keep it; give its tokens."""
        assert self.cache is not None
        node, found = self.cache.match(request.prefix)
        shared = min(found, request.prompt + request.produced - 1) // self.costs.block_tokens
        if shared:
            self.cache.pin(node)
            request.node, request.shared = node, shared
        return shared * self.costs.block_tokens

    def _share(self, request: Request, path: tuple[tuple[str, int], ...]) -> None:
        """Put what a request has of a path into the prefix cache."""
        assert self.cache is not None
        node = self.cache.insert(path)
        if request.node is not None:
            self.cache.unpin(request.node)
        shared = min(node.end, sum(size for _, size in path)) // self.costs.block_tokens
        self.used -= shared - request.shared
        request.node, request.shared = node, shared

    def _unshare(self, request: Request, tokens: float) -> float:
        """Let go of what a request shares; give the blocks of its own, of so many tokens in all."""
        own = self.pages.held(tokens) - request.shared  # type: ignore[arg-type]
        if request.node is not None:
            assert self.cache is not None
            self.cache.unpin(request.node)
            request.node, request.shared = None, 0
        return own

    def _preempt(self) -> None:
        """Let the request that was taken in last give way."""
        self.activity.preemptions += 1
        if self.prefilling:
            request = self.prefilling.pop().request
            self.used -= self._unshare(request, request.prompt + request.produced)
            self.waiting.appendleft(request)
        else:
            decoding = self.decoding
            assert decoding.count > 1, "a request that fits alone was to give way"
            request = decoding.last_joined()
            tokens = decoding.tokens(request)
            remaining, steps = request.output - request.produced, request.last - request.joined
            request.produced += min((decoding.steps - request.joined) * remaining // steps, remaining - 1)
            decoding.leave(request)
            self.used -= self._unshare(request, tokens)
            if self._swaps:
                request.cached = tokens
                self._moving += self.costs.swap_seconds(math.ceil(tokens))
                self.ready.appendleft(request)
            else:
                self.waiting.appendleft(request)
        request.preemptions += 1

    def _resume(self) -> None:
        """Let requests go on whose cache is elsewhere, the oldest first, as long as there is room."""
        while self.ready and not (self.waiting and self.waiting[0].index < self.ready[0].index):
            request = self.ready[0]
            tokens = request.cached or request.prompt
            room = self.pages.held(tokens + 1)  # type: ignore[arg-type]
            running = self.decoding.count + len(self.prefilling)
            if running >= self.scheduling.max_batch or room + self._spare(running) > self._available():
                return
            self.ready.popleft()
            self.used += self.pages.held(tokens)  # type: ignore[arg-type]
            if self.cache is not None:
                self._evict()
            if request.preemptions:
                self._moving += self.costs.swap_seconds(math.ceil(tokens))
            self._join(request, tokens)

    def _drop_sent(self) -> None:
        """Free the blocks that have been sent."""
        while self._sent and self._sent[0][0] <= self.clock:
            self.used -= heapq.heappop(self._sent)[1]
