"""`bench`: single operations measured on the devices that are there, beside what they should take.

Not here: words (`report`), and how they are timed (`runtime.bench`).
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from meshwise.commands.bench_operations import (
    AttentionHeads,
    Expected,
    Operation,
    attentions,
    collectives,
    copies,
    machine,
    matmuls,
)
from meshwise.commands.command import Screen, command, verb
from meshwise.commands.requests import Flag, Request
from meshwise.commands.where import Where
from meshwise.core.errors import MeshwiseError
from meshwise.core.units import Quantity, format_duration, parse_bytes, parse_duration
from meshwise.costs.machine import MeasuredOperation, check_new, machine_document, write_new, write_rows
from meshwise.report.bench import BenchResult, BenchRow, bench_report
from meshwise.runtime.bench import Bench
from meshwise.runtime.devices import machine_memory, share_of_machine

Sizes = tuple[tuple[int, ...], ...] | None


class BenchRequest(Where):
    """What `meshwise bench` is asked; the cluster is the one that it runs on."""

    positional = ("what",)

    what: Literal["matmul", "attention", "memory", "collectives", "machine"]
    """What to measure; machine: everything that describes a CPU's devices as chips."""
    dtype: Literal["bf16", "fp16", "fp32", "fp8", "int8"] | None = None
    """Format of the operands; by default bf16, and for a machine bf16 and fp32."""
    sizes: Annotated[str | None, Flag("SIZES")] = None
    """Instead of the usual sizes, separated by commas: MxKxN of a matmul, BATCHxQUERIESxKEYS of attention (as many
    queries as keys are causal), bytes of a copy or a collective."""
    heads: int = Field(default=32, ge=1, le=4096)
    """Query heads of attention."""
    kv_heads: int = Field(default=8, ge=1, le=4096)
    """Key/value heads of attention."""
    head_dim: int = Field(default=128, ge=1, le=4096)
    """Head dimension of attention."""
    seconds: Annotated[float, Quantity("seconds", parse_duration, format_duration, "0.5s")] = Field(
        default=0.5, gt=0, le=600
    )
    """Time to spend on each operation."""
    cpu_devices: int | None = Field(default=None, ge=1, le=512)
    """Use this many fake devices of the CPU, whatever other devices there are."""


