"""One replica of an engine: continuous batching over a paged cache, from event to event.

A replica is always at the end of what it does next: `clock` is when the running step, or run of decode steps, is
over, and `_settle` what happens then. A run goes on to the next finish, or until blocks run out; a request that arrives
meanwhile and could be taken in cuts it at the end of the step that is running.

Not here: what is done next (`scheduling`), which requests come to this replica (`fleet`), sums over steps (`decoding`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from meshwise.costs.engine import EngineCosts, query_key_pairs
from meshwise.scheduling import PagedCache, Scheduler, Scheduling, Step
from meshwise.simulation.serving.decoding import Decoding
from meshwise.simulation.serving.recording import Activity, Recorder, Span
from meshwise.simulation.serving.requests import Request


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
        self.decoding = Decoding(costs, scheduling.speculation, (seed, number < 0, abs(number)), scheduling.ranks)
        each = max(costs.kv_blocks // scheduling.ranks, 1)
        self.caches = tuple(
            PagedCache(pages, each, keeps_prefixes=scheduling.prefix_cache) for pages in self.decoding.pages
        )
        self.scheduler = Scheduler(
            scheduling, self.caches, self.decoding, hand_over=None if hand_over is None else self._send
        )
        self._activity = Activity(number, costs.kv_blocks)
        self._hand_over = hand_over
        self._sent: list[tuple[float, float, int]] = []  # when blocks of whose rank, handed over, may be dropped
        self._cancelled: list[Request] = []  # to be let go before the next step
        self._busy = False  # whether what it does now is still to be settled
        self._begun = begins
        self._in_use = 0.0  # blocks when the running step, or run, begins
        self._run_begun = 0.0
        self._run_steps = 0
        self._running = False
        self._step: Step[Request] | None = None  # None: blocks are sent

    @property
    def activity(self) -> Activity:
        """What it has done."""
        self._activity.hit_tokens = self.scheduler.hit_tokens
        self._activity.preemptions = self.scheduler.preemptions
        return self._activity

    @property
    def in_use(self) -> float:
        """Blocks that requests use."""
        return sum(cache.in_use for cache in self.caches)

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
        scheduler = self.scheduler
        scheduler.add(request)
        if self._running and scheduler.takes_another():
            self._cut(time)

    def cancel(self, request: Request, time: float) -> None:
        """Let a request go at `time`, up to which all was done: when the step that runs then is over."""
        self._cancelled.append(request)
        if self._running:
            self._cut(time)

    def _cut(self, time: float) -> None:
        """End a run with the step that runs at `time`."""
        steps = self.decoding.steps_until(time, self._run_begun, self._run_steps)
        if steps < self._run_steps:
            self._run_steps = steps
            self.clock = self._run_begun + self.decoding.seconds(steps)

    # What to do next

    def _begin(self) -> bool:
        """Begin what comes next, if there is anything."""
        decoding, scheduler = self.decoding, self.scheduler
        if self._cancelled:
            self.outstanding -= sum(map(scheduler.cancel, self._cancelled))
            self._cancelled.clear()
        if self._sent:
            self._drop_sent()
        elif not decoding.count and not scheduler.prefilling:
            for cache in self.caches:
                cache.used = 0  # no rounding is carried on
        self._step = step = scheduler.begin()
        if step is None:
            if self._sent and scheduler.waiting:
                self._occupy(0.0, self._sent[0][0] - self.clock, 0)
                return True
            assert not self.outstanding, "a request that fits alone was not taken in"
            return False
        # Seconds of swapping that the step takes besides.
        moving = sum(map(self.costs.swap_seconds, step.moved)) if step.moved else 0.0
        if step.chunks:
            self._occupy(moving, self._prefill_seconds(step), min(step.decoding, 1))
            return True
        steps = decoding.longest_run([cache.available for cache in self.caches])  # which prepares `seconds`, too
        if step.alone or not steps:  # there may be blocks now for who gave way; blocks of drafts are rounded
            steps = 1
        self._run_begun = self.clock + moving
        self._running = True
        self._occupy(moving, decoding.seconds(steps), steps)
        return True

    def _prefill_seconds(self, step: Step[Request]) -> float:
        """Seconds of a step of pieces of prompts, maybe beside those that decode."""
        decoding, tokens = self.decoding, self.decoding.filled_tokens(step.chunks)
        for piece, _ in step.chunks:
            if piece.request.started < 0:
                piece.request.started = self.clock
        if step.decoding:
            seconds = decoding.step_seconds_of(decoding.filled, tokens) + decoding.attention_seconds()
        else:
            seconds = decoding.prefill_seconds(tokens)
        attending = 0.0
        for kind in self.costs.attention:
            pairs = 0
            for piece, new in step.chunks:
                pairs += query_key_pairs(piece.done, new, kind.window)
            attending += kind.seconds_per_pair * pairs
        return seconds + attending

    def _occupy(self, moving: float, seconds: float, steps: int) -> None:
        """Be busy with a step or a run, of so many decode steps."""
        self._begun = self.clock
        self._in_use = self.in_use
        self.clock = self.clock + moving + seconds
        self._run_steps = steps
        self._busy = True

    # What happens at the end

    def _settle(self) -> None:
        """A step of prompts, of decoding or of both is over, or a run, or time in which blocks were sent."""
        self._running = False
        step = self._step
        if step is None:
            return
        decoding, steps, clock = self.decoding, self._run_steps, self.clock
        count, blocks = step.decoding, (self._in_use, self._in_use)
        if steps:
            ended = decoding.ending(steps)
            self.scheduler.advance(steps)
            blocks = (self._in_use, self.in_use)
        else:
            ended = []
        tokens = 0
        for piece, new in step.chunks:
            tokens += new
            if piece.done + new == piece.tokens:
                request = piece.request
                if not request.produced:
                    request.first = clock
                if request.produced + 1 == request.output:
                    ended.append(request)
        if ended or tokens:
            self.scheduler.finish(step, ended)
            self.outstanding -= len(ended)
            for request in ended:
                self.recorder.done(request, clock)
        activity, recorder = self._activity, self.recorder
        activity.add(clock - self._begun, blocks, count, steps, tokens)
        if clock >= activity.next_sample:
            queued = len(self.scheduler.waiting) + len(self.scheduler.ready)
            activity.sample(clock, blocks[1], decoding.count, queued)
        if len(recorder.spans) < recorder.max_spans:
            kind = "decode" if not tokens else "mixed" if steps else "prefill"
            recorder.spans.append(Span(self.number, self._begun, clock, kind, count, steps, tokens))

    # Caches that are sent

    def _send(self, request: Request, blocks: float) -> None:
        """Hand a request over, whose own blocks are free when they have been sent."""
        assert self._hand_over is not None
        rank = request.rank
        heapq.heappush(self._sent, (self._hand_over(request, self.clock), blocks, rank))
        self.outstanding -= 1

    def _drop_sent(self) -> None:
        """Free the blocks that have been sent."""
        while self._sent and self._sent[0][0] <= self.clock:
            _, blocks, rank = heapq.heappop(self._sent)
            self.caches[rank].used -= blocks
