"""`meshwise roofline`: one operation on one chip."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import click
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options
from meshwise.cli.pairs import parse_sizes
from meshwise.costs.operation import parse_operation
from meshwise.costs.roofline import Memory, Rates, bytes_per_flop, critical_size, rates_of
from meshwise.costs.roofline import roofline as time_of
from meshwise.errors import UnknownNameError
from meshwise.hardware import Chip, load_chip
from meshwise.report.roofline import Critical, RooflineCase, roofline_report, roofline_svg
from meshwise.tensors import Einsum, Elementwise, Op
from meshwise.units import Quantity, format_bandwidth, format_flops_per_s, parse_bandwidth, parse_flops_per_s

__all__ = ["RooflineRequest", "examine", "roofline"]


class RooflineRequest(BaseModel):
    """What `meshwise roofline` is asked."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    expression: str = Field(description="The operation: 'bf16[B, D] * int8[D, F] -> bf16[B, F]'.")
    chip: str = Field(description="The chip, as 'meshwise chips' lists it.", json_schema_extra={"metavar": "CHIP"})
    sizes: Annotated[dict[str, int], BeforeValidator(parse_sizes)] = Field(
        default={},
        description="Axis sizes, B=1024 or B=1024,D=8Ki; may be repeated. Axes without one are taken as very large.",
        json_schema_extra={"metavar": "AXIS=SIZE"},
    )
    vary: str | None = Field(
        default=None,
        description="The axis whose critical size is sought; the first of the first input by default.",
        json_schema_extra={"metavar": "AXIS"},
    )
    memory: Memory = Field(
        default=Memory.HBM, description="Where the operands live: hbm, vmem (on-chip memory) or host."
    )
    padding: bool = Field(default=True, description="Count the partly filled tiles of the matrix unit.")
    flops_per_s: Annotated[float | None, Quantity("FLOP/s", parse_flops_per_s, format_flops_per_s, "989TFLOP/s")] = (
        Field(default=None, gt=0, description="Take this peak instead of the catalog's.")
    )
    memory_bandwidth: Annotated[float | None, Quantity("bytes/s", parse_bandwidth, format_bandwidth, "3.35TB/s")] = (
        Field(default=None, gt=0, description="Take this bandwidth instead of the catalog's.")
    )


@click.command()
@request_options(RooflineRequest, arguments=("expression",), flags={"chip": "--on", "sizes": "--set"})
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Write the picture to this file as SVG.")
@output_options
def roofline(request: RooflineRequest, svg: Path | None, output: Output) -> None:
    r"""Time one operation on one chip: what binds, and from which batch on.

    \b
    EXPRESSION names dtype and axes of each tensor:
      meshwise roofline "bf16[B, D] * int8[D, F] -> bf16[B, F]" --on v5e --set D=8192,F=32Ki
      meshwise roofline "fp32[N] + fp32[N] -> fp32[N]" --on h100 --set N=1Gi
    """
    case = examine(request)
    if svg is not None:
        svg.write_text(roofline_svg(case), encoding="utf-8")
    output.show(roofline_report(case, _echo(request, case)))


def examine(request: RooflineRequest) -> RooflineCase:
    """Compute everything that the report shows.

    Raises:
        NotationError: the expression does not parse.
        UnknownNameError: of the chip, or an axis that is not in the expression.
    """
    op = parse_operation(request.expression)
    assert isinstance(op, (Einsum, Elementwise))
    chip = load_chip(request.chip)
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
        compute_source=_compute_source(op, chip, request),
        memory_source=_memory_source(chip, request),
    )


def _rates(op: Op, chip: Chip, request: RooflineRequest) -> Rates:
    """Take the catalog's rates, or the user's."""
    if request.memory_bandwidth is not None:  # stands in also where the catalog knows none
        chip = chip.replace(
            hbm_bandwidth=request.memory_bandwidth,
            onchip_bandwidth=request.memory_bandwidth,
            host_link_bandwidth=request.memory_bandwidth,
        )
    rates = rates_of(op, chip, request.memory)
    if request.flops_per_s is not None:
        rates = dataclasses.replace(rates, flops_per_s=request.flops_per_s)
    return rates if request.padding else dataclasses.replace(rates, tile=None)


def _compute_source(op: Op, chip: Chip, request: RooflineRequest) -> str:
    if request.flops_per_s is not None:
        return "given by the user"
    source = chip.source("flops_per_s" if op.matmul else "vector_flops_per_s")
    return f"{source.title}, {source.date}"


def _memory_source(chip: Chip, request: RooflineRequest) -> str:
    if request.memory_bandwidth is not None:
        return "given by the user"
    names = {Memory.HBM: "hbm_bandwidth", Memory.VMEM: "onchip_bandwidth", Memory.HOST: "host_link_bandwidth"}
    source = chip.source(names[request.memory])
    return f"{source.title}, {source.date}"


def _echo(request: RooflineRequest, case: RooflineCase) -> dict[str, Any]:
    """Echo the inputs with defaults; units in the names."""
    return {
        "expression": request.expression,
        "chip": request.chip,
        "sizes": dict(request.sizes),
        "vary": case.critical.axis if case.critical else None,
        "memory": request.memory.value,
        "padding": request.padding,
        "peak_flops_per_s": request.flops_per_s,
        "memory_bandwidth_bytes_per_s": request.memory_bandwidth,
    }
