"""A row of a file of measured runs as a typed value, and reading such files. Not here: what a row means (`setup`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwise.core.errors import MeshwiseError
from meshwise.scoring.columns import COLUMNS, METRICS
from meshwise.scoring.rows import Row, RowFormat, UnreadRow, header_of, read_text, rows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun(Row):
    """A row; cells that are blank are None, or "" where they are text. The fields are the columns (`COLUMNS`)."""

    METRICS = METRICS

    dtype: str = ""
    sp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    fsdp_or_zero_stage: str = ""
    recompute: str = ""
    micro_batch: int | None = None
    global_batch_seqs: int
    seq_len: int
    flops_convention: str = ""

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch_seqs * self.seq_len

    @property
    def positions(self) -> int:
        """Tokens of the longest sequence."""
        return self.seq_len

    @property
    def machine_words(self) -> str:
        """Remarks that may say how many slices of TPUs there are."""
        return f"{self.fsdp_or_zero_stage} {self.notes} {self.hardware}"


#: Training runs as rows.
_RUNS = RowFormat(
    COLUMNS,
    ("n_chips", "global_batch_seqs", "seq_len", "measured_metric", "measured_value", "unit"),
    MeasuredRun,
)


def read_runs(path: Path) -> tuple[MeasuredRun | UnreadRow, ...]:
    """Read a file; a row with a wrong cell says so, and leaves the others as they are.

    Raises:
        MeshwiseError: it cannot be read, or its header has an unknown column or lacks one.
    """
    return runs_of(read_text(path), str(path))


def runs_of(text: str, where: str) -> tuple[MeasuredRun | UnreadRow, ...]:
    """Read the text of a file; `where` is what errors call it."""
    header = header_of(text)
    if "engine" in header and "phase" in header:
        raise MeshwiseError(
            f"{where}: these are measurements of serving (columns engine, phase), which `meshwise score` predicts; "
            "expected training runs (docs/measurements.md)"
        )
    if "category" in header and "op" in header:
        raise MeshwiseError(
            f"{where}: these are single operations (columns category, op), which say nothing of clocks over minutes, "
            "the host, or what hides behind what; expected training runs: one row a run, with the columns of "
            "docs/measurements.md. meshwise bench shows such operations beside what they should take"
        )
    return rows_of(text, where, _RUNS)
