"""The page as a process: it starts, listens on this machine alone, ends on Ctrl-C; and what a browser makes of it."""

import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from meshwise.core.errors import MeshwiseError, MissingDependencyError
from meshwise.web import serve
from tests.web.conftest import BROWSER, said

QUIET = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=10000"),
]


@pytest.mark.slow  # starts two processes: the page listens here alone, and a search grows into its answer
def test_a_search_grows_into_its_answer(served):
    port = int(served.rsplit(":", 1)[1])
    others = [row[4][0] for row in socket.getaddrinfo(socket.gethostname(), port, socket.AF_INET)]
    for other in {*others} - {"127.0.0.1"}:
        with pytest.raises(OSError, match=r"refused|unreachable"):
            socket.create_connection((other, port), 1).close()
    asked = f"{served}/train?model=llama-3-70b&on=h100:64&batch-tokens=4Mi&seq-len=8192"
    started = time.monotonic()
    with urllib.request.urlopen(asked) as answer:  # noqa: S310
        head = answer.read(200).decode()
        first = time.monotonic() - started
        body = head + answer.read().decode()
    assert first < time.monotonic() - started, "the question is there before the answer"
    assert re.search(r"<h2>Searching \.\.\.</h2>.*<h2>Best: ", body, re.DOTALL)
    with urllib.request.urlopen(asked) as answer:  # noqa: S310
        assert "Searching" not in answer.read().decode(), "it is remembered"


@pytest.mark.slow  # starts a browser
@pytest.mark.skipif(BROWSER is None, reason="needs a browser, chromium or google-chrome")
@pytest.mark.parametrize("path", ["/roofline", "/book?problem=roofline.q2.Bcrit", "/shard"])
def test_a_browser_makes_sliders_of_links(served, path, tmp_path):
    words = [BROWSER, *QUIET, f"--user-data-dir={tmp_path}", "--dump-dom", f"{served}{path}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)  # noqa: S603
    rows = re.findall(r'<p class="stop">.*?</p>', done.stdout, re.DOTALL)
    assert len(rows) >= 2
    for row in rows:
        assert 'type="range"' in row
        assert all('hidden=""' in a for a in re.findall(r"<a [^>]*>", row))
        assert re.search(r'aria-valuetext="[^"]+"', row)
    assert not re.search(r'<button[^>]*data-copy[^>]*hidden=""', done.stdout)
    assert "Content Security Policy" not in done.stderr


def test_a_link_an_address_and_a_command_lead_to_the_same_page():
    command = "meshwise chips h100"
    paths = {serve._path(text) for text in (command, "/chips?chip=h100", "http://127.0.0.1:8765/chips?chip=h100")}
    assert paths == {"/chips?chip=h100"}
    with pytest.raises(MeshwiseError, match="the page shows no command 'chipz'"):
        serve._path("chipz")


def test_a_port_that_is_taken_is_said_in_words():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = said(f"meshwise ui --no-browser --port {port}")
    assert code == 2
    assert err == f"error: --port {port}: address already in use; give another, --port 9000\n"


def test_a_missing_extra_is_said_in_words(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with socket.socket() as listening, pytest.raises(MissingDependencyError, match=r"pip install 'meshwise\[web\]'"):
        serve._serve(listening)


def test_help_needs_none_of_the_extra():
    """Nor does the list of views, whose links are made without it."""
    script = "import sys; from meshwise.cli.main import main; main(['ui', '--views']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)  # noqa: S603
    assert not re.search(r"'(starlette|uvicorn|jinja2|markupsafe|jax)'", done.stdout)


def test_static_files_name_nothing_from_elsewhere():
    folder = Path(serve.__file__).parent
    for file in [*folder.glob("static/*"), *folder.glob("templates/*")]:
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, file.name
