"""The page, answered in this process, and the command line beside it."""

import contextlib
import html
import io
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from benchmarks.endpoint import free_port
from meshwise.cli.main import main
from meshwise.web.app import make_app

#: A browser that runs without a window, such as Debian's chromium; nothing here installs one.
BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)

#: Takes minutes.
LONG = "/train?model=deepseek-v3&on=h100:2048&batch-tokens=16Mi&seq-len=4096"


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """Address of a page in a process of its own, which must end well."""
    port = free_port()
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "meshwise", "ui", "--port", str(port), "--no-browser", "meshwise models"],
        stderr=subprocess.PIPE,
        text=True,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        assert process.stderr.readline() == f"meshwise ui: {address}/models (Ctrl-C ends it)\n"
        yield address
        with urllib.request.urlopen(address + LONG) as answer:  # noqa: S310
            answer.read(100)
            process.send_signal(signal.SIGINT)  # while somebody waits for a search
            assert process.wait(120) == 0
            assert b"has ended (-9), perhaps for lack of memory, or with the server" in answer.read()
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture(scope="session")
def page() -> Iterator[TestClient]:
    with TestClient(make_app(processes=False), base_url="http://127.0.0.1:8765", follow_redirects=False) as client:
        yield client


def said(command: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(shlex.split(command)[1:])
    return code, out.getvalue(), err.getvalue()


def as_json(command: str) -> dict:
    """What a command prints with --json, on stdout or, of an error, on stderr."""
    _, out, err = said(f"{command} --json")
    return json.loads(out or err[err.index("{") :])


def untimed(value: object) -> object:
    """Without what differs from run to run: the CPU time of a search."""
    if isinstance(value, dict):
        return {k: untimed(v) for k, v in value.items() if k != "cpu_s"}
    return [untimed(v) for v in value] if isinstance(value, list) else value


def text_of(body: str) -> str:
    """What a page says, without its marks."""
    inline = re.sub(r"</?(?:a|code|kbd|span|svg|rect|circle|wbr)\b[^>]*>", "", body)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", inline)).split())
