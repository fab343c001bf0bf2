"""Files of measurements: columns of the public format, rows as typed values. Not here: what a row means (`setup`)."""

from __future__ import annotations

import csv
import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Generic, Literal, TypeVar

from meshwise.core.errors import MeshwiseError


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Args:
        name: in the header.
        kind: of its values: text, a whole number of at least 1 ("count") or 0 ("whole"), or a number above 0.
        meaning: in words.
        blank: what a blank cell means; "" where there must be none.
    """

    name: str
    kind: Literal["text", "count", "whole", "number"]
    meaning: str
    blank: str = "unknown"


@dataclass(frozen=True, slots=True)
class Metric:
    """One kind of measurement.

    Args:
        name: in the column `measured_metric`.
        of: what it measures: the time of a step, or memory.
        meaning: in words.
    """

    name: str
    of: Literal["time", "memory"]
    meaning: str


_ONE = "1"

#: Every column there is, in order.
COLUMNS = tuple(
    Column(*row)
    for row in (
        ("id", "text", "of the row, unique in its file", "the number of its line"),
        ("source", "text", "who measured: a name that all rows of one origin share", "the file"),
        ("chip", "text", "our name for the hardware (`meshwise chips`)", "the row is refused"),
        ("run_id", "text", "a name that rows of one run share", "a run of its own"),
        ("source_url_or_repo_path", "text", "where it was published", "not published"),
        ("year", "count", "of the measurement", "unknown: old software is not assumed"),
        ("model", "text", "a name, as `meshwise estimate` takes it or as the source calls it", "the dimensions say it"),
        ("params_b", "number", "parameters in thousand millions, by which what is not said is chosen", "not checked"),
        ("layers", "count", "layers", "those of the named model"),
        ("d_model", "count", "width of the residual stream", "that of the named model"),
        ("d_ff", "count", "feed-forward width; of an expert in mixtures", "four times d_model"),
        ("n_heads", "count", "query heads", "those of the named model"),
        ("n_kv_heads", "count", "key/value heads", "as many as query heads"),
        ("head_dim", "count", "width of a head", "d_model / n_heads"),
        ("vocab", "count", "rows of the table of tokens", "the usual one of the family, else the row is refused"),
        ("moe_experts", "count", "routed experts", "a dense model"),
        ("moe_topk", "count", "experts that a token visits", "a dense model"),
        ("hardware", "text", ("the source's words: `8 per node, 4x Omni-Path 100`, `1600 Gb/s RoCE per node` name the "
         "network"), "the chip's usual network"),
        ("n_chips", "count", "chips (of two cores where a chip has two)", ""),
        ("dtype", "text", "number formats: `bf16`, `fp16`, `fp8`, `mxfp8`, ... or as the source says", "bf16"),
        ("tp", "count", "tensor parallelism", _ONE),
        ("sp", "count", "over how many ways the residual stream is split between matmuls: 1 or tp", "tp"),
        ("pp", "count", "pipeline stages", _ONE),
        ("vpp", "count", "pieces of the model on each stage; more than 1 is the interleaved schedule", _ONE),
        ("cp", "count", "context parallelism", _ONE),
        ("ep", "count", "expert parallelism, over dp and tp", _ONE),
        ("dp", "count", "replicas that see different sequences, those of expert parallelism and FSDP among them",
         "what the other axes leave"),
        ("fsdp_or_zero_stage", "text", "what replicas share out: `DDP`, `ZeRO stage 1`, `FSDP`, ...",
         "chosen: the fastest that fits"),
        ("recompute", "text", ("what is computed again: `none`, `full`, `selective (attention core)`, "
         "`MaxText remat_policy=minimal`, ...; how many layers are offloaded"), "chosen: the fastest that fits"),
        ("micro_batch", "count", "sequences that a replica works on at a time", "chosen: the fastest that fits"),
        ("global_batch_seqs", "count", "sequences of a step", ""),
        ("seq_len", "count", "tokens of a sequence", ""),
        ("measured_metric", "text", "what was measured, see below", ""),
        ("measured_value", "number", "the number", ""),
        ("unit", "text", "its unit; what stands in brackets is a remark", ""),
        ("primary", "text", "`yes` on one row for each independent number; others are not counted", "yes"),
        ("arch_source", "text", ("where the dimensions are from, and what is special: `2-matrix MLP`, `tied logits`, "
         "`learned positions`"), "nothing special"),
        ("flops_convention", "text", ("how FLOPs of an MFU or of TFLOP/s were counted: attention `halved` for "
         "causality or `NOT halved`, `INCLUDES` recomputation"), "as `meshwise` counts MFU"),
        ("software", "text", "what ran it, with version or year", "unknown"),
        ("notes", "text", "anything else; slices of TPUs (`2 slice(s)`), balance of experts (`force-balanced`)",
         "nothing else"),
    )
)  # fmt: skip

#: Every metric there is.
METRICS = {
    m.name: m
    for m in (
        Metric("step_time", "time", "seconds of a step, in `s` or `ms`"),
        Metric("tokens_per_s_per_chip", "time", "tokens a second, for each chip"),
        Metric("tokens_per_s", "time", "tokens a second, all chips together"),
        Metric("MFU", "time", "model FLOPs over peak, in per cent; the unit names the peak: `% of 459 TFLOP/s`"),
        Metric("model_tflops_per_chip", "time", "model FLOPs, in TFLOP/s for each chip"),
        Metric("hardware_tflops_per_chip", "time", "the same with recomputed FLOPs"),
        Metric("weights_grads_optimizer_GiB", "memory", "training state on the fullest chip, in GiB"),
        Metric("activation_memory_GiB", "memory", "activations on the fullest chip, in GiB"),
        Metric("peak_memory", "memory", "peak of the allocator on the fullest chip, in GiB or GB"),
        Metric("gpu_memory", "memory", "what the device's tools show as used, in GiB or GB: reserved, not needed"),
    )
}


class RowError(MeshwiseError):
    """A cell of a file of measurements that cannot be read; says the line and the column."""


@dataclass(frozen=True, slots=True)
class UnreadRow:
    """A row that cannot be read, which leaves the other rows of its file as they are.

    Args:
        id: of the row, or the number of its line.
        reason: the line and the column, what was expected, what was found.
    """

    id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(ABC):
    """What every row says: where it is from, of which model, on which machine, and the number.

    `METRICS` are those that rows of a kind may have.
    """

    METRICS: ClassVar[Mapping[str, Metric]]

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
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    dp: int | None = None
    measured_metric: str
    measured_value: float
    unit: str
    primary: str = "yes"
    arch_source: str = ""
    software: str = ""
    notes: str = ""

    @property
    def words(self) -> str:
        """All remarks, in lower case, to look for words in."""
        return f"{self.model} {self.arch_source} {self.software} {self.notes}".lower()

    @property
    def is_memory(self) -> bool:
        """Whether memory was measured, not time."""
        return self.METRICS[self.measured_metric].of == "memory"

    @property
    def counts(self) -> bool:
        """Whether it is an independent number; numbers of memory are, whatever else the run says."""
        return self.primary != "no" or self.is_memory

    @property
    @abstractmethod
    def positions(self) -> int:
        """Tokens of the longest sequence: rows of a learned table of positions."""

    @property
    def machine_words(self) -> str:
        """Remarks that may say how many slices of TPUs there are."""
        return f"{self.notes} {self.hardware}"


R = TypeVar("R", bound=Row)


@dataclass(frozen=True, slots=True)
class RowFormat(Generic[R]):
    """A kind of rows.

    Args:
        columns: that there are.
        always: columns that are never blank.
        row: the type of a row, its fields the columns.
    """

    columns: tuple[Column, ...]
    always: tuple[str, ...]
    row: type[R]


def read_text(path: Path) -> str:
    """Read a file's text.

    Raises:
        MeshwiseError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise MeshwiseError(f"{path}: {reason}") from None


