"""The endpoint: routes, bodies, keys, streams. Safe by default: bounds on everything, nothing is fetched or executed.

A client that goes away, whether it reads a stream or waits for the whole answer, frees its pages before the next step.
Not here: fields (`protocol`), the engine (`service`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from meshwise.core.errors import MeshwiseError
from meshwise.engine.http.answers import Answer
from meshwise.engine.http.protocol import (
    MOST_PROMPTS,
    Chat,
    Completion,
    Detokenize,
    Generation,
    HttpError,
    StreamOptions,
    Tokenize,
    read,
)
from meshwise.engine.http.service import Service
from meshwise.engine.text import Piece

#: Seconds in which a body must have come.
_BODY_SECONDS = 30.0

_LOG = logging.getLogger("meshwise.endpoint")

Handler = Callable[[Request], Awaitable[Response]]


class Endpoint:
    """The routes of a service.

    Args:
        service: that answers.
        hosts: names by which clients may call the endpoint; None: any.
    """

    def __init__(self, service: Service, hosts: Sequence[str] | None = None) -> None:
        self.service, self.settings, self.vocabulary = service, service.settings, service.vocabulary
        open_routes = {"/health": self._health, "/ready": self._ready}
        keyed = {
            "/metrics": ("GET", self._metrics),
            "/v1/models": ("GET", self._models),
            "/v1/models/{model:path}": ("GET", self._model),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completion),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
        }
        routes = [Route(path, self._guarded(handler, keyed=False)) for path, handler in open_routes.items()]
        routes += [Route(p, self._guarded(h, keyed=True), methods=[m]) for p, (m, h) in keyed.items()]
        middleware = [] if hosts is None else [Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))]

        @contextlib.asynccontextmanager
        async def lifespan(_app: Starlette) -> AsyncIterator[None]:
            service.start()
            try:
                yield
            finally:
                await asyncio.to_thread(service.stop)

        errors: Mapping[Any, Any] = {404: self._absent, 405: self._absent}
        self.app = Starlette(routes=routes, middleware=middleware, lifespan=lifespan, exception_handlers=errors)

    # What every request goes through

    def _guarded(self, handler: Handler, *, keyed: bool) -> Handler:
        """Ask for the key, and tell errors in OpenAI's shape."""

        async def guarded(request: Request) -> Response:
            try:
                if keyed:
                    self._check_key(request)
                return await handler(request)
            except HttpError as error:
                return self._refusal(error)
            except MeshwiseError as error:
                return self._refusal(HttpError(400, str(error)))
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:  # noqa: BLE001 -- the boundary: a request that fails harms no other
                _LOG.error("%s %s: a bug: %r", request.method, request.url.path, error)
                return self._refusal(HttpError(500, "the endpoint failed; this is a bug"))

        return guarded

    def _refusal(self, error: HttpError) -> JSONResponse:
        self.service.metrics.refused(error.status)
        headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(error.body, error.status, headers)

    async def _absent(self, request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        return self._refusal(HttpError(status, f"{request.method} {request.url.path}: there is no such route"))

    def _check_key(self, request: Request) -> None:
        key = self.settings.api_key
        if key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), key.encode()):  # takes as long whatever is right of it
            raise HttpError(401, "expected the API key as 'Authorization: Bearer KEY', found another, or none")

    async def _body(self, request: Request) -> bytes:
        """The body, as far as it is allowed to go."""
        parts, size = [], 0
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for part in request.stream():
                    size += len(part)
                    if size > self.settings.max_body:
                        raise HttpError(413, f"expected a body of at most {self.settings.max_body:,} bytes, found more")
                    parts.append(part)
        except TimeoutError:
            raise HttpError(408, f"the body did not come within {_BODY_SECONDS:g} seconds") from None
        return b"".join(parts)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.model:
            raise HttpError(404, f"model {name!r:.100}: only {self.settings.model!r} is served here", "model")

    # About the endpoint

    async def _health(self, _request: Request) -> Response:
        failed = self.service.engines.failure is not None
        return JSONResponse({"status": "failed" if failed else "ok"}, 503 if failed else 200)

    async def _ready(self, _request: Request) -> Response:
        return JSONResponse({"ready": self.service.ready}, 200 if self.service.ready else 503)

    async def _metrics(self, _request: Request) -> Response:
        return Response(self.service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _described(self) -> dict[str, Any]:
        own = {"id": self.settings.model, "object": "model", "created": 0, "owned_by": "meshwise"}
        return {**own, "max_model_len": self.settings.longest, "vocab_size": self.service.known_tokens}

    async def _models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return JSONResponse(self._described())

    async def _tokenize(self, request: Request) -> Response:
        asked = read(Tokenize, await self._body(request))
        self._check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise HttpError(400, "expected a prompt or messages, found neither or both", "prompt")
        if asked.messages is not None:
            tokens = self.vocabulary.chat([m.plain() for m in asked.messages])
        else:
            tokens = self.vocabulary.encode(asked.prompt or "", special=asked.add_special_tokens)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": self.settings.longest})

    async def _detokenize(self, request: Request) -> Response:
        asked = read(Detokenize, await self._body(request))
        self._check_model(asked.model)
        return JSONResponse({"prompt": self.vocabulary.decode(asked.tokens, skip_special=False)})

    # Generation

    async def _chat(self, request: Request) -> Response:
        asked = read(Chat, await self._body(request))
        tokens = self.vocabulary.chat([m.plain() for m in asked.messages])
        return await self._generate(request, asked, [tokens], asked.limit)

    async def _completion(self, request: Request) -> Response:
        asked = read(Completion, await self._body(request))
        if not 1 <= len(asked.prompts) <= MOST_PROMPTS:
            raise HttpError(400, f"prompt: expected 1 to {MOST_PROMPTS}, found {len(asked.prompts):,}", "prompt")
        prompts = [p if isinstance(p, list) else self.vocabulary.encode(p) for p in asked.prompts]
        return await self._generate(request, asked, prompts, asked.max_tokens)

    async def _generate(
        self, request: Request, asked: Generation, prompts: Sequence[list[int]], count: int | None
    ) -> Response:
        self._check_model(asked.model)
        if asked.stream_options is not None and not asked.stream:
            raise HttpError(400, "stream_options: they need stream", "stream_options")
        told, usage = asked.alternatives is not None, asked.stream_options or StreamOptions()
        own = (self.settings.model, self.vocabulary, isinstance(asked, Chat), told)
        answer = Answer(*own, sum(map(len, prompts)), continuous=usage.continuous_usage_stats)
        stack = contextlib.AsyncExitStack()
        pieces = await stack.enter_async_context(self.service.serve(asked, prompts, count))
        if asked.stream:
            return _Stream(self._events(answer, pieces, usage=usage.include_usage), stack)
        async with stack:
            made = await _unless_gone(request, _gathered(pieces, len(prompts) * asked.choices))
        return Response(status_code=499) if made is None else JSONResponse(answer.whole(made))

    async def _events(
        self, answer: Answer, pieces: AsyncIterator[tuple[int, Piece]], *, usage: bool
    ) -> AsyncIterator[bytes]:
        """Server-sent events; an error on the way is the last of them."""
        begun: set[int] = set()
        try:
            async for index, piece in pieces:
                if index not in begun and (first := answer.first_chunk(index)) is not None:
                    yield _event(first)
                begun.add(index)
                yield _event(answer.chunk(index, piece))
            if usage:
                yield _event(answer.last_chunk())
        except HttpError as error:
            self.service.metrics.refused(error.status)
            yield _event(error.body)
        yield b"data: [DONE]\n\n"


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class _Stream(StreamingResponse):
    """A stream that lets go of its requests however it ends, a client that stopped reading included."""

    def __init__(self, events: AsyncIterator[bytes], stack: contextlib.AsyncExitStack) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            await super().__call__(scope, receive, send)


async def _gathered(pieces: AsyncIterator[tuple[int, Piece]], choices: int) -> list[list[Piece]]:
    outputs: list[list[Piece]] = [[] for _ in range(choices)]
    async for index, piece in pieces:
        outputs[index].append(piece)
    return outputs


async def _unless_gone(request: Request, work: Awaitable[list[list[Piece]]]) -> list[list[Piece]] | None:
    """What work gives; None as soon as the client is gone, for which it is not waited."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
