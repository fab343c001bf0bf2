"""Tokens to train on, the same for every layout: made up, or of a text file; and the tokenizer that reads it.

Each step's tokens depend on its number alone, so a checkpoint holds nothing of them. Not here: where they go on the
devices (`loop`).
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshwise.core.errors import MeshwiseError, MissingDependencyError


def read_tokenizer(file: Path) -> tuple[Any, bytes]:
    """Read a tokenizer.json.

    Returns: the library's tokenizer, and the file's bytes.

    Raises:
        MissingDependencyError: the library is missing.
        MeshwiseError: the file cannot be read.
    """
    if importlib.util.find_spec("tokenizers") is None:
        raise MissingDependencyError("a text needs the library tokenizers: pip install 'meshwise[run]'")
    from tokenizers import Tokenizer  # noqa: PLC0415  (an optional extra)

    rules = read_bytes("--tokenizer", file)
    try:
        return Tokenizer.from_buffer(rules), rules
    except Exception as error:  # noqa: BLE001  (the library raises Exception itself)
        first = str(error).splitlines()[0]
        raise MeshwiseError(f"--tokenizer {file}: expected a tokenizer.json: {first}") from None


def read_bytes(flag: str, file: Path) -> bytes:
    """Read a file that a flag names.

    Raises:
        MeshwiseError: it cannot be read.
    """
    try:
        return file.read_bytes()
    except OSError as error:
        raise MeshwiseError(f"{flag} {file}: {error.strerror}") from None


#: Share of synthetic tokens that do not follow from the one before.
_SURPRISE = 1 / 8


class TokenSource(Protocol):
    """Where a step's sequences come from."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """What must be equal for the same tokens; a resumed run compares it."""
        ...

    def sequences(self, step: int, count: int, length: int) -> np.ndarray:
        """The sequences of a step.

        Args:
            step: its number, from 1.
            count, length: sequences, and tokens of each.

        Returns: int32 [count, length].
        """
        ...


@dataclass(frozen=True, slots=True)
class SyntheticTokens:
    """Made-up text that can be learned: a token is its predecessor plus one, seven times out of eight.

    >>> tokens = SyntheticTokens(vocabulary=100, seed=0)
    >>> bool((tokens.sequences(3, 2, 8) == tokens.sequences(3, 2, 8)).all())
    True

    Args:
        vocabulary: tokens that there are.
        seed: of the random numbers.
    """

    vocabulary: int
    seed: int

    @property
    def identity(self) -> Mapping[str, Any]:
        """Kind and seed; the vocabulary is the model's."""
        return {"source": "synthetic", "seed": self.seed}

    def sequences(self, step: int, count: int, length: int) -> np.ndarray:
        """The sequences of a step: int32 [count, length]."""
        random = np.random.default_rng([self.seed, step])
        jumps = random.random((count, length)) < _SURPRISE
        jumps[:, 0] = True
        starts = random.integers(0, self.vocabulary, (count, length))
        positions = np.arange(length)
        last = np.maximum.accumulate(np.where(jumps, positions, 0), axis=1)  # where the last jump was
        values = (np.take_along_axis(starts, last, axis=1) + positions - last) % self.vocabulary
        return values.astype(np.int32)


@dataclass(frozen=True, slots=True)
class TextTokens:
    """Random windows of one long text.

    Args:
        ids: the text as tokens.
        seed: of the windows.
        digest: of text and tokenizer.
    """

    ids: np.ndarray = field(repr=False)
    seed: int
    digest: str

    @property
    def identity(self) -> Mapping[str, Any]:
        """Kind, seed, and the digest of text and tokenizer."""
        return {"source": "text", "seed": self.seed, "digest": self.digest}

    def sequences(self, step: int, count: int, length: int) -> np.ndarray:
        """The sequences of a step: int32 [count, length]."""
        random = np.random.default_rng([self.seed, step])
        starts = random.integers(0, len(self.ids) - length + 1, count)
        return self.ids[starts[:, None] + np.arange(length)]


def read_text(text: Path, tokenizer: Path, *, vocabulary: int, shortest: int, seed: int) -> TextTokens:
    """Read a text file and cut it into tokens, all of it into memory.

    Args:
        text: the file, UTF-8.
        tokenizer: the tokenizer.json of the `tokenizers` library.
        vocabulary: tokens that the model knows.
        shortest: tokens that are needed at least.
        seed: of the windows that are read.

    Raises:
        MissingDependencyError: the `tokenizers` library is missing.
        MeshwiseError: a file that cannot be read; another vocabulary than the model's; a text that is too short.
    """
    reader, rules = read_tokenizer(tokenizer)
    raw = read_bytes("--text", text)
    try:
        words = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MeshwiseError(f"--text {text}: expected UTF-8, found another byte at {error.start:,}") from None
    ids = np.array(reader.encode(words, add_special_tokens=False).ids, dtype=np.int32)
    if len(ids) < shortest:
        raise MeshwiseError(
            f"--text {text}: expected at least {shortest:,} tokens (a sequence and one more), found {len(ids):,}"
        )
    if int(ids.max()) >= vocabulary:
        raise MeshwiseError(
            f"--tokenizer {tokenizer}: token {int(ids.max()):,} is not among the {vocabulary:,} of the model; "
            "give the tokenizer of this model"
        )
    return TextTokens(ids, seed, hashlib.sha256(hashlib.sha256(raw).digest() + rules).hexdigest())
