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
from itertools import chain

import numpy as np

from meshwise.costs.engine import EngineCosts, query_key_pairs
from meshwise.simulation.serving.cache import PagedCache, Request
from meshwise.simulation.serving.decoding import Decoding
from meshwise.simulation.serving.recording import Activity, Recorder, Span
from meshwise.simulation.serving.system import Scheduling


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
        ordered: when it was asked for, and is paid from.
        leaving: when it was told to go; None: it stays.
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
        self.ordered = 0.0
        self.leaving: float | None = None
        self.decoding = Decoding(costs, scheduling.speculation)
        self.waiting: deque[Request] = deque()
        self.ready: deque[Request] = deque()  # their cache is elsewhere: swapped out, or sent by another replica
        self.prefilling: deque[Piece] = deque()
        self.cache = PagedCache(self.decoding.pages, costs.kv_blocks, keeps_prefixes=scheduling.prefix_cache)
        self.activity = Activity(number, costs.kv_blocks)
        self._policy = scheduling.policy
        self._watermark = math.ceil(scheduling.watermark * costs.kv_blocks)
        self._random = np.random.default_rng((seed, number < 0, abs(number)))
        self._hand_over = hand_over
        self._sent: list[tuple[float, float]] = []  # when blocks of requests that were handed over may be dropped
        self._filling = True
        self._busy = False  # whether what it does now is still to be settled
        self._begun = begins
        self._in_use = (0.0, 0.0)  # blocks when the running step, or run, begins and when it ends
        self._moving = 0.0  # seconds of swapping that the next step takes besides
        self._run_begun = 0.0
        self._run_steps = 0
        self._running = False
        self._chunks: list[tuple[Piece, int]] = []  # of the step that is running, with how many tokens

    # Time

    def run_until(self, time: float) -> None:
        """Do all that begins before `time`."""
        if not self.outstanding and not self._busy:
            return  # it has nothing to do
        while self.clock <= time:
            if self._busy:
                self._busy = False
                self._settle()
            if self.clock >= time:
                return  # what arrives now is seen by what begins now
            if not self._begin():
                return

    def lifetime(self, end: float) -> float:
        """Seconds that it was there, where all is over at `end`; told to go, it finishes what it has."""
        gone = end if self.leaving is None else min(max(self.leaving, self.clock), end)
        return gone - self.ordered

    def enqueue(self, request: Request, time: float) -> None:
        """Take in a request that arrives at `time`, up to which all was done.

        Its cache is sent along where it has produced a token.
        """
        self.outstanding += 1
        if not self._busy:
            self.clock = max(self.clock, time)
        queue = self.ready if request.produced else self.waiting
        queue.append(request)
        # Whether one more request may be taken in before one is done; its blocks aside.
        joins = self._running and self._policy != "decode-first" and len(self.ready) + len(self.waiting) == 1
        if joins and self.decoding.count < self.scheduling.max_batch:
            steps = self.decoding.steps_until(time, self._run_begun, self._run_steps)
            if steps < self._run_steps:
                self._run_steps = steps
                self.clock = self._run_begun + self.decoding.seconds(steps)

    # What to do next

    def _begin(self) -> bool:
        """Begin what comes next, if there is anything."""
        if self._sent:
            self._drop_sent()
        elif not self.decoding.count and not self.prefilling:
            self.cache.used = 0  # no rounding is carried on
        if self.ready:
            self._resume()
        if self._policy == "chunked":
            return self._begin_mixed()
        if self._policy == "prefill-first":
            return self._begin_prefill() or self._begin_run()
        self._filling = (self._filling or not self.decoding.count) and self._begin_prefill()
        return self._filling or self._begin_run()

    def _begin_mixed(self) -> bool:
        """Begin a step of pieces of prompts beside those that decode; a run where there are none."""
        decoding = self.decoding
        if not self.prefilling and not self.waiting:
            return self._begin_run()
        while self._next_blocks() > self.cache.available and (self.prefilling or decoding.count > 1):
            self._preempt()
        budget = self.scheduling.max_step_tokens - decoding.count * self.scheduling.tokens_each
        chunks: list[tuple[Piece, int]] = []
        for piece in chain(tuple(self.prefilling), iter(self._admit, None)):
            chunks.append((piece, min(piece.tokens - piece.done, budget)))
            budget -= chunks[-1][1]
            if not budget:
                break
        if not chunks:
            return self._begin_run()
        tokens = sum(new for _, new in chunks)
        seconds = decoding.step_seconds_of(decoding.count, tokens) + decoding.attention_seconds()
        self._occupy(seconds + self._take(chunks), min(decoding.count, 1))
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
        self._occupy(seconds + self._take(chunks), 0)
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
                self._occupy(self._sent[0][0] - self.clock, 0)
                return True
            assert not self.outstanding, "a request that fits alone was not taken in"
            return False
        steps = decoding.longest_run(self.cache.available)
        while not steps:
            self._preempt()
            steps = min(decoding.longest_run(self.cache.available), 1)  # then there may be room for who gave way
        self._run_begun = self.clock + self._moving
        self._running = True
        self._occupy(decoding.seconds(steps), steps)
        return True

    def _occupy(self, seconds: float, steps: int) -> None:
        """Be busy with a step or a run, of so many decode steps."""
        self._begun = self.clock
        in_use = self.cache.in_use
        self._in_use = (in_use, in_use)
        self.clock = self.clock + self._moving + seconds
        self._moving = 0.0
        self._run_steps = steps
        self._busy = True

    # What happens at the end

    def _settle(self) -> None:
        """A step of prompts, of decoding or of both is over, or a run, or time in which blocks were sent."""
        self._running = False
        count, steps = self.decoding.count, self._run_steps
        if steps:
            self._advance(steps)
        if self._chunks:
            tokens = self._prefill_chunks()
            self._did("mixed" if steps else "prefill", count if steps else 0, steps, tokens)
        elif steps:
            self._did("decode", count, steps, 0)

    def _did(self, kind: str, decoding: int, steps: int, tokens: int) -> None:
        """Record a step, or a run, that is over."""
        activity, recorder, end = self.activity, self.recorder, self.clock
        activity.add(end - self._begun, self._in_use, decoding, steps, tokens)
        if end >= activity.next_sample:
            activity.sample(end, self._in_use[1], self.decoding.count, len(self.waiting) + len(self.ready))
        if len(recorder.spans) < recorder.max_spans:
            recorder.spans.append(Span(self.number, self._begun, end, kind, decoding, steps, tokens))

    def _prefill_chunks(self) -> int:
        """The pieces of the running step are in the cache; give their tokens."""
        tokens = 0
        for piece, new in self._chunks:
            tokens += new
            piece.done += new
            if piece.done == piece.tokens:  # pieces are worked on in order: the first is done first
                self.prefilling.popleft()
                self._prefilled(piece.request)
        self._chunks = []
        return tokens

    def _advance(self, steps: int) -> None:
        """All that decode have done `steps` steps."""
        decoding, cache = self.decoding, self.cache
        cache.used += decoding.advance(steps)
        self._in_use = (self._in_use[0], cache.in_use)
        for request in decoding.finished():
            tokens = decoding.tokens(request)
            decoding.leave(request)
            self._leave(request, tokens)
        cache.take(0)

    def _prefilled(self, request: Request) -> None:
        """A prompt is in the cache, and the next token is there."""
        tokens = request.prompt + request.produced
        request.produced += 1
        if request.produced == 1:
            request.first = self.clock
        self.cache.share(request, request.prefix)
        remaining = request.output - request.produced
        if not remaining:
            self._leave(request, tokens)
        elif self._hand_over is not None:
            own = self.cache.unshare(request, tokens)
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
        if request.keep_as is not None:
            own = request.prompt + request.output - 1 - sum(size for _, size in request.prefix)
            self.cache.share(request, (*request.prefix, (request.keep_as, own)))
        self.cache.used -= self.cache.unshare(request, tokens)
        self.outstanding -= 1
        self.recorder.done(request, self.clock)

    # Blocks

    def _next_blocks(self) -> float:
        """Blocks that those that decode need for their next step."""
        decoding = self.decoding
        return decoding.pages.grown(decoding.count, decoding.steps, 1)

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
        hit = self.cache.pin_prefix(request)
        piece = Piece(request, hit)
        blocks = self.cache.held(piece.tokens) - request.shared
        if (most is not None and piece.tokens - hit > most) or blocks + self._spare(running) > self.cache.available:
            if hit:
                self.cache.unshare(request, 0)
            return None
        self.cache.take(blocks)
        self.activity.hit_tokens += hit
        self.waiting.popleft()
        self.prefilling.append(piece)
        if request.started < 0:
            request.started = self.clock
        return piece

    def _preempt(self) -> None:
        """Let the request that was taken in last give way."""
        self.activity.preemptions += 1
        if self.prefilling:
            request = self.prefilling.pop().request
            self.cache.used -= self.cache.unshare(request, request.prompt + request.produced)
            self.waiting.appendleft(request)
        else:
            decoding = self.decoding
            assert decoding.count > 1, "a request that fits alone was to give way"
            request = decoding.last_joined()
            tokens = decoding.tokens(request)
            remaining, steps = request.output - request.produced, request.last - request.joined
            request.produced += min((decoding.steps - request.joined) * remaining // steps, remaining - 1)
            decoding.leave(request)
            self.cache.used -= self.cache.unshare(request, tokens)
            if self.scheduling.preemption == "swap":
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
            room = self.cache.held(tokens + 1)
            running = self.decoding.count + len(self.prefilling)
            if running >= self.scheduling.max_batch or room + self._spare(running) > self.cache.available:
                return
            self.ready.popleft()
            self.cache.take(self.cache.held(tokens))
            if request.preemptions:
                self._moving += self.costs.swap_seconds(math.ceil(tokens))
            self._join(request, tokens)

    def _drop_sent(self) -> None:
        """Free the blocks that have been sent."""
        while self._sent and self._sent[0][0] <= self.clock:
            self.cache.used -= heapq.heappop(self._sent)[1]