def header_of(text: str) -> list[str]:
    """Give the names of a file's columns."""
    return [cell.strip() for cell in next(csv.reader(text.splitlines(keepends=True)), [])]


def rows_of(text: str, where: str, kind: RowFormat[R]) -> tuple[R | UnreadRow, ...]:
    """Read the text of a file; `where` is what errors call it.

    Returns: a row for each line that is not blank; those with a wrong cell, or the id of a row before, say so.

    Raises:
        MeshwiseError: the header has an unknown column or lacks one, or there are no rows.
    """
    header = header_of(text)
    _check_header(header, where, kind)
    lines = csv.reader(text.splitlines(keepends=True))
    next(lines)
    rows: list[R | UnreadRow] = []
    seen: set[str] = set()
    for cells in lines:
        if any(cell.strip() for cell in cells):
            rows.append(_read_row(cells, header, seen, (where, lines.line_num), kind))
            seen.add(rows[-1].id)
    if not rows:
        raise MeshwiseError(f"{where}: expected rows of measurements under a header, found none")
    return tuple(rows)


def all_read(rows: Iterable[R | UnreadRow]) -> tuple[R, ...]:
    """Give rows of which all can be read.

    Raises:
        RowError: one cannot.
    """
    read: list[R] = []
    for row in rows:
        if isinstance(row, UnreadRow):
            raise RowError(row.reason)
        read.append(row)
    return tuple(read)


