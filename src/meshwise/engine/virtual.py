"""The engine in virtual time: steps take what costs say and give tokens that are known before; nothing is executed.

With it the engine's decisions are compared with the simulator's, for the very same requests. Not here: JAX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwise.costs.engine import EngineCosts
from meshwise.engine.engine import Engine, Work
from meshwise.engine.requests import EngineRequest, SentCache, Token


@dataclass(frozen=True, slots=True)
class VirtualStep:
    """A step that ends at a time, and its tokens."""

    work: Work
    end: float
    tokens: list[Token]


@dataclass(frozen=True, slots=True)
class VirtualCache:
    """A cache that is there at a time."""

    executor: VirtualExecutor
    time: float

    @property
    def arrived(self) -> bool:
        """Whether it is there."""
        return self.time <= self.executor.now


@dataclass(slots=True)
class VirtualExecutor:
    """Executes steps in no time, by a clock that goes on as costs say.

    Args:
        costs: of a step.
        outputs: what each request will be given.
        now: seconds.
        ranks: of the engine.
        rows: as of `Executor`.
    """

    costs: EngineCosts
    outputs: Mapping[EngineRequest, Sequence[int]]
    now: float = 0.0
    ranks: int = 1
    rows: int = 1
    steps: list[tuple[float, int, int, int]] = field(default_factory=list)
    sent: list[VirtualCache] = field(default_factory=list)

    def clock(self) -> float:
        """Seconds."""
        return self.now

    def run(self, work: Work) -> list[Token]:
        """Let time pass."""
        contexts = [d.position + 1 for d in work.decodes]
        chunks = [(c.start, c.count) for c in work.chunks]
        self.now += self.costs.step_seconds(contexts, chunks, work.filled(self.ranks, self.rows))
        self.steps.append((self.now, len(contexts), len(chunks), sum(new for _, new in chunks)))
        return [Token(self.outputs[request][request.made]) for request in work.asking]

    def follows(self, work: Work, before: VirtualStep) -> bool:  # noqa: ARG002 -- tokens are known
        """Always."""
        return True

    def start(self, work: Work, before: VirtualStep | None) -> VirtualStep:
        """Queue a step behind the one before."""
        contexts, chunks = [d.position + 1 for d in work.decodes], [(c.start, c.count) for c in work.chunks]
        begun = self.now if before is None else max(self.now, before.end)
        end, tokens = begun + self.costs.step_seconds(contexts, chunks, work.filled(self.ranks, self.rows)), []
        for request in work.asking:
            known = self.outputs[request]
            place = request.made + (before is not None and request in before.work.asking)
            tokens.append(Token(known[place] if place < len(known) else 0))  # else one that will be dropped
        self.steps.append((end, len(contexts), len(chunks), sum(new for _, new in chunks)))
        return VirtualStep(work, end, tokens)

    def finish(self, started: VirtualStep) -> list[Token]:
        """Let time pass."""
        self.now = max(self.now, started.end)
        return started.tokens

    def send(self, request: EngineRequest, table: list[int]) -> VirtualCache:  # noqa: ARG002 -- as executors do
        """Send a prompt's cache over one link, after those before it."""
        begin = max(self.now, self.sent[-1].time if self.sent else 0.0)
        self.sent.append(VirtualCache(self, begin + self.costs.transfer_seconds(request.prompt)))
        return self.sent[-1]

    def receive(self, cache: SentCache, table: list[int]) -> None:
        """Nothing is to be done."""


@dataclass(frozen=True, slots=True)
class Event:
    """A request that comes, or is cancelled, at a time."""

    time: float
    request: EngineRequest
    cancelled: bool = False


def serve_events(engine: Engine, executor: VirtualExecutor, events: Sequence[Event]) -> None:
    """Serve requests that come and are cancelled over virtual time; events are in its order."""
    coming = list(events)[::-1]
    while True:
        while coming and coming[-1].time <= executor.now:
            event = coming.pop()
            (engine.cancel if event.cancelled else engine.submit)(event.request)
        if not engine.step():
            away = [cache.time for cache in executor.sent if not cache.arrived]
            if away and engine.scheduler.waiting:
                executor.now = min(away)
            elif not coming:
                return
            else:
                executor.now = max(executor.now, coming[-1].time)
