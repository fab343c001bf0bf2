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

    def documents(self, step: int, count: int, length: int) -> np.ndarray | None:
        """Where the documents of these tokens begin, None where a sequence is one whatever it holds.

        Args:
            step, count, length: as of `sequences`.

        Returns: the position with which the document of each token begins: int32 [count, length].
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

    def documents(self, step: int, count: int, length: int) -> None:  # noqa: ARG002
        """There are none."""
        return


@dataclass(frozen=True, slots=True)
class DocumentEnds:
    """How documents of one long row of tokens are told apart.

    Args:
        name: as it was asked for: the number of a token, or "rows".
        token: with which each ends; None where `begins` says.
        begins: places in the row at which one begins, in order.
    """

    name: str
    token: int | None = None
    begins: np.ndarray | None = field(default=None, repr=False)

    def within(self, windows: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Where the documents of windows begin.

        Args:
            windows: tokens [count, length].
            starts: of each, its place in the row.

        Returns: positions in the window, of the document of each token: int32 [count, length].
        """
        positions = np.arange(windows.shape[1])
        if self.begins is not None:
            places = starts[:, None] + positions
            own = self.begins[np.searchsorted(self.begins, places, side="right") - 1]
            return np.maximum(own - starts[:, None], 0).astype(np.int32)
        ends = np.pad(windows[:, :-1] == self.token, ((0, 0), (1, 0)))
        return np.maximum.accumulate(np.where(ends, positions, 0), axis=1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class RowTokens:
    """Random windows of one long row of tokens, of a text or of a file of numbers.

    Args:
        ids: the row; of a file that is mapped into memory, where its format allows that, it is never read whole.
        vocabulary: tokens that the model knows.
        seed: of the windows.
        digest: of the text and its tokenizer, or of the file's size, beginning and end.
        source: kind of the file.
        name: as it was given.
        ends: of documents that are kept apart, None for none.
    """

    ids: np.ndarray = field(repr=False)
    vocabulary: int
    seed: int
    digest: str
    source: str
    name: str = ""
    ends: DocumentEnds | None = None

    @property
    def identity(self) -> Mapping[str, Any]:
        """Kind, format, seed, digest, and how documents are told apart."""
        apart = {} if self.ends is None else {"documents": self.ends.name}
        return {"source": self.source, "seed": self.seed, "digest": self.digest, **apart}

    def sequences(self, step: int, count: int, length: int) -> np.ndarray:
        """The sequences of a step: int32 [count, length].

        Raises:
            MeshwiseError: a token that the model does not know.
        """
        found = self._windows(self._starts(step, count, length), length)
        if int(found.max()) >= self.vocabulary:
            raise MeshwiseError(
                f"{self.name}: token {int(found.max()):,} is not among the {self.vocabulary:,} of the model; give the "
                "format that the file is in (--token-format), or the model of its tokenizer"
            )
        return found.astype(np.int32)

    def documents(self, step: int, count: int, length: int) -> np.ndarray | None:
        """Where documents begin, as `TokenSource.documents`."""
        if self.ends is None:
            return None
        starts = self._starts(step, count, length)
        return self.ends.within(self._windows(starts, length), starts)

    def _starts(self, step: int, count: int, length: int) -> np.ndarray:
        return np.random.default_rng([self.seed, step]).integers(0, len(self.ids) - length + 1, count)

    def _windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        return self.ids[starts[:, None] + np.arange(length)].astype(np.int64)


#: Tokens in which one must end a document, if any is to.
_LOOKED_AT = 1 << 24

#: What is asked for where each row of a table is a document.
_EACH_ROW = "rows"


def _document_ends(
    asked: str | None, name: str, ids: np.ndarray, begins: np.ndarray | None, tokenizer: Any = None
) -> DocumentEnds | None:
    """Read what --documents says.

    Args:
        asked: a token's number, its text, or "rows"; None for nothing.
        name: of the file, with its flag.
        ids: its tokens.
        begins: places at which its rows begin, if it has rows.
        tokenizer: that made them of a text.

    Raises:
        MeshwiseError: it is none of these; no token ends a document.
    """
    if asked is None:
        return None
    if asked == _EACH_ROW:
        if begins is None:
            raise MeshwiseError(
                f"--documents rows: {name} has no rows of several tokens; give the token with which a document ends"
            )
        return DocumentEnds(asked, begins=begins)
    token = int(asked) if asked.isdecimal() else None if tokenizer is None else tokenizer.token_to_id(asked)
    if token is None:
        among = "no token of the --tokenizer" if tokenizer is not None else "no number"
        raise MeshwiseError(
            f"--documents {asked}: {among}; expected the token with which a document ends, by its number or, of a "
            "--text, as the tokenizer writes it, or rows, of a table's lists"
        )
    if not (ids[:_LOOKED_AT] == token).any():
        many = f"the first {_LOOKED_AT:,} tokens" if len(ids) > _LOOKED_AT else f"the {len(ids):,} tokens"
        raise MeshwiseError(f"--documents {asked}: none of {many} of {name} is token {token:,}, which ends a document")
    return DocumentEnds(str(token), token)


#: Bytes at either end of a file of tokens that its digest is of.
_ENDS = 1 << 20


#: Endings of files that say themselves how their numbers are held.
_TABLES = (".parquet", ".arrow", ".safetensors")

#: Names of a column, or a tensor, of tokens, where there are others.
_TOKENS = ("input_ids", "tokens")


def map_tokens(
    flag: str,
    file: Path,
    kind: str | None,
    *,
    vocabulary: int,
    shortest: int,
    seed: int,
    documents: str | None = None,
) -> RowTokens:
    """Map a file of token numbers: without a header, as nanoGPT and Megatron's `.bin` hold them, or of a known format.

    Args:
        flag: that named it.
        file: of little-endian numbers, or one of Parquet, Arrow or safetensors by its ending: the column, or tensor, of
            whole numbers (or lists of them), named `input_ids` or `tokens` where there are several.
        kind: "uint16" or "uint32", of a file without a header; by the vocabulary where None.
        vocabulary: tokens that the model knows.
        shortest: tokens that are needed at least.
        seed: of the windows that are read.
        documents: the number of the token with which each ends, or "rows"; None where they are not kept apart.

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
        ids, begins = _read_table(name, file) if known else (_mapped(file, dtype, size), None)
    except OSError as error:
        raise MeshwiseError(f"{name}: {error.strerror or error}") from None
    if len(ids) < shortest:
        raise MeshwiseError(
            f"{name}: expected at least {shortest:,} tokens (a sequence and one more), found {len(ids):,}"
        )
    digest = hashlib.sha256(str(size).encode() + ends).hexdigest()
    apart = _document_ends(documents, name, ids, begins)
    return RowTokens(ids, vocabulary, seed, digest, f"{ids.dtype} tokens", name, apart)


def _mapped(file: Path, dtype: np.dtype, size: int) -> np.ndarray:
    return np.memmap(file, dtype, mode="r") if size else np.empty(0, dtype)


#: Token numbers row after row, and the places at which rows begin, if they are of several.
_Rows = tuple[np.ndarray, np.ndarray | None]


def _read_table(name: str, file: Path) -> _Rows:
    """The token numbers of a file in one of `_TABLES`.

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
    return found[chosen[0]]()


def _tensors(name: str, file: Path) -> dict[str, Callable[[], _Rows]]:
    """What reads each tensor of whole numbers."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415  (an optional extra)

    try:
        opened: Any = safe_open(file, "numpy")  # mapped; kept open by what reads
        names = [key for key in opened.keys() if opened.get_slice(key).get_dtype()[0] in "IU"]  # noqa: SIM118
    except SafetensorError as error:
        raise MeshwiseError(f"{name}: expected safetensors: {error}") from None

    def read(key: str) -> _Rows:
        found = opened.get_tensor(key)
        return found.reshape(-1), np.arange(found.shape[0]) * found[0].size if found.ndim > 1 else None

    return {key: partial(read, key) for key in names}


def _columns(name: str, file: Path) -> dict[str, Callable[[], _Rows]]:
    """What reads each column of whole numbers, or of lists of these."""
    import pyarrow as pa  # noqa: PLC0415  (an optional extra)
    import pyarrow.parquet  # noqa: PLC0415

    parquet: Any = pyarrow.parquet

    def is_whole(type_: Any) -> bool:
        inner = type_.value_type if pa.types.is_list(type_) or pa.types.is_large_list(type_) else type_
        return bool(pa.types.is_integer(inner))

    def joined(parts: list[Any]) -> np.ndarray:
        return np.concatenate([part.drop_null().to_numpy() for part in parts] or [np.empty(0, np.int64)])

    def read(key: str) -> _Rows:
        column = parquet.read_table(file, columns=[key])[key] if table is None else table[key]
        if not pa.types.is_nested(column.type):
            return joined(column.chunks), None
        lists = [part.drop_null() for part in column.chunks]
        parts = [part.flatten() for part in lists]
        if any(part.null_count for part in parts):
            raise MeshwiseError(f"{name}: expected whole numbers in the lists of {key}, found some that are null")
        lengths = joined([part.value_lengths() for part in lists])
        return joined(parts), np.cumsum(lengths) - lengths

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


def read_text(
    text: Path, tokenizer: Path, *, vocabulary: int, shortest: int, seed: int, documents: str | None = None
) -> RowTokens:
    """Read a text file and cut it into tokens, all of it into memory.

    Args:
        text: the file, UTF-8.
        tokenizer: the tokenizer.json of the `tokenizers` library.
        vocabulary: tokens that the model knows.
        shortest: tokens that are needed at least.
        seed: of the windows that are read.
        documents: the token with which each ends, by number or as the tokenizer writes it; None where they are not kept
            apart.

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
    digest = hashlib.sha256(hashlib.sha256(raw).digest() + rules).hexdigest()
    name = f"--text {text}"
    return RowTokens(
        ids, vocabulary, seed, digest, "text", name, _document_ends(documents, name, ids, None, tokenizer=reader)
    )
