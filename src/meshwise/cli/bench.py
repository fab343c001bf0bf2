"""`meshwise bench`: single operations measured on the devices that are there."""

from __future__ import annotations

from pathlib import Path

import click

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options, say
from meshwise.cli.progress import Progress
from meshwise.commands.bench import BenchRequest, run_bench
from meshwise.commands.where import WHERE_FLAGS
from meshwise.core.errors import MeshwiseError
from meshwise.costs.machine import check_new, write_new, write_rows
from meshwise.report.bench import bench_report


@click.command()
@request_options(BenchRequest, arguments=("what",), flags=WHERE_FLAGS)
@click.option(
    "--save", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows to this new file, as CSV."
)
@click.option(
    "--save-cluster",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Of a machine: write it to this new file, for --cluster.",
)
@output_options
def bench(request: BenchRequest, save: Path | None, save_cluster: Path | None, output: Output) -> None:
    """Measure single operations on the devices that are there.

    WHAT is matmul, attention, memory, collectives, or machine: what describes a CPU's fake devices as chips. The rows
    are in the format of measurements that docs/measurements.md describes; beside them stands what they should take,
    where chip and network are known.

    \b
      meshwise bench matmul --save rows.csv
      meshwise bench collectives --on h100:8
      meshwise bench collectives --cpu-devices 8 --sizes 64KiB,1MiB
      meshwise bench machine --cpu-devices 4 --save-cluster machine.toml
    """  # noqa: D301  (click's mark for lines that stay as they are)
    if save_cluster is not None and request.what != "machine":
        raise MeshwiseError(f"--save-cluster {save_cluster}: {request.what} describes no cluster; bench machine does")
    for file in (save, save_cluster):
        check_new(file)
    with Progress() as progress:
        result = run_bench(request, progress, told=say)
    if save is not None:
        write_rows(save, [row.measured for row in result.rows])
    if save_cluster is not None:
        write_new(save_cluster, str(result.document))
    inputs = {**request.model_dump(exclude={"cluster", "cluster_file"}), **request.echo_where()}
    files = {"save": save, "save_cluster": save_cluster}
    output.show(bench_report(result, inputs | {name: None if f is None else str(f) for name, f in files.items()}))
