"""A request to the engine: tokens, how they are sampled, when they end, and who hears of them.

Not here: text (`text`), batches (`scheduling`).
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from meshwise.core.errors import MeshwiseError
from meshwise.scheduling import Path, Request, block_path


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen.

    Args:
        temperature: 0: the most likely token.
        top_p, top_k, min_p: filters; 1, 0 and 0 filter nothing.
        presence_penalty, frequency_penalty, repetition_penalty: 0, 0 and 1 change nothing.
        seed: of what is drawn.
        logprobs: alternatives that are told beside each token's own logprob; None: no logprobs.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logprobs: int | None = None

    @property
    def penalised(self) -> bool:
        """Whether what was seen changes what follows."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def plain(self) -> bool:
        """Whether the most likely token is all that is asked for."""
        return self.temperature == 0 and not self.penalised and self.logprobs is None


class Token(NamedTuple):
    """A token that was sampled.

    Args:
        id: of the vocabulary.
        logprob: under the model; 0 where none was asked for.
        likely: the most likely tokens, with their logprobs; as many as were asked for.
    """

    id: int
    logprob: float = 0.0
    likely: tuple[tuple[int, float], ...] = ()


class Keeping(Protocol):
    """What an output must keep to, in the engine's thread; `schema` says it."""

    schema: Mapping[str, Any]

    def bits(self, words: int) -> Any:
        """A bit a token, set where it may come next: uint32 [words]."""
        ...

    def take(self, token: int) -> str | None:
        """Take the token that came; the reason, where the output ends with it."""
        ...


class Having(Protocol):
    """An engine that has requests."""

    def cancel(self, request: EngineRequest) -> None:
        """Let a request go before the next step, if it is not over by then."""
        ...


class SentCache(Protocol):
    """Keys and values of a request on their way to other devices."""

    @property
    def arrived(self) -> bool:
        """Whether nothing of where they were is needed any more."""
        ...


class Sink(Protocol):
    """Who hears of a request's tokens, in the engine's thread."""

    def token(self, token: Token) -> bool:
        """Take a token; True: the output ends with it (a stop word)."""
        ...

    def done(self, reason: str) -> None:
        """The output is over: "stop", "length", "cancelled" or "error"."""
        ...


@dataclass(slots=True)
class Collected:
    """A sink that keeps all."""

    tokens: list[Token] = field(default_factory=list)
    reason: str | None = None

    def token(self, token: Token) -> bool:
        """Keep a token."""
        self.tokens.append(token)
        return False

    def done(self, reason: str) -> None:
        """Keep the reason."""
        self.reason = reason

    @property
    def ids(self) -> list[int]:
        """The tokens alone."""
        return [token.id for token in self.tokens]


class EngineRequest(Request):
    """A request to the engine.

    Args:
        index: its number, in the order of arrival; given by the engine.
        prompt_tokens: at least one.
        max_tokens: of its output.
        sampling: how they are chosen.
        stops: tokens that end the output; they are not part of it.
        sink: who hears of it.
        block_tokens: of the engine's cache.
        salt: only requests of the same salt share what is cached.
        constraint: what its output must keep to; None: nothing.

    Attributes:
        tokens: of the prompt, and of the output as it comes.
        reason: why it is over; None: it is not.
        replica: number of the engine that it was sent to, among those of its kind.
        engine: that has it; None: not sent yet.
        coming: tokens of its output that were made and are not here yet: its last one, where steps are started ahead.
        cache: its keys and values, on their way to an engine that decodes; None: they are where it is, or nowhere.
        times: when it came, was first worked on, gave its first token, and was done; seconds of the engine's clock.
    """

    __slots__ = (
        "block_tokens",
        "cache",
        "coming",
        "constraint",
        "engine",
        "max_tokens",
        "reason",
        "replica",
        "salt",
        "sampling",
        "sink",
        "stops",
        "times",
        "tokens",
    )

    def __init__(
        self,
        prompt_tokens: Sequence[int],
        max_tokens: int,
        sink: Sink,
        *,
        sampling: Sampling | None = None,
        stops: frozenset[int] = frozenset(),
        block_tokens: int = 16,
        salt: bytes = b"",
        constraint: Keeping | None = None,
    ) -> None:
        if not prompt_tokens:
            raise MeshwiseError("a request needs at least one token of a prompt, found none")
        if max_tokens < 1:
            raise MeshwiseError(f"max tokens: expected at least 1, found {max_tokens}")
        self.tokens = array("i", prompt_tokens)
        self.block_tokens, self.salt = block_tokens, salt
        super().__init__(-1, len(self.tokens), self._path(len(self.tokens)))
        self.max_tokens, self.sink, self.stops = max_tokens, sink, stops
        self.sampling, self.constraint = sampling or Sampling(), constraint
        self.reason: str | None = None
        self.replica = 0
        self.engine: Having | None = None
        self.cache: SentCache | None = None
        self.coming = 0
        self.times: dict[str, float] = {}

    @property
    def made(self) -> int:
        """Tokens of its output so far."""
        return len(self.tokens) - self.prompt

    def kept(self) -> Path:
        """Whole blocks of its prompt and output; the last token is not in the cache."""
        return self._path(len(self.tokens) + self.coming - 1)

    def _path(self, length: int) -> Path:
        return block_path(self.tokens[:length].tobytes(), self.tokens.itemsize, self.block_tokens, self.salt)

    def take(self, token: Token) -> str | None:
        """Take its next token; the reason, where the output ends with it."""
        self.tokens.append(token.id)
        self.coming = 0
        kept = None if self.constraint is None else self.constraint.take(token.id)
        if kept == "error" or token.id in self.stops:
            return kept or "stop"
        if self.sink.token(token):
            return "stop"
        if kept is not None:
            return kept
        return "length" if self.made >= self.max_tokens else None


def tell_over(request: EngineRequest) -> None:
    """Say that a request is over; a sink that fails harms nobody."""
    with contextlib.suppress(Exception):
        request.sink.done(request.reason or "error")
