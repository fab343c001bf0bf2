"""Processes of the command line where their surroundings fail: streams, signals, homes, caches, networks."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from meshwise.cli import main as cli
from tests.cli.test_main import JAX, WORKING

#: Says when it is about to run, which the start of an interpreter would otherwise blur.
READY = """
import os, signal, sys
from meshwise.__main__ import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts its background jobs with SIGINT ignored
os.write(2, b'!')
sys.exit(main())
"""

COMPARED = "plan train llama-3-8b --on h100:8,h100:16,h100:32 --batch-tokens 1Mi --seq-len 4096"

#: Verbs whose processes are tried; those that start JAX take too long, and compile in processes of their own.
VERBS = [name for name in WORKING if name not in JAX]

#: Forks at each tick; the child is sent the interrupt there, and has streams of its own with what was written before.
FORKED = """
import os, shutil, signal, sys
from meshwise.__main__ import main
folder, interval, points = sys.argv.pop(1), float(sys.argv.pop(1)), iter(range(8))
def tick(_, frame):
    while (frame := frame.f_back) and frame.f_code is not main.__code__:
        pass
    if frame is None:  # a busy machine: it came before `main` could answer it, or after
        return signal.setitimer(signal.ITIMER_REAL, 0.001)
    if (point := next(points, None)) is None:
        return
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        open(f"{folder}/code.{point}", "w").write(str(code))
        signal.setitimer(signal.ITIMER_REAL, interval)
        return
    for stream, name in ((1, "out"), (2, "err")):
        shutil.copyfile(f"{folder}/{name}", f"{folder}/{name}.{point}")
        os.dup2(os.open(f"{folder}/{name}.{point}", os.O_WRONLY | os.O_APPEND), stream)
    signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts its background jobs with SIGINT ignored
signal.signal(signal.SIGALRM, tick)
signal.setitimer(signal.ITIMER_REAL, 0.001)
code = main()
signal.setitimer(signal.ITIMER_REAL, 0)
sys.exit(code)
"""

#: Names and addresses but this machine's own are refused: what any library asks for goes through these.
NO_NETWORK = """
import socket, sys
HERE = (None, "", "127.0.0.1", "::1", "localhost")
def refuse(host, *_args, **_more):
    raise AssertionError(f"the network was asked for: {host}")
def own(asked):
    return lambda host, *args, **more: (asked if host in HERE else refuse)(host, *args, **more)
class Socket(socket.socket):
    def connect(self, address):
        return refuse(address) if isinstance(address, tuple) and address[0] not in HERE else super().connect(address)
    connect_ex = sendto = connect
