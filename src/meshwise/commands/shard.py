"""`shard`: the request, and a sharded product with its collectives. Not here: flags (`cli`) and words (`report`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field

from meshwise.commands.pairs import parse_sizes
from meshwise.commands.requests import PARAMETERS, mesh_text, validated
from meshwise.commands.where import Where
from meshwise.core.dtypes import DType
from meshwise.core.errors import UnknownNameError
from meshwise.costs.product import Product, price_product
from meshwise.hardware import Cluster
from meshwise.sharding import Mesh, parse_expression, parse_mesh


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


def examine_shard(request: ShardRequest) -> tuple[Product, Mesh | None, Cluster | None]:
    """Price the product; also give mesh and cluster as understood, where there are any.

    Raises:
        NotationError, ShardingError, UnknownNameError, ClusterError: what was asked does not parse or cannot be.
    """
    mesh = parse_mesh(request.mesh) if request.mesh else None
    expression = parse_expression(request.expression, mesh)
    known = dict.fromkeys(a for t in expression.tensors for a in t.axes if isinstance(a, str))
    for name in request.sizes:
        if name not in known:
            raise UnknownNameError("axis", name, known, hint="Axes are the names in the expression.")
    cluster = request.find()
    product = price_product(
        expression, mesh=mesh, sizes=request.sizes, dtype=request.dtype, cluster=cluster, wires=request.wires
    )
    return product, mesh, cluster


def shard(
    expression: str,
    *,
    mesh: str | Mapping[str, int] | None = None,
    sizes: str | Mapping[str, int] | None = None,
    on: str | None = None,
    cluster: str | None = None,
    wires: str | None = None,
    dtype: str = "bf16",
) -> Product:
    """List the collectives that a sharded product needs: what `meshwise shard` answers, as values.

    >>> import meshwise
    >>> product = meshwise.shard("A[I, J_X] * B[J_X, K] -> C[I, K]", mesh="X=4", sizes="I=1Ki,J=8Ki,K=8Ki")
    >>> [str(step.collective) for step in product.ways[0].steps]
    ['all-reduce over X: [, ]{U_X} -> [, ]']

    Args:
        expression: the product, or one array before and after, in the notation of docs/sharding.md.
        mesh: mesh axes, "X=4,Y=8" or a mapping, the last one innermost.
        sizes: axis -> size, or text.
        on: a cluster, which gives times.
        cluster: a TOML file with own numbers, instead of `on`.
        wires: where mesh axes lie on the network, "X=4x1,Y=1x8".
        dtype: of tensors written without one.

    Raises:
        MeshwiseError: an argument that cannot be understood.
    """
    given = {
        "expression": expression,
        "mesh": mesh_text(mesh),
        "sizes": {} if sizes is None else sizes,
        "cluster": on,
        "cluster_file": cluster,
        "wires": wires,
        "dtype": dtype,
    }
    return examine_shard(validated(ShardRequest, given, PARAMETERS))[0]
