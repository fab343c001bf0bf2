"""`meshwise shard`: the collectives of a sharded product."""

from __future__ import annotations

import click

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options
from meshwise.commands.shard import ShardRequest, examine_shard
from meshwise.commands.where import WHERE_FLAGS
from meshwise.report.shard import shard_report


@click.command()
@request_options(ShardRequest, arguments=("expression",), flags={**WHERE_FLAGS, "sizes": "--set"})
@output_options
def shard(request: ShardRequest, output: Output) -> None:
    """List the collectives that a sharded product needs.

    EXPRESSION is a product of sharded tensors, or one array before and after. An axis that is split carries its mesh
    axes: I_X, I_XY, I_(data,tensor); {U_X} marks a value still to be summed over X.

    \b
      meshwise shard "A[I, J_X] * B[J_X, K] -> C[I, K]"
      meshwise shard "A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]" --mesh X=4,Y=8
      meshwise shard "A[I, J_X] * B[J, K] -> C[I, K]" --mesh X=4 \\
        --set I=1Ki,J=8Ki,K=8Ki --on v5e:4x4
    """  # noqa: D301  (click's mark for lines that stay as they are)
    product, mesh, cluster = examine_shard(request)
    inputs = {
        "expression": request.expression,
        "mesh": None if mesh is None else dict(mesh.axes),
        "sizes": dict(request.sizes),
        **request.echo_where(),
        "wires": request.wires,
        "dtype": request.dtype.value,
    }
    output.show(shard_report(product, cluster, request.sizes, inputs))
