"""`roofline`: the request, and one operation on one chip computed. Not here: flags (`cli`) and words (`report`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from meshwise.commands.pairs import parse_sizes
from meshwise.commands.requests import PARAMETERS, validated
from meshwise.core.errors import UnknownNameError
from meshwise.core.tensors import Einsum, Elementwise, Op
from meshwise.core.units import Quantity, format_bandwidth, format_flops_per_s, parse_bandwidth, parse_flops_per_s
from meshwise.costs.roofline import Memory, Rates, bytes_per_flop, critical_size, parse_operation, rates_of
from meshwise.costs.roofline import roofline as time_of
from meshwise.hardware import Chip, load_chip
from meshwise.report.roofline import Critical, RooflineCase


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


def examine_roofline(request: RooflineRequest) -> RooflineCase:
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


def roofline(
    expression: str,
    *,
    on: str,
    sizes: str | Mapping[str, int] | None = None,
    vary: str | None = None,
    memory: Literal["hbm", "vmem", "host"] = "hbm",
    padding: bool = True,
    flops_per_s: str | float | None = None,
    memory_bandwidth: str | float | None = None,
) -> RooflineCase:
    """Time one operation on one chip: what `meshwise roofline` answers, as values.

    >>> import meshwise
    >>> case = meshwise.roofline("bf16[B, D] * int8[D, F] -> bf16[B, F]", on="v5e", sizes="D=8192,F=32Ki")
    >>> case.critical.axis, round(case.critical.size)
    ('B', 125)

    Args:
        expression: the operation, a dtype and axes for each tensor.
        on: the chip.
        sizes: axis -> size, or text; axes without one are taken as very large.
        vary: the axis whose critical size is sought.
        memory: where the operands live.
        padding: whether partly filled tiles of the matrix unit are counted.
        flops_per_s: a peak instead of the catalog's, FLOP/s.
        memory_bandwidth: a bandwidth instead of the catalog's, bytes/s.

    Raises:
        MeshwiseError: an argument that cannot be understood.
    """
    given = {
        "expression": expression,
        "chip": on,
        "sizes": {} if sizes is None else sizes,
        "vary": vary,
        "memory": memory,
        "padding": padding,
        "flops_per_s": flops_per_s,
        "memory_bandwidth": memory_bandwidth,
    }
    return examine_roofline(validated(RooflineRequest, given, PARAMETERS | {"chip": "on"}))