def _read_row(
    cells: Sequence[str], header: Sequence[str], seen: Container[str], place: tuple[str, int], kind: RowFormat[R]
) -> R | UnreadRow:
    """Read one row; `seen` are ids of those before, `place` is the file and the line."""
    where, line = f"{place[0]}, line {place[1]}", place[1]
    values = {name: cell.strip() for name, cell in zip(header, cells, strict=False)}
    name = values.get("id") or f"line {line}"
    if len(cells) != len(header):
        return UnreadRow(name, f"{where}: expected {len(header)} cells, found {len(cells)}")
    if name in seen:
        return UnreadRow(name, f"{where}: two rows have the id {name!r}; give each its own")
    try:
        return _row({**values, "id": name}, where, kind)
    except RowError as error:
        return UnreadRow(name, str(error))


def _check_header(header: list[str], where: str, kind: RowFormat[R]) -> None:
    names = [c.name for c in kind.columns]
    for name in header:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "docs/measurements.md lists the columns"
            raise MeshwiseError(f"{where}: column {name!r} is not one of the format; {hint}")
    if repeated := next((name for name in header if header.count(name) > 1), None):
        raise MeshwiseError(f"{where}: column {repeated!r} stands twice in the header; keep one")
    if missing := [name for name in kind.always if name not in header]:
        raise MeshwiseError(f"{where}: the header lacks {', '.join(missing)}; docs/measurements.md lists the columns")


def _row(values: Mapping[str, str], where: str, kind: RowFormat[R]) -> R:
    by_name = {c.name: c for c in kind.columns}
    cells = {name: _cell(by_name[name], text, where) for name, text in values.items()}
    for name in kind.always:
        if cells[name] in (None, ""):
            raise RowError(f"{where}, column {name}: expected a value, found a blank cell")
    metric = str(cells["measured_metric"])
    if metric not in kind.row.METRICS:
        raise RowError(
            f"{where}, column measured_metric: expected one of {', '.join(kind.row.METRICS)}; found {metric!r}"
        )
    if cells.get("primary") not in (None, "", "yes", "no"):
        raise RowError(f"{where}, column primary: expected yes or no, found {cells['primary']!r}")
    cells["primary"] = cells.get("primary") or "yes"
    assert set(cells) <= {f.name for f in fields(kind.row)}
    return kind.row(**cells)  # type: ignore[arg-type]


_EXPECTED = {
    "count": "a whole number of at least 1",
    "whole": "a whole number of at least 0",
    "number": "a number above 0",
}


def _cell(column: Column, text: str, where: str) -> str | int | float | None:
    if column.kind == "text":
        return text
    if not text:
        return None
    expected = _EXPECTED[column.kind]
    wrong = RowError(f"{where}, column {column.name}: expected {expected}, found {text!r}")
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        raise wrong from None
    if not math.isfinite(value) or value < 0 or (value == 0 and column.kind != "whole"):
        raise wrong
    if column.kind == "number":
        return value
    if value != int(value):
        raise wrong
    return int(value)


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
