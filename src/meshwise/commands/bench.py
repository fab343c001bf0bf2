"""`bench`: single operations measured on the devices that are there, beside what they should take.

Not here: words (`report`), and how they are timed (`runtime.bench`).
"""

from __future__ import annotations

import datetime as dt
from pathlib import Path

from meshwise.commands.bench_operations import BenchRequest, Operations
from meshwise.commands.command import Screen, Tell, command, silent, verb
from meshwise.commands.requests import Request
from meshwise.core.errors import MeshwiseError
from meshwise.core.explanation import Answer
from meshwise.costs.machine import MeasuredOperation, check_new, machine_document, write_new, write_rows
from meshwise.costs.serving.engine import operations_of_layer
from meshwise.report.bench import BenchResult, BenchRow, bench_report
from meshwise.runtime.bench import Bench
from meshwise.runtime.devices import machine_memory, share_of_machine


@command(BenchRequest)
def bench(request: BenchRequest, *, progress: Tell = silent, say: Tell = silent) -> BenchResult:
    """Measure single operations on the devices that are there: what `meshwise bench` answers, as values.

    Args:
        progress: told of each operation before it runs.
        say: told what is to be known of the devices.

    Raises:
        MissingDependencyError: JAX is missing.
        MeshwiseError: an argument that cannot be understood, or an operation that the devices cannot run.
    """
    request.check()
    cluster, sizes = request.find(), request.read_sizes()
    devices = Bench(cpu_devices=request.cpu_devices, seconds=request.seconds, told=say)
    asked = Operations(request, sizes, cluster, devices)
    operations, rows = list(asked), list[BenchRow]()
    chip = None if asked.chip is None else asked.chip.name
    year = dt.datetime.now(dt.UTC).date().year
    for number, operation in enumerate(operations, 1):
        progress(f"{operation.text} ({number} of {len(operations)})")
        sample = operation.run()
        measured = MeasuredOperation(
            id=f"{request.what}-{number:03d}",
            source="meshwise bench",
            chip=chip or devices.hardware,
            year=year,
            hardware=devices.hardware,
            measured_value=sample.seconds * 1e3,
            software=devices.software,
            notes=f"median of {sample.calls} calls, {sample.low * 1e3:.6g} to {sample.high * 1e3:.6g} ms",
            **operation.columns,
        )
        rows.append(
            BenchRow(operation.text, measured, operation.work, operation.unit, operation.expected, operation.times)
        )
    number, document = len(devices.devices), _document(devices, rows) if request.what == "machine" else None
    return BenchResult(tuple(rows), devices.hardware, number, devices.software, chip, asked.basis, document)


def _document(devices: Bench, rows: list[BenchRow]) -> str:
    """Describe this machine as a cluster file."""
    from meshwise.engine.step_bench import tiny_model  # noqa: PLC0415 -- it loads JAX

    number, memory = len(devices.devices), machine_memory()
    if memory is None:
        raise MeshwiseError("machine: the system does not tell how much memory there is; write a cluster file by hand")
    measured = [row.measured for row in rows]
    operations, title = operations_of_layer(tiny_model(1)), share_of_machine(number)
    return machine_document(measured, title=title, num_devices=number, memory=memory, layer_operations=operations)


class _Files(Request):
    save: Path | None = None
    """Write the rows to this new file, as CSV."""
    save_cluster: Path | None = None
    """With machine: write the cluster file, for --cluster, to this new file."""


Answer.reports[BenchResult] = lambda result: bench_report(result, {})


@verb(BenchRequest, _Files)
def show_bench(screen: Screen, request: BenchRequest, files: _Files) -> None:
    """Measure single operations on the devices that are there.

    WHAT is matmul, attention, memory, collectives, machine (what is needed to describe a CPU's fake devices as
    chips), or plan: a saved plan's own products and attentions, as large as one of its devices has them. Rows have the
    columns of docs/measurements.md; the predicted time stands beside them where chip and network are known.

    \b
      meshwise bench matmul --save rows.csv
      meshwise bench collectives --on h100:8
      meshwise bench plan plan.json
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
