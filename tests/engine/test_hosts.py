"""One engine in several processes: each decides alike; a process that is gone, or told to end, ends all."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.endpoint import free_port
from meshwise.commands import serve_hosts
from meshwise.core.errors import MeshwiseError
from meshwise.engine import hosts
from meshwise.engine.engine import Engine
from meshwise.engine.hosts import Ended, Following, Leading
from meshwise.engine.requests import EngineRequest, Sampling, Token
from meshwise.runtime.processes import Processes
from meshwise.scheduling import Scheduling


class Board:
    """Messages in this process's memory."""

    def __init__(self):
        self.messages, self.changed = {}, threading.Condition()

    def put(self, name, value):
        with self.changed:
            self.messages[name] = value
            self.changed.notify_all()

    def get(self, name, seconds):
        with self.changed:
            self.changed.wait_for(lambda: name in self.messages, seconds)
            return self.messages.get(name)

    def found(self, folder):
        with self.changed:
            return {k.rsplit("/", 1)[1]: v for k, v in self.messages.items() if k.startswith(f"{folder}/")}

    def remove(self, name):
        with self.changed:
            del self.messages[name]
            self.changed.notify_all()

    def settles(self, holds):
        """Whether something holds of the messages before long; on a busy machine that takes a while."""
        with self.changed:
            return self.changed.wait_for(holds, 20)


class Executor:
    """Tokens that follow from those before; started ones are there at once."""

    rows = 1

    def start(self, work, before):
        coming = [] if before is None else [r for r, _ in before]
        return [(r, Token(hash((*r.tokens, r.sampling.seed, r in coming)) % 97)) for r in work.asking]

    def finish(self, started):
        return [token for _, token in started]

    def run(self, work):
        return self.finish(self.start(work, None))

    def follows(self, work, before):
        here = {r for r, _ in before}
        return not any(chunk.request in here for chunk in work.chunks)


class Reader:
    """A sink that ends its output, or fails, at some token: what nobody else knows."""

    def __init__(self, last, *, fails):
        self.last, self.fails = last, fails

    def token(self, _token):
        self.last -= 1
        if self.last == 0 and self.fails:
            raise ValueError
        return self.last == 0

    def done(self, reason):
        pass


def engine(log, own, *, ahead):
    scheduling = Scheduling("chunked", 4, 24, prefix_cache=True, watermark=0.0)
    return Engine(scheduling, 24, Executor(), block_tokens=4, log=log.append, ahead=ahead, hosts=own)


def follow(board, number, log, lost, *, ahead=False):
    """An engine beside the first, and the thread that serves it until the first ends, or it fails."""
    following = Following(board, number, dict, lost.append)
    made = engine(log, following, ahead=ahead)
    following.start()

    def serve():
        with contextlib.suppress(Ended, KeyError):
            made.serve()

    thread = threading.Thread(target=serve)
    thread.start()
    return made, thread


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_processes_decide_alike(seed, ahead, monkeypatch):
    """Arrivals, cancellations, stops and failures of sinks at any time; messages that were read are forgotten."""
    monkeypatch.setattr(hosts, "_BEAT", 0.02)
    board, draw, logs, lost = Board(), random.Random(seed), ([], [], []), []  # noqa: S311 -- no secret
    followers, threads = zip(*(follow(board, n, logs[n], lost, ahead=ahead) for n in (1, 2)), strict=True)
    first = engine(logs[0], Leading(board, 2, lost.append, lambda: None), ahead=ahead)
    sent = []
    for _ in range(400):
        if draw.random() < 0.2:
            prompt = [*range(draw.randint(0, 12)), *(draw.randrange(97) for _ in range(draw.randint(1, 12)))]
            reader = Reader(draw.choice([0, 1, 3, 9]), fails=draw.random() < 0.3)
            stops, sampling = frozenset({draw.randrange(97)}), Sampling(seed=draw.randrange(9))
            sent.append(
                EngineRequest(prompt, draw.randint(1, 20), reader, sampling=sampling, stops=stops, block_tokens=4)
            )
            first.submit(sent[-1])
        if sent and draw.random() < 0.1:
            first.cancel(draw.choice(sent[-4:]))
        first.step()
    while first.step():
        pass
    assert board.settles(lambda: len(board.found("step")) < 20)
    first.stop()
    first.serve()
    for thread in threads:
        thread.join(timeout=20)
    assert [type(follower.failure) for follower in followers] == [Ended, Ended]
    assert lost == []
    assert logs[0] == logs[1] == logs[2]
    assert {"add", "step", "ended", "cancel"} <= {entry[0] for entry in logs[0]}


