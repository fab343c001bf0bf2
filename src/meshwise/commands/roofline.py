"""`roofline`: one operation on one chip. Not here: words and the picture (`report`)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from pydantic import Field

from meshwise.commands.command import Screen, command, verb
from meshwise.commands.plan_files import write_file
from meshwise.commands.requests import Flag, Request, Sizes
from meshwise.core.errors import UnknownNameError
from meshwise.core.explanation import Answer
from meshwise.core.tensors import Op
from meshwise.core.units import Quantity, format_bandwidth, format_flops_per_s, parse_bandwidth, parse_flops_per_s
from meshwise.costs.operation import parse_operation
from meshwise.costs.roofline import Memory, Rates, bytes_per_flop, critical_size, rates_of
from meshwise.costs.roofline import roofline as time_of
from meshwise.hardware import Chip, load_chip
from meshwise.report.roofline import Critical, RooflineCase, roofline_report, roofline_svg

_Rate = Annotated[float, Quantity("FLOP/s", parse_flops_per_s, format_flops_per_s, "989TFLOP/s")]
_Bandwidth = Annotated[float, Quantity("bytes/s", parse_bandwidth, format_bandwidth, "3.35TB/s")]

#: Memory -> its bandwidth, a field of a chip.
_BANDWIDTHS = {Memory.HBM: "hbm_bandwidth", Memory.VMEM: "onchip_bandwidth", Memory.HOST: "host_link_bandwidth"}


class RooflineRequest(Request):
    """What `meshwise roofline` is asked."""

    positional = ("expression",)

    expression: str
    """The operation: 'bf16[B, D] * int8[D, F] -> bf16[B, F]', or 'attention(Q, K, V) -> O'."""
    on: Annotated[str, Flag("CHIP")] = Field(serialization_alias="chip")
    """The chip, as 'meshwise chips' lists it."""
    sizes: Sizes = Field(default={})
    """Axis sizes, B=1024 or B=1024,D=8Ki; may be repeated. Axes without a size count as very large."""
    vary: Annotated[str | None, Flag("AXIS")] = None
    """Axis whose critical size is computed; by default the first axis of the first input."""
    memory: Memory = Memory.HBM
    """Memory of the operands: hbm, vmem (on-chip memory) or host."""
    padding: bool = True
    """Count the partly filled tiles of the matrix unit."""
    flops_per_s: _Rate | None = Field(default=None, gt=0, serialization_alias="peak_flops_per_s")
    """Take this peak instead of the catalog's."""
    memory_bandwidth: _Bandwidth | None = Field(default=None, gt=0, serialization_alias="memory_bandwidth_bytes_per_s")
    """Take this bandwidth instead of the catalog's."""


@command(RooflineRequest)
def roofline(request: RooflineRequest) -> RooflineCase:
    """Time one operation on one chip: what `meshwise roofline` answers, as values.

    >>> import meshwise
    >>> case = meshwise.roofline("bf16[B, D] * int8[D, F] -> bf16[B, F]", on="v5e", sizes="D=8192,F=32Ki")
    >>> case.critical.axis, round(case.critical.size)
    ('B', 125)

    Raises:
        MeshwiseError: an argument that cannot be understood.
    """
    op = parse_operation(request.expression)
    chip = load_chip(request.on)
    for name in (*request.sizes, *([request.vary] if request.vary else [])):
        if name not in op.axes:
            raise UnknownNameError("axis", name, op.axes, hint="Axes are the names in the expression.")
    rates = _rates(op, chip, request)
    axes = tuple(dict.fromkeys(a for t in op.inputs for a in t.axes))
    large = tuple(a for a in axes if a not in request.sizes)
    inverse = bytes_per_flop(op, request.sizes)
    axis = request.vary or next(iter(axes), None)
    critical = Critical(axis, critical_size(op, axis, request.sizes, rates.ridge)) if axis else None
    return RooflineCase(
        op=op,
        chip=chip.title,
        sizes=request.sizes,
        memory=request.memory,
        rates=rates,
        line=None if large else time_of(op, request.sizes, rates),
        intensity=1 / inverse if inverse > 0 else None,
        critical=critical,
        large=large,
        compute_source=_source(chip, "flops_per_s" if op.matmul else "vector_flops_per_s", request.flops_per_s),
        memory_source=_source(chip, _BANDWIDTHS[request.memory], request.memory_bandwidth),
    )


def _rates(op: Op, chip: Chip, request: RooflineRequest) -> Rates:
    """Take the catalog's rates, or the user's."""
    if request.memory_bandwidth is not None:  # stands in also where the catalog knows none
        chip = chip.replace(**dict.fromkeys(_BANDWIDTHS.values(), request.memory_bandwidth))
    rates = rates_of(op, chip, request.memory)
    if request.flops_per_s is not None:
        rates = dataclasses.replace(rates, flops_per_s=request.flops_per_s)
    return rates if request.padding else dataclasses.replace(rates, tile=None)


def _source(chip: Chip, field: str, given: float | None) -> str:
    """Where a rate is from: the catalog's source, unless the user gave it."""
    if given is not None:
        return "given by the user"
    source = chip.source(field)
    return f"{source.title}, {source.date}"


class _Files(Request):
    svg: Path | None = Field(default=None, exclude=True)
    """Write the picture to this file as SVG."""


Answer.reports[RooflineCase] = lambda case: roofline_report(case, {})


@verb(RooflineRequest, _Files)
def show_roofline(screen: Screen, request: RooflineRequest, files: _Files) -> None:
    """Time one operation on one chip: what binds, and from which batch on.

    \b
    EXPRESSION names dtype and axes of each tensor:
      meshwise roofline "bf16[B, D] * int8[D, F] -> bf16[B, F]" --on v5e \\
        --set D=8192,F=32Ki
      meshwise roofline "fp32[N] + fp32[N] -> fp32[N]" --on h100 --set N=1Gi
      meshwise roofline "attention(bf16[B, T, K, G, H], bf16[B, S, K, H], \\
        bf16[B, S, K, H]) -> bf16[B, T, K, G, H]" --on v5e --vary S \\
        --set B=1,T=1,K=8,G=8,H=128
    """  # noqa: D301  (click's mark for lines that stay as they are)
    case = roofline.answer(request)
    write_file("--svg", files.svg, lambda: roofline_svg(case))
    screen.show(roofline_report(case, request.echo() | {"vary": case.critical.axis if case.critical else None}))
