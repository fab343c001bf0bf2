"""`meshwise collective`: one collective on a cluster."""

from __future__ import annotations

import click

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options
from meshwise.commands.collective import CollectiveRequest, examine_collective
from meshwise.commands.where import WHERE_FLAGS
from meshwise.report.collective import collective_report


@click.command()
@request_options(CollectiveRequest, arguments=("kind", "array"), flags={**WHERE_FLAGS, "sizes": "--set"})
@output_options
def collective(request: CollectiveRequest, output: Output) -> None:
    """Time one collective on a cluster.

    KIND is all-gather, reduce-scatter, all-reduce, all-to-all or permute. ARRAY is the array with its sharding: before
    an all-gather, after a reduce-scatter; with an arrow, before and after.

    \b
      meshwise collective all-gather "bf16[1024, 4096_X]" --mesh X=16 \\
        --on v5e:16x16
      meshwise collective all-reduce "bf16[8192, 8192]" --mesh X=8 --on h100:8
      meshwise collective all-to-all "bf16[4096_X, 8192] -> bf16[4096, 8192_X]" \\
        --mesh X=4 --on v5e:4x4
    """  # noqa: D301  (click's mark for lines that stay as they are)
    case = examine_collective(request)
    inputs = {
        "kind": request.kind,
        "array": request.array,
        "mesh": dict(case.mesh.axes),
        **request.echo_where(),
        "over": list(case.mesh_axes),
        "sizes": dict(request.sizes),
        "wires": request.wires,
        "dtype": request.dtype.value,
        "choices": request.choices,
        "calibration": case.calibration.name,
    }
    output.show(collective_report(case, inputs))
