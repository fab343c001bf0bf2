"""Answers in OpenAI's shape, whole or as chunks of a stream. Not here: what requests say (`protocol`)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwise.engine.requests import Token
from meshwise.engine.text import Piece
from meshwise.engine.vocabulary import Vocabulary


@dataclass
class Answer:
    """The answer to one request, as its pieces come.

    Args:
        model: as it is called.
        vocabulary: of the model.
        chat: whether it is one of a chat, else a completion.
        logprobs: whether they are told.
        prompt_tokens: of all prompts.
        continuous: whether each chunk tells the usage so far.
        id, created: of the answer.
        counts: tokens of each choice so far, by its number.
    """

    model: str
    vocabulary: Vocabulary
    chat: bool
    logprobs: bool
    prompt_tokens: int
    continuous: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    counts: dict[int, int] = field(default_factory=dict)

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of prompts and outputs."""
        count = sum(self.counts.values())
        whole = self.prompt_tokens + count
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": count, "total_tokens": whole}

    def whole(self, outputs: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """All choices at once."""
        choices = []
        for index, pieces in enumerate(outputs):
            text, tokens = "".join(p.text for p in pieces), [t for p in pieces for t in p.tokens]
            self.counts[index] = pieces[-1].count
            said: dict[str, Any] = {"index": index, "finish_reason": pieces[-1].reason}
            said |= {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            choices.append({**said, "logprobs": self._logprobs(tokens)})
        return self._envelope(choices, "chat.completion" if self.chat else "text_completion") | {"usage": self.usage}

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """What a choice of a chat begins with."""
        if not self.chat:
            return None
        return self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """One piece of one choice."""
        said: dict[str, Any] = {"index": index, "finish_reason": piece.reason}
        if self.chat:
            said["delta"] = {"content": piece.text} if piece.text or piece.reason is None else {}
        else:
            said["text"] = piece.text
        said["logprobs"] = self._logprobs(piece.tokens)
        self.counts[index] = piece.count
        return self._chunk(said)

    def last_chunk(self) -> dict[str, Any]:
        """The chunk after all others, with the usage."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return self._envelope([], kind) | {"usage": self.usage}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        said = self._envelope([choice], "chat.completion.chunk" if self.chat else "text_completion")
        return said | {"usage": self.usage} if self.continuous else said

    def _envelope(self, choices: list[dict[str, Any]], kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.chat else "cmpl"
        head = {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        names = [self._name(t.id) for t in tokens]
        if not self.chat:
            return {
                "tokens": names,
                "token_logprobs": [t.logprob for t in tokens],
                "top_logprobs": [{self._name(i): p for i, p in t.likely} for t in tokens],
            }
        content = [
            self._one(t.id, t.logprob) | {"top_logprobs": [self._one(i, p) for i, p in t.likely]} for t in tokens
        ]
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._name(token)
        return {"token": name, "logprob": logprob, "bytes": list(name.encode())}

    def _name(self, token: int) -> str:
        return self.vocabulary.decode([token], skip_special=False)
