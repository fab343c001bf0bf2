"""The engine: requests in, steps by the scheduler, tokens out. One thread decides and runs; others only send.

A request that comes, or is cancelled, is seen before the next step begins. Every decision is told to a log, which
replayed gives the same decisions (`replay`). Not here: how a step is executed (`executor`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from meshwise.engine.hosts import Hosts
from meshwise.engine.replay import head
from meshwise.engine.requests import EngineRequest, SentCache, Token, tell_over
from meshwise.scheduling import BlockTable, Running, Scheduler, Scheduling, Step, busiest, rank_tables


@dataclass(frozen=True, slots=True)
class Decode:
    """A request that decodes in a step.

    Args:
        request: whose last token is fed.
        position: of this token.
        table: pages of the request.
    """

    request: EngineRequest
    position: int
    table: list[int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a prompt in a step.

    Args:
        request: whose tokens are fed.
        start, count: position of the first, and how many.
        last: whether the next token follows from it.
        table: pages of the request.
    """

    request: EngineRequest
    start: int
    count: int
    last: bool
    table: list[int]


@dataclass(frozen=True, slots=True)
class Work:
    """What a step executes; tokens follow for each that decodes, then for each last piece, in order."""

    decodes: list[Decode]
    chunks: list[Chunk]

    @property
    def asking(self) -> list[EngineRequest]:
        """Requests whose next token the step gives."""
        return [d.request for d in self.decodes] + [c.request for c in self.chunks if c.last]

    def filled(self, ranks: int, rows: int = 1) -> tuple[int, int]:
        """Requests that decode, and tokens of prompts in whole rows, if all ranks had as many as the busiest."""
        decoding = busiest(((d.request.rank, 1) for d in self.decodes), ranks)
        return decoding, busiest(((c.request.rank, -(-c.count // rows) * rows) for c in self.chunks), ranks)


class Executor(Protocol):
    """Executes steps; prompts in whole rows of so many tokens."""

    @property
    def rows(self) -> int:
        """Tokens of a row."""
        ...

    def run(self, work: Work) -> list[Token]:
        """The next token of each of `work.asking`."""
        ...

    def follows(self, work: Work, before: Any) -> bool:
        """Whether a step can be started while the tokens of the one before are still on the device."""
        ...

    def start(self, work: Work, before: Any) -> Any:
        """Start a step, after one that was started before and is not finished; None: there is none."""
        ...

    def finish(self, started: Any) -> list[Token]:
        """Wait for a step that was started; its tokens, as `run` gives them."""
        ...

    def send(self, request: EngineRequest, table: list[int]) -> SentCache:
        """Copy a request's pages for `receive` of another; what is written there later does not change the copy."""
        ...

    def receive(self, cache: SentCache, table: list[int]) -> None:
        """Put what another sent into some pages."""
        ...


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that is over.

    Args:
        begun, seconds: of the engine's clock.
        contexts: of each request that decoded, the tokens it attended to.
        chunks: of each piece of a prompt, tokens cached before, and its own.
        filled: requests that decode and tokens of prompts, to which the executor filled it up; rows only.
        waiting: requests that waited when it began.
        blocks: that requests used when it ended.
    """

    begun: float
    seconds: float
    contexts: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]
    filled: tuple[int, int]
    waiting: int
    blocks: float

    @property
    def kind(self) -> str:
        """Of the step: decode, prefill or mixed."""
        return "decode" if not self.chunks else "mixed" if self.contexts else "prefill"


@dataclass(slots=True)
class _UnderWay:
    """A step that was started, and whose tokens were not fetched yet.

    Args:
        work: of the step.
        begun: when.
        waiting: requests that waited then.
        started: as the executor calls it.
        ending: who ends with it for its length.
    """

    work: Work
    begun: float
    waiting: int
    started: Any
    ending: set[EngineRequest] = field(default_factory=set)


class Watcher(Protocol):
    """Who hears what the engine does, in its thread."""

    def step(self, record: StepRecord) -> None:
        """A step is over."""
        ...

    def over(self, request: EngineRequest) -> None:
        """A request is over."""
        ...


#: Seconds after which it is looked whether a cache has arrived, where nothing else can be done.
_POLL = 0.001

#: One line of the log: what happened, and its numbers.
Entry = tuple[Any, ...]


class Engine:
    """Serves requests; one thread at a time may submit them.

    Args:
        scheduling: policy and limits.
        blocks, block_tokens: pages of the cache, and tokens of each.
        executor: executes steps.
        clock: seconds.
        log: takes an entry for each thing that happens, in order; see `replay`.
        watcher: see there.
        hand_over: takes requests that are prefilled, with their caches, where other engines decode.
        ahead: whether a step is decided and started before the tokens of the last are fetched. What ends otherwise than
            by its length is noticed a step later, whose token is dropped.
        hosts: other processes that run it, too.
    """

    def __init__(
        self,
        scheduling: Scheduling,
        blocks: int,
        executor: Executor,
        *,
        block_tokens: int = 16,
        clock: Callable[[], float] = time.monotonic,
        log: Callable[[Entry], None] | None = None,
        watcher: Watcher | None = None,
        hand_over: Callable[[EngineRequest], None] | None = None,
        ahead: bool = False,
        hosts: Hosts | None = None,
    ) -> None:
        assert scheduling.preemption == "recompute", "refused before: swapping"
        assert scheduling.speculation is None, "refused before: drafts"
        self.executor, self.clock = executor, clock
        self.running: Running[EngineRequest] = Running(block_tokens, ranks=scheduling.ranks)
        self.caches = rank_tables(self.running, blocks, scheduling)
        self.scheduler: Scheduler[EngineRequest] = Scheduler(
            scheduling, self.caches, self.running, None if hand_over is None else self._send
        )
        self.failure: BaseException | None = None
        self._log, self._watcher = log, watcher
        self._record(*head(scheduling, blocks, block_tokens, hands_over=hand_over is not None))
        assert not ahead or hand_over is None, "what is handed over has its first token"
        self._hand_over, self._ahead, self._hosts = hand_over, ahead, hosts
        self._under_way: _UnderWay | None = None
        self._fetched = 0.0  # when tokens were last there
        # With a rank's cache, and its blocks that are kept until what was sent has arrived.
        self._sent: list[tuple[EngineRequest, SentCache, BlockTable, float]] = []
        self._prefilled: dict[EngineRequest, list[int]] = {}
        self._inbox: deque[tuple[str, EngineRequest]] = deque()
        self._wake, self._counting = threading.Event(), threading.Lock()
        self._stopping = False
        self._count = self._submitted = self._done = 0

    # From any thread

    def submit(self, request: EngineRequest) -> None:
        """Send a request; its sink hears of it."""
        request.times.setdefault("arrived", self.clock())
        with self._counting:
            self._submitted += 1
        self._inbox.append(("add", request))
        self._wake.set()

    def cancel(self, request: EngineRequest) -> None:
        """Let a request go before the next step, if it is not over by then."""
        self._inbox.append(("cancel", request))
        self._wake.set()

    def stop(self) -> None:
        """Let `serve` return after the running step."""
        self._stopping = True
        self._wake.set()

    @property
    def outstanding(self) -> int:
        """Requests that were sent and are neither done nor handed over."""
        return self._submitted - self._done

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest request that fits when it is alone."""
        return self.caches[0].most_tokens

    @property
    def blocks_in_use(self) -> float:
        """Blocks of the cache that requests use."""
        return sum(cache.in_use for cache in self.caches)

    # In the engine's thread

    def serve(self) -> None:
        """Serve until `stop`; on a failure of the executor all requests end with an error."""
        try:
            while not self._stopping:
                self._wake.clear()
                if not self.step():
                    self._wake.wait(_POLL if self._sent else None if self._hosts is None else self._hosts.idle)
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self._end_all("error" if self.failure else "cancelled")
            if self._hosts is not None:
                self._hosts.close(self.failure)

    def step(self) -> bool:
        """Take in what came, and run a step; False where there is nothing to do."""
        self._take_in()
        if self._ahead:
            return self._step_ahead()
        step = self.scheduler.begin()
        if step is None:
            return False
        begun, waiting = self.clock(), len(self.scheduler.waiting)
        work = self._work(step, begun)
        made = self.executor.run(work)
        ended = self._hand_out(work.asking, made)
        self._prefilled = {chunk.request: chunk.table for chunk in work.chunks}
        self._settle(step, ended)
        for request in ended:
            self._over(request)
        self._watch(work, begun, waiting)
        return True

    def _step_ahead(self) -> bool:
        """Decide and start a step, and only then take in the tokens of the one before."""
        step, before = self.scheduler.begin(), self._under_way
        if step is None:
            self._under_way, late = None, self._fetch(before)
            self._drop(late)
            return before is not None
        begun, waiting, late = self.clock(), len(self.scheduler.waiting), list[EngineRequest]()
        work = self._work(step, begun)
        if before is not None and not self.executor.follows(work, before.started):
            before, late = None, self._fetch(before)
        started = self.executor.start(work, None if before is None else before.started)
        late += self._fetch(before)
        asking = set(work.asking)
        ending = {request for request in asking if request.reason is None and request.made + 1 >= request.max_tokens}
        for request in ending:
            request.coming = 1
        self._under_way = _UnderWay(work, begun, waiting, started, ending)
        own = [request for request in late if request.serial or request in asking]
        self._settle(step, [*own, *(request for request in work.asking if request in ending)])
        for request in own:
            self._over(request)
        self._drop([request for request in late if request not in own])
        return True

    def _fetch(self, under_way: _UnderWay | None) -> list[EngineRequest]:
        """Hand out the tokens of a step; requests that are over with it, and that the scheduler thinks go on."""
        if under_way is None:
            return []
        made = self.executor.finish(under_way.started)
        own = [pair for pair in zip(under_way.work.asking, made, strict=True) if pair[0].reason is None]
        ended = self._hand_out([request for request, _ in own], [token for _, token in own])
        for request in ended:
            if request in under_way.ending:
                self._over(request)
        self._watch(under_way.work, max(under_way.begun, self._fetched), under_way.waiting)
        self._fetched = self.clock()
        return [request for request in ended if request not in under_way.ending]

    def _drop(self, late: list[EngineRequest]) -> None:
        """Let requests go that were over when they gave way to others."""
        for request in late:
            self._record("cancel", request.index)
            self.scheduler.cancel(request)
            self._over(request)

    def _settle(self, step: Step[EngineRequest], ended: list[EngineRequest]) -> None:
        self.scheduler.settle(step, ended)
        if self._log is not None:
            self._record("ended", [(request.index, request.kept()) for request in ended])

    def _watch(self, work: Work, begun: float, waiting: int) -> None:
        if self._watcher is None:
            return
        contexts = tuple(decode.position + 1 for decode in work.decodes)
        pieces = tuple((c.start, c.count) for c in work.chunks)
        seconds, filled = self.clock() - begun, work.filled(len(self.caches), self.executor.rows)
        self._watcher.step(StepRecord(begun, seconds, contexts, pieces, filled, waiting, self.blocks_in_use))

    def _work(self, step: Step[EngineRequest], begun: float) -> Work:
        """What a step executes, in pages of its own."""
        members = list(self.running.members.values()) if step.decoding else []
        held = [int(self.running.tokens(request)) for request in members]
        decodes = [
            Decode(request, tokens, self.caches[request.rank].grow(request, tokens + 1))
            for request, tokens in zip(members, held, strict=True)
        ]
        for decode in decodes:
            if decode.request.cache is not None:
                self.executor.receive(decode.request.cache, decode.table)
                decode.request.cache = None
        chunks = [
            Chunk(
                p.request, p.done, new, p.done + new == p.tokens, self.caches[p.request.rank].grow(p.request, p.tokens)
            )
            for p, new in step.chunks
        ]
        work = Work(decodes, chunks)
        if self._log is not None:
            self._record("step", *self._described(work))
        for chunk in chunks:
            chunk.request.times.setdefault("begun", begun)
        return work

    def _take_in(self) -> None:
        for one in [sent for sent in self._sent if sent[1].arrived]:
            self._sent.remove(one)
            self._record("arrived", one[0].index)
            one[2].used -= one[3]
        came = [self._inbox.popleft() for _ in range(len(self._inbox))]
        for what, request in came if self._hosts is None else self._hosts.agree(came):
            if what == "add":
                if request.index < 0:
                    request.index = self._count
                    self._count += 1
                self._record("add", request.index, request.prompt, request.prefix, request.produced)
                self.scheduler.add(request)
            elif request.engine is not None and request.engine is not self:  # handed over meanwhile
                request.engine.cancel(request)
            elif request.reason is None:
                if self._under_way is None or request not in self._under_way.ending:
                    self._record("cancel", request.index)
                    self.scheduler.cancel(request)
                request.reason = "cancelled"
                self._over(request)

    def _send(self, request: EngineRequest, blocks: float) -> None:
        """Hand a request over; its blocks stay taken until its cache has arrived."""
        assert self._hand_over is not None, "the scheduler hands over"
        request.cache = self.executor.send(request, self._prefilled[request])
        self._sent.append((request, request.cache, self.caches[request.rank], blocks))
        self._done += 1
        self._hand_over(request)

    def _hand_out(self, asking: list[EngineRequest], made: list[Token]) -> list[EngineRequest]:
        """Give each request its token; those that are over with it."""
        now, ended = self.clock(), []
        for request, token in zip(asking, made, strict=True):
            request.times.setdefault("first", now)
            try:
                request.reason = request.take(token)
            except Exception:  # noqa: BLE001 -- whatever a sink does, others go on
                request.reason = "error"
            if request.reason is not None:
                ended.append(request)
        if self._hosts is not None:
            self._hosts.ended(ended)
        return ended

    def _over(self, request: EngineRequest) -> None:
        request.times["done"] = self.clock()
        self._done += 1
        if self._watcher is not None:
            self._watcher.over(request)
        tell_over(request)

    def _end_all(self, reason: str) -> None:
        """All that is not over ends, those too that wait to be taken in."""
        scheduler = self.scheduler
        here = [*self.running.members.values(), *scheduler.waiting, *scheduler.ready]
        here += [piece.request for piece in scheduler.prefilling]
        here += [] if self._under_way is None else [r for r in self._under_way.ending if r.reason is None]
        for request in [*here, *(r for what, r in self._inbox if what == "add")]:
            request.reason = reason
            tell_over(request)
        self._inbox.clear()

    def _described(self, work: Work) -> tuple[list[list[Any]], list[list[Any]]]:
        """A step in numbers: who decodes with which pages, and which pieces of whom."""
        decodes = [[d.request.index, d.position, list(d.table)] for d in work.decodes]
        return decodes, [[c.request.index, c.start, c.count, list(c.table)] for c in work.chunks]

    def _record(self, *entry: Any) -> None:
        if self._log is not None:
            self._log(entry)
