"""The endpoint as a process under what goes wrong: killed again and again, and clients that come, go and talk nonsense.

    python benchmarks/endpoint.py kills --times 30
    python benchmarks/endpoint.py soak --seconds 600 --clients 200
    python benchmarks/endpoint.py http --times 3000

The first two serve a small model with drawn weights on a port of their own, and exit with 1 where something was not as
it should be. `tests/engine/test_process.py` runs short ones. The third serves an engine whose steps take no time, to a
client in a process of its own: what is left is the endpoint's own cost, and the client's.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self, cast

from meshwise.engine.engine import Engine, Work
from meshwise.engine.http.metrics import Metrics
from meshwise.engine.http.server import bind, make_server
from meshwise.engine.http.service import Service, Settings
from meshwise.engine.replicas import Replicas
from meshwise.engine.requests import Token
from meshwise.engine.vocabulary import numbers_only
from meshwise.scheduling import Scheduling

#: Tokens of the vocabulary of `http`.
WORDS = 1000
MODEL = "D=64 F=128 L=2 N=4 K=2 H=16 V=256"
OPTIONS = ("--max-len", "256", "--max-batch", "8", "--max-step-tokens", "256", "--drain", "1s", "--max-queue", "400")


def free_port() -> int:
    """A port that nobody has now, below those that the system hands out: no connection gets it before it is bound."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


@dataclass
class Process:
    """`meshwise serve` on a port.

    Args:
        port: see there.
        cache: folder of compiled programs.
        options: further ones.
    """

    port: int
    cache: Path
    options: tuple[str, ...] = ()
    process: subprocess.Popen[str] = field(init=False)
    seconds: float = 0.0

    def __enter__(self) -> Self:
        """Start it, and wait until it is ready."""
        begun = time.monotonic()
        words = [sys.executable, "-m", "meshwise", "serve", MODEL, "--port", str(self.port), *OPTIONS, *self.options]
        words += ["--compile-cache", str(self.cache)]
        quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
        self.process = subprocess.Popen(words, env=environment, **quiet)  # type: ignore[call-overload]  # noqa: S603
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() - begun > 300:
                raise RuntimeError(f"it did not start: {self.process.communicate()[0]}")
            time.sleep(0.05)
        self.seconds = time.monotonic() - begun
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        if self.process.poll() is None:
            self.process.terminate()
        self.process.communicate(timeout=60)

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.ask("GET", "/ready", timeout=2.0)[0] == 200
        return False

    def ask(self, method: str, path: str, body: bytes | None = None, timeout: float = 60.0) -> tuple[int, bytes]:
        """One request; status and answer."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            line.request(method, path, body)
            answer = line.getresponse()
            return answer.status, answer.read()
        finally:
            line.close()

    @property
    def resident(self) -> int:
        """Bytes of memory that the process holds."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def gauge(self, name: str) -> float:
        """A number of /metrics."""
        text = self.ask("GET", "/metrics")[1].decode()
        return float(next(line.split()[1] for line in text.splitlines() if line.startswith(f"{name} ")))


def drawing(seed: int) -> random.Random:
    """Numbers of a seed."""
    return random.Random(seed)  # noqa: S311 -- no secret


