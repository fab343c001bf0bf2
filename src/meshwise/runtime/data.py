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


@dataclass(frozen=True, slots=True)
class FileTokens:
    """Random windows of a file of token numbers, which is mapped into memory and never read whole.

    Args:
        ids: the file.
        vocabulary: tokens that the model knows.
        seed: of the windows.
        digest: of the file's size, beginning and end.
        name: as it was given.
    """

    ids: np.ndarray = field(repr=False)
    vocabulary: int
    seed: int
    digest: str
    name: str = ""

    @property
    def identity(self) -> Mapping[str, Any]:
        """Kind, format, seed and digest."""
        return {"source": f"{self.ids.dtype} tokens", "seed": self.seed, "digest": self.digest}

    def sequences(self, step: int, count: int, length: int) -> np.ndarray:
        """The sequences of a step: int32 [count, length].

        Raises:
            MeshwiseError: a token that the model does not know.
        """
        random = np.random.default_rng([self.seed, step])
        starts = random.integers(0, len(self.ids) - length + 1, count)
        found = self.ids[starts[:, None] + np.arange(length)].astype(np.int64)
        if int(found.max()) >= self.vocabulary:
            raise MeshwiseError(
                f"{self.name}: token {int(found.max()):,} is not among the {self.vocabulary:,} of the model; give the "
                "format that the file is in (--token-format), or the model of its tokenizer"
            )
        return found.astype(np.int32)


#: Bytes at either end of a file of tokens that its digest is of.
_ENDS = 1 << 20


def map_tokens(flag: str, file: Path, kind: str | None, *, vocabulary: int, shortest: int, seed: int) -> FileTokens:
    """Map a file of token numbers without a header, as nanoGPT and Megatron's `.bin` hold them.

    Args:
        flag: that named it.
        file: of little-endian numbers.
        kind: "uint16" or "uint32"; by the vocabulary where None.
        vocabulary: tokens that the model knows.
        shortest: tokens that are needed at least.
        seed: of the windows that are read.

    Raises:
        MeshwiseError: a file that cannot be read, that is not whole numbers of this size, or that is too short.
    """
    dtype = np.dtype(kind or ("uint16" if vocabulary <= 1 << 16 else "uint32")).newbyteorder("<")
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            ends = opened.read(_ENDS)
            opened.seek(max(0, size - _ENDS))
            ends += opened.read()
        if size % dtype.itemsize:
            raise MeshwiseError(f"{flag} {file}: {size:,} bytes are no whole number of {dtype.name} tokens")
        if size // dtype.itemsize < shortest:
            raise MeshwiseError(
                f"{flag} {file}: expected at least {shortest:,} tokens (a sequence and one more), "
                f"found {size // dtype.itemsize:,}"
            )
        ids = np.memmap(file, dtype, mode="r")
    except OSError as error:
        raise MeshwiseError(f"{flag} {file}: {error.strerror}") from None
    digest = hashlib.sha256(str(size).encode() + ends).hexdigest()
    return FileTokens(ids, vocabulary, seed, digest, f"{flag} {file}")


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
