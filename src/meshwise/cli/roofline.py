"""`meshwise roofline`: one operation on one chip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options
from meshwise.commands.roofline import RooflineRequest, examine_roofline
from meshwise.core.errors import MeshwiseError
from meshwise.report.roofline import RooflineCase, roofline_report, roofline_svg


@click.command()
@request_options(RooflineRequest, arguments=("expression",), flags={"chip": "--on", "sizes": "--set"})
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Write the picture to this file as SVG.")
@output_options
def roofline(request: RooflineRequest, svg: Path | None, output: Output) -> None:
    """Time one operation on one chip: what binds, and from which batch on.

    \b
    EXPRESSION names dtype and axes of each tensor:
      meshwise roofline "bf16[B, D] * int8[D, F] -> bf16[B, F]" --on v5e \\
        --set D=8192,F=32Ki
      meshwise roofline "fp32[N] + fp32[N] -> fp32[N]" --on h100 --set N=1Gi
    """  # noqa: D301  (click's mark for lines that stay as they are)
    case = examine_roofline(request)
    if svg is not None:
        picture = roofline_svg(case)
        try:
            svg.write_text(picture, encoding="utf-8")
        except OSError as error:
            raise MeshwiseError(f"--svg {svg}: {error.strerror}") from None
    output.show(roofline_report(case, _echo(request, case)))


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
