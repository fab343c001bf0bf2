"""`collective`: one collective on a cluster. Not here: words (`report`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from meshwise.commands.command import Screen, command, verb
from meshwise.commands.requests import Flag, MeshText, Sizes
from meshwise.commands.where import Where
from meshwise.core.dtypes import DType
from meshwise.core.errors import ShardingError
from meshwise.core.explanation import Answer
from meshwise.costs.collectives import collective_time
from meshwise.costs.fabric import Fabric, best_axis_mapping, collective_bytes, parse_axis_mapping
from meshwise.costs.fitted import find_calibration
from meshwise.costs.network import make_group_link
from meshwise.costs.paths import algorithms
from meshwise.costs.rules import find_rule
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


class CollectiveRequest(Where):
    """What `meshwise collective` is asked."""

    positional = ("kind", "array")

    kind: Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute"]
    """The collective."""
    array: str
    """The array, 'bf16[1024, 4096_X]', or before and after: 'A[I_X, J] -> A[I, J_X]'."""
    mesh: MeshText
    """Mesh axes, X=4,Y=8, the last one innermost."""
    over: Annotated[str | None, Flag("AXES")] = None
    """Mesh axes of the group, X or X,Y; by default the axes that the array names, else all."""
    sizes: Sizes = Field(default={})
    """Sizes of named axes, I=1024."""
    wires: Annotated[str | None, Flag("WIRES")] = None
    """How mesh axes map to the network's dimensions, as extents: X=8x2; one axis each by default."""
    dtype: DType = DType.BF16
    """Number format of an array written without one."""
    choices: float | None = Field(default=None, gt=0, le=1e6)
    """Ragged all-to-all: each row goes to this many members drawn at random (experts of a token), one copy to each
    distinct one."""
    calibration: str = "none"
    """Achieved rates and algorithms: none (data-sheet rates, whole shards on rings), operations (the chip's own
    software), or a family by name."""


@command(CollectiveRequest)
def collective(request: CollectiveRequest) -> CollectiveCase:
    """Time one collective on a cluster: what `meshwise collective` answers, as values.

    >>> import meshwise
    >>> case = meshwise.collective("all-gather", "bf16[1024, 4096_X]", mesh="X=16", on="v5e:16x16")
    >>> case.num_bytes, case.mesh_axes
    (8388608.0, ('X',))

    Raises:
        MeshwiseError: an argument that cannot be understood.
    """
    mesh = parse_mesh(request.mesh)
    cluster = request.must_find()
    calibration = find_calibration(request.calibration, cluster.chip)
    links = calibration.links
    fabric = Fabric.of(cluster, flat_rings=calibration.flat_rings)
    tensor, step = _step(request, mesh)
    copies = 1.0
    if request.choices is not None:
        if step.kind is not CollectiveKind.ALL_TO_ALL:
            raise ShardingError(f"choices: only an all-to-all is ragged, found {step.kind.value}")
        copies = find_rule("expert-destinations").value(k=request.choices, Z=step.group_size(mesh))
    num_bytes = copies * collective_bytes(step, tensor.shape(request.sizes), mesh, tensor.dtype or request.dtype)

    def seconds(wiring: Mapping[str, Any]) -> float:
        return float(
            collective_time(step.kind, num_bytes, make_group_link(fabric, wiring, step.mesh_axes), links=links)
        )

    wiring = (
        parse_axis_mapping(request.wires, mesh, fabric) if request.wires else best_axis_mapping(mesh, fabric, seconds)
    )
    return CollectiveCase(
        kind=step.kind,
        text=request.array,
        mesh=mesh,
        mesh_axes=step.mesh_axes,
        num_bytes=num_bytes,
        copies=copies,
        cluster=cluster,
        fabric=fabric,
        wiring=wiring,
        wire=make_group_link(fabric, wiring, step.mesh_axes),
        calibration=calibration,
        algorithms=algorithms(step.kind, num_bytes, fabric, wiring, step.mesh_axes, links=links),
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
    if kind not in (CollectiveKind.ALL_REDUCE, CollectiveKind.PERMUTE):
        missing = [a for a in over if not any(a in split for split in held.splits)]
        if missing:
            raise ShardingError(
                f"{kind.value}: expected an array that is split over {', '.join(missing)}, "
                f"such as 'bf16[1024, 4096_{missing[0]}]'"
            )
    whole = Sharding(tuple(tuple(a for a in split if a not in over) for split in held.splits))
    before = after = held
    match kind:
        case CollectiveKind.ALL_GATHER:
            after = whole
        case CollectiveKind.REDUCE_SCATTER:
            before = whole.replace(unreduced=frozenset(over))
        case CollectiveKind.ALL_REDUCE:
            before = held.replace(unreduced=held.unreduced | set(over))
            after = held.replace(unreduced=held.unreduced - set(over))
    return tensor, Collective(kind, over, before, after)


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


Answer.reports[CollectiveCase] = lambda case: collective_report(case, {})


@verb(CollectiveRequest)
def show_collective(screen: Screen, request: CollectiveRequest) -> None:
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
    case = collective.answer(request)
    found = {"mesh": dict(case.mesh.axes), "over": list(case.mesh_axes), "calibration": case.calibration.name}
    screen.show(collective_report(case, request.echo() | found))
