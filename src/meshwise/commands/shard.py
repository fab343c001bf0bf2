"""`shard`: a sharded product with its collectives. Not here: words (`report`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from meshwise.commands.command import Screen, command, verb
from meshwise.commands.requests import Flag, MeshText, Sizes
from meshwise.commands.where import Where
from meshwise.core.dtypes import DType
from meshwise.core.errors import UnknownNameError
from meshwise.core.explanation import Answer
from meshwise.costs.product import Product, price_product
from meshwise.report.shard import shard_report
from meshwise.sharding import parse_expression, parse_mesh


class ShardRequest(Where):
    """What `meshwise shard` is asked; a cluster gives times."""

    positional = ("expression",)

    expression: str
    """The product, 'A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]'."""
    mesh: MeshText | None = None
    """Mesh axes, X=4,Y=8, the last one innermost."""
    sizes: Sizes = Field(default={})
    """Sizes of the axes, I=1024,J=8Ki."""
    wires: Annotated[str | None, Flag("WIRES")] = None
    """How mesh axes map to the network's dimensions, as extents: X=4x1,Y=1x8."""
    dtype: DType = DType.BF16
    """Number format of tensors written without one."""
    overlap: bool = False
    """Rank the ways by the longer of computing and communicating (the book's bound), not by their sum."""


@command(ShardRequest)
def shard(request: ShardRequest) -> Product:
    """List the collectives that a sharded product needs: what `meshwise shard` answers, as values.

    >>> import meshwise
    >>> product = meshwise.shard("A[I, J_X] * B[J_X, K] -> C[I, K]", mesh="X=4", sizes="I=1Ki,J=8Ki,K=8Ki")
    >>> [str(step.collective) for step in product.ways[0].steps]
    ['all-reduce over X: [, ]{U_X} -> [, ]']

    Raises:
        MeshwiseError: an argument that cannot be understood.
    """
    mesh = parse_mesh(request.mesh) if request.mesh else None
    expression = parse_expression(request.expression, mesh)
    known = dict.fromkeys(a for t in expression.tensors for a in t.axes if isinstance(a, str))
    for name in request.sizes:
        if name not in known:
            raise UnknownNameError("axis", name, known, hint="Axes are the names in the expression.")
    return price_product(
        expression,
        mesh=mesh,
        sizes=request.sizes,
        dtype=request.dtype,
        cluster=request.find(),
        wires=request.wires,
        overlap=request.overlap,
    )


Answer.reports[Product] = lambda product: shard_report(product, None, {}, {})


@verb(ShardRequest)
def show_product(screen: Screen, request: ShardRequest) -> None:
    """List the collectives that a sharded product needs.

    EXPRESSION is a product of sharded tensors, or one array before and after. An axis that is split carries its mesh
    axes: I_X, I_XY, I_(data,tensor); {U_X} marks a value still to be summed over X.

    \b
      meshwise shard "A[I, J_X] * B[J_X, K] -> C[I, K]"
      meshwise shard "A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]" --mesh X=4,Y=8
      meshwise shard "A[I, J_X] * B[J, K] -> C[I, K]" --mesh X=4 \\
        --set I=1Ki,J=8Ki,K=8Ki --on v5e:4x4
    """  # noqa: D301  (click's mark for lines that stay as they are)
    product = shard.answer(request)
    inputs = request.echo() | {"mesh": None if product.mesh is None else dict(product.mesh.axes)}
    screen.show(shard_report(product, request.find(), request.sizes, inputs))