socket.socket = Socket
socket.getaddrinfo, socket.gethostbyname = own(socket.getaddrinfo), own(socket.gethostbyname)
from meshwise.__main__ import main
sys.exit(main())
"""


def words(name):
    return [*name.split(), *WORKING[name]]


def call(*arguments, code=None, to="", **more):
    command = [sys.executable, *(["-c", code] if code else ["-m", "meshwise"]), *arguments]
    if to:
        command = ["bash", "-c", f'set -o pipefail; "$@" {to}', "bash", *command]
    return subprocess.run(command, capture_output=True, text=True, check=False, **more)  # noqa: S603


@cache
def undisturbed(name):
    """The exit code of a verb, and the seconds that it takes."""
    begun = time.monotonic()
    return call(*words(name)).returncode, time.monotonic() - begun


@pytest.mark.parametrize("to", ["| head -1", "| head -c 1 >&2", "2>/dev/full", ">/dev/null 2>&-"])
def test_streams_that_fail_change_no_exit_code(to):
    done = call("chips", "h100-sxm", to=to)
    assert (done.returncode, done.stderr[1:]) == (0, "")
    assert call("chips", "nothing", to=to).returncode == 2


def test_a_closed_pipe_loses_no_file(tmp_path):
    saved = tmp_path / "plan.json"
    asked = [*words("estimate train"), "--save", str(saved), "--details", "--no-changes"]
    done = call(*asked, to="| head -0")
    assert (done.returncode, done.stderr) == (0, "")
    assert saved.exists()


def test_a_full_device_is_said():
    done = call("chips", to=">/dev/full")
    assert (done.returncode, done.stderr) == (2, "error: the answer cannot be written: no space left on the device\n")


def interrupted(seconds, *arguments):
    """Ctrl-C so long after the start; the exit code, both streams, and seconds of CPU until the end."""
    others = spent_by_children()
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", READY, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    assert process.stderr.read(1) == b"!"
    time.sleep(max(seconds, 0.01))  # between the mark and `main` is a line of the test only
    before = spent_by(process.pid)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    if err.count(b"File") == err.count(b'File "<string>", line 5') == 1:  # of a busy machine: it came before `main`
        return interrupted(seconds, *arguments)
    return process.returncode, out.decode(), err.decode(), spent_by_children() - others - before


def spent_by(process):
    """Seconds of CPU of a process that runs."""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def spent_by_children():
    """Seconds of CPU of all processes that were waited for."""
    spent = os.times()
    return spent.children_user + spent.children_system


def test_an_interrupt_while_it_loads_is_said_in_words():
    for seconds in (0.0, 0.02, 0.06, 0.15):
        code, out, err, _ = interrupted(seconds, *words("plan train"))
        assert "Traceback" not in err
        if code:
            assert (code, out, err.strip()) == (130, "", "error: interrupted")
        else:  # a busy machine sends it late: in the search, whose best is shown
            assert out != ""


def test_at_the_end_nothing_is_looked_through_for_garbage():
    """Half of the time in which a large search ended went there."""
    code = "import gc, meshwise.__main__ as m; m.main(); print(gc.get_freeze_count() > 0)"
    assert call("--version", code=code).stdout.endswith("True\n")


def test_what_a_library_makes_of_an_interrupt_is_one(monkeypatch, capsys):
    def swallowed(**_):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise IndexError("tuple index out of range")

    monkeypatch.setattr(cli.app, "main", swallowed)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert cli.main(["chips"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "error: interrupted\n"


def judge(code, out, err, whole):
    assert code in (0, 130), err
    assert "Traceback" not in err
    assert "bug" not in err
    assert (out == "") == (code == 130) or out == whole or "nterrupted" in out


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VERBS if name != "load"])
def test_signals_at_eight_points(name, tmp_path):
    """Slow: 8 forks of each verb. An interrupt gives 130 or an answer, never a traceback or a torn stream."""
    expected, seconds = undisturbed(name)
    # A fork of a sweep writes the table of the process that it comes from, and may be in its way.
    for number in range(3 if name == "sweep" else 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        with (folder / "out").open("a") as out, (folder / "err").open("a") as err:
            command = [sys.executable, "-c", FORKED, str(folder), str(seconds / 8), *words(name)]
            if subprocess.run(command, stdout=out, stderr=err, check=False).returncode == expected:  # noqa: S603
                break
    else:
        raise AssertionError((folder / "err").read_text())
    whole = (folder / "out").read_text()
    codes = [int((folder / f"code.{point}").read_text()) for point in range(len(list(folder.glob("code.*"))))]
    assert 130 in codes  # not at each point: a callback of an import may swallow the interrupt that falls into it
    for point, code in enumerate(codes):
        judge(code, *((folder / f"{kind}.{point}").read_text() for kind in ("out", "err")), whole)


@pytest.mark.slow
def test_signals_at_eight_points_of_an_event_loop():
    """Slow: 8 processes, as an event loop does not survive a fork."""
    begun = time.monotonic()
    whole = call(*words("load")).stdout
    span = time.monotonic() - begun
    for point in range(8):
        judge(*interrupted(span * point / 8, *words("load"))[:3], whole)


@pytest.mark.slow
def test_an_interrupted_comparison_ends_soon_and_says_what_is_missing():
    """Slow: whole searches. After Ctrl-C nothing more is searched."""
    for seconds in (1, 2, 4, 6):
        code, out, _, spent = interrupted(seconds, *COMPARED.split())
        assert spent < 2  # whose searches take 20 to their ends
        assert code in (0, 130)
        if code == 0 and "Fastest so far" in out:
            assert "searched in part" in out or "not searched" in out


@pytest.mark.slow
@pytest.mark.parametrize("name", VERBS)
def test_surroundings(name, tmp_path):
    """Slow: three processes of each verb. Homes that are missing or cannot be written, other languages, no network."""
    expected, _ = undisturbed(name)
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    plain = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    other = plain | {"HOME": str(locked), "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = call(*words(name), code=NO_NETWORK, env=other)
    problems = [word for word in ("Traceback", "network") if word in done.stderr]
    assert (done.returncode, problems) == (expected, []), done.stderr
    assert call(*words(name), to="2>/dev/full", env=plain | {"HOME": "/nowhere/at/all"}).returncode == expected
    done = call(*words(name), to=">/dev/full")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr


@pytest.mark.jax
@pytest.mark.parametrize("name", JAX)
def test_nothing_is_fetched_by_what_starts_jax(name, tmp_path):
    done = call(*words(name), code=NO_NETWORK, env=os.environ | {"MESHWISE_CACHE": str(tmp_path)})
    assert (done.returncode, "network was asked" in done.stderr) == (0, False), done.stderr


@pytest.mark.jax
def test_two_at_once_on_one_cache(tmp_path):
    """Both compile the same program, and keep it under the same name."""
    command = [sys.executable, "-m", "meshwise", *words("verify"), "--json"]
    both = [
        subprocess.Popen(  # noqa: S603
            command, env=os.environ | {"MESHWISE_CACHE": str(tmp_path)}, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    out = [process.communicate(timeout=600)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    one, other = (json.loads(answer) for answer in out)
    for name in one.keys() - {"compiled", "assumed"}:  # which say how long it took, and what was there already
        assert one[name] == other[name]
    assert not [path for path in Path(tmp_path).rglob("*") if path.suffix == ".tmp"]