def test_a_process_without_a_sign_of_life_is_lost(monkeypatch):
    monkeypatch.setattr(hosts, "_BEAT", 0.02)
    monkeypatch.setattr(hosts, "_LOST", 0.1)
    words, told = [], threading.Event()
    leading = Leading(Board(), 1, lambda said: (words.append(said), told.set()), lambda: None)
    leading.agree([])
    assert told.wait(10)
    leading.close(None)
    assert words[0] == "process 1 has given no sign of life for 0 seconds; all end with it"


def test_an_idle_engine_sends_messages(monkeypatch):
    """So that no wait for one ends without it."""
    monkeypatch.setattr(hosts, "_BEAT", 0.01)
    monkeypatch.setattr(Leading, "idle", 0.01)
    monkeypatch.setattr(hosts, "_PATIENCE", 5.0)
    board, lost, late = Board(), [], []
    found = board.get
    monkeypatch.setattr(board, "get", lambda *asked: found(*asked) or late.append(asked))
    follower, thread = follow(board, 1, [], lost)
    first = engine([], Leading(board, 1, lost.append, lambda: None), ahead=False)
    serving = threading.Thread(target=first.serve)
    serving.start()
    assert board.settles(lambda: json.loads(board.messages["alive/1"])[1] > 5)
    first.stop()
    serving.join(timeout=20)
    thread.join(timeout=20)
    assert (type(follower.failure), lost, late) == (Ended, [], [])


def test_messages_wait_for_processes_that_were_not_heard_yet(monkeypatch):
    monkeypatch.setattr(hosts, "_BEAT", 0.01)
    board, lost = Board(), []
    leading = Leading(board, 2, lost.append, lambda: None)
    for _ in range(5):
        leading.agree([])
    board.put("alive/1", b"[3, 4, false, null]")
    time.sleep(0.2)
    here = sorted(board.found("step"))
    board.put("alive/2", b"[0, 2, false, null]")
    assert board.settles(lambda: "1" not in board.found("step"))
    leading.close(None)
    assert here == ["0", "1", "2", "3", "4"]
    assert sorted(board.found("step")) == ["2", "3", "4", "5"]
    assert lost == []


def test_what_fails_in_another_process_is_said_by_the_first(monkeypatch):
    monkeypatch.setattr(hosts, "_BEAT", 0.02)
    board, said, told = Board(), [], threading.Event()
    follower, thread = follow(board, 1, [], said)
    monkeypatch.setattr(follower.executor, "run", lambda _: {}[3])
    leading = Leading(board, 1, lambda words: (said.append(words), told.set()), lambda: None)
    leading.agree([("add", EngineRequest([1, 2], 3, Reader(9, fails=False), block_tokens=4))])
    assert told.wait(10)
    leading.close(None)
    thread.join(timeout=20)
    assert said[0] == "process 1 has failed: KeyError: 3; all end with it"


def test_a_service_that_does_not_answer_ends_the_first(monkeypatch):
    monkeypatch.setattr(hosts, "_BEAT", 0.02)
    board, said, told = Board(), [], threading.Event()

    def found(_folder):
        raise MeshwiseError("no service")

    monkeypatch.setattr(board, "found", found)
    Leading(board, 1, lambda words: (said.append(words), told.set()), lambda: None).agree([])
    assert told.wait(10)
    assert said == ["no service"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError(3), "Error: KeyError: 3 (MESHWISE_DEBUG=1 shows where)"),
        (MeshwiseError("no such file\n  ^"), "Error: no such file\n  ^"),
    ],
)
def test_what_fails_is_said_before_a_process_ends(error, said, monkeypatch):
    words, codes = [], []
    monkeypatch.setattr(serve_hosts, "join", lambda _: None)
    monkeypatch.setattr(serve_hosts, "abandon", codes.append)
    monkeypatch.setattr(serve_hosts, "position", lambda: (1, 2))
    with serve_hosts.together(Processes("h:1", 2, 1), words.append):
        raise error
    assert (words, codes) == ([said], [1])


@pytest.mark.parametrize(("host", "own", "count"), [("10.0.0.1", 0, 1), ("10.0.0.1", 1, 0), ("localhost", 0, 0)])
def test_a_service_that_is_open_is_said_once(host, own, count, monkeypatch):
    words = []
    monkeypatch.setattr(serve_hosts, "join", lambda _: None)
    monkeypatch.setattr(serve_hosts, "position", lambda: (own, 2))
    with serve_hosts.together(Processes(f"{host}:1", 2, own), words.append):
        pass
    assert words == [f"--coordinator {host}:1 is open to the network, without key or encryption"] * count


