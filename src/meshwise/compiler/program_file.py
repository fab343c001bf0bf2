"""Programs from files: HLO as text or as protocol buffers, as XLA dumps them and JAX prints them, compressed or not.

Not here: reading the text (`hlo.reader`).
"""

from __future__ import annotations

import gzip
import importlib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwise.compiler.hlo.reader import Module, read_module
from meshwise.core.errors import CompilerError, MeshwiseError, MissingDependencyError, quoted

_GZIP = b"\x1f\x8b"

#: What the reader raises where a program contradicts itself.
_DAMAGE = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Read a program, and work out what it does: where that goes wrong in ways that say nothing, its text is at fault.

    Compilers write what is consistent, and the reader relies on it.

    Raises:
        CompilerError: a damaged program, or one of a form that is not known here.
    """
    try:
        yield
    except MeshwiseError:
        raise
    except _DAMAGE as error:
        raise CompilerError(
            f"{path}: the program contradicts itself, or has a form that is not known here "
            f"({quoted(error)}); give the file as the compiler wrote it"
        ) from error


def read_program(path: str) -> Module:
    """Read a compiled program.

    Args:
        path: of HLO text (`compiled.as_text()`, `*.txt` of `--xla_dump_to`), or of a serialised `HloProto` or
            `HloModuleProto` (`*.hlo.pb`); compressed by gzip or not.

    Raises:
        CompilerError: a file that cannot be read, or that is neither.
        MissingDependencyError: a protocol buffer, where JAX is not installed.
    """
    try:
        data = Path(path).read_bytes()
        data = gzip.decompress(data) if data.startswith(_GZIP) else data
    except (OSError, EOFError, zlib.error) as error:
        why = (isinstance(error, OSError) and error.strerror) or str(error)  # without the number, and the path again
        raise CompilerError(f"{path}: it cannot be read: {why}") from None
    head = data[:4096].lstrip()
    if head.startswith((b"module @", b"module {", b"#loc", b"module attributes", b"ML\xefR")):
        raise CompilerError(
            f"{path}: expected HLO, found StableHLO, which is not compiled yet; compile it, or give what "
            "XLA_FLAGS=--xla_dump_to=FOLDER writes (*after_optimizations.txt)"
        )
    start = data.find(b"HloModule ", 0, 65536)
    if start >= 0 and not data[:start].strip().strip(b"\x00"):
        return _module(path, data[start:].decode("utf-8", errors="replace"))
    return _module(path, _text_of(path, data))


def _module(path: str, text: str) -> Module:
    try:
        return read_module(text)
    except CompilerError as error:
        raise CompilerError(f"{path}: {error}; give the whole file, as the compiler wrote it") from None


def _text_of(path: str, data: bytes) -> str:
    """The text of a serialised module, by XLA's own printer."""
    try:
        hlo: Any = importlib.import_module("jaxlib._hlo")  # an optional extra; private, and used here only
    except ImportError:
        raise MissingDependencyError(
            f"{path}: protocol buffers are read by JAX: pip install 'meshwise[jax]'; or give the text (*.txt)"
        ) from None
    for candidate in (_first_field(data), data):
        try:
            text = str(hlo.HloModule.from_serialized_hlo_module_proto(candidate).to_string()) if candidate else ""
        except RuntimeError:  # XLA's own: no module
            continue
        if text:
            return text
    raise CompilerError(
        f"{path}: expected HLO text (HloModule ...) or a serialised HloProto or HloModuleProto, found neither"
    )


def _first_field(data: bytes) -> bytes:
    """The first field of a protocol buffer, if that is made of bytes: the module of an `HloProto`."""
    if data[:1] != b"\x0a":
        return b""
    length = shift = 0
    for at, byte in enumerate(data[1:11], 1):
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return data[at + 1 : at + 1 + length]
    return b""
