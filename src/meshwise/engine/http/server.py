"""The endpoint on a port, until it is told to end: then what was asked for is finished, and nothing more is taken.

Not here: routes (`app`).
"""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType

import uvicorn

from meshwise.core.errors import MeshwiseError
from meshwise.engine.http.app import Endpoint
from meshwise.engine.http.service import Service

#: Names of this machine for itself; a page elsewhere that is given one of them by its own name server is not answered.
LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


class Server(uvicorn.Server):
    """A server that says when it ends.

    Args:
        config: of uvicorn.
        service: that is not ready any more then.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 -- as signals call it
        """SIGTERM, or Ctrl-C: drain; Ctrl-C after either ends at once. The process goes on, to sum up.

        A second SIGTERM changes nothing: `timeout`, and others that start processes, send one to the group besides.
        """
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # of its lifespan, which is cut off
        self.should_exit = self._service.draining = True


def bind(host: str, port: int) -> socket.socket:
    """Take a port; 0: any that is free.

    Raises:
        MeshwiseError: it is taken, or may not be.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # Said to be TCP: else asyncio leaves Nagle's algorithm on, and answers wait 40 ms for an acknowledgement.
        with ExitStack() as undo:
            taken = undo.enter_context(socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP))
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind((host, port))
            undo.pop_all()
    except OSError as error:
        raise MeshwiseError(f"--host {host} --port {port}: cannot be taken: {error.strerror or error}") from None
    return taken


def make_server(service: Service, host: str, *, drain: float, most: int) -> Server:
    """Make the server of a service; `run(sockets=[bind(...)])` serves.

    Args:
        service: see there.
        host: that it listens on.
        drain: seconds that running requests have to finish, when it ends.
        most: connections at once.
    """
    for name in ("asyncio", "uvicorn.error"):  # of clients that are gone, and of nonsense on the line
        logging.getLogger(name).setLevel(logging.ERROR)
    endpoint = Endpoint(service, LOOPBACK if host in LOOPBACK else None)
    config = uvicorn.Config(
        endpoint.app,
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=most,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=int(drain),
        h11_max_incomplete_event_size=16 * 1024,
        lifespan="on",
        ws="none",
        http="h11",
    )
    return Server(config, service)


def serve(service: Service, taken: socket.socket, server: Server, ready: Callable[[], None]) -> None:
    """Serve until a signal says to end.

    Args:
        service: see there.
        taken: the port.
        server: of the service.
        ready: called before requests are taken.
    """
    ready()
    server.run(sockets=[taken])
    if service.engines.failure is not None:
        raise service.engines.failure
