"""Engines that share a load: replicas of one model, each with devices and a thread of its own.

Some may only prefill, and hand requests over to others with their caches. Which of them a request goes to is decided as
the simulator decides it (`scheduling.routing`). Not here: what an engine does with it (`engine`).
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
        decoding: to which `engines` hand over; None: to nobody.
    """

    def __init__(
        self, engines: Sequence[Engine], routing: str = "least-loaded", decoding: Replicas | None = None
    ) -> None:
        self.engines, self._decoding = tuple(engines), decoding
        self._router: Router[Engine] = Router(routing)
        self._choosing = threading.Lock()
        self._threads = [
            threading.Thread(target=self._serve, args=(engine,), name=f"engine {number}", daemon=True)
            for number, engine in enumerate(self.all)
        ]

    @property
    def all(self) -> tuple[Engine, ...]:
        """The engines, and those that they hand over to."""
        return self.engines if self._decoding is None else (*self.engines, *self._decoding.engines)

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
        for engine in self.all:
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
        return next((engine.failure for engine in self.all if engine.failure is not None), None)

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest request that fits when it is alone."""
        return min(engine.most_tokens for engine in self.all)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the cache."""
        return self.engines[0].caches[0].pages.block_tokens

    @property
    def hit_tokens(self) -> int:
        """Tokens of prompts that were found in the caches."""
        return sum(engine.scheduler.hit_tokens for engine in self.all)

    @property
    def preemptions(self) -> int:
        """Requests that gave way."""
        return sum(engine.scheduler.preemptions for engine in self.all)

    def submit(self, request: EngineRequest) -> None:
        """Send a request to one of them."""
        with self._choosing:
            chosen = self._router.choose(self.engines, request.prefix)
            request.replica, request.engine = self.engines.index(chosen), chosen
            chosen.submit(request)

    @staticmethod
    def cancel(request: EngineRequest) -> None:
        """Let a request go, where it is."""
        if request.engine is not None:
            request.engine.cancel(request)
