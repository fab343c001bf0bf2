"""`meshwise collective`: one collective on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import click
from pydantic import BeforeValidator, Field

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options
from meshwise.cli.pairs import parse_sizes
from meshwise.cli.where import WHERE_FLAGS, Where
from meshwise.costs.collectives import collective_time
from meshwise.costs.network import Fabric, make_wire
from meshwise.costs.wiring import best_wiring, collective_bytes, parse_wiring
from meshwise.dtypes import DType
from meshwise.errors import ShardingError
from meshwise.report.collective import CollectiveCase, collective_report
from meshwise.sharding import (
    Collective,
    CollectiveKind,
    Mesh,
    ShardedTensor,
    Sharding,
    parse_expression,
    parse_mesh,
    parse_tensor,
    reshard,
)

__all__ = ["CollectiveRequest", "collective", "examine"]


class CollectiveRequest(Where):
    """What `meshwise collective` is asked."""

    kind: Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute"] = Field(
        description="The collective."
    )
    array: str = Field(description="The array, 'bf16[1024, 4096_X]', or before and after: 'A[I_X, J] -> A[I, J_X]'.")
    mesh: str = Field(description="Mesh axes, X=4,Y=8, the last one innermost.", json_schema_extra={"metavar": "AXES"})
    over: str | None = Field(
        default=None,
        description="Mesh axes of the group, X or X,Y; by default those that the array names, else all.",
        json_schema_extra={"metavar": "AXES"},
    )
    sizes: Annotated[dict[str, int], BeforeValidator(parse_sizes)] = Field(
        default={}, description="Sizes of named axes, I=1024.", json_schema_extra={"metavar": "AXIS=SIZE"}
    )
    wires: str | None = Field(
        default=None,
        description="Where mesh axes lie: extents on the network's dimensions, X=8x2; one axis each by default.",
        json_schema_extra={"metavar": "WIRES"},
    )
    dtype: DType = Field(default=DType.BF16, description="Format of an array written without one.")


@click.command()
@request_options(CollectiveRequest, arguments=("kind", "array"), flags={**WHERE_FLAGS, "sizes": "--set"})
@output_options
def collective(request: CollectiveRequest, output: Output) -> None:
    r"""Time one collective on a cluster.

    KIND is all-gather, reduce-scatter, all-reduce, all-to-all or permute. ARRAY is the array with its sharding: before
    an all-gather, after a reduce-scatter; with an arrow, before and after.

    \b
      meshwise collective all-gather "bf16[1024, 4096_X]" --mesh X=16 --on v5e:16x16
      meshwise collective all-reduce "bf16[8192, 8192]" --mesh X=8 --on h100:8
      meshwise collective all-to-all "bf16[4096_X, 8192] -> bf16[4096, 8192_X]" --mesh X=4 --on v5e:4x4
    """
    case = examine(request)
    inputs = {
        "kind": request.kind,
        "array": request.array,
        "mesh": dict(case.mesh.axes),
        **request.echo_where(),
        "over": list(case.mesh_axes),
        "sizes": dict(request.sizes),
        "wires": request.wires,
        "dtype": request.dtype.value,
    }
    output.show(collective_report(case, inputs))


def examine(request: CollectiveRequest) -> CollectiveCase:
    """Compute everything that the report shows.

    Raises:
        NotationError, ShardingError, UnknownNameError, ClusterError: what was asked does not parse or cannot be.
    """
    mesh = parse_mesh(request.mesh)
    cluster = request.must_find()
    fabric = Fabric.of(cluster)
    tensor, step = _step(request, mesh)
    num_bytes = collective_bytes(step, tensor.shape(request.sizes), mesh, tensor.dtype or request.dtype)

    def seconds(wiring: Mapping[str, Any]) -> float:
        return float(collective_time(step.kind, num_bytes, make_wire(fabric, wiring, step.mesh_axes)))

    wiring = parse_wiring(request.wires, mesh, fabric) if request.wires else best_wiring(mesh, fabric, seconds)
    return CollectiveCase(
        kind=step.kind,
        text=request.array,
        mesh=mesh,
        mesh_axes=step.mesh_axes,
        num_bytes=num_bytes,
        cluster=cluster,
        fabric=fabric,
        wiring=wiring,
        wire=make_wire(fabric, wiring, step.mesh_axes),
    )


def _step(request: CollectiveRequest, mesh: Mesh) -> tuple[ShardedTensor, Collective]:
    """Find the array and the collective that was meant."""
    kind = CollectiveKind(request.kind)
    if "->" in request.array or "→" in request.array:
        return _between(kind, request.array, mesh)
    tensor = parse_tensor(request.array, mesh)
    held = tensor.sharding
    named = tuple(a for split in held.splits for a in split) or tuple(sorted(held.unreduced)) or mesh.names
    over = tuple(a.strip() for a in request.over.split(",")) if request.over else named
    mesh.size(*over)
    whole = Sharding(tuple(tuple(a for a in split if a not in over) for split in held.splits))
    pending = whole.replace(unreduced=frozenset(over))
    match kind:
        case CollectiveKind.ALL_GATHER:
            _must_split(held, over, kind)
            return tensor, Collective(kind, over, held, whole)
        case CollectiveKind.REDUCE_SCATTER:
            _must_split(held, over, kind)
            return tensor, Collective(kind, over, pending, held)
        case CollectiveKind.ALL_REDUCE:
            kept = held.replace(unreduced=frozenset(over) | held.unreduced)
            return tensor, Collective(kind, over, kept, held.replace(unreduced=held.unreduced - set(over)))
        case CollectiveKind.PERMUTE:
            return tensor, Collective(kind, over, held, held)
        case _:
            _must_split(held, over, kind)
            return tensor, Collective(kind, over, held, held)


def _must_split(held: Sharding, over: tuple[str, ...], kind: CollectiveKind) -> None:
    split = {a for dimension in held.splits for a in dimension}
    missing = [a for a in over if a not in split]
    if missing:
        raise ShardingError(
            f"{kind.value}: expected an array that is split over {', '.join(missing)}, "
            f"such as 'bf16[1024, 4096_{missing[0]}]'"
        )


def _between(kind: CollectiveKind, text: str, mesh: Mesh) -> tuple[ShardedTensor, Collective]:
    """Read before and after, and check that one collective of this kind leads from one to the other."""
    expression = parse_expression(text, mesh)
    if not expression.is_reshard:
        raise ShardingError(f"{text}: expected one array before and the same axes after")
    source, target = expression.inputs[0].sharding, expression.output.sharding
    steps = [s for s in reshard(source, target) if s.moves_data]
    if [s.kind for s in steps] != [kind]:
        found = ", then ".join(s.kind.value for s in steps) or "nothing that moves data"
        raise ShardingError(f"{text}: this is not one {kind.value} but {found}")
    return expression.inputs[0], steps[0]
