"""Seconds of requests that decode together: any number of their steps is one jump, in closed form.

In the steps of `scheduling.Running` sums over all requests are a sum of offsets and a count, a finish is a number of a
step, and a request is touched when it joins and when it leaves. Not here: when to decode, and whose cache gives way
(`scheduling`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from functools import cache, lru_cache, partial

import numpy as np

from meshwise.costs.engine import AttentionCosts, EngineCosts
from meshwise.scheduling import Running, Speculation
from meshwise.simulation.serving.requests import Request

#: Numbers of tokens of a prefill whose seconds are remembered.
_REMEMBERED = 4096


class Decoding(Running[Request]):
    """The requests of a replica that decode, and their seconds.

    Args:
        costs: of a step.
        speculation: what drafts there are.
        seed: of what draws which drafts are accepted.
        ranks: of the replica.
    """

    def __init__(
        self, costs: EngineCosts, speculation: Speculation | None, seed: tuple[int, ...], ranks: int = 1
    ) -> None:
        super().__init__(costs.block_tokens, speculation, ranks)
        self.costs, self.speculation = costs, speculation
        # Made only where it is drawn from: a fleet may have 100,000 replicas.
        self._drawn = None if speculation is None else partial(speculation.steps, np.random.default_rng(seed))
        self.offsets: float = 0
        self.finishes: list[tuple[int, int, Request]] = []
        self.read_s = sum(kind.seconds_per_cached_token for kind in costs.attention if kind.window is None)
        self.windows = [_Window(kind, self.growth) for kind in costs.attention if kind.window is not None]
        # Seconds, besides attention, of a decode step by its requests, and of a step that only prefills by its tokens.
        self.fixed_seconds = cache(lambda count: self.step_seconds_of(count, 0))
        self.prefill_seconds = lru_cache(_REMEMBERED)(lambda tokens: self.step_seconds_of(0, tokens))
        self._step_s = self._growth_s = 0.0

    def join(self, request: Request, cached: float) -> None:
        """Take in a request whose cache holds `cached` tokens."""
        Running.join(self, request, cached)
        steps = request.output - request.produced
        if self._drawn is not None:
            steps = self._drawn(steps)
        request.last = self.steps + steps
        self.offsets += request.offset
        heapq.heappush(self.finishes, (request.last, request.serial, request))
        for window in self.windows:
            window.join(request, self.steps)

    def leave(self, request: Request) -> None:
        """Let a request go; `tokens` and `produced` of it must be asked before."""
        Running.leave(self, request)
        self.offsets -= request.offset
        for window in self.windows:
            window.leave(request, self.steps)
        if not self.count:
            self.offsets = 0  # no rounding is carried on

    def produced(self, request: Request) -> int:
        """Tokens of its output that a request has now; of drafts a share of those that it still gets."""
        remaining, steps = request.output - request.produced, request.last - request.joined
        return request.produced + min((self.steps - request.joined) * remaining // steps, remaining - 1)

    def ending(self, steps: int) -> list[Request]:
        """Remove and give the requests that are done after so many more steps."""
        finishes, last = self.finishes, self.steps + steps
        done: list[Request] = []
        while finishes and finishes[0][0] <= last:
            _, serial, request = heapq.heappop(finishes)
            if request.serial == serial:
                done.append(request)
        return done

    def longest_run(self, blocks: Iterable[float]) -> int:
        """Count the steps until one is done, or reaches a window, or blocks of a rank run out; prepare `seconds`."""
        finishes = self.finishes
        while finishes[0][2].serial != finishes[0][1]:
            heapq.heappop(finishes)
        steps: float = finishes[0][0] - self.steps
        for window in self.windows:
            steps = min(steps, window.steps_below(self.steps))
        for count, pages, left in zip(self.counts, self.pages, blocks, strict=True):
            if count > 1 and count * (steps * self.growth / self.costs.block_tokens + 1) > left:
                steps = min(steps, pages.steps_within(count, self.steps, left))  # type: ignore[arg-type]
        self._step_s = self.fixed_seconds(self.filled) + self.attention_seconds()
        self._growth_s = self.read_s * self.growth * self.count
        for window in self.windows:
            self._growth_s += window.growth_s()
        return int(steps)

    def seconds(self, steps: int) -> float:
        """Seconds of `steps` steps, as many as `longest_run` says at most."""
        return steps * self._step_s + self._growth_s * (steps * (steps - 1) // 2)

    def steps_until(self, time: float, start: float, most: int) -> int:
        """Find the first step that ends at `time` or later, at most `most`, of a run that began at `start`."""
        linear, elapsed = self._step_s - self._growth_s / 2, time - start
        if self._growth_s:
            guess = (math.sqrt(linear * linear + 2 * self._growth_s * elapsed) - linear) / self._growth_s
        else:
            guess = elapsed / self._step_s
        steps = min(max(math.ceil(guess), 1), most)
        while steps > 1 and start + self.seconds(steps - 1) >= time:
            steps -= 1
        while steps < most and start + self.seconds(steps) < time:
            steps += 1
        return steps

    def advance(self, steps: int) -> list[float]:
        """Do steps; give the blocks that those of each rank took."""
        blocks = super().advance(steps)
        for window in self.windows:
            window.advance(self.steps)
        return blocks

    def attention_seconds(self) -> float:
        """Seconds in which the next step attends."""
        seconds = self.read_s * (self.offsets + self.count * self.growth * self.steps)
        for window in self.windows:
            seconds += window.seconds(self.steps)
        return seconds

    def step_seconds_of(self, count: int, more_tokens: int) -> float:
        """Seconds, besides attention, of a step in which `count` decode, with so many more tokens of prompts."""
        costs, speculation = self.costs, self.speculation
        drafted = 0 if speculation is None else speculation.draft_tokens
        tokens = count * (1 + drafted) + more_tokens
        seconds = costs.overhead_s + costs.per_request_s * count + costs.tokens_seconds(tokens)
        return seconds + (drafted * speculation.draft_step_s if speculation is not None and count else 0.0)


class _Window:
    """What one kind of windowed layers reads: requests below the window grow, others read the window.

    Args:
        kind: of layers.
        growth: tokens a step.
    """

    def __init__(self, kind: AttentionCosts, growth: float) -> None:
        assert kind.window is not None
        self.window = kind.window
        self.read_s = kind.seconds_per_cached_token
        self.growth = growth
        self.below = self.full = 0
        self.offsets: float = 0
        self.crossings: list[tuple[int, int, Request]] = []

    def _crossing(self, request: Request) -> int:
        """The step in which a request first attends to the whole window."""
        return math.ceil((self.window - request.offset) / self.growth)

    def join(self, request: Request, step: int) -> None:
        crossing = self._crossing(request)
        if crossing <= step:
            self.full += 1
            return
        self.below += 1
        self.offsets += request.offset
        heapq.heappush(self.crossings, (crossing, request.serial, request))

    def leave(self, request: Request, step: int) -> None:
        if self._crossing(request) <= step:
            self.full -= 1
            return
        self.below -= 1
        self.offsets -= request.offset

    def advance(self, step: int) -> None:
        """Move on to `step`: those that now see the whole window grow no more."""
        crossings = self.crossings
        while crossings and crossings[0][0] <= step:
            _, serial, request = heapq.heappop(crossings)
            if request.serial == serial:
                self.below -= 1
                self.full += 1
                self.offsets -= request.offset

    def steps_below(self, step: int) -> float:
        """Steps until the next one reaches the window."""
        crossings = self.crossings
        while crossings and crossings[0][2].serial != crossings[0][1]:
            heapq.heappop(crossings)
        return crossings[0][0] - step if crossings else math.inf

    def seconds(self, step: int) -> float:
        return self.read_s * (self.full * self.window + self.offsets + self.below * self.growth * step)

    def growth_s(self) -> float:
        return self.read_s * self.growth * self.below