def body_of(draw: random.Random, *, stream: bool, tokens: int) -> bytes:
    """A request."""
    prompt = [draw.randrange(256) for _ in range(draw.randint(1, 60))]
    said = {"model": "own", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    return json.dumps(said | {"temperature": draw.choice([0, 0.8])}).encode()


def one_client(process: Process, draw: random.Random, seen: Counter[str], going: threading.Event) -> None:
    """Send requests, whole and streamed, until told otherwise; count how each ended."""
    while going.is_set():
        stream = draw.random() < 0.5
        try:
            status, answer = process.ask("POST", "/v1/completions", body_of(draw, stream=stream, tokens=40), 20.0)
            whole = not stream or b"[DONE]" in answer
            seen[f"{status}" if whole else "cut off"] += 1
        except TimeoutError:
            seen["hung"] += 1
        except (OSError, http.client.HTTPException) as error:
            seen[type(error).__name__] += 1
            time.sleep(0.02)


def wait_for(holds: Callable[[], object]) -> None:
    """Until something holds, or for half a minute."""
    ends = time.monotonic() + 30
    while not holds() and time.monotonic() < ends:
        time.sleep(0.01)


def kills(times: int, clients: int = 8) -> Iterator[tuple[float, Counter[str]]]:
    """Kill a process that serves, `times` times, each time while clients are answered.

    Returns: seconds to be ready again, and how requests ended: by a status, or an error that says the line is cut.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        for time_ in range(times):
            seen: Counter[str] = Counter()
            going = threading.Event()
            going.set()
            with Process(port, Path(folder), ("--name", "own")) as process:
                draws = [drawing(1000 * time_ + k) for k in range(clients)]
                threads = [threading.Thread(target=one_client, args=(process, d, seen, going)) for d in draws]
                for thread in threads:
                    thread.start()
                wait_for(lambda: seen["200"])  # noqa: B023 -- called here
                time.sleep(drawing(time_).random())
                process.process.send_signal(signal.SIGKILL)
                process.process.wait()
                time.sleep(0.2)
                going.clear()
                for thread in threads:
                    thread.join(timeout=30)
                    seen["hung"] += thread.is_alive()
            yield process.seconds, seen


def misbehave(process: Process, draw: random.Random, seen: Counter[str], ends: float) -> None:
    """One client after another that leaves, reads slowly, or talks nonsense, among those that do as they should."""
    while time.monotonic() < ends:
        kind = draw.choice(["whole", "stream", "gone", "slow", "fuzz", "half"])
        data = body_of(draw, stream=kind in ("stream", "slow") or draw.random() < 0.5, tokens=draw.randint(1, 40))
        if kind == "fuzz":
            place = draw.randrange(len(data))
            data = draw.choice(
                [data[:place], data[:place] + b"\xff" + data[place + 1 :], data * 2, b"{}", b"\x00" * 99]
            )
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", process.port), timeout=60) as line:
            line.sendall(head.encode() + b"Connection: close\r\n\r\n" + (data[:-1] if kind == "half" else data))
            if kind in ("gone", "half"):
                time.sleep(draw.random() * 0.05)
                seen[kind] += 1
                continue
            first = line.recv(64)
            while line.recv(64 if kind == "slow" else 65536):
                time.sleep(0.005 * (kind == "slow"))
            seen[first.split(b" ", 2)[1].decode() if first.startswith(b"HTTP") else "cut off"] += 1


def soak(seconds: float, clients: int) -> tuple[Counter[str], list[str]]:
    """Serve `clients` connections that misbehave; how they ended, and what is wrong afterwards."""
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder, Process(free_port(), Path(folder), ("--name", "own")) as process:
        ends = time.monotonic() + seconds
        threads = [threading.Thread(target=misbehave, args=(process, drawing(k), seen, ends)) for k in range(clients)]
        for thread in threads:
            thread.start()
        time.sleep(seconds / 5)
        before = process.resident
        for thread in threads:
            thread.join()
        gauges = ("meshwise_requests_running", "meshwise_requests_waiting")
        wait_for(lambda: not any(process.gauge(name) for name in gauges))
        left = {name: process.gauge(name) for name in gauges}
        wrong += [f"{name} is {count:g} after all clients are gone" for name, count in left.items() if count]
        if process.resident > 1.2 * before:
            wrong.append(f"memory grew from {before / 2**20:.0f} to {process.resident / 2**20:.0f} MiB")
        if process.ask("POST", "/v1/completions", body_of(drawing(0), stream=False, tokens=3))[0] != 200:
            wrong.append("it does not answer any more")
        if seen["cut off"] or any(status.startswith("5") for status in seen):
            wrong.append(f"answers that no client deserved: {dict(seen)}")
        seen["MiB"] = process.resident // 2**20
    return seen, wrong


class Instant:
    """Executes steps at once: each token follows the one before."""

    rows = 1

    def run(self, work: Work) -> list[Token]:
        """The next tokens."""
        return [Token((request.tokens[-1] + 1) % WORDS) for request in work.asking]


def timed_requests(port: int, times: int, answer: Connection) -> None:
    """Send requests one after the other on one connection, by a process of its own; seconds of each, by its kind."""
    draw, line = drawing(0), http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    seconds: dict[str, list[float]] = {"one token": [], "64 tokens, streamed": []}
    for number in range(times):
        kind = list(seconds)[number % 2]
        text = " ".join(str(draw.randrange(WORDS)) for _ in range(200))
        said = {"model": "own", "messages": [{"role": "user", "content": text}], "max_tokens": (1, 64)[number % 2]}
        body = json.dumps(said | {"stream": bool(number % 2), "temperature": 0})
        begun = time.perf_counter()
        line.request("POST", "/v1/chat/completions", body)
        got = line.getresponse()
        assert (got.status, bool(got.read())) == (200, True)
        seconds[kind].append(time.perf_counter() - begun)
    answer.send(seconds)


def http_cost(times: int) -> dict[str, list[float]]:
    """Seconds of requests to an endpoint whose engine takes no time."""
    vocabulary, metrics = numbers_only(WORDS), Metrics()
    engine = Engine(Scheduling(max_batch=8, prefix_cache=True), 4096, cast("Any", Instant()), watcher=metrics)
    service = Service(Replicas([engine]), vocabulary, Settings("own", 1024), metrics)
    taken = bind("127.0.0.1", 0)
    server = make_server(service, "127.0.0.1", drain=1, most=100)
    thread = threading.Thread(target=lambda: server.run(sockets=[taken]))
    thread.start()
    here, there = multiprocessing.get_context("spawn").Pipe()
    given = (taken.getsockname()[1], times, there)
    client = multiprocessing.get_context("spawn").Process(target=timed_requests, args=given)
    client.start()
    seconds: dict[str, list[float]] = here.recv()
    client.join()
    server.should_exit = True
    thread.join()
    return seconds


def main() -> int:
    """Run one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("kills", "soak", "http"))
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=200)
    given = parser.parse_args()
    if given.what == "http":
        for kind, each in http_cost(given.times).items():
            own = sorted(1e3 * one for one in each[len(each) // 10 :])  # after a warm-up
            p99 = own[-(-99 * len(own) // 100) - 1]
            print(f"{kind}: {len(own):,} requests, median {statistics.median(own):.2f} ms, p99 {p99:.2f} ms")
        return 0
    if given.what == "soak":
        seen, wrong = soak(given.seconds, given.clients)
        print(f"{given.clients} connections, {given.seconds:g} s: {dict(seen)}", *wrong, sep="\n")
        return bool(wrong)
    total, ready = Counter[str](), list[float]()
    for seconds, seen in kills(given.times):
        ready.append(seconds)
        total += seen
        print(f"ready after {seconds:.1f} s; {dict(seen)}", flush=True)
    print(f"{given.times} kills: ready again after {max(ready[1:]):.1f} s at most; {dict(total)}")
    return bool(total["hung"]) or not total["200"]


if __name__ == "__main__":
    sys.exit(main())
