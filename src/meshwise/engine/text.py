"""Text as it comes, token by token: whole characters only, and nothing of a stop string. Not here: HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwise.engine.requests import Token
from meshwise.engine.vocabulary import Vocabulary

#: Tokens of the prompt that a decoder sees first, so that the space before a word is right.
_CONTEXT = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text, and the tokens that it took; at the end the reason.

    Args:
        text: maybe none yet.
        tokens: since the piece before.
        reason: None: there is more to come.
        count: tokens of the output so far.
    """

    text: str
    tokens: tuple[Token, ...] = ()
    reason: str | None = None
    count: int = 0


@dataclass
class TextSink:
    """Takes tokens in the engine's thread and sends pieces of text.

    Args:
        vocabulary: of the model.
        prompt: its tokens.
        stops: strings that end the output; they are not part of it.
        send: takes pieces.
    """

    vocabulary: Vocabulary
    prompt: Sequence[int]
    stops: tuple[str, ...]
    send: Callable[[Piece], None]
    count: int = 0
    _held: str = ""
    _tokens: list[Token] = field(default_factory=list)
    _stopped: bool = False

    def __post_init__(self) -> None:
        """Begin where the prompt ends."""
        from tokenizers.decoders import DecodeStream  # noqa: PLC0415 -- an optional extra

        self._stream: Any = DecodeStream(ids=list(self.prompt[-_CONTEXT:]), skip_special_tokens=True)

    def token(self, token: Token) -> bool:
        """Take a token; True where a stop string is complete."""
        self.count += 1
        self._tokens.append(token)
        self._held += self._stream.step(self.vocabulary.tokenizer, token.id) or ""
        places = [place for stop in self.stops if (place := self._held.find(stop)) >= 0]
        if places:
            self._stopped = True
            self._held = self._held[: min(places)]
            return True
        ready = len(self._held) - max((_overlap(self._held, stop) for stop in self.stops), default=0)
        if ready:
            self._pass_on(self._held[:ready])
            self._held = self._held[ready:]
        return False

    def done(self, reason: str) -> None:
        """Send what was held back, and the reason."""
        self.send(Piece(self._held, tuple(self._tokens), reason, self.count))

    def _pass_on(self, text: str) -> None:
        self.send(Piece(text, tuple(self._tokens), count=self.count))
        self._tokens.clear()


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text that a stop string begins with.

    >>> _overlap("one two", "two three"), _overlap("one", "two")
    (3, 0)
    """
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
