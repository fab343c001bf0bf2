"""One measurement of an operation, in the columns of the public format (docs/measurements.md), and files of them.

Not here: taking measurements (`runtime.bench`), or fitting constants to them.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from meshwise.core.errors import MeshwiseError


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOperation:
    """A row of the format; what does not apply is None, and blank in a file.

    Args:
        id: of the row, unique in its file.
        source: who measured.
        chip: our name for the hardware, or what the device calls itself.
        year: of the measurement.
        category: "gemm", "attention prefill", "attention decode", "collective", "memory", "vector" or "overhead".
        op: what ran.
        hardware: what the device calls itself.
        n_chips: devices that took part.
        dtype: of the operands.
        m, n, k: of a product (m, k) x (k, n).
        batch, heads, kv_heads, head_dim, seq_q, seq_kv, causal: of an attention.
        bytes: of a collective: the whole array that it gathers, scatters or reduces, or what a device exchanges (as
            nccl-tests counts); of a copy: what it reads and writes.
        measured_metric: "latency".
        measured_value: the median, in `unit`.
        unit: "ms".
        primary: "yes": one row for each independent number.
        software: what ran it.
        notes: how it was measured.
    """

    id: str
    source: str
    chip: str
    year: int
    category: str
    op: str
    hardware: str
    n_chips: int
    dtype: str
    m: int | None = None
    n: int | None = None
    k: int | None = None
    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    seq_q: int | None = None
    seq_kv: int | None = None
    causal: str | None = None
    bytes: int | None = None
    measured_metric: str = "latency"
    measured_value: float
    unit: str = "ms"
    primary: str = "yes"
    software: str
    notes: str = ""

    @property
    def seconds(self) -> float:
        """The measurement in seconds."""
        return self.measured_value * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[self.unit]


def rows_text(rows: Sequence[MeasuredOperation]) -> str:
    """Rows as CSV, under a header."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [f.name for f in fields(MeasuredOperation)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return out.getvalue()


def check_new(path: Path | None) -> None:
    """Refuse, before anything is measured, a file that could not be written after it.

    Raises:
        MeshwiseError: it exists, or its folder does not.
    """
    if path is not None and path.exists():
        raise MeshwiseError(f"{path}: there is a file already; nothing was overwritten, give another name")
    if path is not None and not os.access(path.parent, os.W_OK):
        raise MeshwiseError(f"{path}: {str(path.parent)!r} is no folder that can be written to; make it first")


def write_new(path: Path, text: str) -> None:
    """Write a text to a new file.

    Raises:
        MeshwiseError: the file exists, or cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
    except FileExistsError:
        raise MeshwiseError(f"{path}: there is a file already; nothing was overwritten, give another name") from None
    except OSError as error:
        raise MeshwiseError(f"{path}: {error.strerror}") from None


def write_rows(path: Path, rows: Sequence[MeasuredOperation]) -> None:
    """Write rows to a new file.

    Raises: as `write_new`.
    """
    write_new(path, rows_text(rows))
