"""Searches in processes of their own: the page stays quick meanwhile, and a search can be cancelled.

A question that is asked twice at once is searched once. Not here: what such a process does (`worker`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import TypeVar

from meshwise.web.answers import Answered
from meshwise.web.links import Pairs

K = TypeVar("K")
V = TypeVar("V")

#: Processes that search at once; further questions wait for one.
MOST = 3

#: Answers and finished searches that are remembered; most bytes of one line of a process.
_REMEMBERED, _LINE = 64, 1 << 26

#: Seconds after which a process is told again that its search is cancelled.
_AGAIN = 0.3

#: Verb, options, and whether somebody waits, so that a search ends after a minute.
Key = tuple[str, Pairs, bool]


class Job:
    """One search, and who waits for it.

    Args:
        key: what is asked.
    """

    def __init__(self, key: Key) -> None:
        self.key = key
        self.id = secrets.token_urlsafe(9)
        self.line = ""
        self.answered: Answered | None = None
        self.cancelled = self.interrupted = self.kept = False
        self.process: Process | None = None
        self.done, self._news = asyncio.Event(), asyncio.Event()
        self._listeners = 0

    @contextlib.contextmanager
    def listened(self) -> Iterator[Job]:
        """Wait for it; when the last who waits has gone, the search is cancelled."""
        self._listeners += 1
        try:
            yield self
        finally:
            self._listeners -= 1
            if self._listeners == 0 and not self.kept:
                self.cancel()

    async def within(self, seconds: float) -> bool:
        """Whether it ends within so many seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.done.wait(), seconds)
        return self.done.is_set()

    async def lines(self) -> AsyncIterator[str]:
        """Progress, until it ends."""
        while not self.done.is_set():
            if self.line:
                yield self.line
            self._news.clear()
            await self._news.wait()

    def cancel(self) -> None:
        """End the search; it gives the best so far."""
        self.cancelled = True
        if self.process is not None and not self.done.is_set():
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGINT)

    def tell(self, line: str) -> None:
        """Pass on a line of progress."""
        self.line = line
        self._news.set()

    def end(self, answered: Answered, *, interrupted: bool) -> None:
        """Pass on the answer."""
        self.answered, self.interrupted = answered, interrupted
        self.done.set()
        self._news.set()


class Searches:
    """The processes, what they search, and what was found."""

    def __init__(self) -> None:
        self._idle: list[Process] = []
        self._running: dict[Key, Job] = {}
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._found: OrderedDict[Key, Answered] = OrderedDict()
        self._places = asyncio.Semaphore(MOST)
        self._tasks: set[asyncio.Task[None]] = set()

    def known(self, key: Key) -> Answered | None:
        """An answer that was found before."""
        return self._found.get(key)

    def job(self, key: Key) -> Job:
        """Search, or join those who wait for the same."""
        job = self._running.get(key)
        if job is None or job.cancelled:
            job = self._running[key] = Job(key)
            _remember(self._jobs, job.id, job)
            self._begin(self._search(job))
        return job

    async def cancel(self, name: str) -> None:
        """Cancel a search by its name, and keep the best so far as the answer."""
        job = self._jobs.get(name)
        if job is None:
            return
        job.kept = True
        while not job.done.is_set():
            job.cancel()
            await job.within(_AGAIN)
        if job.answered is not None:
            _remember(self._found, job.key, job.answered)

    def forget(self, key: Key) -> None:
        """Search anew when it is asked again."""
        self._found.pop(key, None)

    def warm(self) -> None:
        """Start a process before it is needed."""
        self._begin(self._warm())

    async def close(self) -> None:
        """End all processes; who waits is told so."""
        for job in self._running.values():
            job.cancelled = True
        for process in [*self._idle, *(job.process for job in self._running.values() if job.process)]:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(process.wait() for process in self._idle))

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _warm(self) -> None:
        self._idle.append(await _start())

    async def _search(self, job: Job) -> None:
        async with self._places:
            answered, interrupted = _failed(job, "Interrupted", "cancelled before it began"), True
            if not job.cancelled:
                try:
                    answered, interrupted = await self._asked(job)
                except OSError as error:
                    answered = _failed(job, "Bug", f"no process can be started for the search: {error.strerror}")
        if self._running.get(job.key) is job:
            del self._running[job.key]
        if not interrupted:
            _remember(self._found, job.key, answered)
        job.end(answered, interrupted=interrupted)

    async def _asked(self, job: Job) -> tuple[Answered, bool]:
        """Ask a process, one that has searched before if there is one; and whether it was interrupted."""
        self._idle = [process for process in self._idle if process.returncode is None]
        job.process = process = self._idle.pop() if self._idle else await _start()
        assert process.stdin is not None, "its input is a pipe"
        verb, pairs, waiting = job.key
        process.stdin.write(json.dumps({"verb": verb, "pairs": pairs, "waiting": waiting}).encode() + b"\n")
        found = await _heard(process, job)
        self._idle.append(process)
        return found


async def _start() -> Process:
    """Start a process, out of reach of the terminal's Ctrl-C."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "meshwise.web.worker", stdin=PIPE, stdout=PIPE, limit=_LINE, start_new_session=True
    )


async def _heard(process: Process, job: Job) -> tuple[Answered, bool]:
    """Listen until the answer; and whether the search was interrupted."""
    assert process.stdout is not None, "its output is a pipe"
    while line := await process.stdout.readline():
        message = json.loads(line)
        if "answer" in message:
            return Answered.from_json(message["answer"]), message["interrupted"]
        job.tell(message["progress"])
    await process.wait()
    why = "perhaps for lack of memory, or with the server"
    return _failed(job, "Ended", f"the process that searched has ended ({process.returncode}), {why}; ask again"), True


def _failed(job: Job, kind: str, words: str) -> Answered:
    verb, pairs, _ = job.key
    return Answered(verb=verb, pairs=pairs, kind=kind, message=words, exit_code=130 if kind == "Interrupted" else 1)


def _remember(kept: OrderedDict[K, V], key: K, value: V) -> None:
    kept[key] = value
    while len(kept) > _REMEMBERED:
        kept.popitem(last=False)
