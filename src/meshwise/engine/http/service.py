"""Requests of the endpoint given to the engines, and their pieces brought back. Not here: HTTP (`app`)."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from meshwise.engine.constraints import Constraint, Constraints
from meshwise.engine.http.metrics import Metrics
from meshwise.engine.http.protocol import Generation, HttpError
from meshwise.engine.replicas import Replicas
from meshwise.engine.requests import EngineRequest
from meshwise.engine.text import Piece, TextSink
from meshwise.engine.vocabulary import Vocabulary

#: Takes a piece, with the number of its choice.
Sender = Callable[[int, Piece], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """Bounds of the endpoint.

    Args:
        model: as it is called.
        longest: tokens of a request, prompt and output together.
        max_queue: outputs that may be asked for and not over.
        max_body: bytes of a request.
        timeout: seconds that a request may take.
        api_key: what requests must bring; None: nothing.
        vocabulary: tokens that the model knows, where it may know fewer than its tokenizer.
    """

    model: str
    longest: int
    max_queue: int = 256
    max_body: int = 4 * 2**20
    timeout: float = 600.0
    api_key: str | None = None
    vocabulary: int | None = None


class Service:
    """Gives requests to engines.

    Args:
        engines: that serve.
        vocabulary: of its model.
        settings: see there.
        metrics: see there.
    """

    def __init__(self, engines: Replicas, vocabulary: Vocabulary, settings: Settings, metrics: Metrics) -> None:
        self.engines, self.vocabulary, self.settings, self.metrics = engines, vocabulary, settings, metrics
        self.constraints = Constraints(vocabulary, settings.vocabulary or 0)
        self.draining = False
        self.active = 0
        metrics.watch(engines)

    def start(self) -> None:
        """Begin to serve."""
        self.engines.start()

    def stop(self) -> None:
        """End after the running step."""
        self.engines.stop()

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.engines.serving and not self.draining

    @property
    def known_tokens(self) -> int:
        """Tokens that both the model and its tokenizer know."""
        known: int = self.vocabulary.tokenizer.get_vocab_size()
        return min(known, self.settings.vocabulary or known)

    def check(self, tokens: Sequence[int], count: int | None) -> int:
        """The tokens of an output after a prompt, at most.

        Raises:
            HttpError: they do not fit, or the prompt has none, or tokens that the model does not know.
        """
        longest = min(self.settings.longest, self.engines.most_tokens)
        if not tokens:
            raise HttpError(400, "prompt: expected at least one token, found none", "prompt")
        if not 0 <= min(tokens) <= max(tokens) < self.known_tokens:
            raise HttpError(400, f"prompt: expected tokens from 0 to {self.known_tokens - 1:,}, found others", "prompt")
        if len(tokens) >= longest:
            found = f"prompt: expected fewer than {longest:,} tokens, output included, found {len(tokens):,}"
            raise HttpError(400, found, "prompt")
        if count is not None and len(tokens) + count > longest:
            raise HttpError(
                400,
                f"max_tokens: {len(tokens):,} tokens of the prompt and {count:,} of the output are more than the "
                f"{longest:,} that fit; ask for at most {longest - len(tokens):,}",
                "max_tokens",
            )
        return longest - len(tokens) if count is None else count

    @contextlib.asynccontextmanager
    async def serve(
        self, asked: Generation, prompts: Sequence[Sequence[int]], count: int | None
    ) -> AsyncIterator[AsyncIterator[tuple[int, Piece]]]:
        """Pieces of all outputs as they come, each with the number of its choice; what is left is let go of.

        Raises:
            HttpError: the endpoint takes no more; a prompt does not fit; it takes too long.
        """
        limits = [self.check(tokens, count) for tokens in prompts]
        outputs = len(prompts) * asked.choices
        if self.engines.failure is not None or not self.ready:
            raise HttpError(503, "the engine is ending" if self.draining else "the engine has failed", retry_after=5)
        if self.active + outputs > self.settings.max_queue:
            most = self.settings.max_queue
            raise HttpError(429, f"{self.active:,} outputs of at most {most:,} are asked for already", retry_after=1)
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Piece]]()

        def send(index: int, piece: Piece) -> None:
            with contextlib.suppress(RuntimeError):  # the endpoint is gone
                loop.call_soon_threadsafe(queue.put_nowait, (index, piece))

        kept = await self._constraints(asked, outputs)
        requests = []
        for place, (tokens, limit) in enumerate(zip(prompts, limits, strict=True)):
            for choice in range(asked.choices):
                index = place * asked.choices + choice
                requests.append(self._request(asked, tokens, limit, index, send=send, constraint=kept[index]))
        self.active += outputs
        try:
            for request in requests:
                self.engines.submit(request)
            yield self._pieces(queue, outputs)
        finally:
            self.active -= outputs
            for request in requests:
                if request.reason is None:
                    self.engines.cancel(request)

    async def _constraints(self, asked: Generation, outputs: int) -> Sequence[Constraint | None]:
        """What each output must keep to.

        Raises:
            MeshwiseError: a schema that cannot be kept to, or nothing to keep to it with.
        """
        schema = asked.schema_of_answer
        if schema is None:
            return [None] * outputs
        if asked.ignore_eos:
            raise HttpError(400, "ignore_eos: an answer in JSON ends where it is whole; leave it out", "ignore_eos")
        return await asyncio.to_thread(lambda: [self.constraints.of_schema(schema) for _ in range(outputs)])

    def _request(
        self,
        asked: Generation,
        tokens: Sequence[int],
        limit: int,
        index: int,
        *,
        send: Sender,
        constraint: Constraint | None,
    ) -> EngineRequest:
        sink = TextSink(self.vocabulary, tokens, asked.stops, lambda piece: send(index, piece))
        seed = secrets.randbits(32) if asked.seed is None else asked.seed + index  # each choice another answer
        return EngineRequest(
            tokens,
            limit,
            sink,
            sampling=asked.sampling(seed),
            stops=frozenset() if asked.ignore_eos else self.vocabulary.stops,
            block_tokens=self.engines.block_tokens,
            constraint=constraint,
            salt=b"" if asked.cache_salt is None else f"{len(asked.cache_salt)}:{asked.cache_salt}".encode(),
        )

    async def _pieces(self, queue: asyncio.Queue[tuple[int, Piece]], outputs: int) -> AsyncIterator[tuple[int, Piece]]:
        left, loop = outputs, asyncio.get_running_loop()
        end = loop.time() + self.settings.timeout
        while left:
            try:
                async with asyncio.timeout_at(end):
                    index, piece = await queue.get()
            except TimeoutError:
                raise HttpError(504, f"the request took more than {self.settings.timeout:g} seconds") from None
            if piece.reason in ("error", "cancelled"):
                raise HttpError(503, "the engine has ended before the request", retry_after=5)
            left -= piece.reason is not None
            yield index, piece
