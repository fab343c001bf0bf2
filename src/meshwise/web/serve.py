"""`ui`: the page, served on 127.0.0.1. Not here: the application (`app`)."""

from __future__ import annotations

import os
import socket
import sys
import webbrowser
from typing import Annotated

from pydantic import Field

from meshwise.commands.command import Screen, verb
from meshwise.commands.requests import Flag, Request
from meshwise.core.errors import MeshwiseError, MissingDependencyError
from meshwise.report import Report
from meshwise.report.table import tabulate
from meshwise.web.links import parse_command
from meshwise.web.views import VIEWS, link

HOST = "127.0.0.1"

#: First port that is tried, and how many after it.
_PORT, _TRIED = 8765, 20


class UiRequest(Request):
    """What `meshwise ui` is asked."""

    positional = ("link",)

    link: str | None = None
    """A link of the page ('/train?model=...'), or a command in quotes, to be opened first."""
    port: Annotated[int, Flag("PORT")] | None = Field(default=None, ge=1, le=65535)
    """Port to listen on; by default the first free one from 8765."""
    browser: bool = True
    """Open the page in the browser, where there is a desktop."""
    views: bool = False
    """List the views and an example command of each, and start nothing."""


@verb(UiRequest)
def show_ui(screen: Screen, request: UiRequest) -> None:
    """Show answers in the browser: each view a link, each link a command.

    LINK is what a link of the page has after the port, or a command in quotes. The server listens on 127.0.0.1 alone
    until Ctrl-C; nothing is fetched from elsewhere, nothing is written.

    \b
      meshwise ui
      meshwise ui "meshwise plan serve llama-3-8b --on h100:8 --prompt 1024 --output 256"
      meshwise ui "/roofline?expression=fp32[N] %2B fp32[N] -> fp32[N]&on=h100"
    """  # noqa: D301  (click's mark for lines that stay as they are)
    if request.views:
        screen.show(_views_report(request))
        return
    path = _path(request.link or "/")
    listening = _listen(request.port)
    address = f"http://{HOST}:{listening.getsockname()[1]}"
    screen.say(f"meshwise ui: {address}{path} (Ctrl-C ends it)")
    if request.browser and _has_desktop():
        webbrowser.open(f"{address}{path}")
    _serve(listening)


def _path(text: str) -> str:
    """The path of a link, of a whole address, or of a command.

    Raises:
        MeshwiseError: neither.
    """
    for start in (f"http://{HOST}", "http://localhost"):
        if text.startswith(start):
            text = "/" + text.removeprefix(start).partition("/")[2]
    return text if text.startswith("/") else link(*parse_command(text))


def _listen(port: int | None) -> socket.socket:
    """A socket that listens on 127.0.0.1.

    Raises:
        MeshwiseError: the port is taken.
    """
    error: OSError | None = None
    for number in (port,) if port is not None else range(_PORT, _PORT + _TRIED):
        found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((HOST, number))
            found.listen()  # who comes before all is loaded waits, and is not turned away
        except OSError as refused:
            found.close()
            error = refused
        else:
            return found
    assert error is not None, "some port was tried"
    which = f"--port {port}" if port is not None else f"ports {_PORT} to {_PORT + _TRIED - 1}"
    raise MeshwiseError(f"{which}: {(error.strerror or 'cannot be used').lower()}; give another, --port 9000")


def _has_desktop() -> bool:
    """Whether a browser would open a window, rather than take over the terminal."""
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _serve(listening: socket.socket) -> None:
    """Serve until Ctrl-C.

    Raises:
        MissingDependencyError: the extra is not installed.
    """
    try:
        import uvicorn  # noqa: PLC0415  (an optional extra)

        from meshwise.web.app import make_app  # noqa: PLC0415
    except ModuleNotFoundError as error:
        listening.close()
        raise MissingDependencyError(f"the page needs {error.name}: pip install 'meshwise[web]'") from None

    class Server(uvicorn.Server):
        """Ends searches first, so that the pages that wait for them end, too."""

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """End."""
            await app.state.searches.close()
            await super().shutdown(sockets)

    app = make_app()
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on", timeout_graceful_shutdown=2)
    try:
        Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        listening.close()


def _views_report(request: UiRequest) -> Report:
    rows = [{"path": f"/{view.name}", "question": view.question, "command": view.example} for view in VIEWS.values()]
    return Report(
        command="ui",
        inputs=request.echo(),
        answer=f"{len(rows)} views, and /, /compare, /about; /api/openapi.json describes the same for programs",
        data={"views": rows},
        body=(tabulate({"!path": "path", "question": "question"}, rows),),
        next_steps=(f"one of them: meshwise ui '{VIEWS['train'].example}'",),
    )
