"""Many tasks at once: on processes of this machine, or on a Ray cluster; what a worker that dies leaves is done again.

A process takes tasks from a socket and sends back their results. It is started by a command of its own, not forked: it
needs no `__main__` that can be imported (notebooks have none), and shares no locks.
Not here: what a task is (`sweep`, `simulate_serve`).
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Protocol, TypeVar

from meshwise.core.errors import MeshwiseError, MissingDependencyError

T = TypeVar("T")
R = TypeVar("R")

#: How often a task is begun whose worker dies, on this machine; on a cluster, whose machines come and go, more often.
_TRIES, _RAY_TRIES = 2, 4

#: What a process is.
_COMMAND = "import sys; from meshwise.commands.workers import do_tasks; do_tasks(int(sys.argv[1]))"

#: Tasks that are given to a Ray cluster at once.
_AHEAD = 1000


@dataclass(frozen=True, slots=True)
class Lost:
    """A task without a result.

    Args:
        reason: in words.
    """

    reason: str


class Workers(Protocol):
    """Who does many tasks."""

    def run(self, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[int, R | Lost]]:
        """Give the place of each task and its result as they come, each once.

        Args:
            function: of a module, so that workers find it.
            tasks: what it is called with.
        """


def choose_workers(jobs: int | None, ray: str | None) -> Workers:
    """Take the cores of this machine, or the Ray cluster that was named.

    Raises:
        MeshwiseError: both were asked for; MissingDependencyError where Ray is not installed.
    """
    if ray is None:
        return Processes(jobs or len(os.sched_getaffinity(0)))
    if jobs is not None:
        raise MeshwiseError("--jobs counts processes of this machine: leave it out with --ray")
    return RayCluster(ray)


@dataclass(eq=False, slots=True)
class _Process:
    """One process, this end of its socket, and the task that it does."""

    process: subprocess.Popen[bytes]
    socket: Connection[Any, Any]
    task: int = -1


@dataclass(frozen=True, slots=True)
class Processes:
    """Processes of this machine.

    Args:
        number: how many at most.
    """

    number: int

    def run(self, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[int, R | Lost]]:
        """See `Workers`; processes end with the last task, and when the caller stops to ask."""
        waiting = deque(range(len(tasks)))
        tries = [0] * len(tasks)
        all_of_them: list[_Process] = []
        idle: list[_Process] = []
        busy: dict[Any, _Process] = {}  # by socket
        try:
            while waiting or busy:
                while waiting and len(busy) < self.number:
                    if not idle:
                        idle.append(_start())
                        all_of_them.append(idle[-1])
                    worker = idle.pop()
                    worker.task = waiting.popleft()
                    tries[worker.task] += 1
                    busy[worker.socket] = worker
                    _give(worker, function, tasks[worker.task])
                for ready in wait(list(busy)):
                    worker = busy.pop(ready)
                    try:
                        result = worker.socket.recv()
                    except (EOFError, OSError):
                        died = _end(worker)
                        if tries[worker.task] < _TRIES:
                            waiting.appendleft(worker.task)
                        else:
                            yield worker.task, Lost(f"its process died {_TRIES} times, last {died}")
                        continue
                    idle.append(worker)
                    yield worker.task, result
        finally:
            for worker in all_of_them:
                _end(worker)


def _start() -> _Process:
    ours, theirs = Pipe()
    # One thread each: there is a process for each core. The path, as this process may have changed its own.
    path = os.pathsep.join(p for p in sys.path if p)
    with theirs:
        process = subprocess.Popen(  # noqa: S603  (our own words)
            [sys.executable, "-c", _COMMAND, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    return _Process(process, ours)


def _give(worker: _Process, function: Callable[[T], R], task: T) -> None:
    try:
        worker.socket.send((function, task))
    except OSError:
        return  # it has died: its socket tells


def _end(worker: _Process) -> str:
    """End a process; give how it ended, in words."""
    worker.socket.close()
    worker.process.kill() if worker.process.poll() is None else None
    code = worker.process.wait()
    return f"with exit code {code}" if code >= 0 else f"by signal {signal.Signals(-code).name}"


def call(function: Callable[[T], R], task: T) -> R | Lost:
    """Call a function; what is raised is our own bug, and a result like others."""
    try:
        return function(task)
    except Exception as error:  # noqa: BLE001  (the boundary of a process)
        return Lost(f"this is a bug in meshwise: {' '.join(f'{type(error).__name__}: {error}'.split())}")


def do_tasks(descriptor: int) -> None:
    """Do the tasks that come from a socket until the other end is closed."""
    socket: Connection[Any, Any] = Connection(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first of them ends the others
    try:
        while True:
            function, task = socket.recv()
            socket.send(call(function, task))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster that runs already; meshwise is installed on its machines, which see the same files.

    Args:
        address: as Ray takes it: auto, HOST:PORT or ray://HOST:PORT.
    """

    address: str
    _ray: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Reach the cluster.

        Raises:
            MissingDependencyError: Ray is not installed.
            MeshwiseError: nothing answers there.
        """
        # Ray reads this when it is imported; by default it tries twenty times for 40 s to reach what is gone.
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")
        try:
            import ray  # noqa: PLC0415  (an optional extra)
        except ImportError:
            raise MissingDependencyError("--ray needs Ray: pip install 'meshwise[ray]'") from None
        object.__setattr__(self, "_ray", ray)
        if ray.is_initialized():  # a program that uses Ray itself
            return
        try:
            ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            cause = " ".join(str(error).split())
            raise MeshwiseError(
                f"--ray {self.address}: no cluster answers there ('ray start --head' starts one): {cause}"
            ) from None

    def run(self, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[int, R | Lost]]:
        """See `Workers`; Ray begins a task again whose worker died."""
        ray, here = self._ray, os.getcwd()  # noqa: PTH109  (text, for other machines)
        remote = ray.remote(max_retries=_RAY_TRIES - 1, num_cpus=1)(_call_in)
        waiting = deque(range(len(tasks)))
        pending: dict[Any, int] = {}
        try:
            while waiting or pending:
                while waiting and len(pending) < _AHEAD:
                    task = waiting.popleft()
                    pending[remote.remote(here, function, tasks[task])] = task
                for ready in ray.wait(list(pending), num_returns=1)[0]:
                    task = pending.pop(ready)
                    try:
                        yield task, ray.get(ready)
                    except ray.exceptions.RayError as error:
                        first = str(error).strip().partition("\n")[0]
                        yield task, Lost(f"Ray began it {_RAY_TRIES} times: {type(error).__name__}: {first}")
        finally:
            for left in pending:
                ray.cancel(left, force=True)


def _call_in(folder: str, function: Callable[[T], R], task: T) -> R | Lost:
    """Call a function where relative paths mean the same, if there is such a folder."""
    try:
        os.chdir(folder)
    except OSError as error:
        return Lost(f"the Ray cluster's machine has no folder {folder}: {error.strerror}")
    return call(function, task)
