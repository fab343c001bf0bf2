"""The bench verb's answer: operations measured, beside what they should take. Not here: measuring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwise.core.explanation import Answer
from meshwise.core.units import format_bandwidth, format_flops_per_s, format_time
from meshwise.costs.machine import MeasuredOperation
from meshwise.report.report import Report
from meshwise.report.table import Columns, picked, tabulate


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One operation.

    Args:
        text: what ran, in words.
        measured: its row of the format.
        work: FLOPs or bytes of one call; unit: "FLOP/s" or "bytes/s" says which, "" that it has neither.
        expected: seconds at the calibration of its chip; None where the chip or its network is not known.
        times: how often a device runs it in a step of the plan; 0 where it is of none.
    """

    text: str
    measured: MeasuredOperation
    work: float
    unit: str
    expected: float | None
    times: float = 0.0

    @property
    def rate(self) -> float:
        """FLOP/s or bytes/s."""
        return self.work / self.measured.seconds


@dataclass(frozen=True, slots=True, repr=False)
class BenchResult(Answer):
    """All operations of one run.

    Args:
        rows: one for each.
        hardware: what the devices call themselves; num_devices: how many there are.
        software: what ran them.
        chip: of the catalog; None where it has no such one.
        basis: what expectations are computed from; None without.
        document: the machine as a cluster file, where it was asked for.
    """

    rows: tuple[BenchRow, ...]
    hardware: str
    num_devices: int
    software: str
    chip: str | None
    basis: str | None
    document: str | None = None


def bench_report(result: BenchResult, inputs: Mapping[str, Any]) -> Report:
    """What was measured."""
    columns: Columns = {"operation": "text", ">measured": ("measured.seconds", format_time), ">rate": _rate}
    expected = any(row.expected is not None for row in result.rows)
    if expected:
        columns = {**columns, ">expected": ("expected", format_time), ">ratio": _ratio}
    if result.rows[0].times:
        columns = {**columns, ">a step": ("times", "{:,g}".format)}
    document = {"cluster_document": result.document} if result.document else {}
    saved = ("--save-cluster machine.toml: this machine for --cluster of other commands",) if document else ()
    unknown = () if expected else ("the expected times of these operations: chip or network is not known here",)
    return Report(
        command="bench",
        inputs=inputs,
        answer=f"{result.num_devices} x {result.hardware}: {_answer(result.rows)}",
        data={
            **picked(result, "hardware num_devices software chip"),
            **document,
            "rows": [
                {**asdict(row.measured), **picked(row, "rate seconds=measured.seconds rate_unit=unit")}
                | {"expected_s": row.expected}
                | ({"times_a_step": row.times} if row.times else {})
                for row in result.rows
            ],
        },
        body=(tabulate(columns, result.rows, missing=""),),
        assumed=(
            f"software: {result.software}",
            *((f"expected: {result.basis}; ratio: measured over expected",) if result.basis and expected else ()),
        ),
        not_modelled=(*unknown, "other load on the machine: repeat on a quiet one"),
        next_steps=("--save rows.csv: the rows in the format of measurements (docs/measurements.md)", *saved),
    )


def _answer(rows: Sequence[BenchRow]) -> str:
    """The highest rate; of a plan's operations what a device spends on all of them in a step."""
    if not rows[0].times:
        best = max((row for row in rows if row.unit == rows[0].unit), key=lambda row: row.rate)
        return f"up to {_rate(best)} ({best.text})"
    known = [row for row in rows if row.expected is not None]
    step = format_time(sum(row.times * row.measured.seconds for row in rows))
    own = sum(row.times * (row.expected or 0.0) for row in known)
    beside = f", {format_time(own)} expected" if len(known) == len(rows) else ""
    return f"products and attention of the plan's layers {step} a step{beside}"


def _ratio(row: BenchRow) -> str:
    return "" if row.expected is None else f"{row.measured.seconds / row.expected:.2f}"


def _rate(row: BenchRow) -> str:
    show = {"FLOP/s": format_flops_per_s, "bytes/s": format_bandwidth}
    return show[row.unit](row.rate) if row.unit else ""