@command(BenchRequest)
def bench(
    request: BenchRequest,
    *,
    progress: Callable[[str], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Measure single operations on the devices that are there: what `meshwise bench` answers, as values.

    Args:
        progress: told of each operation before it runs.
        say: told what is to be known of the devices.

    Raises:
        MissingDependencyError: JAX is missing.
        MeshwiseError: an argument that cannot be understood, or an operation that the devices cannot run.
    """
    _check(request)
    cluster = request.find()
    asked = _sizes(request)
    devices = Bench(cpu_devices=request.cpu_devices, seconds=request.seconds, told=say)
    expected = Expected.of(devices, cluster)
    operations = list(_operations(request, devices, asked, expected))
    year = dt.datetime.now(dt.UTC).date().year
    rows = []
    for number, operation in enumerate(operations, 1):
        progress(f"{operation.text} ({number} of {len(operations)})")
        sample = operation.run()
        measured = MeasuredOperation(
            id=f"{request.what}-{number:03d}",
            source="meshwise bench",
            chip=expected.name or devices.hardware,
            year=year,
            hardware=devices.hardware,
            measured_value=sample.seconds * 1e3,
            software=devices.software,
            notes=f"median of {sample.calls} calls, {sample.low * 1e3:.6g} to {sample.high * 1e3:.6g} ms",
            **operation.columns,
        )
        rows.append(BenchRow(operation.text, measured, operation.work, operation.unit, operation.expected))
    return BenchResult(
        tuple(rows),
        devices.hardware,
        len(devices.devices),
        devices.software,
        expected.name,
        expected.basis,
        _document(devices, rows) if request.what == "machine" else None,
    )


def _document(devices: Bench, rows: list[BenchRow]) -> str:
    """Describe this machine as a cluster file."""
    number, memory = len(devices.devices), machine_memory()
    if memory is None:
        raise MeshwiseError("machine: the system does not tell how much memory there is; write a cluster file by hand")
    measured = [row.measured for row in rows]
    return machine_document(measured, title=share_of_machine(number), num_devices=number, memory=memory)


def _check(request: BenchRequest) -> None:
    """Refuse what does not go together.

    Raises:
        MeshwiseError: a format or sizes that the operation does not have.
    """
    if request.what == "attention" and request.dtype in ("fp8", "int8"):
        raise MeshwiseError(f"--dtype {request.dtype}: attention runs in bf16, fp16 or fp32 here; use one of these")
    if request.what == "machine" and request.dtype not in (None, "bf16", "fp32"):
        raise MeshwiseError(
            f"--dtype {request.dtype}: plans run in bf16 or fp32 on a CPU; use one of these, or leave it"
        )
    if request.what == "memory" and request.dtype not in (None, "fp32"):
        raise MeshwiseError(f"--dtype {request.dtype}: copies are of fp32; leave it out, --sizes are bytes")
    if request.what == "machine" and request.sizes is not None:
        raise MeshwiseError("--sizes: a machine is measured at the sizes that its description needs; leave it out")
    if request.heads % request.kv_heads:
        raise MeshwiseError(
            f"--heads {request.heads}: expected a multiple of --kv-heads {request.kv_heads}, so that groups are equal"
        )


def _operations(request: BenchRequest, devices: Bench, asked: Sizes, expected: Expected) -> Iterator[Operation]:
    dtype = request.dtype or "bf16"
    match request.what:
        case "matmul":
            yield from matmuls(devices, dtype, asked, expected)
        case "attention":
            heads = AttentionHeads(request.heads, request.kv_heads, request.head_dim)
            yield from attentions(devices, dtype, asked, heads, expected)
        case "memory":
            yield from copies(devices, asked, expected)
        case "collectives":
            yield from collectives(devices, dtype, asked, expected)
        case "machine":
            yield from machine(devices, request.dtype, expected)


def _sizes(request: BenchRequest) -> Sizes:
    """Read `--sizes`.

    Raises:
        MeshwiseError: not of the form that the operation has.
    """
    if request.sizes is None:
        return None
    words = [word.strip() for word in request.sizes.split(",") if word.strip()]
    number = {"matmul": 3, "attention": 3}.get(request.what, 1)
    example = {"matmul": "4096x4096x4096", "attention": "8x1x4096"}.get(request.what, "1MiB,16MiB")
    found = []
    for word in words:
        parts = word.lower().split("x") if number > 1 else [word]
        try:
            sizes = tuple(int(p) for p in parts) if number > 1 else (int(parse_bytes(word)),)
        except ValueError:
            sizes = ()
        if len(sizes) != number or min(sizes) < 1:
            raise MeshwiseError(f"--sizes: expected sizes such as {example}, found {word!r}")
        found.append(sizes)
    if not found:
        raise MeshwiseError(f"--sizes: expected sizes such as {example}, found {request.sizes!r}")
    return tuple(found)


class _Files(Request):
    save: Path | None = None
    """Write the rows to this new file, as CSV."""
    save_cluster: Path | None = None
    """With machine: write the cluster file, for --cluster, to this new file."""


@verb(BenchRequest, _Files)
def show_bench(screen: Screen, request: BenchRequest, files: _Files) -> None:
    """Measure single operations on the devices that are there.

    WHAT is matmul, attention, memory, collectives, or machine (what is needed to describe a CPU's fake devices as
    chips). Rows have the columns of docs/measurements.md; the predicted time stands beside them where chip and
    network are known.

    \b
      meshwise bench matmul --save rows.csv
      meshwise bench collectives --on h100:8
      meshwise bench collectives --cpu-devices 8 --sizes 64KiB,1MiB
      meshwise bench machine --cpu-devices 4 --save-cluster machine.toml
    """  # noqa: D301  (click's mark for lines that stay as they are)
    if files.save_cluster is not None and request.what != "machine":
        raise MeshwiseError(
            f"--save-cluster {files.save_cluster}: {request.what} describes no cluster; bench machine does"
        )
    check_new(files.save)
    check_new(files.save_cluster)
    result = bench.answer(request, progress=screen.progress, say=screen.say)
    if files.save is not None:
        write_rows(files.save, [row.measured for row in result.rows])
    if files.save_cluster is not None:
        write_new(files.save_cluster, str(result.document))
    screen.show(bench_report(result, request.echo() | files.echo()))
