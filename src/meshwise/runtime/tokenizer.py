"""A model's tokenizer, read by the library `tokenizers`. Not here: texts to train on (`data`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

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
