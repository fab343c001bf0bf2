"""`meshwise bench`: single operations measured on the devices that are there."""

from __future__ import annotations

from pathlib import Path

import click

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options
from meshwise.cli.progress import Progress
from meshwise.costs.measured import write_rows
from meshwise.report.bench import bench_report
from meshwise.verbs.bench import BenchRequest, run_bench
from meshwise.verbs.where import WHERE_FLAGS

__all__ = ["bench"]


@click.command()
@request_options(BenchRequest, arguments=("what",), flags=WHERE_FLAGS)
@click.option(
    "--save", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows to this new file, as CSV."
)
@output_options
def bench(request: BenchRequest, save: Path | None, output: Output) -> None:
    """Measure single operations on the devices that are there.

    WHAT is matmul, attention, memory or collectives. The rows are in the format of measurements that
    docs/measurements.md describes; beside them stands what they should take, where chip and network are known.

    \b
      meshwise bench matmul --save rows.csv
      meshwise bench collectives --on h100:8
      meshwise bench collectives --cpu-devices 8 --sizes 64KiB,1MiB
    """  # noqa: D301  (click's mark for lines that stay as they are)
    with Progress() as progress:
        result = run_bench(request, progress)
    if save is not None:
        write_rows(save, [row.measured for row in result.rows])
    inputs = {**request.model_dump(exclude={"cluster", "cluster_file"}), **request.echo_where()}
    output.show(bench_report(result, {**inputs, "save": None if save is None else str(save)}))
