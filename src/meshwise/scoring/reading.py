"""A row of a file of measured runs as a typed value, and reading such files. Not here: what a row means (`setup`)."""

from __future__ import annotations

import csv
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from meshwise.errors import MeshwiseError
from meshwise.scoring.columns import COLUMNS, METRICS, Column

__all__ = ["MeasuredRun", "RowError", "read_runs", "runs_of"]

_BY_NAME = {c.name: c for c in COLUMNS}
_ALWAYS = ("n_chips", "global_batch_seqs", "seq_len", "measured_metric", "measured_value", "unit")


class RowError(MeshwiseError):
    """A cell of a file of measurements that cannot be read; says the line and the column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A row; cells that are blank are None, or "" where they are text. The fields are the columns (`COLUMNS`)."""

    id: str
    source: str = ""
    chip: str = ""
    run_id: str = ""
    source_url_or_repo_path: str = ""
    year: int | None = None
    model: str = ""
    params_b: float | None = None
    layers: int | None = None
    d_model: int | None = None
    d_ff: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    head_dim: int | None = None
    vocab: int | None = None
    moe_experts: int | None = None
    moe_topk: int | None = None
    hardware: str = ""
    n_chips: int
    dtype: str = ""
    tp: int | None = None
    sp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp: int | None = None
    fsdp_or_zero_stage: str = ""
    recompute: str = ""
    micro_batch: int | None = None
    global_batch_seqs: int
    seq_len: int
    measured_metric: str
    measured_value: float
    unit: str
    primary: str = "yes"
    arch_source: str = ""
    flops_convention: str = ""
    software: str = ""
    notes: str = ""

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch_seqs * self.seq_len

    @property
    def is_memory(self) -> bool:
        """Whether memory was measured, not time."""
        return METRICS[self.measured_metric].of == "memory"

    @property
    def counts(self) -> bool:
        """Whether it is an independent number; numbers of memory are, whatever else the run says."""
        return self.primary != "no" or self.is_memory

    @property
    def words(self) -> str:
        """All remarks, in lower case, to look for words in."""
        return f"{self.model} {self.arch_source} {self.software} {self.notes}".lower()


def read_runs(path: Path) -> tuple[MeasuredRun, ...]:
    """Read a file.

    Raises:
        MeshwiseError: it cannot be read, its header has an unknown column or lacks one, or a cell is wrong (RowError).
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise MeshwiseError(f"{path}: {reason}") from None
    return runs_of(text, str(path))


def runs_of(text: str, where: str) -> tuple[MeasuredRun, ...]:
    """Read the text of a file; `where` is what errors call it."""
    lines = csv.reader(text.splitlines(keepends=True))
    header = [cell.strip() for cell in next(lines, [])]
    _check_header(header, where)
    runs: list[MeasuredRun] = []
    for cells in lines:
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(header):
            raise RowError(f"{where}, line {lines.line_num}: expected {len(header)} cells, found {len(cells)}")
        values = {name: cell.strip() for name, cell in zip(header, cells, strict=True)}
        runs.append(_run(values, f"{where}, line {lines.line_num}", lines.line_num))
    if not runs:
        raise MeshwiseError(f"{where}: expected rows of measurements under a header, found none")
    _check_ids(runs, where)
    return tuple(runs)


def _check_header(header: list[str], where: str) -> None:
    if "engine" in header and "phase" in header:
        raise MeshwiseError(
            f"{where}: these are measurements of serving (columns engine, phase), which are not scored; "
            "expected training runs (docs/measurements.md)"
        )
    if "category" in header and "op" in header:
        raise MeshwiseError(
            f"{where}: these are single operations (columns category, op), which say nothing of clocks over minutes, "
            "the host, or what hides behind what; expected training runs: one row a run, with the columns of "
            "docs/measurements.md. meshwise bench shows such operations beside what they should take"
        )
    for name in header:
        if name not in _BY_NAME:
            near = difflib.get_close_matches(name, _BY_NAME, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "docs/measurements.md lists the columns"
            raise MeshwiseError(f"{where}: column {name!r} is not one of the format; {hint}")
    if repeated := next((name for name in header if header.count(name) > 1), None):
        raise MeshwiseError(f"{where}: column {repeated!r} stands twice in the header; keep one")
    if missing := [name for name in _ALWAYS if name not in header]:
        raise MeshwiseError(f"{where}: the header lacks {', '.join(missing)}; docs/measurements.md lists the columns")


def _check_ids(runs: Iterable[MeasuredRun], where: str) -> None:
    seen: set[str] = set()
    for run in runs:
        if run.id in seen:
            raise RowError(f"{where}: two rows have the id {run.id!r}; give each its own")
        seen.add(run.id)


def _run(values: Mapping[str, str], where: str, line: int) -> MeasuredRun:
    cells = {name: _cell(_BY_NAME[name], text, where) for name, text in values.items()}
    for name in _ALWAYS:
        if cells[name] in (None, ""):
            raise RowError(f"{where}, column {name}: expected a value, found a blank cell")
    metric = str(cells["measured_metric"])
    if metric not in METRICS:
        raise RowError(f"{where}, column measured_metric: expected one of {', '.join(METRICS)}; found {metric!r}")
    if cells.get("primary") not in (None, "", "yes", "no"):
        raise RowError(f"{where}, column primary: expected yes or no, found {cells['primary']!r}")
    cells["id"] = cells.get("id") or f"line {line}"
    cells["primary"] = cells.get("primary") or "yes"
    known = {f.name for f in fields(MeasuredRun)}
    assert set(cells) <= known
    return MeasuredRun(**cells)  # type: ignore[arg-type]


def _cell(column: Column, text: str, where: str) -> str | int | float | None:
    if column.kind == "text":
        return text
    if not text:
        return None
    expected = "a whole number of at least 1" if column.kind == "count" else "a number above 0"
    wrong = RowError(f"{where}, column {column.name}: expected {expected}, found {text!r}")
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        raise wrong from None
    if not math.isfinite(value) or value <= 0:
        raise wrong
    if column.kind == "number":
        return value
    if value != int(value):
        raise wrong
    return int(value)
