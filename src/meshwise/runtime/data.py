"""Tokens to train on, the same for every layout: made up, or of a text file; and the tokenizer that reads it.

Each step's tokens depend on its number alone, so a checkpoint holds nothing of them. Not here: where they go on the
devices (`loop`).
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
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
    """Random windows of the token numbers of a file, one after the other.

    Args:
        ids: of the file, which is mapped into memory where its format allows that, and then never read whole.
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


#: Endings of files that say themselves how their numbers are held.
_TABLES = (".parquet", ".arrow", ".safetensors")

#: Names of a column, or a tensor, of tokens, where there are others.
_TOKENS = ("input_ids", "tokens")


def map_tokens(flag: str, file: Path, kind: str | None, *, vocabulary: int, shortest: int, seed: int) -> FileTokens:
    """Map a file of token numbers: without a header, as nanoGPT and Megatron's `.bin` hold them, or of a known format.

    Args:
        flag: that named it.
        file: of little-endian numbers, or one of Parquet, Arrow or safetensors by its ending: the column, or tensor, of
            whole numbers (or lists of them), named `input_ids` or `tokens` where there are several.
        kind: "uint16" or "uint32", of a file without a header; by the vocabulary where None.
        vocabulary: tokens that the model knows.
        shortest: tokens that are needed at least.
        seed: of the windows that are read.

    Raises:
        MissingDependencyError: a library is missing that reads the format.
        MeshwiseError: a file that cannot be read, that is not whole numbers of this size, or that is too short.
    """
    name, known = f"{flag} {file}", file.suffix in _TABLES
    if known and kind is not None:
        raise MeshwiseError(f"--token-format {kind}: {file.name} says itself how its numbers are held; leave it out")
    dtype = np.dtype(kind or ("uint16" if vocabulary <= 1 << 16 else "uint32")).newbyteorder("<")
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            ends = opened.read(_ENDS)
            opened.seek(max(0, size - _ENDS))
            ends += opened.read()
        if not known and size % dtype.itemsize:
            raise MeshwiseError(f"{name}: {size:,} bytes are no whole number of {dtype.name} tokens")
        ids = _read_table(name, file) if known else np.memmap(file, dtype, mode="r") if size else np.empty(0, dtype)
    except OSError as error:
        raise MeshwiseError(f"{name}: {error.strerror or error}") from None
    if len(ids) < shortest:
        raise MeshwiseError(
            f"{name}: expected at least {shortest:,} tokens (a sequence and one more), found {len(ids):,}"
        )
    digest = hashlib.sha256(str(size).encode() + ends).hexdigest()
    return FileTokens(ids, vocabulary, seed, digest, name)


def _read_table(name: str, file: Path) -> np.ndarray:
    """The token numbers of a file in one of `_TABLES`, row after row.

    Raises:
        MissingDependencyError: a library is missing.
        MeshwiseError: it is no such file, or no tokens are found in it.
    """
    kind = file.suffix[1:]
    library, extra = ("safetensors", "run") if kind == "safetensors" else ("pyarrow", "parquet")
    if importlib.util.find_spec(library) is None:
        raise MissingDependencyError(f"{name} needs the library {library}: pip install 'meshwise[{extra}]'")
    found = _tensors(name, file) if kind == "safetensors" else _columns(name, file)
    chosen = [column for column in _TOKENS if column in found] or list(found)
    if len(chosen) != 1:
        among = f"; found {', '.join(chosen)}" if chosen else ""
        what = "tensor" if kind == "safetensors" else "column"
        raise MeshwiseError(f"{name}: expected one {what} of whole numbers, or one named {' or '.join(_TOKENS)}{among}")
    return found[chosen[0]]().reshape(-1)


def _tensors(name: str, file: Path) -> dict[str, Callable[[], np.ndarray]]:
    """What reads each tensor of whole numbers."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415  (an optional extra)

    try:
        opened: Any = safe_open(file, "numpy")  # mapped; kept open by what reads
        names = [key for key in opened.keys() if opened.get_slice(key).get_dtype()[0] in "IU"]  # noqa: SIM118
    except SafetensorError as error:
        raise MeshwiseError(f"{name}: expected safetensors: {error}") from None
    return {key: partial(opened.get_tensor, key) for key in names}


def _columns(name: str, file: Path) -> dict[str, Callable[[], np.ndarray]]:
    """What reads each column of whole numbers, or of lists of these."""
    import pyarrow as pa  # noqa: PLC0415  (an optional extra)
    import pyarrow.parquet  # noqa: PLC0415

    parquet: Any = pyarrow.parquet

    def is_whole(type_: Any) -> bool:
        inner = type_.value_type if pa.types.is_list(type_) or pa.types.is_large_list(type_) else type_
        return bool(pa.types.is_integer(inner))

    def read(key: str) -> np.ndarray:
        column = parquet.read_table(file, columns=[key])[key] if table is None else table[key]
        parts = [part.flatten() if pa.types.is_nested(part.type) else part for part in column.chunks]
        return np.concatenate([part.drop_null().to_numpy() for part in parts] or [np.empty(0, np.int64)])

    try:
        table = None if file.suffix == ".parquet" else _arrow(pa, file)
        schema = parquet.read_schema(file) if table is None else table.schema
    except pa.ArrowInvalid as error:
        raise MeshwiseError(f"{name}: expected {file.suffix[1:].capitalize()}: {error}") from None
    return {own.name: partial(read, own.name) for own in schema if is_whole(own.type)}


def _arrow(pa: Any, file: Path) -> Any:
    """A table that stays in the file, mapped."""
    with pa.memory_map(str(file)) as source:
        try:
            return pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid:  # as the library datasets saves
            source.seek(0)
            return pa.ipc.open_stream(source).read_all()


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
