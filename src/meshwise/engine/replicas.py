"""Engines that share a load: replicas of one model, each with devices and a thread of its own.

Which of them a request goes to is decided as the simulator decides it (`scheduling.routing`). Not here: what an engine
does with it (`engine`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from meshwise.engine.engine import Engine
from meshwise.engine.requests import EngineRequest
from meshwise.scheduling.routing import Router


class Replicas:
    """Serves requests with several engines.

    Args:
        engines: alike, at least one.
        routing: a name of `scheduling.routing.ROUTINGS`.
    """

    def __init__(self, engines: Sequence[Engine], routing: str = "least-loaded") -> None:
        self.engines = tuple(engines)
        self._router: Router[Engine] = Router(routing)
        self._threads = [
            threading.Thread(target=self._serve, args=(engine,), name=f"engine {number}", daemon=True)
            for number, engine in enumerate(self.engines)
        ]

    @staticmethod
    def _serve(engine: Engine) -> None:
        with contextlib.suppress(Exception):  # kept as its failure
            engine.serve()

    def start(self) -> None:
        """Begin to serve."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End after the running steps."""
        for engine in self.engines:
            engine.stop()
        for thread in self._threads:
            thread.join(timeout=30)

    @property
    def serving(self) -> bool:
        """Whether all of them serve."""
        return all(thread.is_alive() for thread in self._threads)

    @property
    def failure(self) -> BaseException | None:
        """Why one of them has ended; the first of these."""
        return next((engine.failure for engine in self.engines if engine.failure is not None), None)

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest request that fits when it is alone."""
        return self.engines[0].most_tokens

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the cache."""
        return self.engines[0].cache.pages.block_tokens

    @property
    def hit_tokens(self) -> int:
        """Tokens of prompts that were found in the caches."""
        return sum(engine.scheduler.hit_tokens for engine in self.engines)

    @property
    def preemptions(self) -> int:
        """Requests that gave way."""
        return sum(engine.scheduler.preemptions for engine in self.engines)

    def submit(self, request: EngineRequest) -> None:
        """Send a request to one of them, from one thread."""
        chosen = self._router.choose(self.engines, request.prefix)
        request.replica = self.engines.index(chosen)
        chosen.submit(request)

    def cancel(self, request: EngineRequest) -> None:
        """Let a request go, where it is."""
        self.engines[request.replica].cancel(request)
