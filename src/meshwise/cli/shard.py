"""`meshwise shard`: the collectives of a sharded product."""

from __future__ import annotations

from typing import Annotated

import click
from pydantic import BeforeValidator, Field

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options
from meshwise.cli.pairs import parse_sizes
from meshwise.cli.where import WHERE_FLAGS, Where
from meshwise.costs.product import price_product
from meshwise.dtypes import DType
from meshwise.report.shard import shard_report
from meshwise.sharding import parse_expression, parse_mesh

__all__ = ["ShardRequest", "shard"]


class ShardRequest(Where):
    """What `meshwise shard` is asked; a cluster gives times."""

    expression: str = Field(description="The product, 'A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]'.")
    mesh: str | None = Field(
        default=None,
        description="Mesh axes, X=4,Y=8, the last one innermost.",
        json_schema_extra={"metavar": "AXES"},
    )
    sizes: Annotated[dict[str, int], BeforeValidator(parse_sizes)] = Field(
        default={}, description="Sizes of the axes, I=1024,J=8Ki.", json_schema_extra={"metavar": "AXIS=SIZE"}
    )
    wires: str | None = Field(
        default=None,
        description="Where mesh axes lie: extents on the network's dimensions, X=4x1,Y=1x8.",
        json_schema_extra={"metavar": "WIRES"},
    )
    dtype: DType = Field(default=DType.BF16, description="Format of tensors written without one.")


@click.command()
@request_options(ShardRequest, arguments=("expression",), flags={**WHERE_FLAGS, "sizes": "--set"})
@output_options
def shard(request: ShardRequest, output: Output) -> None:
    r"""List the collectives that a sharded product needs.

    EXPRESSION is a product of sharded tensors, or one array before and after. An axis that is split carries its mesh
    axes: I_X, I_XY, I_(data,tensor); {U_X} marks a value still to be summed over X.

    \b
      meshwise shard "A[I, J_X] * B[J_X, K] -> C[I, K]"
      meshwise shard "A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]" --mesh X=4,Y=8
      meshwise shard "A[I, J_X] * B[J, K] -> C[I, K]" --mesh X=4 --set I=1Ki,J=8Ki,K=8Ki --on v5e:4x4
    """
    mesh = parse_mesh(request.mesh) if request.mesh else None
    expression = parse_expression(request.expression, mesh)
    cluster = request.find()
    product = price_product(
        expression, mesh=mesh, sizes=request.sizes, dtype=request.dtype, cluster=cluster, wires=request.wires
    )
    inputs = {
        "expression": request.expression,
        "mesh": None if mesh is None else dict(mesh.axes),
        "sizes": dict(request.sizes),
        **request.echo_where(),
        "wires": request.wires,
        "dtype": request.dtype.value,
    }
    output.show(shard_report(product, cluster, request.sizes, inputs))
