"""One engine in several processes: each runs the same loop, and the first tells the others what comes from outside.

The first process sends requests, cancellations and ended outputs; everything else follows, in each process alike.
Messages go through the service by which the processes found one another: no sockets of our own, and nothing is
unpickled. A process that is gone ends all. Not here: the loop (`engine`), how processes join (`runtime.processes`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Protocol

from meshwise.core.errors import MeshwiseError
from meshwise.engine.requests import EngineRequest, Keeping, Sampling, Token

#: Seconds from one sign of life to the next; and without any until a process counts as lost.
_BEAT, _LOST = 1.0, 20.0

#: Seconds to wait for a message, many beats: JAX never forgets a wait that ends without one, some 20 kB each.
_PATIENCE = 30.0

#: Sign of life of a process before its first: its number, messages read, whether it was asked to end, and its failure.
_UNHEARD = b"[-1, 0, false, null]"

#: What an engine takes in: "add" or "cancel", and the request.
Event = tuple[str, EngineRequest]


class Board(Protocol):
    """Where processes leave messages for each other; as `runtime.processes.Messages`."""

    def put(self, name: str, value: bytes) -> None:
        """Leave a message, or replace it."""
        ...

    def get(self, name: str, seconds: float) -> bytes | None:
        """A message, as soon as it is there; None: it did not come in time."""
        ...

    def found(self, folder: str) -> dict[str, bytes]:
        """All messages whose name begins with a folder, by the rest of their names."""
        ...

    def remove(self, name: str) -> None:
        """Forget a message."""
        ...


class Hosts(Protocol):
    """Other processes that run the same engine, as the engine sees them.

    Attributes:
        idle: seconds that an idle engine waits for requests before it agrees with the others again.
    """

    idle: ClassVar[float]

    def agree(self, came: list[Event]) -> list[Event]:
        """Events that every process takes in before a step."""
        ...

    def ended(self, requests: Sequence[EngineRequest]) -> None:
        """Outputs ended with the tokens of a step."""
        ...

    def close(self, failure: BaseException | None) -> None:
        """The engine has ended."""
        ...


class Ended(BaseException):
    """The first process has ended in order; no failure, and nothing that a request could catch."""


class Leading:
    """What the first process sends to the others: a message for each step, and one a beat while the engine is idle.

    Args:
        board: see there.
        others: how many they are.
        lost: called in words when one of them is gone or has failed, in a thread of its own.
        ending: called when one of them was asked to end, or the engine has failed.
    """

    idle: ClassVar[float] = _BEAT

    def __init__(self, board: Board, others: int, lost: Callable[[str], None], ending: Callable[[], None]) -> None:
        self._board, self._lost, self._ending = board, lost, ending
        self._numbers: dict[EngineRequest, int] = {}
        self._ended: list[int] = []
        self._sent = self._added = self._removed = 0
        self._heard = {str(n): (_UNHEARD, time.monotonic()) for n in range(1, others + 1)}
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="other processes", daemon=True)

    def agree(self, came: list[Event]) -> list[Event]:
        """Send the others what came before a step, and which outputs ended in the one before."""
        if not self._watching.is_alive():
            self._watching.start()
        events: list[tuple[str, Any]] = []
        for what, request in came:
            if what == "add":
                self._numbers[request] = self._added
                self._added += 1
                events.append((what, _described(request)))
            elif request in self._numbers:  # else it is over
                events.append((what, self._numbers.pop(request)))
        self._send({"ended": self._ended, "events": events})
        self._ended = []
        return came

    def ended(self, requests: Sequence[EngineRequest]) -> None:
        """Outputs ended with the tokens of a step."""
        self._ended += [self._numbers.pop(request) for request in requests]

    def close(self, failure: BaseException | None) -> None:
        """Tell the others to end, and why."""
        self._over.set()
        with contextlib.suppress(MeshwiseError):  # then they know
            self._send({"end": "" if failure is None else f"the first process has failed: {in_a_line(failure)}"})
        if failure is not None:
            self._ending()

    def _send(self, message: dict[str, Any]) -> None:
        self._board.put(f"step/{self._sent}", json.dumps(message).encode())
        self._sent += 1

    def _watch(self) -> None:
        try:
            while not self._over.wait(_BEAT):
                self._look()
        except MeshwiseError as error:
            if not self._over.is_set():
                self._lost(str(error))

    def _look(self) -> None:
        """Look for signs of life, and forget messages that all have read."""
        found, now = self._board.found("alive"), time.monotonic()
        for name, (before, since) in self._heard.items():
            beat = found.get(name, before)
            if beat != before:
                self._heard[name] = beat, now
            elif now - since > _LOST:
                self._lost(f"process {name} has given no sign of life for {_LOST:.0f} seconds; all end with it")
        beats = {name: json.loads(beat) for name, (beat, _) in self._heard.items()}
        for name, (_, _, _, failure) in beats.items():
            if failure is not None:
                self._lost(f"process {name} has failed: {failure}; all end with it")
        if any(ending for _, _, ending, _ in beats.values()):
            self._ending()
        for number in range(self._removed, min((read for _, read, _, _ in beats.values()), default=0)):
            self._board.remove(f"step/{number}")
            self._removed = number + 1


class Following:
    """What another process hears of the first.

    Args:
        board: see there.
        own: number of this process.
        constrained: makes what an output must keep to, from a JSON schema.
        lost: called in words when the first process is gone, in a thread of its own.
    """

    idle: ClassVar[float] = 0.0  # it waits for the next message

    def __init__(
        self, board: Board, own: int, constrained: Callable[[Any], Keeping], lost: Callable[[str], None]
    ) -> None:
        self._board, self._own, self._constrained, self._lost = board, own, constrained, lost
        self._requests: dict[int, EngineRequest] = {}
        self._next: dict[str, Any] | None = None
        self._read = self._added = 0
        self.ending = False
        self._failure: str | None = None
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="sign of life", daemon=True)

    def agree(self, came: list[Event]) -> list[Event]:
        """What came at the first process before its next step.

        Raises:
            Ended: it has ended.
            MeshwiseError: it has failed.
        """
        assert not came, "requests come to the first process"
        message, self._next = self._message(), None
        return [(what, self._request(what, sent)) for what, sent in message["events"]]

    def ends(self, number: int) -> bool:
        """Whether an output ended with the token that was just made; it is waited for."""
        return number in self._message()["ended"]

    def ended(self, requests: Sequence[EngineRequest]) -> None:
        """Outputs ended, as the first process says."""
        if requests:
            self._requests = {n: request for n, request in self._requests.items() if request not in requests}

    def close(self, failure: BaseException | None) -> None:
        """Give a last sign of life, which says why the engine has failed."""
        self._failure = None if failure is None or isinstance(failure, Ended) else in_a_line(failure)
        self._over.set()
        if self._beating.is_alive():
            self._beating.join(_LOST)

    def start(self) -> None:
        """Begin to give signs of life."""
        self._beating.start()

    def _message(self) -> dict[str, Any]:
        """The message of the step that comes next."""
        while self._next is None:
            found = self._board.get(f"step/{self._read}", _PATIENCE)
            if found is None:
                continue
            self._read += 1
            self._next = json.loads(found)
        words = self._next.get("end")
        if words is None:
            return self._next
        raise MeshwiseError(words) if words else Ended

    def _request(self, what: str, sent: Any) -> EngineRequest:
        if what == "cancel":
            return self._requests.pop(sent)
        number = self._added
        self._added += 1
        schema = sent.pop("schema")
        request = EngineRequest(
            sent["tokens"],
            sent["max_tokens"],
            _Echo(self, number),
            sampling=Sampling(**sent["sampling"]),
            stops=frozenset(sent["stops"]),
            block_tokens=sent["block_tokens"],
            salt=bytes.fromhex(sent["salt"]),
            constraint=None if schema is None else self._constrained(schema),
        )
        request.times["arrived"] = 0.0
        self._requests[number] = request
        return request

    def _beat(self) -> None:
        for count in itertools.count():
            over = self._over.wait(_BEAT if count else 0.0)
            beat = [count, self._read, self.ending, self._failure]
            try:
                self._board.put(f"alive/{self._own}", json.dumps(beat).encode())
            except MeshwiseError as error:
                if not self._over.is_set():
                    self._lost(str(error))
                return
            if over:
                return


class _Echo:
    """A sink in another process: what the first process's says."""

    def __init__(self, hosts: Following, number: int) -> None:
        self._hosts, self._number = hosts, number

    def token(self, token: Token) -> bool:  # noqa: ARG002 -- who reads it is in the first process
        """Whether the output ends."""
        return self._hosts.ends(self._number)

    def done(self, reason: str) -> None:
        """Nobody hears of it here."""


def _described(request: EngineRequest) -> dict[str, Any]:
    return {
        "tokens": request.tokens[: request.prompt].tolist(),
        "max_tokens": request.max_tokens,
        "sampling": asdict(request.sampling),
        "stops": sorted(request.stops),
        "block_tokens": request.block_tokens,
        "salt": request.salt.hex(),
        "schema": None if request.constraint is None else request.constraint.schema,
    }


def in_a_line(error: BaseException) -> str:
    """What failed; of what was not expected its type, too.

    >>> in_a_line(MeshwiseError("a file")), in_a_line(KeyError(3)), in_a_line(ValueError())
    ('a file', 'KeyError: 3', 'ValueError')
    """
    kind = [] if isinstance(error, MeshwiseError) else [type(error).__name__]
    return ": ".join(kind + str(error).splitlines()[:1])