def test_what_fails_in_the_first_process_ends_the_others_in_words():
    board, ended = Board(), []
    Leading(board, 1, ended.append, lambda: ended.append("told")).close(ValueError("no memory\nat all"))
    follower = engine([], Following(board, 1, dict, ended.append), ahead=False)
    with pytest.raises(MeshwiseError, match=r"the first process has failed: ValueError: no memory$"):
        follower.serve()
    assert ended == ["told"]


MODEL = "D=64 F=128 L=2 N=8 K=8 H=8 V=256"
LIMITS = ["--max-len", "64", "--max-batch", "2", "--max-step-tokens", "32"]


class Served:
    """`meshwise serve` in one process, or in two of as many devices each."""

    def __init__(self, folder, programs, processes):
        self.folder, self.address = folder, f"localhost:{free_port()}"
        port = str(free_port())
        self.url = f"http://127.0.0.1:{port}"
        line = [sys.executable, "-m", "meshwise", "serve", MODEL, "--cpu-devices", str(8 // processes), "--tensor", "8",
                "--port", port, "--compile-cache", str(programs), "--name", "m", *LIMITS]  # fmt: skip
        together = ["--coordinator", self.address, "--num-processes", "2", "--log", str(folder / "log"), "--process-id"]
        flags = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")
        environment = {**os.environ, "XLA_FLAGS": flags}
        self.processes = []
        for n in range(processes):
            own = [*line, *([*together, str(n)] if processes > 1 else [])]
            with (folder / f"{n}.err").open("w") as err:
                self.processes.append(subprocess.Popen(own, stdout=err, stderr=err, env=environment))  # noqa: S603

    def words(self, n):
        return (self.folder / f"{n}.err").read_text()

    def wait(self):
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and all(p.poll() is None for p in self.processes):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/ready", timeout=5):  # noqa: S310
                return self
            time.sleep(0.2)
        raise AssertionError([self.words(n) for n in range(len(self.processes))])

    def ask(self, *, timeout=200, **asked):
        body = {"model": "m", "max_tokens": 20, "temperature": 0, "ignore_eos": True, **asked}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode())  # noqa: S310 -- ours
        with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310
            return json.load(answer)["choices"][0]["text"]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Where programs are kept once they are compiled."""
    return tmp_path_factory.mktemp("programs")


@contextlib.contextmanager
def served(folder, programs, processes):
    made = Served(folder, programs, processes)
    try:
        yield made.wait()
    finally:
        for p in made.processes:
            p.kill()
            p.wait()


def questions():
    for number in range(12):
        prompt = [(7 * number + i) % 256 for i in range(1 + 3 * number % 11)]
        yield {"prompt": prompt, "temperature": number % 2, "seed": number, "stop": ["1"] if number % 3 == 0 else None}


def answers(made):
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda asked: made.ask(**asked), questions()))


@pytest.mark.slow  # three processes that compile: tokens, decisions and ends are those of one process
def test_two_processes_answer_as_one(tmp_path, programs):
    with served(tmp_path, programs, 1) as alone:
        expected = answers(alone)
    assert len(set(expected)) > 6
    with served(tmp_path, programs, 2) as made:
        assert answers(made) == expected
        with pytest.raises(TimeoutError):
            made.ask(prompt=[5], max_tokens=60, timeout=0.02)  # a client that goes away
        assert made.ask(prompt=[1, 2, 3]) == made.ask(prompt=[1, 2, 3])
        made.processes[1].send_signal(signal.SIGTERM)
        assert [p.wait(timeout=300) for p in made.processes] == [0, 0], made.words(0)
    logs = [(tmp_path / f"log.{n}").read_text() for n in range(2)]
    assert logs[0] == logs[1]
    assert logs[0].count('["step"') > 100


@pytest.mark.slow  # four processes that compile: nobody waits for one that is gone, and it is said
@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (0, "JAX distributed service detected fatal errors. This most likely indicates that another task died"),
        (1, "\nError: process 1 has given no sign of life for 20 seconds; all end with it\n"),
    ],
)
def test_a_process_that_is_killed_ends_all(lost, said, tmp_path, programs):
    with served(tmp_path, programs, 2) as made, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(made.ask, prompt=[1], max_tokens=60)
        time.sleep(0.3)
        made.processes[lost].kill()
        assert made.processes[1 - lost].wait(timeout=300) != 0
        with pytest.raises((OSError, urllib.error.URLError, ConnectionError)):
            asked.result(timeout=300)
        assert said in made.words(1 - lost)
